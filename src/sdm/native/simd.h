// Vectors of the widest kind that the instruction set of this build has, through the compilers' vector extensions:
// the same source gives SSE2, AVX2, AVX-512 and NEON code. Included by kernels.cpp only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define SDM_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define SDM_VECTOR_BYTES 32
#else
#define SDM_VECTOR_BYTES 16
#endif

#define SDM_INLINE inline __attribute__((always_inline))

namespace sdm {
namespace SDM_ISA {

template <class Real>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(SDM_VECTOR_BYTES)));
  typedef int32_t mask __attribute__((vector_size(SDM_VECTOR_BYTES)));
};
template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(SDM_VECTOR_BYTES)));
  typedef int64_t mask __attribute__((vector_size(SDM_VECTOR_BYTES)));
};

template <class Real>
using Vector = typename VectorOf<Real>::type;

template <class Real>
constexpr int kLanes = SDM_VECTOR_BYTES / static_cast<int>(sizeof(Real));

// Pointers need only the alignment of a single element.
template <class Real>
SDM_INLINE Vector<Real> load(const Real* from) {
  Vector<Real> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class Real>
SDM_INLINE void store(Real* to, Vector<Real> v) {
  std::memcpy(to, &v, sizeof v);
}

// Cheaper than memset for the few hundred bytes of a row.
template <class Real, int Count>
SDM_INLINE void clear(Real* to) {
  for (int i = 0; i < Count; i += kLanes<Real>) store(to + i, Vector<Real>{});
}

template <class Real>
SDM_INLINE Vector<Real> broadcast(Real x) {
  return x - Vector<Real>{};
}

// One level of a tree that sums many vectors at once. In every block of 2 * Half lanes, the lower half of the result is
// the sum of the two halves of a's block, the upper half the same of b's.
template <class Real, int Half, int... Lane>
SDM_INLINE Vector<Real> add_halves(Vector<Real> a, Vector<Real> b, std::integer_sequence<int, Lane...>) {
  constexpr int L = kLanes<Real>;
#if defined(__clang__)
#define SDM_SHUFFLE(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SDM_SHUFFLE(...) __builtin_shuffle(a, b, typename VectorOf<Real>::mask{__VA_ARGS__})
#endif
  return SDM_SHUFFLE((Lane % (2 * Half) < Half ? Lane : L + Lane - Half)...) +
         SDM_SHUFFLE((Lane % (2 * Half) < Half ? Lane + Half : L + Lane)...);
#undef SDM_SHUFFLE
}

template <class Real, int Half>
SDM_INLINE Vector<Real> add_halves(Vector<Real> a, Vector<Real> b) {
  return add_halves<Real, Half>(a, b, std::make_integer_sequence<int, kLanes<Real>>{});
}

// Lane i of the result is the sum of vector i, for as many vectors as there are lanes.
template <class Real, int Half = 1>
SDM_INLINE Vector<Real> sums_of(const Real* vectors) {
  constexpr int L = kLanes<Real>;
  if constexpr (Half == L) {
    return load(vectors);
  } else {
    return add_halves<Real, Half>(sums_of<Real, 2 * Half>(vectors), sums_of<Real, 2 * Half>(vectors + Half * L));
  }
}

template <class Real, int Half = kLanes<Real> / 2>
SDM_INLINE Real horizontal_sum(Vector<Real> v) {
  v = add_halves<Real, Half>(v, v);
  if constexpr (Half == 1) {
    return v[0];
  } else {
    return horizontal_sum<Real, Half / 2>(v);
  }
}

// out[i] (+)= the sum of vector i, for `count` vectors laid one after the other. The order of additions within a
// vector is the same for every i.
template <class Real>
SDM_INLINE void sum_each(const Real* vectors, int count, bool accumulate, Real* out) {
  constexpr int L = kLanes<Real>;
  int i = 0;
  for (; i + L <= count; i += L) {
    Vector<Real> sums = sums_of<Real>(vectors + i * L);
    if (accumulate) sums += load(out + i);
    store(out + i, sums);
  }
  for (; i < count; ++i) {
    const Real sum = horizontal_sum<Real>(load(vectors + i * L));
    out[i] = accumulate ? out[i] + sum : sum;
  }
}

// A store that does not bring its line into the caches first. The address must be aligned to a vector, and
// finish_streaming() must follow before another thread reads what was stored. Sanitizers do not see such stores.
#if defined(__AVX512F__) && !defined(SDM_EXACT_SCRATCH)
SDM_INLINE void stream_past(float* to, Vector<float> v) { _mm512_stream_ps(to, reinterpret_cast<__m512>(v)); }
SDM_INLINE void stream_past(double* to, Vector<double> v) { _mm512_stream_pd(to, reinterpret_cast<__m512d>(v)); }
#elif defined(__AVX2__) && !defined(SDM_EXACT_SCRATCH)
SDM_INLINE void stream_past(float* to, Vector<float> v) { _mm256_stream_ps(to, reinterpret_cast<__m256>(v)); }
SDM_INLINE void stream_past(double* to, Vector<double> v) { _mm256_stream_pd(to, reinterpret_cast<__m256d>(v)); }
#else
template <class Real>
SDM_INLINE void stream_past(Real* to, Vector<Real> v) {
  store(to, v);
}
#endif

SDM_INLINE void finish_streaming() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// Asks for memory that is read or changed soon: into the second cache, which holds a few tokens' rows beside those in
// use. The first would not, and has too few buffers for misses to wait for them all.
template <int Bytes>
SDM_INLINE void prefetch(const void* address) {
  for (int offset = 0; offset < Bytes; offset += 64) {
    __builtin_prefetch(static_cast<const char*>(address) + offset, 0, 2);
  }
}

template <class T>
SDM_INLINE void prefetch_array(const T* array, int64_t count) {
  const char* const end = reinterpret_cast<const char*>(array + count);
  for (const char* line = reinterpret_cast<const char*>(array); line < end; line += 64) prefetch<64>(line);
}

}  // namespace SDM_ISA
}  // namespace sdm

// Vectors of the widest kind that the instruction set of this build has, through the compilers' vector extensions:
// the same source gives SSE2, AVX2, AVX-512 and NEON code. Included by kernels.cpp only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

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

template <class Real>
SDM_INLINE Vector<Real> broadcast(Real x) {
  return x - Vector<Real>{};
}

// [a0+a1, a2+a3, ..., b0+b1, ...]: one level of a tree that sums many vectors at once.
template <class Real>
SDM_INLINE Vector<Real> add_neighbours(Vector<Real> a, Vector<Real> b) {
  typename VectorOf<Real>::mask even, odd;
  for (int lane = 0; lane < kLanes<Real>; ++lane) {
    even[lane] = 2 * lane;
    odd[lane] = 2 * lane + 1;
  }
#if defined(__clang__)
  Vector<Real> x, y;
  for (int lane = 0; lane < kLanes<Real>; ++lane) {
    const int i = 2 * lane, half = kLanes<Real>;
    x[lane] = i < half ? a[i] : b[i - half];
    y[lane] = i < half ? a[i + 1] : b[i + 1 - half];
  }
  return x + y;
#else
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
#endif
}

// The sum of each of `Count` vectors (a power of two up to the number of lanes), in the first `Count` lanes.
template <class Real, int Count>
SDM_INLINE Vector<Real> sums_of(const Real* vectors) {
  if constexpr (Count == 1) {
    return load(vectors);
  } else {
    return add_neighbours<Real>(sums_of<Real, Count / 2>(vectors),
                                sums_of<Real, Count / 2>(vectors + (Count / 2) * kLanes<Real>));
  }
}

template <class Real>
SDM_INLINE Real horizontal_sum(Vector<Real> v) {
  for (int width = kLanes<Real>; width > 1; width /= 2) v = add_neighbours<Real>(v, v);
  return v[0];
}

// out[i] (+)= the sum of vector i, for `count` vectors laid one after the other. The order of additions within a
// vector is the same for every i.
template <class Real>
SDM_INLINE void sum_each(const Real* vectors, int count, bool accumulate, Real* out) {
  constexpr int L = kLanes<Real>;
  int i = 0;
  for (; i + L <= count; i += L) {
    Vector<Real> sums = sums_of<Real, L>(vectors + i * L);
    if (accumulate) sums += load(out + i);
    store(out + i, sums);
  }
  for (; i < count; ++i) {
    const Real sum = horizontal_sum<Real>(load(vectors + i * L));
    out[i] = accumulate ? out[i] + sum : sum;
  }
}

SDM_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 1, 3); }

template <int Bytes>
SDM_INLINE void prefetch_range(const void* address) {
  for (int offset = 0; offset < Bytes; offset += 64) prefetch(static_cast<const char*>(address) + offset);
}

}  // namespace SDM_ISA
}  // namespace sdm

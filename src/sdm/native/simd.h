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
};
template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(SDM_VECTOR_BYTES)));
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

// Lane order, so that a sum does not depend on how the compiler would tree it.
template <class Real>
SDM_INLINE Real horizontal_sum(Vector<Real> v) {
  Real half[kLanes<Real>];
  std::memcpy(half, &v, sizeof v);
  for (int width = kLanes<Real> / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) half[lane] += half[lane + width];
  }
  return half[0];
}

SDM_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 1, 3); }

}  // namespace SDM_ISA
}  // namespace sdm

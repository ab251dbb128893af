// S channels of a row in registers, and rows as they are stored: in the type of the computation, or as bfloat16. Loops over
// the vectors of a tile that compute one thing are here; kernels spell out only those that compute several at once, where
// a vector is loaded once for all of them. Included by kernels.cpp only.
#pragma once

#include "simd.h"
#include "sparse_delta_rule/slabs.h"

namespace sdm {
namespace SDM_ISA {

SDM_INLINE Vector<float> load_row(const float* row) { return load(row); }
SDM_INLINE Vector<double> load_row(const double* row) { return load(row); }
SDM_INLINE void store_row(float* row, Vector<float> v) { store(row, v); }
SDM_INLINE void store_row(double* row, Vector<double> v) { store(row, v); }

typedef uint16_t HalfWords __attribute__((vector_size(SDM_VECTOR_BYTES / 2)));
typedef uint32_t Words __attribute__((vector_size(SDM_VECTOR_BYTES)));

SDM_INLINE Vector<float> load_row(const BFloat16* row) {
  HalfWords halves;
  std::memcpy(&halves, row, sizeof halves);
  return reinterpret_cast<Vector<float>>(__builtin_convertvector(halves, Words) << 16);
}

SDM_INLINE void store_row(BFloat16* row, Vector<float> v) {
  const Words bits = reinterpret_cast<Words>(v);
  const Words nearest_even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words not_a_number = reinterpret_cast<Words>(v != v);
  const HalfWords halves =
      __builtin_convertvector((nearest_even & ~not_a_number) | (not_a_number & 0x7fc0), HalfWords);
  std::memcpy(row, &halves, sizeof halves);
}

SDM_INLINE float to_real(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
template <class Real>
SDM_INLINE Real to_real(Real x) {
  return x;
}

template <class Real>
SDM_INLINE void assign(Real& to, Real x) {
  to = x;
}
SDM_INLINE void assign(BFloat16& to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to.bits = static_cast<uint16_t>(x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0);
}

template <class Real, int S>
struct Tile {
  static constexpr int L = kLanes<Real>, V = S / L;
  static_assert(V >= 1 && S % L == 0, "a slab is a whole number of vectors");
  Vector<Real> v[V];

  template <class Stored>
  static SDM_INLINE Tile load_from(const Stored* row) {
    Tile tile;
    for (int i = 0; i < V; ++i) tile.v[i] = load_row(row + i * L);
    return tile;
  }
  SDM_INLINE void store_to(Real* row) const {
    for (int i = 0; i < V; ++i) store(row + i * L, v[i]);
  }
  SDM_INLINE void stream_to(Real* row) const {
    for (int i = 0; i < V; ++i) stream_past(row + i * L, v[i]);
  }

  SDM_INLINE Tile& operator+=(const Tile& other) {
    for (int i = 0; i < V; ++i) v[i] += other.v[i];
    return *this;
  }
  SDM_INLINE Tile& operator-=(const Tile& other) {
    for (int i = 0; i < V; ++i) v[i] -= other.v[i];
    return *this;
  }
  SDM_INLINE Tile& operator*=(Real x) {
    const Vector<Real> factor = broadcast<Real>(x);
    for (int i = 0; i < V; ++i) v[i] *= factor;
    return *this;
  }
  // tile -= x * other, in one rounding where the instruction set has it.
  SDM_INLINE void subtract(Real x, const Tile& other) {
    const Vector<Real> factor = broadcast<Real>(x);
    for (int i = 0; i < V; ++i) v[i] -= factor * other.v[i];
  }
  friend SDM_INLINE Tile operator*(Real x, Tile tile) { return tile *= x; }
  friend SDM_INLINE Tile operator-(Tile tile) {
    for (int i = 0; i < V; ++i) tile.v[i] = -tile.v[i];
    return tile;
  }

  // tile += weight * row. The row passes through one register at a time, as in the function below: a tile of its own
  // would not fit beside the others.
  template <class Stored>
  SDM_INLINE void add(Real weight, const Stored* row) {
    const Vector<Real> w = broadcast<Real>(weight);
    for (int i = 0; i < V; ++i) v[i] += w * load_row(row + i * L);
  }

  // row <- decay * row + weight * tile.
  template <class Stored>
  SDM_INLINE void write_into(Stored* row, Real decay, Real weight) const {
    const Vector<Real> f = broadcast<Real>(decay), k = broadcast<Real>(weight);
    for (int i = 0; i < V; ++i) store_row(row + i * L, f * load_row(row + i * L) + k * v[i]);
  }
};

// Lane by lane; horizontal_sum makes one number of it.
template <class Real, int S>
SDM_INLINE Vector<Real> dot_lanes(const Tile<Real, S>& a, const Tile<Real, S>& b) {
  Vector<Real> sum = {};
  for (int i = 0; i < a.V; ++i) sum += a.v[i] * b.v[i];
  return sum;
}

// The last slab of a row may have fewer than S channels; the others of the tile are zero.
template <class Real, int S>
SDM_INLINE Tile<Real, S> load_channels(const Real* from, int64_t channels) {
  if (__builtin_expect(channels == S, 1)) return Tile<Real, S>::load_from(from);
  Real padded[S] = {};
  for (int64_t c = 0; c < channels; ++c) padded[c] = from[c];
  return Tile<Real, S>::load_from(padded);
}

template <class Real, int S>
SDM_INLINE void store_channels(Real* to, const Tile<Real, S>& tile, int64_t channels) {
  if (__builtin_expect(channels == S, 1)) return tile.store_to(to);
  Real padded[S];
  tile.store_to(padded);
  for (int64_t c = 0; c < channels; ++c) to[c] = padded[c];
}

}  // namespace SDM_ISA
}  // namespace sdm

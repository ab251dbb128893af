// The inner loops of a linear layer on a few rows: dot products of a block of weight rows with a block of x.
#pragma once

#include "linear/linear.h"
#include "simd.h"
#include "sparse_delta_rule/tile.h"

namespace sdm {
namespace SDM_ISA {

typedef int8_t Bytes __attribute__((vector_size(SDM_VECTOR_BYTES / 4)));
typedef int16_t Shorts __attribute__((vector_size(SDM_VECTOR_BYTES / 2)));

// Twice as wide at each step: compilers make a poor job of larger ones.
SDM_INLINE Vector<float> load_row(const int8_t* row) {
  Bytes bytes;
  std::memcpy(&bytes, row, sizeof bytes);
  const Shorts shorts = __builtin_convertvector(bytes, Shorts);
  return __builtin_convertvector(__builtin_convertvector(shorts, VectorOf<float>::mask), Vector<float>);
}

// Lane sums of the products of `Outputs` rows of weights with `Rows` rows of x, for whole vectors of inputs:
// sums[row][output] is a vector.
template <class Real, class Weight, int Outputs, int Rows>
SDM_INLINE void multiply(const Weight* weight, const Real* x, int64_t n, Real* sums) {
  constexpr int L = kLanes<Real>;
  Vector<Real> sum[Outputs][Rows] = {};
  for (int64_t i = 0; i + L <= n; i += L) {
    Vector<Real> inputs[Rows];
    for (int row = 0; row < Rows; ++row) inputs[row] = load(x + row * n + i);
    for (int out = 0; out < Outputs; ++out) {
      const Weight* at = weight + out * n + i;
      // Processors do not foresee several short streams, and foresee a long one only as far as its page.
      if (Outputs > 1) __builtin_prefetch(at + Outputs * n, 0, 3);
      if (Outputs == 1) __builtin_prefetch(reinterpret_cast<const char*>(at) + 4096, 0, 2);
      const Vector<Real> w = load_row(at);
      for (int row = 0; row < Rows; ++row) sum[out][row] += w * inputs[row];
    }
  }
  for (int out = 0; out < Outputs; ++out) {
    for (int row = 0; row < Rows; ++row) store(sums + (row * L + out) * L, sum[out][row]);
  }
}

// At most as many outputs as a vector has lanes, of rows r ... r + Rows - 1. The order of the additions of a dot product
// depends on the number of inputs alone: neither on the other rows nor on the threads.
template <class Real, class Weight, int Rows>
SDM_INLINE void linear_block(const LinearCall<Real>& call, int64_t o, int count, int64_t r) {
  constexpr int L = kLanes<Real>;
  const int64_t n = call.inputs;
  const Weight* weight = static_cast<const Weight*>(call.weight) + o * n;
  const Real* x = call.x + r * n;
  Real sums[Rows * L * L], total[L];
  // One row of wide weights waits for memory, which is fastest as a single stream. Several rows wait for arithmetic on what
  // is in registers, and narrow weights for the chain of additions of an output: four of them run side by side.
  constexpr int Outputs = Rows == 1 && sizeof(Weight) >= sizeof(float) ? 1 : 4;
  int out = 0;
  for (; out + Outputs <= count; out += Outputs) {
    multiply<Real, Weight, Outputs, Rows>(weight + out * n, x, n, sums + out * L);
  }
  for (; out < count; ++out) multiply<Real, Weight, 1, Rows>(weight + out * n, x, n, sums + out * L);
  for (int row = 0; row < Rows; ++row) {
    sum_each(sums + row * L * L, count, false, total);
    Real* y = call.y + (r + row) * (call.y_stride ? call.y_stride : call.outputs) + o;
    for (out = 0; out < count; ++out) {
      for (int64_t i = n / L * L; i < n; ++i) total[out] += to_real(weight[out * n + i]) * x[row * n + i];
      y[out] = call.scale ? total[out] * call.scale[o + out] : total[out];
      if (call.bias) y[out] += call.bias[o + out];
    }
  }
}

template <class Real, class Weight>
void linear_outputs(const LinearCall<Real>& call, int64_t begin, int64_t end) {
  for (int64_t o = begin; o < end; o += kLanes<Real>) {
    const int count = static_cast<int>(end - o < kLanes<Real> ? end - o : kLanes<Real>);
    int64_t r = 0;
    for (; r + 4 <= call.rows; r += 4) linear_block<Real, Weight, 4>(call, o, count, r);
    for (; r < call.rows; ++r) linear_block<Real, Weight, 1>(call, o, count, r);
  }
}

}  // namespace SDM_ISA
}  // namespace sdm

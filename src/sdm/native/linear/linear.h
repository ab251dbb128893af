// y = x W^T for a few rows x, as a decode step has them: bound by reading W once.
//
// Weights are numbers of the caller's kind, bfloat16, or int8 with one scale per output.
#pragma once

#include <cstdint>

namespace sdm {

enum class WeightFormat : int64_t { kReal = 0, kBFloat16 = 1, kInt8 = 2 };

template <class Real>
struct LinearCall {
  int threads;
  int64_t rows, inputs, outputs, format;
  const Real* x;       // [rows, inputs]
  const void* weight;  // [outputs, inputs] in the format
  const Real* scale;   // [outputs], or null
  const Real* bias;    // [outputs], or null
  Real* y;             // [rows, outputs]

  template <class Visit>
  void each_field(const Visit& field) {
    field("threads", threads), field("rows", rows), field("inputs", inputs), field("outputs", outputs);
    field("format", format), field("x", x), field("weight", weight), field("scale", scale), field("bias", bias);
    field("y", y);
  }
};

template <class Real>
struct LinearKernels {
  // Outputs begin ... end - 1 of all rows, for each WeightFormat.
  void (*outputs[3])(const LinearCall<Real>& call, int64_t begin, int64_t end);
};

// Sizes below zero and an unknown format throw std::invalid_argument.
template <class Real>
void linear(const LinearCall<Real>& call);

}  // namespace sdm

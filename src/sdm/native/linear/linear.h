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
  int64_t y_stride = 0;  // numbers between the rows of y; 0: outputs. Not for callers.

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

// Several layers on the same rows at once: their outputs side by side.
template <class Real>
struct LinearGroup {
  int threads;
  int64_t rows, inputs, count;
  const int64_t* layers;  // [count, 5] outputs, format, and the addresses of weight, scale and bias, as in LinearCall
  const Real* x;          // [rows, inputs]
  Real* y;                // [rows, sum of outputs]

  template <class Visit>
  void each_field(const Visit& field) {
    field("threads", threads), field("rows", rows), field("inputs", inputs), field("count", count);
    field("layers", layers), field("x", x), field("y", y);
  }
};

// y = (silu(x gate^T) * x up^T) down^T, each weight with its scale.
template <class Real>
struct GatedMLP {
  int threads;
  int64_t rows, inputs, hidden, outputs, format;
  const Real* x;  // [rows, inputs]
  const void* gate;
  const void* up;
  const void* down;
  const Real* gate_scale;
  const Real* up_scale;
  const Real* down_scale;
  Real* y;  // [rows, outputs]

  template <class Visit>
  void each_field(const Visit& field) {
    field("threads", threads), field("rows", rows), field("inputs", inputs), field("hidden", hidden);
    field("outputs", outputs), field("format", format), field("x", x), field("gate", gate), field("up", up);
    field("down", down), field("gate_scale", gate_scale), field("up_scale", up_scale), field("down_scale", down_scale);
    field("y", y);
  }
};

// y = x weight / sqrt(mean(x^2) + eps) for every row.
template <class Real>
struct RMSNorm {
  int threads;  // not used: the rows of a step are too few to share
  int64_t rows, size;
  double eps;
  const Real* x;       // [rows, size]
  const Real* weight;  // [size]
  Real* y;             // [rows, size]

  template <class Visit>
  void each_field(const Visit& field) {
    field("threads", threads), field("rows", rows), field("size", size), field("eps", eps), field("x", x);
    field("weight", weight), field("y", y);
  }
};

// Sizes below zero and an unknown format throw std::invalid_argument.
template <class Real>
void linear(const LinearCall<Real>& call);
template <class Real>
void linear_group(const LinearGroup<Real>& call);
template <class Real>
void gated_mlp(const GatedMLP<Real>& call);
template <class Real>
void rms_norm(const RMSNorm<Real>& call);

}  // namespace sdm

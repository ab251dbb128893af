#include "linear/linear.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernel_table.h"
#include "parallel.h"

namespace sdm {

namespace {

template <class Real>
const LinearKernels<Real>& linear_kernels();
template <>
const LinearKernels<float>& linear_kernels() {
  return kernels().linear_float;
}
template <>
const LinearKernels<double>& linear_kernels() {
  return kernels().linear_double;
}

}  // namespace

template <class Real>
void linear(const LinearCall<Real>& call) {
  if (call.rows < 0 || call.inputs < 0 || call.outputs < 0) {
    throw std::invalid_argument("sizes must not be negative");
  }
  const auto& outputs = linear_kernels<Real>().outputs;
  const bool known = call.format >= 0 && call.format < 3;
  if (!known || !outputs[call.format]) {
    throw std::invalid_argument("there are no weights of format " + std::to_string(call.format) + " here");
  }
  // A task reads enough weights to be worth handing out, and whole vectors of outputs: how they are summed up does not change.
  constexpr int64_t kNumbers = 1 << 15;
  const int64_t share = (kNumbers / std::max<int64_t>(call.inputs, 1) + 15) / 16 * 16 + 16;
  const int64_t tasks = (call.outputs + share - 1) / share;
  parallel_for(tasks, call.threads, [&](int64_t task) {
    outputs[call.format](call, task * share, std::min(call.outputs, (task + 1) * share));
  });
}

template void linear(const LinearCall<float>&);
template void linear(const LinearCall<double>&);

}  // namespace sdm

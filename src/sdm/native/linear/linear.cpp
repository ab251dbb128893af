#include "linear/linear.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernel_table.h"
#include "memory.h"
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

template <class Real>
void check(const LinearCall<Real>& call) {
  if (call.rows < 0 || call.inputs < 0 || call.outputs < 0) {
    throw std::invalid_argument("sizes must not be negative");
  }
  const bool known = call.format >= 0 && call.format < 3;
  if (!known || !linear_kernels<Real>().outputs[call.format]) {
    throw std::invalid_argument("there are no weights of format " + std::to_string(call.format) + " here");
  }
}

// A task reads enough weights to be worth handing out, and whole vectors of outputs: how they are summed up does not
// change.
int64_t outputs_per_task(int64_t inputs) {
  constexpr int64_t kNumbers = 1 << 15;
  return (kNumbers / std::max<int64_t>(inputs, 1) + 15) / 16 * 16 + 16;
}

template <class Real>
int64_t task_count(const LinearCall<Real>& call) {
  const int64_t share = outputs_per_task(call.inputs);
  return (call.outputs + share - 1) / share;
}

// Runs one of task_count(call) tasks. Returns its outputs as [begin, end).
template <class Real>
std::pair<int64_t, int64_t> run_task(const LinearCall<Real>& call, int64_t task) {
  const int64_t share = outputs_per_task(call.inputs);
  const int64_t begin = task * share, end = std::min(call.outputs, begin + share);
  linear_kernels<Real>().outputs[call.format](call, begin, end);
  return {begin, end};
}

}  // namespace

template <class Real>
void linear(const LinearCall<Real>& call) {
  check(call);
  parallel_for(task_count(call), call.threads, [&](int64_t task) { run_task(call, task); });
}

template <class Real>
void linear_group(const LinearGroup<Real>& group) {
  if (group.count < 0) throw std::invalid_argument("sizes must not be negative");
  constexpr int kFields = 5;
  std::vector<LinearCall<Real>> calls;
  std::vector<int64_t> tasks_before = {0};
  int64_t total = 0;
  for (int64_t n = 0; n < group.count; ++n) {
    const int64_t* layer = group.layers + n * kFields;
    calls.push_back({group.threads, group.rows, group.inputs, layer[0], layer[1], group.x,
                     reinterpret_cast<const void*>(layer[2]), reinterpret_cast<const Real*>(layer[3]),
                     reinterpret_cast<const Real*>(layer[4]), group.y + total});
    check(calls.back());
    total += layer[0];
    tasks_before.push_back(tasks_before.back() + task_count(calls.back()));
  }
  for (auto& call : calls) call.y_stride = total;
  parallel_for(tasks_before.back(), group.threads, [&](int64_t task) {
    const auto after = std::upper_bound(tasks_before.begin(), tasks_before.end(), task);
    const auto n = static_cast<std::size_t>(after - tasks_before.begin() - 1);
    run_task(calls[n], task - tasks_before[n]);
  });
}

template <class Real>
void gated_mlp(const GatedMLP<Real>& mlp) {
  const int64_t hidden = std::max<int64_t>(mlp.rows, 0) * std::max<int64_t>(mlp.hidden, 0);
  Scratch memory(static_cast<std::size_t>(2 * hidden) * sizeof(Real));
  Real *gated = memory.template as<Real>(), *raised = gated + hidden;
  const LinearCall<Real> gate = {mlp.threads, mlp.rows, mlp.inputs,     mlp.hidden, mlp.format,
                                 mlp.x,       mlp.gate, mlp.gate_scale, nullptr,    gated};
  const LinearCall<Real> up = {mlp.threads, mlp.rows, mlp.inputs,   mlp.hidden, mlp.format,
                               mlp.x,       mlp.up,   mlp.up_scale, nullptr,    raised};
  const LinearCall<Real> down = {mlp.threads, mlp.rows, mlp.hidden,     mlp.outputs, mlp.format,
                                 gated,       mlp.down, mlp.down_scale, nullptr,     mlp.y};
  check(gate);
  check(down);
  parallel_for(task_count(gate), mlp.threads, [&](int64_t task) {
    run_task(gate, task);
    const auto [begin, end] = run_task(up, task);
    for (int64_t row = 0; row < mlp.rows; ++row) {
      for (int64_t i = row * mlp.hidden + begin; i < row * mlp.hidden + end; ++i) {
        gated[i] = gated[i] / (1 + std::exp(-gated[i])) * raised[i];
      }
    }
  });
  parallel_for(task_count(down), mlp.threads, [&](int64_t task) { run_task(down, task); });
}

template <class Real>
void rms_norm(const RMSNorm<Real>& norm) {
  if (norm.rows < 0 || norm.size < 0) throw std::invalid_argument("sizes must not be negative");
  constexpr int64_t kSums = 16;  // side by side: a single chain of additions would wait for each of them
  for (int64_t row = 0; row < norm.rows; ++row) {
    const Real* x = norm.x + row * norm.size;
    Real sums[kSums] = {}, total = 0;
    int64_t i = 0;
    for (; i + kSums <= norm.size; i += kSums) {
      for (int64_t n = 0; n < kSums; ++n) sums[n] += x[i + n] * x[i + n];
    }
    for (; i < norm.size; ++i) total += x[i] * x[i];
    for (const Real sum : sums) total += sum;
    const Real scale = 1 / std::sqrt(total / static_cast<Real>(norm.size) + static_cast<Real>(norm.eps));
    for (i = 0; i < norm.size; ++i) norm.y[row * norm.size + i] = x[i] * scale * norm.weight[i];
  }
}

template void linear(const LinearCall<float>&);
template void linear(const LinearCall<double>&);
template void linear_group(const LinearGroup<float>&);
template void linear_group(const LinearGroup<double>&);
template void gated_mlp(const GatedMLP<float>&);
template void gated_mlp(const GatedMLP<double>&);
template void rms_norm(const RMSNorm<float>&);
template void rms_norm(const RMSNorm<double>&);

}  // namespace sdm

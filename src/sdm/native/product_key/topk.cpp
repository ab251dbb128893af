#include "product_key/topk.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "kernel_table.h"
#include "memory.h"
#include "parallel.h"

namespace sdm {

namespace {

template <class Real>
const ProductKeyKernels<Real>& product_key_kernels();
template <>
const ProductKeyKernels<float>& product_key_kernels() {
  return kernels().product_key_float;
}
template <>
const ProductKeyKernels<double>& product_key_kernels() {
  return kernels().product_key_double;
}

// Rows are independent, so the cut is free: enough tasks to share, few enough that each has working memory of its own.
constexpr int64_t kMaxTasks = 32;
constexpr int64_t kMinRows = 8;

struct Cut {
  int64_t rows, tasks, per_task;
  explicit Cut(int64_t all)
      : rows(all), tasks(std::clamp<int64_t>(all / kMinRows, 1, kMaxTasks)), per_task((all + tasks - 1) / tasks) {}
  int64_t begin(int64_t task) const { return std::min(rows, task * per_task); }
  int64_t end(int64_t task) const { return std::min(rows, (task + 1) * per_task); }
};

void check_sizes(int64_t rows, int64_t n, int64_t k) {
  constexpr int64_t kMost = INT32_MAX;  // ranks and indices of a half are 32-bit
  if (rows < 0 || n < 1 || n > kMost || k < 1 || k > n * n || k > kMost) {
    throw std::invalid_argument("k must lie in [1, N] and N in [1, 2^62]: got k = " + std::to_string(k) +
                                " and sqrt(N) = " + std::to_string(n));
  }
}

}  // namespace

template <class Real>
void product_key_topk(const ProductKeyForward<Real>& call) {
  check_sizes(call.rows, call.n, call.k);
  const ProductKeyKernels<Real>& inner = product_key_kernels<Real>();
  const Cut cut(call.rows);
  const int64_t candidates = call.candidates(), bytes = inner.workspace(call.n, call.k, candidates);
  const Scratch scratch(static_cast<std::size_t>(bytes * cut.tasks));
  parallel_for(cut.tasks, call.threads, [&](int64_t task) {
    inner.rows(call, candidates, cut.begin(task), cut.end(task), scratch.as<char>() + task * bytes);
  });
}

template <class Real>
void product_key_topk_backward(const ProductKeyBackward<Real>& call) {
  check_sizes(call.rows, call.n, call.k);
  const Cut cut(call.rows);
  const uint64_t n = static_cast<uint64_t>(call.n), slots = n * n;
  std::atomic<bool> out_of_range{false};
  parallel_for(cut.tasks, call.threads, [&](int64_t task) {
    for (int64_t row = cut.begin(task); row < cut.end(task); ++row) {
      Real* first = call.grad_scores + row * 2 * call.n;
      Real* second = first + call.n;
      std::fill(first, first + 2 * call.n, Real{0});
      for (int64_t j = row * call.k; j < (row + 1) * call.k; ++j) {
        const uint64_t slot = static_cast<uint64_t>(call.index[j]);
        if (slot >= slots) {
          out_of_range = true;
          continue;
        }
        const uint64_t i = slot / n;
        first[i] += call.grad_values[j];
        second[slot - i * n] += call.grad_values[j];
      }
    }
  });
  if (out_of_range) throw std::out_of_range("index must lie in [0, N) = [0, " + std::to_string(slots) + ")");
}

template void product_key_topk(const ProductKeyForward<float>&);
template void product_key_topk(const ProductKeyForward<double>&);
template void product_key_topk_backward(const ProductKeyBackward<float>&);
template void product_key_topk_backward(const ProductKeyBackward<double>&);

}  // namespace sdm

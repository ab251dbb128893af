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

template <class Real>
void topk(const Real* scores, Real* values, int64_t* index, int64_t rows, int64_t n, int64_t k, int threads) {
  int64_t candidates = 0;
  for (int64_t b = 0; b < std::min(n, k); ++b) candidates += std::min(n, k / (b + 1));
  const ProductKeyArgs<Real> args{scores, values, index, n, k, candidates};
  const ProductKeyKernels<Real>& inner = product_key_kernels<Real>();
  const Cut cut(rows);
  const int64_t bytes = inner.workspace(n, k, candidates);
  const Scratch scratch(static_cast<std::size_t>(bytes * cut.tasks));
  parallel_for(cut.tasks, threads, [&](int64_t task) {
    inner.rows(args, cut.begin(task), cut.end(task), scratch.as<char>() + task * bytes);
  });
}

template <class Real>
void backward(const Real* grad_values, const int64_t* index, Real* grad_scores, int64_t rows, int64_t n, int64_t k,
              int threads) {
  const Cut cut(rows);
  const uint64_t slots = static_cast<uint64_t>(n) * static_cast<uint64_t>(n);
  std::atomic<bool> out_of_range{false};
  parallel_for(cut.tasks, threads, [&](int64_t task) {
    for (int64_t row = cut.begin(task); row < cut.end(task); ++row) {
      Real* first = grad_scores + row * 2 * n;
      Real* second = first + n;
      std::fill(first, first + 2 * n, Real{0});
      for (int64_t j = row * k; j < (row + 1) * k; ++j) {
        const uint64_t slot = static_cast<uint64_t>(index[j]);
        if (slot >= slots) {
          out_of_range = true;
          continue;
        }
        const uint64_t i = slot / static_cast<uint64_t>(n);
        first[i] += grad_values[j];
        second[slot - i * static_cast<uint64_t>(n)] += grad_values[j];
      }
    }
  });
  if (out_of_range) throw std::out_of_range("index must lie in [0, N) = [0, " + std::to_string(slots) + ")");
}

void check_sizes(int64_t rows, int64_t n, int64_t k) {
  constexpr int64_t kMost = INT32_MAX;  // ranks and indices of a half are 32-bit
  if (rows < 0 || n < 1 || n > kMost || k < 1 || k > n * n || k > kMost) {
    throw std::invalid_argument("k must lie in [1, N] and N in [1, 2^62]: got k = " + std::to_string(k) +
                                " and sqrt(N) = " + std::to_string(n));
  }
}

}  // namespace

void product_key_topk(const void* scores, void* values, int64_t* index, int64_t rows, int64_t n, int64_t k,
                      bool is_double, int threads) {
  check_sizes(rows, n, k);
  if (is_double) {
    topk(static_cast<const double*>(scores), static_cast<double*>(values), index, rows, n, k, threads);
  } else {
    topk(static_cast<const float*>(scores), static_cast<float*>(values), index, rows, n, k, threads);
  }
}

void product_key_topk_backward(const void* grad_values, const int64_t* index, void* grad_scores, int64_t rows, int64_t n,
                               int64_t k, bool is_double, int threads) {
  check_sizes(rows, n, k);
  if (is_double) {
    backward(static_cast<const double*>(grad_values), index, static_cast<double*>(grad_scores), rows, n, k, threads);
  } else {
    backward(static_cast<const float*>(grad_values), index, static_cast<float*>(grad_scores), rows, n, k, threads);
  }
}

}  // namespace sdm

// Product-key selection against sorting all sums.
#include "product_key/topk.h"

#include <algorithm>
#include <stdexcept>

#include "testing.h"

namespace testing {
namespace {

template <class Real>
void test_case(const std::string& name) {
  const int64_t rows = integer(0, 70), n = integer(1, 40), k = integer(1, std::min<int64_t>(n * n, 90));
  std::vector<Real> scores(rows * 2 * n), grad_values(rows * k);
  // Few different scores: ties are where selections go wrong. Sums of these are exact.
  const bool ties = integer(0, 1);
  for (Real& x : scores) x = ties ? static_cast<Real>(integer(0, 4)) : static_cast<Real>(uniforms(1, -3, 3)[0]);
  for (Real& x : grad_values) x = static_cast<Real>(integer(-8, 8));
  const auto run = [&](int threads) {
    std::pair<std::vector<Real>, std::vector<int64_t>> out{std::vector<Real>(rows * k), std::vector<int64_t>(rows * k)};
    sdm::product_key_topk<Real>({threads, rows, n, k, scores.data(), out.first.data(), out.second.data()});
    return out;
  };
  const auto [values, index] = run(1);
  const auto [values_threaded, index_threaded] = run(3);
  require(identical(values, values_threaded) && identical(index, index_threaded), name + "threads");

  std::vector<Real> grad_scores(scores.size(), Real(7)), expected(scores.size());
  for (int64_t row = 0; row < rows; ++row) {
    const Real *first = scores.data() + row * 2 * n, *second = first + n;
    // Wide enough that the sum has no error.
    const auto sum = [&](int64_t slot) { return static_cast<long double>(first[slot / n]) + second[slot % n]; };
    std::vector<int64_t> slots(n * n);
    for (int64_t i = 0; i < n * n; ++i) slots[i] = i;
    std::stable_sort(slots.begin(), slots.end(), [&](int64_t a, int64_t b) { return sum(a) > sum(b); });
    slots.resize(k);
    std::sort(slots.begin(), slots.end());
    for (int64_t j = 0; j < k; ++j) {
      require(index[row * k + j] == slots[j], name + "index");
      require(values[row * k + j] == first[slots[j] / n] + second[slots[j] % n], name + "value");
      expected[row * 2 * n + slots[j] / n] += grad_values[row * k + j];
      expected[row * 2 * n + n + slots[j] % n] += grad_values[row * k + j];
    }
  }
  const auto run_backward = [&](const std::vector<int64_t>& at) {
    sdm::product_key_topk_backward<Real>({3, rows, n, k, grad_values.data(), at.data(), grad_scores.data()});
  };
  run_backward(index);
  require(identical(grad_scores, expected), name + "gradient");
  if (rows == 0) return;
  std::vector<int64_t> bad = index;
  bad[integer(0, rows * k - 1)] = integer(0, 1) ? -1 : n * n;
  try {
    run_backward(bad);
    require(false, name + "a slot out of range was accepted");
  } catch (const std::out_of_range&) {
  }
}

}  // namespace

void test_product_key(int number) {
  const std::string name = "product key, case " + std::to_string(number) + ": ";
  number % 2 ? test_case<float>(name) : test_case<double>(name);
}

}  // namespace testing

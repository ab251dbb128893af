// What the randomised tests of the kernels share: numbers, comparisons, and how a test fails.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace testing {

using Numbers = std::vector<double>;

inline std::mt19937_64& generator() {
  static std::mt19937_64 instance(20240229);
  return instance;
}

inline int64_t integer(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(generator());
}

// Numbers that float holds exactly, so that kernels of every type compute from the same inputs.
inline Numbers uniforms(int64_t count, double low, double high) {
  Numbers out(count);
  for (double& x : out) x = static_cast<float>(std::uniform_real_distribution<double>(low, high)(generator()));
  return out;
}

template <class To, class From>
std::vector<To> converted(const std::vector<From>& from) {
  return {from.begin(), from.end()};
}

// Offsets of documents, some of them empty, that together have `tokens` tokens.
std::vector<int64_t> documents(int64_t tokens);

inline void require(bool condition, const std::string& what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what.c_str());
  std::exit(1);
}

inline double deviation(const Numbers& a, const Numbers& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(a[i] - b[i]);
    most = difference <= most ? most : difference;  // keeps NaN
  }
  return most;
}

template <class T>
bool identical(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

inline double largest(const Numbers& a) {
  double most = 0;
  for (const double x : a) most = std::max(most, std::abs(x));
  return most;
}

inline double dot(const Numbers& a, const Numbers& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Compares gradients with the slope of `loss` along one random direction. `leaves` are what the gradients belong to;
// they are put back.
template <class Loss>
void require_gradients(const std::vector<Numbers*>& leaves, const std::vector<Numbers*>& gradients, const Loss& loss,
                       const std::string& name) {
  const double step = 1e-6;
  double slope = 0;
  std::vector<Numbers> directions, at;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    at.push_back(*leaves[i]);
    directions.push_back(uniforms(static_cast<int64_t>(leaves[i]->size()), -1, 1));
    slope += dot(*gradients[i], directions[i]);
  }
  const auto loss_at = [&](double distance) {
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      for (std::size_t k = 0; k < at[i].size(); ++k) (*leaves[i])[k] = at[i][k] + distance * directions[i][k];
    }
    return loss();
  };
  const double numeric = (loss_at(step) - loss_at(-step)) / (2 * step);
  for (std::size_t i = 0; i < leaves.size(); ++i) *leaves[i] = at[i];
  require(std::abs(numeric - slope) < 1e-5 * (1 + std::abs(numeric)), name + "gradient");
}

// One random case of each op; the number is for the message of a failure.
void test_sparse_delta(int number);
void test_product_key(int number);
void test_gated_delta(int number);
void test_sparse_delta_map(int number);
void test_linear(int number);
void test_decode_step(int number);

// One pass of an op with blocks of rows in its scratch memory, for the planted faults.
void sparse_delta_forward_of_fixed_size(bool is_double);
void sparse_delta_backward_of_fixed_size(bool is_double);

}  // namespace testing

// Product-key selection: what the bound functions take and what they share with the inner loops.
//
// n scores per half, k selected slots, m = min(n, k) scores of a half that can take part.
#pragma once

#include <cstdint>

namespace sdm {

// As Python names it.
template <class Real>
struct ProductKeyForward {
  int threads;
  int64_t rows, n, k;
  const Real* scores;  // [rows, 2n]
  Real* values;        // [rows, k]
  int64_t* index;      // [rows, k]

  template <class Visit>
  void each_field(const Visit& field) {
    field("threads", threads), field("rows", rows), field("n", n), field("k", k), field("scores", scores);
    field("values", values), field("index", index);
  }

  // Rank pairs (a, b) with (a+1)(b+1) <= k.
  int64_t candidates() const {
    int64_t pairs = 0;
    for (int64_t b = 0; b < (n < k ? n : k); ++b) pairs += n < k / (b + 1) ? n : k / (b + 1);
    return pairs;
  }
};

template <class Real>
struct ProductKeyBackward {
  int threads;
  int64_t rows, n, k;
  const Real* grad_values;  // [rows, k]
  const int64_t* index;     // [rows, k]
  Real* grad_scores;        // [rows, 2n], overwritten

  template <class Visit>
  void each_field(const Visit& field) {
    field("threads", threads), field("rows", rows), field("n", n), field("k", k), field("grad_values", grad_values);
    field("index", index), field("grad_scores", grad_scores);
  }
};

template <class Real>
struct ProductKeyKernels {
  // Bytes of working memory that a task needs, whatever its number of rows.
  int64_t (*workspace)(int64_t n, int64_t k, int64_t candidates);
  void (*rows)(const ProductKeyForward<Real>& args, int64_t candidates, int64_t begin, int64_t end, void* workspace);
};

template <class Real>
void product_key_topk(const ProductKeyForward<Real>& call);

// Indices out of range throw std::out_of_range.
template <class Real>
void product_key_topk_backward(const ProductKeyBackward<Real>& call);

}  // namespace sdm

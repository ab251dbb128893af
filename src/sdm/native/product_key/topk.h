// Product-key selection: what the bound functions take and what they share with the inner loops.
//
// n scores per half, k selected slots, m = min(n, k) scores of a half that can take part.
#pragma once

#include <cstdint>

namespace sdm {

template <class Real>
struct ProductKeyArgs {
  const Real* scores;  // [rows, 2n]
  Real* values;        // [rows, k]
  int64_t* index;      // [rows, k]
  int64_t n, k;
  int64_t candidates;  // rank pairs (a, b) with (a+1)(b+1) <= k
};

template <class Real>
struct ProductKeyKernels {
  // Bytes of working memory that a task needs, whatever its number of rows.
  int64_t (*workspace)(int64_t n, int64_t k, int64_t candidates);
  void (*rows)(const ProductKeyArgs<Real>& args, int64_t begin, int64_t end, void* workspace);
};

void product_key_topk(const void* scores, void* values, int64_t* index, int64_t rows, int64_t n, int64_t k,
                      bool is_double, int threads);

// grad_scores [rows, 2n] is overwritten. Indices out of range throw std::out_of_range.
void product_key_topk_backward(const void* grad_values, const int64_t* index, void* grad_scores, int64_t rows, int64_t n,
                               int64_t k, bool is_double, int threads);

}  // namespace sdm

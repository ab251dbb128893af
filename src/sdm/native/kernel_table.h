// The inner loops of every op, as one table of function pointers per instruction set.
//
// kernels.cpp is compiled once per instruction set and fills one table; everything outside it calls through
// kernels(). To add an op: a member here, its functions in a header that kernels.cpp includes.
#pragma once

#include "attention/window_step.h"
#include "gated_delta_rule/rule.h"
#include "linear/linear.h"
#include "product_key/topk.h"
#include "sparse_delta_rule/slabs.h"

namespace sdm {

struct KernelTable {
  const char* isa;
  AttentionKernels<float> attention_float;
  AttentionKernels<double> attention_double;
  ProductKeyKernels<float> product_key_float;
  ProductKeyKernels<double> product_key_double;
  GatedDeltaKernels<float> gated_delta_float;
  GatedDeltaKernels<double> gated_delta_double;
  LinearKernels<float> linear_float;
  LinearKernels<double> linear_double;
  SparseDeltaKernels<float> sparse_delta_float;
  SparseDeltaKernels<double> sparse_delta_double;
};

// The table for this processor, or the one that the environment variable SDM_ISA names (portable, avx2, avx512).
// Throws std::invalid_argument when that one is unknown or cannot run here.
const KernelTable& kernels();

template <class Real>
const SparseDeltaKernels<Real>& sparse_delta_kernels();
template <>
inline const SparseDeltaKernels<float>& sparse_delta_kernels<float>() {
  return kernels().sparse_delta_float;
}
template <>
inline const SparseDeltaKernels<double>& sparse_delta_kernels<double>() {
  return kernels().sparse_delta_double;
}

const char* isa_name();
// 1 if the core was built with OpenMP, 0 if it starts threads itself.
int has_openmp();

}  // namespace sdm

// The inner loops, compiled once per instruction set with SDM_ISA naming the namespace.
//
// Functions here must not be shared between the builds: everything lives in namespace sdm::SDM_ISA, and nothing of
// the standard library that could be emitted out of line (containers, algorithms) is used, because the linker would
// keep one copy of it, perhaps the one that only the newest processors can run.
#include "attention/kernels.h"
#include "gated_delta_rule/backward_kernels.h"
#include "gated_delta_rule/kernels.h"
#include "kernel_table.h"
#include "linear/kernels.h"
#include "product_key/kernels.h"
#include "simd.h"
#include "sparse_delta_rule/backward_kernels.h"
#include "sparse_delta_rule/kernels.h"

#define SDM_STRING_(x) #x
#define SDM_STRING(x) SDM_STRING_(x)

namespace sdm {
namespace SDM_ISA {

template <class Real>
constexpr GatedDeltaKernels<Real> gated_delta_kernels() {
  return {&gated_delta_forward_workspace<Real>, &gated_delta_backward_workspace<Real>, &gated_delta_forward_slab<Real>,
          &gated_delta_backward_slab<Real>};
}

template <class Real>
constexpr LinearKernels<Real> linear_kernels() {
  if constexpr (sizeof(Real) == sizeof(float)) {
    return {{linear_outputs<Real, Real>, linear_outputs<Real, BFloat16>, linear_outputs<Real, int8_t>}};
  } else {
    return {{linear_outputs<Real, Real>, nullptr, nullptr}};
  }
}

template <class Real>
constexpr SparseDeltaKernels<Real> sparse_delta() {
  SparseDeltaKernels<Real> k = {};
  k.forward[0] = forward<Real, Real, kSlabWidths[0]>;
  k.forward[1] = forward<Real, Real, kSlabWidths[1]>;
  k.forward[2] = forward<Real, Real, kSlabWidths[2]>;
  k.forward_rest = forward_rest<Real, Real>;
  k.replay[0] = replay<Real, kSlabWidths[0]>;
  k.replay[1] = replay<Real, kSlabWidths[1]>;
  k.replay[2] = replay<Real, kSlabWidths[2]>;
  k.backward[0] = backward<Real, kSlabWidths[0]>;
  k.backward[1] = backward<Real, kSlabWidths[1]>;
  k.backward[2] = backward<Real, kSlabWidths[2]>;
  k.gather = gather<Real, Real>;
  k.scatter = scatter<Real>;
  if constexpr (sizeof(Real) == sizeof(float)) {
    k.forward_bf16[0] = forward<Real, BFloat16, kSlabWidths[0]>;
    k.forward_bf16[1] = forward<Real, BFloat16, kSlabWidths[1]>;
    k.forward_bf16[2] = forward<Real, BFloat16, kSlabWidths[2]>;
    k.forward_bf16_rest = forward_rest<Real, BFloat16>;
    k.gather_bf16 = gather<Real, BFloat16>;
  }
  return k;
}

const KernelTable& table() {
  static constexpr KernelTable filled = {
      SDM_STRING(SDM_ISA),
      {&attend<float>},
      {&attend<double>},
      {&product_key_workspace<float>, &product_key_rows<float>},
      {&product_key_workspace<double>, &product_key_rows<double>},
      gated_delta_kernels<float>(),
      gated_delta_kernels<double>(),
      linear_kernels<float>(),
      linear_kernels<double>(),
      sparse_delta<float>(),
      sparse_delta<double>(),
  };
  return filled;
}

}  // namespace SDM_ISA
}  // namespace sdm

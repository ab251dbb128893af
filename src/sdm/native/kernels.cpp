// The inner loops, compiled once per instruction set with SDM_ISA naming the namespace.
//
// Functions here must not be shared between the builds: everything lives in namespace sdm::SDM_ISA, and nothing of
// the standard library that could be emitted out of line (containers, algorithms) is used, because the linker would
// keep one copy of it, perhaps the one that only the newest processors can run.
#include "gated_delta_backward_kernels.h"
#include "gated_delta_kernels.h"
#include "kernel_table.h"
#include "product_key_kernels.h"
#include "simd.h"

#define SDM_STRING_(x) #x
#define SDM_STRING(x) SDM_STRING_(x)

namespace sdm {
namespace SDM_ISA {

template <class Real>
constexpr GatedDeltaKernels<Real> gated_delta_kernels() {
  return {&gated_delta_forward_workspace<Real>, &gated_delta_backward_workspace<Real>, &gated_delta_forward_slab<Real>,
          &gated_delta_backward_slab<Real>};
}

const KernelTable& table() {
  static constexpr KernelTable filled = {
      SDM_STRING(SDM_ISA),
      {&product_key_workspace<float>, &product_key_rows<float>},
      {&product_key_workspace<double>, &product_key_rows<double>},
      gated_delta_kernels<float>(),
      gated_delta_kernels<double>(),
  };
  return filled;
}

}  // namespace SDM_ISA
}  // namespace sdm

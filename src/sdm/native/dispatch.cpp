#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernel_table.h"

namespace sdm {

namespace portable {
const KernelTable& table();
}
#ifdef SDM_HAVE_AVX2
namespace avx2 {
const KernelTable& table();
}
namespace avx512 {
const KernelTable& table();
}
#endif

namespace {

struct Candidate {
  const KernelTable& (*table)();
  bool runs_here;
};

const KernelTable& choose() {
#ifdef SDM_HAVE_AVX2
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const Candidate candidates[] = {
      {&avx512::table, has_avx512}, {&avx2::table, has_avx2}, {&portable::table, true}};
#else
  const Candidate candidates[] = {{&portable::table, true}};
#endif
  const char* wanted = std::getenv("SDM_ISA");
  for (const Candidate& candidate : candidates) {
    const bool named = wanted && *wanted ? std::strcmp(candidate.table().isa, wanted) == 0 : candidate.runs_here;
    if (!named) continue;
    if (!candidate.runs_here) {
      throw std::invalid_argument(std::string("SDM_ISA=") + wanted + ": this processor cannot run it");
    }
    return candidate.table();
  }
  throw std::invalid_argument(std::string("SDM_ISA=") + wanted + " is not one of portable, avx2, avx512 of this build");
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable& chosen = choose();
  return chosen;
}

const char* isa_name() { return kernels().isa; }

int has_openmp() {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}

}  // namespace sdm

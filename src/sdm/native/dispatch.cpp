#include <atomic>
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
#endif
#ifdef SDM_HAVE_AVX512
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
#if defined(SDM_HAVE_AVX2) || defined(SDM_HAVE_AVX512)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  const Candidate candidates[] = {
#ifdef SDM_HAVE_AVX512
      {&avx512::table, has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")},
#endif
#ifdef SDM_HAVE_AVX2
      {&avx2::table, has_avx2},
#endif
      {&portable::table, true}};
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
  // No static local: a child that is forked while another thread initialises one would wait for it forever.
  static std::atomic<const KernelTable*> chosen{nullptr};
  const KernelTable* table = chosen.load(std::memory_order_acquire);
  if (!table) chosen.store(table = &choose(), std::memory_order_release);
  return *table;
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

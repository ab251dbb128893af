// A randomised test of the kernels without Python, for the sanitizers: `make sanitize` builds it with
// AddressSanitizer + UBSan and with ThreadSanitizer. Prints "ok" or the first deviation and exits with 1.
//
//     native_test [CASES]   random cases of every op
//     native_test faults    whether AddressSanitizer reports scratch memory that is one row too short
//
// Each case draws sizes, inputs and options, compares outputs with a plain loop in double, gradients with finite
// differences along one random direction, and the results of one and of several threads bit by bit.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "memory.h"
#include "testing.h"

namespace testing {

std::vector<int64_t> documents(int64_t tokens) {
  std::vector<int64_t> offsets = {0, tokens};
  for (int64_t i = integer(0, 3); i > 0; --i) offsets.push_back(integer(0, tokens));
  std::sort(offsets.begin(), offsets.end());
  return offsets;
}

namespace {

constexpr int kReported = 86;

// What a forked child that runs `pass` ends with.
template <class Pass>
int exit_code_of(const Pass& pass) {
  const pid_t child = fork();
  require(child >= 0, "fork");
  if (child == 0) {
    dup2(open("/dev/null", O_WRONLY), STDERR_FILENO);
    pass();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Makes every block of rows that `pass` allocates, one after the other, one row of the narrowest slab too short.
template <class Pass>
void test_planted_faults(const char* name, int least_blocks, const Pass& pass) {
  using sdm::ScratchFault;
  require(exit_code_of(pass) == 0, std::string(name) + " without a fault");
  ScratchFault::blocks = 0;
  pass();
  const int blocks = ScratchFault::blocks;
  require(blocks >= least_blocks, std::string(name) + ": " + std::to_string(blocks) + " blocks of rows");
  for (int block = 0; block < blocks; ++block) {
    const int code = exit_code_of([&] {
      ScratchFault::blocks = 0;
      ScratchFault::number = block;
      ScratchFault::missing = 64;
      pass();
    });
    const std::string what = std::string(name) + ": block " + std::to_string(block) + " too short";
    require(code == kReported, what + ", and the sanitizer did not report it (exit code " + std::to_string(code) + ")");
  }
  std::printf("ok: %s, faults in %d blocks reported\n", name, blocks);
}

}  // namespace
}  // namespace testing

// Tells a report from other failures. The runtime of the sanitizer looks it up.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() { return "exitcode=86"; }

int main(int argc, char** argv) {
  using namespace testing;
  if (argc > 1 && std::string(argv[1]) == "faults") {
    for (const bool is_double : {false, true}) {
      // The table; and in backward the saved and the kept rows too.
      test_planted_faults("forward", 1, [&] { sparse_delta_forward_of_fixed_size(is_double); });
      test_planted_faults("backward", 3, [&] { sparse_delta_backward_of_fixed_size(is_double); });
    }
    return 0;
  }
  const int cases = argc > 1 ? std::atoi(argv[1]) : 200;
  for (int i = 0; i < cases; ++i) {
    test_sparse_delta(i);
    test_product_key(i);
    test_gated_delta(i);
    test_sparse_delta_map(i);
    test_linear(i);
    test_decode_step(i);
  }
  std::printf("ok: %d cases\n", cases);
}

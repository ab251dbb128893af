// A randomised test of the kernels without Python, for the sanitizers: `make sanitize` builds it with
// AddressSanitizer + UBSan and with ThreadSanitizer. Prints "ok" or the first deviation and exits with 1.
//
// Each case draws sizes, inputs and options, compares outputs with a plain loop in double, gradients with finite
// differences along one random direction, and the results of one and of several threads bit by bit.
#include <algorithm>

#include "testing.h"

namespace testing {

std::vector<int64_t> documents(int64_t tokens) {
  std::vector<int64_t> offsets = {0, tokens};
  for (int64_t i = integer(0, 3); i > 0; --i) offsets.push_back(integer(0, tokens));
  std::sort(offsets.begin(), offsets.end());
  return offsets;
}

}  // namespace testing

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 200;
  for (int i = 0; i < cases; ++i) {
    testing::test_sparse_delta(i);
    testing::test_product_key(i);
    testing::test_gated_delta(i);
  }
  std::printf("ok: %d cases\n", cases);
}

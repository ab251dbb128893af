// What the caller's tensors say, checked: sizes, indices and decays.
#pragma once

#include <cstdint>
#include <limits>
#include <mutex>
#include <string>

#include "sparse_delta_rule/streams.h"

namespace sdm {

// The first offence in token order, whichever thread finds it.
class FirstError {
 public:
  void report(int64_t position, bool is_index, std::string message);
  void rethrow() const;  // std::out_of_range for an index, else std::invalid_argument

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::mutex mutex_;
  int64_t position_ = kNone;
  bool is_index_ = false;
  std::string message_;
};

// What a pass over the tokens of a stream fills in.
template <class Real>
struct CheckedTokens {
  int32_t* write_row;  // [tokens, W] slots, until rows are numbered
  int32_t* read_row;   // [tokens, R]
  Real* factor;        // as in Stream
  Real* inverse;       // null in the forward pass
  Real* push;          // null for the delta rule, whose pushes are the caller's write weights
  Restore* restore;    // [tokens, W] not filled in yet; null in the forward pass
  Real* size;          // [tokens] the magnitudes of what a token pushes on a row of weight 1, added up over all channels;
                       // null in the forward pass
};

// Throws std::invalid_argument for sizes and offsets that are none. Leaves one thread to calls that are too small to share.
template <class Real>
void check_sizes(SparseDeltaCall<Real>& call);

// Reads the tokens [first, last) of a stream, up to the first offence.
template <class Real>
void check_tokens(const SparseDeltaCall<Real>& call, const SparseDeltaPlan<Real>* plan,
                  const PreparedStream<Real>& prepared, int64_t first, int64_t last, const CheckedTokens<Real>& out,
                  FirstError& error);

}  // namespace sdm

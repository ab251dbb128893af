// A call of the sparse delta rule: the caller's tensors, as Python names them.
//
// Token arrays are [total tokens, H, ...]; sequence s owns the tokens from begin(s) on. slabs.h has the letters.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace sdm {

template <class Real>
struct SparseDeltaCall {
  int threads;
  int64_t sequences, tokens, heads, slots, channels;  // tokens: of each sequence, unless cu_seqlens says otherwise
  int32_t writes, reads;
  bool wide_index;       // indices are int64, else int32
  bool decay_per_write;  // log_decay is [.., H, W], else [.., H]
  bool slot_rule;
  const int64_t* cu_seqlens;  // [sequences + 1], or null
  const void* write_index;    // [.., H, W]
  const Real* write_weight;   // [.., H, W]
  const Real* value;          // [.., H, D]
  const Real* beta;           // [.., H]
  const Real* log_decay;
  const void* read_index;     // [.., H, R]
  const Real* read_weight;    // [.., H, R]
  const void* initial_state;  // [H, N, D] or [sequences, H, N, D]; null: zeros
  bool initial_per_sequence;  // else shared by all sequences
  bool initial_bf16;          // else Real

  template <class Visit>
  void each_field(const Visit& field) {
    field("threads", threads), field("sequences", sequences), field("tokens", tokens), field("heads", heads);
    field("slots", slots), field("channels", channels), field("writes", writes), field("reads", reads);
    field("wide_index", wide_index), field("decay_per_write", decay_per_write), field("slot_rule", slot_rule);
    field("cu_seqlens", cu_seqlens), field("write_index", write_index), field("write_weight", write_weight);
    field("value", value), field("beta", beta), field("log_decay", log_decay), field("read_index", read_index);
    field("read_weight", read_weight), field("initial_state", initial_state);
    field("initial_per_sequence", initial_per_sequence), field("initial_bf16", initial_bf16);
  }

  int64_t begin(int64_t sequence) const { return cu_seqlens ? cu_seqlens[sequence] : sequence * tokens; }
  int64_t length(int64_t sequence) const {
    return cu_seqlens ? cu_seqlens[sequence + 1] - cu_seqlens[sequence] : tokens;
  }
  std::size_t initial_bytes() const {
    const int64_t tables = initial_per_sequence ? streams() : heads;
    return static_cast<std::size_t>(tables * slots * channels) * (initial_bf16 ? 2 : sizeof(Real));
  }
  int64_t streams() const { return sequences * heads; }
  int64_t longest() const {
    int64_t most = 0;
    for (int64_t s = 0; s < sequences; ++s) most = std::max(most, length(s));
    return most;
  }
  // No stream touches more slots than this.
  int64_t most_rows() const { return std::min(slots, longest() * (int64_t{writes} + reads)); }
};

template <class Real>
struct SparseDeltaForward : SparseDeltaCall<Real> {
  Real* y;            // [.., H, D]
  Real* residual;     // [.., H, D] value - retrieved; null: not wanted
  void* final_state;  // [sequences, H, N, D] in Real; null: not wanted; initial_state: it is updated in place

  template <class Visit>
  void each_field(const Visit& field) {
    SparseDeltaCall<Real>::each_field(field);
    field("y", y), field("residual", residual), field("final_state", final_state);
  }
};

// Which old rows backward copies instead of recovering them by inverting the write: those where inverting could leave a
// row with more than rounding_limit units of rounding, relative to what it holds. 0 copies every row, infinity none that
// can be inverted at all.
template <class Real>
struct SparseDeltaPlan : SparseDeltaCall<Real> {
  double rounding_limit;
  const Real* residual;  // of the forward pass; the slot rule does without

  template <class Visit>
  void each_field(const Visit& field) {
    SparseDeltaCall<Real>::each_field(field);
    field("rounding_limit", rounding_limit), field("residual", residual);
  }
};

template <class Real>
struct SparseDeltaBackward : SparseDeltaPlan<Real> {
  const Real* grad_y;
  const Real* grad_final_state;  // null: zeros
  Real *grad_write_weight, *grad_value, *grad_beta, *grad_log_decay, *grad_read_weight;
  Real* grad_initial_state;                    // shaped like the initial state; null: not wanted
  int64_t table_bytes = int64_t{10} << 20;  // larger tables recycle their rows

  template <class Visit>
  void each_field(const Visit& field) {
    SparseDeltaPlan<Real>::each_field(field);
    field("grad_y", grad_y), field("grad_final_state", grad_final_state);
    field("grad_write_weight", grad_write_weight), field("grad_value", grad_value), field("grad_beta", grad_beta);
    field("grad_log_decay", grad_log_decay), field("grad_read_weight", grad_read_weight);
    field("grad_initial_state", grad_initial_state);
  }
};

// As Python calls them: sizes and offsets are checked here, indices and decays on the way.
template <class Real>
void sparse_delta_rule_forward(SparseDeltaForward<Real> call);
template <class Real>
void sparse_delta_rule_backward(SparseDeltaBackward<Real> call);
// How many rows backward would save.
template <class Real>
int64_t sparse_delta_rule_saved_rows(SparseDeltaPlan<Real> call);

// The same on checked calls, with as many threads as they say.
template <class Real>
void sparse_delta_forward(const SparseDeltaForward<Real>& call);
template <class Real>
void sparse_delta_backward(const SparseDeltaBackward<Real>& call);

}  // namespace sdm

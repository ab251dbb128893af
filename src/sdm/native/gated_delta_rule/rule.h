// The dense gated delta rule: what the bound functions take and what they share with the inner loops.
//
// B batch, T time, H heads, K key size, D value channels, S sequences (batch rows or documents). Tokens of all
// sequences are numbered through: token x of head h has its key at key[(x * H + h) * K]. A token has one decay per head
// (decay_size 1), or one for each key channel, which is a row of the state (decay_size K).
#pragma once

#include <cstdint>

namespace sdm {

// The state is saved before every kGatedDeltaSegment-th token of a sequence. Backward recomputes the states between.
constexpr int64_t kGatedDeltaSegment = 32;
// Channels of one task. Fixed, so that no sum depends on the number of threads.
template <class Real>
constexpr int64_t kGatedDeltaSlab = 256 / sizeof(Real);

// What both passes are told, as Python names it.
template <class Real>
struct GatedDeltaCall {
  int threads;
  int64_t sequences, tokens, heads, key_size, channels;  // tokens: of all sequences
  int64_t decay_size;         // 1 or K
  const int64_t* cu_seqlens;  // [S+1], or null for S rows of equal length
  const Real* query;          // [tokens, H, K]
  const Real* key;            // [tokens, H, K]
  const Real* beta;           // [tokens, H]
  const Real* log_decay;      // [tokens, H, decay_size]
  const Real* decay;          // [tokens, H, K] its exponential with a decay per channel; not a field of Python's

  template <class Visit>
  void each_field(const Visit& field) {
    field("threads", threads), field("sequences", sequences), field("tokens", tokens), field("heads", heads);
    field("key_size", key_size), field("channels", channels), field("cu_seqlens", cu_seqlens), field("query", query);
    field("key", key), field("beta", beta), field("decay_size", decay_size), field("log_decay", log_decay);
  }
  bool by_channel() const { return decay_size > 1; }
};

template <class Real>
struct GatedDeltaForward : GatedDeltaCall<Real> {
  const Real* value;          // [tokens, H, D]
  const Real* initial_state;  // [S, H, K, D], or null for zeros
  Real* y;                    // [tokens, H, D]
  Real* final_state;          // [S, H, K, D], or null; may be the memory of the initial state
  Real* residual;             // [tokens, H, D] value minus retrieved, or null
  Real* saved_states;         // [segments, H, K, D], or null

  template <class Visit>
  void each_field(const Visit& field) {
    GatedDeltaCall<Real>::each_field(field);
    field("value", value), field("initial_state", initial_state), field("y", y), field("final_state", final_state);
    field("residual", residual), field("saved_states", saved_states);
  }
};

template <class Real>
struct GatedDeltaBackward : GatedDeltaCall<Real> {
  const Real* residual;          // of the forward pass
  const Real* saved_states;      // of the forward pass
  const Real* grad_y;            // [tokens, H, D]
  const Real* grad_final_state;  // [S, H, K, D], or null for zeros
  Real* grad_value;              // [tokens, H, D]
  Real* grad_initial_state;      // [S, H, K, D]
  // For the inner loops these are [slabs, tokens, ...], a partial sum per slab of channels.
  Real* grad_query;      // [tokens, H, K]
  Real* grad_key;        // [tokens, H, K]
  Real* grad_beta;       // [tokens, H]
  Real* grad_log_decay;  // [tokens, H, decay_size]

  template <class Visit>
  void each_field(const Visit& field) {
    GatedDeltaCall<Real>::each_field(field);
    field("residual", residual), field("saved_states", saved_states), field("grad_y", grad_y);
    field("grad_final_state", grad_final_state), field("grad_query", grad_query), field("grad_key", grad_key);
    field("grad_value", grad_value), field("grad_beta", grad_beta), field("grad_log_decay", grad_log_decay);
    field("grad_initial_state", grad_initial_state);
  }
};

// One sequence, one head, one slab of channels.
struct GatedDeltaTask {
  int64_t sequence, head, slab;
  int64_t begin, end;     // tokens
  int64_t first_segment;  // where the saved states of the sequence start
};

template <class Real>
struct GatedDeltaKernels {
  // Numbers of working memory that a thread needs.
  int64_t (*forward_workspace)(int64_t key_size);
  int64_t (*backward_workspace)(int64_t key_size);
  void (*forward)(const GatedDeltaForward<Real>& args, const GatedDeltaTask& task, Real* workspace);
  void (*backward)(const GatedDeltaBackward<Real>& args, const GatedDeltaTask& task, Real* workspace);
};

// A log_decay above 0 and offsets that are no offsets throw std::invalid_argument.
template <class Real>
void gated_delta_forward(const GatedDeltaForward<Real>& call);
template <class Real>
void gated_delta_backward(const GatedDeltaBackward<Real>& call);

}  // namespace sdm

// The dense gated delta rule: what the bound functions take and what they share with the inner loops.
//
// B batch, T time, H heads, K key size, D value channels, S sequences (batch rows or documents). Tokens of all
// sequences are numbered through: token x of head h has its key at key[(x * H + h) * K].
#pragma once

#include <cstdint>

namespace sdm {

// The state is saved before every kGatedDeltaSegment-th token of a sequence. Backward recomputes the states between.
constexpr int64_t kGatedDeltaSegment = 32;
// Channels of one task. Fixed, so that no sum depends on the number of threads.
template <class Real>
constexpr int64_t kGatedDeltaSlab = 256 / sizeof(Real);

template <class Real>
struct GatedDeltaArgs {
  int64_t heads, key_size, channels;
  const Real* query;          // [tokens, H, K]
  const Real* key;            // [tokens, H, K]
  const Real* value;          // [tokens, H, D]
  const Real* beta;           // [tokens, H]
  const Real* log_decay;      // [tokens, H]
  const Real* initial_state;  // [S, H, K, D], or null for zeros
  Real* output;               // [tokens, H, D]
  Real* final_state;          // [S, H, K, D], or null
  Real* residual;             // [tokens, H, D] value minus retrieved, or null
  Real* saved_states;         // [segments, H, K, D], or null

  const Real* grad_output;       // [tokens, H, D]
  const Real* grad_final_state;  // [S, H, K, D], or null for zeros
  Real* grad_value;              // [tokens, H, D]
  Real* grad_initial_state;      // [S, H, K, D]
  // One partial sum per slab of channels; the caller adds them up.
  Real* grad_query;      // [slabs, tokens, H, K]
  Real* grad_key;        // [slabs, tokens, H, K]
  Real* grad_beta;       // [slabs, tokens, H]
  Real* grad_log_decay;  // [slabs, tokens, H]
  int64_t tokens;
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
  void (*forward)(const GatedDeltaArgs<Real>& args, const GatedDeltaTask& task, Real* workspace);
  void (*backward)(const GatedDeltaArgs<Real>& args, const GatedDeltaTask& task, Real* workspace);
};

// cu_seqlens [S+1], or null for S rows of equal length. initial_state and final_state may be the same memory.
// A log_decay above 0 and offsets that are no offsets throw std::invalid_argument.
void gated_delta_forward(const void* query, const void* key, const void* value, const void* beta, const void* log_decay,
                         const void* initial_state, const int64_t* cu_seqlens, void* output, void* final_state,
                         void* residual, void* saved_states, int64_t sequences, int64_t tokens, int64_t heads,
                         int64_t key_size, int64_t channels, bool is_double, int threads);

void gated_delta_backward(const void* query, const void* key, const void* beta, const void* log_decay,
                          const int64_t* cu_seqlens, const void* residual, const void* saved_states,
                          const void* grad_output, const void* grad_final_state, void* grad_query, void* grad_key,
                          void* grad_value, void* grad_beta, void* grad_log_decay, void* grad_initial_state,
                          int64_t sequences, int64_t tokens, int64_t heads, int64_t key_size, int64_t channels,
                          bool is_double, int threads);

}  // namespace sdm

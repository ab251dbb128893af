#include "sparse_delta_rule/python.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "sparse_delta_rule/streams.h"

namespace sdm {
namespace {

template <class Real>
SparseDeltaInputs<Real> checked_inputs(int threads, int64_t sequences, int64_t tokens, int64_t heads, int64_t slots,
                                       int64_t channels, int writes, int reads, bool wide_index, bool decay_per_write,
                                       bool slot_rule, const int64_t* cu_seqlens, const void* write_index,
                                       const void* write_weight, const void* value, const void* beta,
                                       const void* log_decay, const void* read_index, const void* read_weight) {
  if (slots >= std::numeric_limits<int32_t>::max()) throw std::invalid_argument("num_slots must be below 2^31 - 1");
  if (cu_seqlens) {
    if (cu_seqlens[0] != 0 || cu_seqlens[sequences] != tokens) {
      throw std::invalid_argument("cu_seqlens must start at 0 and end at T = " + std::to_string(tokens) + ", got " +
                                  std::to_string(cu_seqlens[0]) + " and " + std::to_string(cu_seqlens[sequences]));
    }
    for (int64_t s = 0; s < sequences; ++s) {
      if (cu_seqlens[s] <= cu_seqlens[s + 1]) continue;
      throw std::invalid_argument("cu_seqlens must not decrease, got " + std::to_string(cu_seqlens[s]) + " then " +
                                  std::to_string(cu_seqlens[s + 1]));
    }
  }
  // Below this, a decode step for instance, waking threads takes longer than the work.
  constexpr int64_t kLeastWork = int64_t{1} << 18;
  if ((cu_seqlens ? 1 : sequences) * tokens * heads * channels * (writes + reads) < kLeastWork) threads = 1;
  const auto real = [](const void* data) { return static_cast<const Real*>(data); };
  return {threads,         sequences, tokens,     heads,       slots,     channels,           writes,      reads,
          wide_index,      decay_per_write,       slot_rule,   cu_seqlens, write_index,       read_index,
          real(write_weight), real(value),        real(beta),  real(log_decay), real(read_weight)};
}

}  // namespace

void sparse_delta_rule_forward(bool is_double, int threads, int64_t sequences, int64_t tokens, int64_t heads,
                               int64_t slots, int64_t channels, int writes, int reads, bool wide_index,
                               bool decay_per_write, bool slot_rule, const int64_t* cu_seqlens,
                               const void* write_index, const void* write_weight, const void* value, const void* beta,
                               const void* log_decay, const void* read_index, const void* read_weight,
                               const void* initial, bool initial_per_sequence, bool initial_bf16, void* y, void* error,
                               void* final_state, bool final_bf16) {
  if (is_double && (initial_bf16 || final_bf16)) throw std::invalid_argument("a bfloat16 state computes in float32");
  const auto run = [&](auto zero) {
    using Real = decltype(zero);
    const auto in = checked_inputs<Real>(threads, sequences, tokens, heads, slots, channels, writes, reads, wide_index,
                                         decay_per_write, slot_rule, cu_seqlens, write_index, write_weight, value, beta,
                                         log_decay, read_index, read_weight);
    sparse_delta_forward<Real>(in, {initial, initial_bf16, initial_per_sequence}, static_cast<Real*>(y),
                               static_cast<Real*>(error), final_state, final_bf16);
  };
  is_double ? run(double{}) : run(float{});
}

void sparse_delta_rule_backward(bool is_double, int threads, int64_t sequences, int64_t tokens, int64_t heads,
                                   int64_t slots, int64_t channels, int writes, int reads, bool wide_index,
                                   bool decay_per_write, bool slot_rule, const int64_t* cu_seqlens,
                                   const void* write_index, const void* write_weight, const void* value,
                                   const void* beta, const void* log_decay, const void* read_index,
                                   const void* read_weight, const void* initial, bool initial_per_sequence,
                                   double rounding_limit, const void* error, const void* grad_y, const void* grad_final,
                                   void* grad_write_weight, void* grad_value, void* grad_beta, void* grad_log_decay,
                                   void* grad_read_weight, void* grad_initial) {
  const auto run = [&](auto zero) {
    using Real = decltype(zero);
    const auto in = checked_inputs<Real>(threads, sequences, tokens, heads, slots, channels, writes, reads, wide_index,
                                         decay_per_write, slot_rule, cu_seqlens, write_index, write_weight, value, beta,
                                         log_decay, read_index, read_weight);
    if (!slot_rule && !error && sequences * tokens > 0) throw std::invalid_argument("backward needs the error of forward");
    const auto real = [](void* data) { return static_cast<Real*>(data); };
    const auto constant = [](const void* data) { return static_cast<const Real*>(data); };
    sparse_delta_backward<Real>(
        in, {initial, false, initial_per_sequence}, {rounding_limit},
        {constant(error), constant(grad_y), constant(grad_final), real(grad_write_weight), real(grad_value),
         real(grad_beta), real(grad_log_decay), real(grad_read_weight), real(grad_initial)});
  };
  is_double ? run(double{}) : run(float{});
}

int64_t sparse_delta_rule_saved_rows(bool is_double, int threads, int64_t sequences, int64_t tokens, int64_t heads,
                                     int64_t slots, int64_t channels, int writes, int reads, bool wide_index,
                                     bool decay_per_write, bool slot_rule, const int64_t* cu_seqlens,
                                     const void* write_index, const void* write_weight, const void* value,
                                     const void* beta, const void* log_decay, const void* read_index,
                                     const void* read_weight, const void* initial, bool initial_per_sequence,
                                     double rounding_limit, const void* error) {
  const auto run = [&](auto zero) {
    using Real = decltype(zero);
    const auto in = checked_inputs<Real>(threads, sequences, tokens, heads, slots, channels, writes, reads, wide_index,
                                         decay_per_write, slot_rule, cu_seqlens, write_index, write_weight, value, beta,
                                         log_decay, read_index, read_weight);
    InversionPlan<Real> plan = {rounding_limit};
    plan.initial = {initial, false, initial_per_sequence};
    plan.error = static_cast<const Real*>(error);
    int64_t saved = 0;
    for (const auto& prepared : prepare(in, 0, in.streams(), Rows::kOwn, !initial, &plan)) saved += prepared.saved_count;
    return saved;
  };
  return is_double ? run(double{}) : run(float{});
}

}  // namespace sdm

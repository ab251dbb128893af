// The sparse delta rule as Python sees it: pointers and numbers. streams.h documents the arguments.
#pragma once

#include <cstdint>

namespace sdm {

void sparse_delta_rule_forward(bool is_double, int threads, int64_t sequences, int64_t tokens, int64_t heads,
                               int64_t slots, int64_t channels, int writes, int reads, bool wide_index,
                               bool decay_per_write, bool slot_rule, const int64_t* cu_seqlens,
                               const void* write_index, const void* write_weight, const void* value, const void* beta,
                               const void* log_decay, const void* read_index, const void* read_weight,
                               const void* initial, bool initial_per_sequence, bool initial_bf16, void* y, void* error,
                               void* final_state, bool final_bf16);

// How many rows backward would save.
int64_t sparse_delta_rule_saved_rows(bool is_double, int threads, int64_t sequences, int64_t tokens, int64_t heads,
                                     int64_t slots, int64_t channels, int writes, int reads, bool wide_index,
                                     bool decay_per_write, bool slot_rule, const int64_t* cu_seqlens,
                                     const void* write_index, const void* write_weight, const void* value,
                                     const void* beta, const void* log_decay, const void* read_index,
                                     const void* read_weight, const void* initial, bool initial_per_sequence,
                                     double rounding_limit, const void* error);

void sparse_delta_rule_backward(bool is_double, int threads, int64_t sequences, int64_t tokens, int64_t heads,
                                   int64_t slots, int64_t channels, int writes, int reads, bool wide_index,
                                   bool decay_per_write, bool slot_rule, const int64_t* cu_seqlens,
                                   const void* write_index, const void* write_weight, const void* value,
                                   const void* beta, const void* log_decay, const void* read_index,
                                   const void* read_weight, const void* initial, bool initial_per_sequence,
                                   double rounding_limit, const void* error, const void* grad_y, const void* grad_final,
                                   void* grad_write_weight, void* grad_value, void* grad_beta, void* grad_log_decay,
                                   void* grad_read_weight, void* grad_initial);

}  // namespace sdm

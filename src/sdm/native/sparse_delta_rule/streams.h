// From the caller's tensors to streams: checked, renumbered, planned.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "memory.h"
#include "sparse_delta_rule/slabs.h"

namespace sdm {

// The caller's tensors. Token arrays are [total tokens, H, ...]; sequence s owns the tokens [begin(s), end(s)).
template <class Real>
struct SparseDeltaInputs {
  int threads;
  int64_t sequences, tokens, heads, slots, channels;  // tokens: of each sequence, unless cu_seqlens says otherwise
  int32_t writes, reads;
  bool wide_index;       // indices are int64, else int32
  bool decay_per_write;  // log_decay is [.., H, W], else [.., H]
  bool slot_rule;
  const int64_t* cu_seqlens;  // [sequences + 1], or null
  const void* write_index;    // [.., H, W]
  const void* read_index;     // [.., H, R]
  const Real* write_weight;   // [.., H, W]
  const Real* value;          // [.., H, D]
  const Real* beta;           // [.., H]
  const Real* log_decay;
  const Real* read_weight;  // [.., H, R]

  int64_t begin(int64_t sequence) const { return cu_seqlens ? cu_seqlens[sequence] : sequence * tokens; }
  int64_t length(int64_t sequence) const {
    return cu_seqlens ? cu_seqlens[sequence + 1] - cu_seqlens[sequence] : tokens;
  }
  int64_t streams() const { return sequences * heads; }
  int64_t longest() const;
  // No stream touches more slots than this.
  int64_t most_rows() const;
};

// Which old rows backward copies instead of recovering them by inverting the write: those where inverting could leave a
// row with more than rounding_limit units of rounding, relative to what it holds. 0 copies every row, infinity none that
// can be inverted at all. Tables larger than table_bytes recycle their rows.
template <class Real>
struct InversionPlan {
  double rounding_limit;
  int64_t table_bytes = int64_t{10} << 20;
  InitialState initial = {};
  const Real* error = nullptr;  // [.., H, D] value - retrieved of the forward pass; the slot rule does without
};

enum class Rows {
  kSlots,     // rows are the slots themselves: for tables updated in place
  kOwn,       // every slot that is born has a row of its own
  kRecycled,  // rows of slots that left go to slots born later
};

// One sequence and head, with the arrays that its Stream points into.
template <class Real>
struct PreparedStream {
  int64_t sequence, head;
  Stream<Real> stream;
  int64_t row_count = 0;  // of the table, the row of zeros included
  int64_t saved_count = 0;
  int64_t kept_count = 0;
  int64_t born_count = 0;
  int32_t* touched_slots = nullptr;  // [born_count] the slots that were born, ascending; Rows::kOwn only
  int32_t* row_of_slot = nullptr;    // [N], -1 where untouched
  std::vector<std::unique_ptr<Scratch>> memory;
};

// Prepares the streams [first, first + count). Throws std::out_of_range for an index outside [0, N) and
// std::invalid_argument for a slot that a token writes twice and for a log_decay above 0 or NaN.
// starts_at_zero: there is no initial state. plan: null for the forward pass.
template <class Real>
std::vector<PreparedStream<Real>> prepare(const SparseDeltaInputs<Real>& inputs, int64_t first, int64_t count,
                                          Rows rows, bool starts_at_zero, const InversionPlan<Real>* plan);

// How many streams to prepare at once: enough for all threads, few enough that preparing needs little memory.
inline int64_t streams_at_once(int64_t streams, int64_t tasks_per_stream, int threads) {
  const int64_t wanted = 4 * int64_t{threads} / (tasks_per_stream > 0 ? tasks_per_stream : 1);
  return wanted < 1 ? 1 : wanted < streams ? wanted : streams;
}

}  // namespace sdm

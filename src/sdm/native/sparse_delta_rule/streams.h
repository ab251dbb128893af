// From the caller's tensors to streams: checked (checked_inputs.h), renumbered (row_numbering.h), planned
// (inversion_plan.h).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "memory.h"
#include "sparse_delta_rule/call.h"
#include "sparse_delta_rule/slabs.h"

namespace sdm {

enum class Rows {
  kSlots,         // rows are the slots themselves: for tables updated in place
  kOwn,           // every slot that is born has a row of its own
  kOwnUntilLeft,  // the same, and after which token a slot leaves is listed
  kRecycled,      // rows of slots that left go to slots born later
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
  int32_t* touched_slots = nullptr;  // [born_count] the slots that were born, ascending
  int32_t* touched_rows = nullptr;   // [born_count] their rows
  std::vector<std::unique_ptr<Scratch>> memory;

  template <class T>
  T* allocate(int64_t count) {
    memory.push_back(std::make_unique<Scratch>(static_cast<std::size_t>(count) * sizeof(T)));
    return memory.back()->template as<T>();
  }

  // Elements before this stream's table in a state of the caller.
  int64_t state_offset(const SparseDeltaCall<Real>& call, bool per_sequence) const {
    return ((per_sequence ? sequence * call.heads : 0) + head) * call.slots * call.channels;
  }
  // The position of a token among all tokens and heads.
  int64_t cell(const SparseDeltaCall<Real>& call, int64_t token) const {
    return (call.begin(sequence) + token) * call.heads + head;
  }
  // Calls run(slot) for the slots in [begin, end) that no token touched.
  template <class Run>
  void each_untouched(int64_t begin, int64_t end, const Run& run) const {
    const int32_t* touched = std::lower_bound(touched_slots, touched_slots + born_count, begin);
    for (int64_t slot = begin; slot < end; ++slot) {
      if (touched < touched_slots + born_count && *touched == slot) {
        ++touched;
      } else {
        run(slot);
      }
    }
  }
};

// Prepares the streams [first, first + count). Throws std::out_of_range for an index outside [0, N) and
// std::invalid_argument for a slot that a token writes twice and for a log_decay above 0 or NaN.
// plan: null for the forward pass.
template <class Real>
std::vector<PreparedStream<Real>> prepare(const SparseDeltaCall<Real>& call, int64_t first, int64_t count, Rows rows,
                                          const SparseDeltaPlan<Real>* plan);

// How many streams to prepare at once: enough for all threads, few enough that preparing needs little memory.
inline int64_t streams_at_once(int64_t streams, int64_t tasks_per_stream, int threads) {
  const int64_t wanted = 4 * int64_t{threads} / (tasks_per_stream > 0 ? tasks_per_stream : 1);
  return wanted < 1 ? 1 : wanted < streams ? wanted : streams;
}

}  // namespace sdm

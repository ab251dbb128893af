// Gives slots their rows, as a compiler gives variables its registers: one pass back through time finds the last visit of
// every slot, the next deals out rows and takes them back. Rows that have just become free are the first to be dealt
// again, while they are still in the nearest cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sparse_delta_rule/checked_inputs.h"

namespace sdm {

template <class Real>
class RowNumbering {
 public:
  // Turns the slots of `tokens` into rows. starts_at_zero: there is no initial state.
  RowNumbering(PreparedStream<Real>& prepared, const CheckedTokens<Real>& tokens, int64_t slots, Rows rows,
               bool starts_at_zero)
      : prepared_(prepared),
        tokens_(tokens),
        writes_(prepared.stream.tokens * prepared.stream.writes),
        reads_(prepared.stream.tokens * prepared.stream.reads),
        slots_(slots),
        recycles_(rows == Rows::kRecycled),
        lists_left_(recycles_ || rows == Rows::kOwnUntilLeft),
        starts_at_zero_(starts_at_zero) {
    const Stream<Real>& stream = prepared.stream;
    if (slots / kSlotsPerVisit > writes_ + reads_) leave_out_unvisited();
    const int64_t most = std::min(slots_, writes_ + reads_);
    row_of_slot_ = prepared.template allocate<int32_t>(slots_);
    std::fill(row_of_slot_, row_of_slot_ + slots_, kNowhere);
    born_before_ = prepared.template allocate<int32_t>(stream.tokens + 1);
    born_row_ = prepared.template allocate<int32_t>(most);
    born_slot_ = prepared.template allocate<int32_t>(most);
    if (!lists_left_) return;
    left_before_ = prepared.template allocate<int32_t>(stream.tokens + 1);
    kept_before_ = prepared.template allocate<int32_t>(stream.tokens + 1);
    left_row_ = prepared.template allocate<int32_t>(most);
  }

  void run() {
    Stream<Real>& stream = prepared_.stream;
    const int32_t W = stream.writes, R = stream.reads;
    if (lists_left_) mark_last_visits();
    std::vector<int32_t> unneeded;
    for (int64_t t = 0; t < stream.tokens; ++t) {
      born_before_[t] = born_;
      if (lists_left_) left_before_[t] = left_, kept_before_[t] = kept_;
      for (int64_t i = t * W; i < (t + 1) * W; ++i) {
        int32_t& cell = tokens_.write_row[i];
        const Visit visit(cell);
        const bool is_new = row_of_slot_[visit.slot] == kNowhere;
        const int32_t row = cell = is_new ? bear(visit.slot) : row_of_slot_[visit.slot];
        const bool was_zero = is_new && starts_at_zero_;
        if (tokens_.restore) tokens_.restore[i] = was_zero ? Restore::kZero : Restore::kInvert;
        if (!visit.is_last) continue;
        // Nobody reads what this write makes, and what was there before is known.
        if (was_zero) {
          unneeded.push_back(row);
        } else {
          left_row_[left_++] = row;
        }
      }
      for (int64_t j = t * R; j < (t + 1) * R; ++j) {
        int32_t& cell = tokens_.read_row[j];
        const Visit visit(cell);
        const bool is_new = row_of_slot_[visit.slot] == kNowhere;
        if (is_new && starts_at_zero_) {
          cell = kZeroRow;
          continue;
        }
        const int32_t row = cell = is_new ? bear(visit.slot) : row_of_slot_[visit.slot];
        if (visit.is_last) left_row_[left_++] = row;
      }
      if (!lists_left_) continue;
      if (recycles_) kept_ += left_ - left_before_[t];
      for (const int32_t row : unneeded) left_row_[left_++] = row;
      unneeded.clear();
      if (recycles_) free_.insert(free_.end(), left_row_ + left_before_[t], left_row_ + left_);
    }
    born_before_[stream.tokens] = born_;
    if (lists_left_) left_before_[stream.tokens] = left_, kept_before_[stream.tokens] = kept_;
    stream.born_before = born_before_;
    stream.born_row = born_row_;
    stream.born_slot = born_slot_;
    stream.left_before = left_before_;
    stream.left_row = left_row_;
    stream.kept_before = kept_before_;
    prepared_.row_count = next_;
    prepared_.born_count = born_;
    prepared_.kept_count = kept_;
    list_touched();
  }

 private:
  static constexpr int32_t kNowhere = -1, kZeroRow = 0;
  // Where there are more, sorting the visits takes less time than a pass over all slots.
  static constexpr int64_t kSlotsPerVisit = 32;

  // A slot as the tokens hold it, or its complement where nobody comes to it again.
  struct Visit {
    explicit Visit(int32_t cell) : slot(cell < 0 ? ~cell : cell), is_last(cell < 0) {}
    const int32_t slot;
    const bool is_last;
  };

  // From here on slots are numbered among those that tokens come to, in the same order.
  void leave_out_unvisited() {
    visited_.assign(tokens_.write_row, tokens_.write_row + writes_);
    visited_.insert(visited_.end(), tokens_.read_row, tokens_.read_row + reads_);
    std::sort(visited_.begin(), visited_.end());
    visited_.erase(std::unique(visited_.begin(), visited_.end()), visited_.end());
    const auto renumber = [&](int32_t* cells, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        cells[i] = static_cast<int32_t>(std::lower_bound(visited_.begin(), visited_.end(), cells[i]) - visited_.begin());
      }
    };
    renumber(tokens_.write_row, writes_);
    renumber(tokens_.read_row, reads_);
    slots_ = static_cast<int64_t>(visited_.size());
  }

  int32_t callers_slot(int64_t slot) const { return visited_.empty() ? static_cast<int32_t>(slot) : visited_[slot]; }

  void mark_last_visits() {
    const Stream<Real>& stream = prepared_.stream;
    std::vector<bool> seen(static_cast<std::size_t>(slots_));
    const auto mark = [&](int32_t* cells, int32_t count) {
      for (int32_t i = count - 1; i >= 0; --i) {
        if (seen[cells[i]]) continue;
        seen[cells[i]] = true;
        cells[i] = ~cells[i];
      }
    };
    for (int64_t t = stream.tokens - 1; t >= 0; --t) {
      mark(tokens_.read_row + t * stream.reads, stream.reads);
      mark(tokens_.write_row + t * stream.writes, stream.writes);
    }
  }

  int32_t bear(int32_t slot) {
    int32_t row = next_;
    if (free_.empty()) {
      ++next_;
    } else {
      row = free_.back();
      free_.pop_back();
    }
    born_row_[born_] = row;
    born_slot_[born_++] = callers_slot(slot);
    return row_of_slot_[slot] = row;
  }

  void list_touched() {
    // One place more than there are: the loop writes before it knows whether to keep.
    prepared_.touched_slots = prepared_.template allocate<int32_t>(int64_t{born_} + 1);
    prepared_.touched_rows = prepared_.template allocate<int32_t>(int64_t{born_} + 1);
    int64_t count = 0;
    for (int64_t slot = 0; slot < slots_; ++slot) {
      prepared_.touched_slots[count] = callers_slot(slot);
      prepared_.touched_rows[count] = row_of_slot_[slot];
      count += row_of_slot_[slot] != kNowhere;
    }
  }

  PreparedStream<Real>& prepared_;
  const CheckedTokens<Real>& tokens_;
  const int64_t writes_, reads_;
  int64_t slots_;
  const bool recycles_, lists_left_, starts_at_zero_;
  std::vector<int32_t> visited_;  // the slots that tokens come to, ascending; empty: all count
  int32_t *born_before_ = nullptr, *born_row_ = nullptr, *born_slot_ = nullptr;
  int32_t *left_before_ = nullptr, *left_row_ = nullptr, *kept_before_ = nullptr;
  int32_t* row_of_slot_ = nullptr;
  std::vector<int32_t> free_;
  int32_t next_ = kZeroRow + 1, born_ = 0, left_ = 0, kept_ = 0;
};

}  // namespace sdm

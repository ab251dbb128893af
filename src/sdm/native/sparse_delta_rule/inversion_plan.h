// Decides which old rows backward copies and which it recovers by inverting the write.
//
// Inverting a write leaves, in the row before it, the rounding of the row after it and of the push, both divided by the
// factor; what it leaves in a row further back is divided by the factors between. No row may end up with more than
// rounding_limit units of rounding per size, so a chain of inversions has an allowance: the smallest that one of its rows
// has left, scaled by the factors since. A write that would use it up has its row copied, and a new chain begins.
//
// What a row holds cannot be told from the sizes of the pushes, since they may cancel: the delta rule overwrites. So a
// few channels, spread over all of them, are run through the recurrence itself, and a row counts by what it holds there.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "sparse_delta_rule/streams.h"

namespace sdm {

template <class Real>
class InversionPlanner {
 public:
  // size: as in CheckedTokens.
  InversionPlanner(const SparseDeltaPlan<Real>& plan, const PreparedStream<Real>& prepared, const Real* size)
      : stream_(prepared.stream),
        limit_(static_cast<Real>(plan.rounding_limit)),
        size_(size),
        pushed_((plan.slot_rule ? plan.value : plan.residual) + prepared.cell(plan, 0) * plan.channels),
        channels_(plan.channels),
        rows_memory_(static_cast<std::size_t>(prepared.row_count) * sizeof(Row)),
        rows_(rows_memory_.template as<Row>()) {
    if (plan.initial_state) {
      const int64_t offset = prepared.state_offset(plan, plan.initial_per_sequence);
      initial_ = static_cast<const Real*>(plan.initial_state) + offset;
    }
    piece_ = channels_ < kProbes ? 1 : kPiece;
    pieces_ = std::min<int64_t>(channels_, kProbes) / piece_;
    scale_ = static_cast<Real>(channels_) / static_cast<Real>(pieces_ * piece_);
  }

  // Fills restore [tokens, W], where rows that are known to be zero are marked, and saved_before [tokens + 1]. Returns
  // the number of copies.
  int64_t run(Restore* restore, int64_t* saved_before) {
    const int32_t W = stream_.writes;
    int64_t count = 0;
    for (int64_t t = 0; t < stream_.tokens; ++t) {
      saved_before[t] = count;
      bear(t);
      Real u[kProbes];
      probe(pushed_ + t * stream_.heads * channels_, u);
      const Real strength = stream_.retrieves ? stream_.beta[t * stream_.heads] : Real(1);
      for (Real& x : u) x *= strength;
      const Real* push = stream_.push + t * stream_.push_stride;
      const Real* factor = stream_.factor + (stream_.factor_per_write ? t * W : t);
      for (int32_t i = 0; i < W; ++i) {
        Row& row = rows_[stream_.write_row[t * W + i]];
        if (t + 1 < stream_.tokens) __builtin_prefetch(&rows_[stream_.write_row[(t + 1) * W + i]], 1, 3);
        const Real f = factor[stream_.factor_per_write ? i : 0];
        const bool invert = allows(row, std::abs(f), std::abs(push[i]) * size_[t]);
        if (restore[t * W + i] != Restore::kZero) {
          restore[t * W + i] = invert ? Restore::kInvert : Restore::kCopy;
          count += !invert;
        }
        write(row, f, push[i], u);
      }
    }
    saved_before[stream_.tokens] = count;
    return count;
  }

 private:
  static constexpr int kProbes = 12, kPiece = 4;  // channels looked at, and how many of them are neighbours
  static constexpr int64_t kTokensAhead = 3;

  // In float32, one cache line.
  struct alignas(64) Row {
    Real probes[kProbes];
    Real size, allowance;
  };

  void probe(const Real* from, Real* to) const {
    std::fill(to, to + kProbes, Real(0));
    for (int64_t p = 0; p < pieces_; ++p) {
      const Real* piece = from + p * channels_ / pieces_;
      for (int64_t c = 0; c < piece_; ++c) to[p * piece_ + c] = piece[c];
    }
  }

  void measure(Row& row) const {
    Real sums[4] = {};
    for (int n = 0; n < kProbes; n += 4) {
      for (int m = 0; m < 4; ++m) sums[m] += std::abs(row.probes[n + m]);
    }
    row.size = scale_ * ((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }

  // Rows of slots that are born at token t.
  void bear(int64_t t) {
    if (initial_ && t + kTokensAhead < stream_.tokens) {
      for (int32_t n = stream_.born_before[t + kTokensAhead]; n < stream_.born_before[t + kTokensAhead + 1]; ++n) {
        const Real* from = initial_ + int64_t{stream_.born_slot[n]} * channels_;
        for (int64_t p = 0; p < pieces_; p += kPiece / piece_) __builtin_prefetch(from + p * channels_ / pieces_, 0, 2);
      }
    }
    for (int32_t n = stream_.born_before[t]; n < stream_.born_before[t + 1]; ++n) {
      Row& row = rows_[stream_.born_row[n]];
      row = {};
      if (initial_) probe(initial_ + int64_t{stream_.born_slot[n]} * channels_, row.probes);
      measure(row);
      row.allowance = std::numeric_limits<Real>::infinity();
    }
  }

  // Whether the write may be inverted. Comparisons with NaN are false, so that such rows are copied.
  bool allows(Row& row, Real factor, Real pushed) const {
    // Below the normal numbers rounding no longer shrinks with what is rounded.
    const Real smallest = static_cast<Real>(channels_) * std::numeric_limits<Real>::min();
    const Real own = limit_ * row.size;
    const Real left = factor * (own < row.allowance ? own : row.allowance) - (factor * row.size + pushed + smallest);
    const bool invert = left > 0 && factor >= smallest;
    row.allowance = invert ? left : std::numeric_limits<Real>::infinity();
    return invert;
  }

  void write(Row& row, Real factor, Real push, const Real* u) const {
    for (int n = 0; n < kProbes; ++n) row.probes[n] = factor * row.probes[n] + push * u[n];
    measure(row);
  }

  const Stream<Real>& stream_;
  const Real limit_;
  const Real* const size_;
  const Real* const pushed_;
  const int64_t channels_;
  const Real* initial_ = nullptr;
  int64_t piece_, pieces_;
  Real scale_;  // from the probes to all channels
  Scratch rows_memory_;
  Row* const rows_;
};

}  // namespace sdm

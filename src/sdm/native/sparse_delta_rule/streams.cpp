#include "sparse_delta_rule/streams.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>

#include "parallel.h"
#include "sparse_delta_rule/plan.h"

namespace sdm {
namespace {

constexpr int64_t kTokensPerTask = 256;

// The first offence in token order, whichever thread finds it.
class FirstError {
 public:
  void report(int64_t position, bool is_index, std::string message) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (position >= position_) return;
    position_ = position;
    is_index_ = is_index;
    message_ = std::move(message);
  }
  void rethrow() const {
    if (position_ == std::numeric_limits<int64_t>::max()) return;
    if (is_index_) throw std::out_of_range(message_);
    throw std::invalid_argument(message_);
  }

 private:
  std::mutex mutex_;
  int64_t position_ = std::numeric_limits<int64_t>::max();
  bool is_index_ = false;
  std::string message_;
};

std::string where(int64_t token, int64_t head) {
  return " (token " + std::to_string(token) + ", head " + std::to_string(head) + ")";
}

// Copies `count` indices to int32. False if one is outside [0, slots), named in `bad`; `ascending` tells whether
// they increase strictly.
template <class Index>
bool narrow(const Index* from, int32_t count, int64_t slots, int32_t* to, bool* ascending, int64_t* bad) {
  using Unsigned = std::make_unsigned_t<Index>;
  const Unsigned limit = static_cast<Unsigned>(slots);
  bool inside = true, sorted = true;
  for (int32_t i = 0; i < count; ++i) {
    inside &= static_cast<Unsigned>(from[i]) < limit;
    to[i] = static_cast<int32_t>(from[i]);
  }
  for (int32_t i = 1; i < count; ++i) sorted &= to[i - 1] < to[i];
  *ascending = sorted;
  if (inside) return true;
  *bad = *std::find_if(from, from + count, [&](Index x) { return static_cast<Unsigned>(x) >= limit; });
  return false;
}

// A slot that occurs twice, or -1.
int64_t repeated_slot(const int32_t* slots, int32_t count) {
  std::vector<int32_t> sorted(slots, slots + count);
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  return twice == sorted.end() ? -1 : *twice;
}

template <class T, class Real>
T* allocate(PreparedStream<Real>& prepared, int64_t count) {
  prepared.memory.push_back(std::make_unique<Scratch>(static_cast<std::size_t>(count) * sizeof(T)));
  return prepared.memory.back()->template as<T>();
}

// Everything that one pass over the tokens of a stream fills in.
template <class Real>
struct Filled {
  int32_t* write_row;
  int32_t* read_row;
  Real* factor;
  Real* inverse;
  Real* push;
  Restore* restore;  // null in the forward pass
  Real* size;        // [tokens] the magnitudes of what a token pushes, its weights aside, added up; null in the forward pass
};

template <class Real>
Real size_of(const Real* from, int64_t count) {
  constexpr int kSideBySide = 16;
  Real sums[kSideBySide] = {}, sum = 0;
  int64_t c = 0;
  for (; c + kSideBySide <= count; c += kSideBySide) {
    for (int n = 0; n < kSideBySide; ++n) sums[n] += std::abs(from[c + n]);
  }
  for (; c < count; ++c) sum += std::abs(from[c]);
  for (const Real x : sums) sum += x;
  return sum;
}

template <class Real, class Index>
void fill(const SparseDeltaInputs<Real>& in, const PreparedStream<Real>& prepared, const Filled<Real>& out,
          int64_t first, int64_t last, const InversionPlan<Real>* plan, FirstError& error) {
  const int32_t W = in.writes, R = in.reads;
  const int64_t start = in.begin(prepared.sequence);
  for (int64_t t = first; t < last; ++t) {
    const int64_t cell = (start + t) * in.heads + prepared.head;
    int32_t* write_row = out.write_row + t * W;
    int32_t* read_row = out.read_row + t * R;
    bool ascending;
    int64_t bad;
    const auto outside = [&](const char* name) {
      return std::string(name) + " must lie in [0, num_slots) = [0, " + std::to_string(in.slots) + "), got " +
             std::to_string(bad) + where(start + t, prepared.head);
    };
    if (!narrow(static_cast<const Index*>(in.write_index) + cell * W, W, in.slots, write_row, &ascending, &bad)) {
      return error.report(cell, true, outside("write_index"));
    }
    if (!ascending && (bad = repeated_slot(write_row, W)) >= 0) {
      return error.report(cell, false,
                          "write_index names slot " + std::to_string(bad) +
                              " more than once within a token; the slots of a token must be distinct (add up the "
                              "weights of repeated slots first)" +
                              where(start + t, prepared.head));
    }
    if (!narrow(static_cast<const Index*>(in.read_index) + cell * R, R, in.slots, read_row, &ascending, &bad)) {
      return error.report(cell, true, outside("read_index"));
    }
    const int32_t gates = in.decay_per_write ? W : 1;
    const Real* log_decay = in.log_decay + cell * gates;
    for (int32_t i = 0; i < gates; ++i) {
      if (!(log_decay[i] <= 0)) {
        char got[32];
        std::snprintf(got, sizeof got, "%g", static_cast<double>(log_decay[i]));
        return error.report(cell, false, std::string("log_decay must be at most 0 (a decay factor of at most 1), got ") +
                                             got + where(start + t, prepared.head));
      }
    }
    if (in.slot_rule) {
      const Real beta = in.beta[cell];
      for (int32_t i = 0; i < W; ++i) {
        const Real push = beta * in.write_weight[cell * W + i];
        out.push[t * W + i] = push;
        out.factor[t * W + i] = std::exp(log_decay[in.decay_per_write ? i : 0]) * (1 - push);
      }
    } else {
      for (int32_t i = 0; i < gates; ++i) out.factor[t * gates + i] = std::exp(log_decay[i]);
    }
    if (plan) {
      const int32_t factors = in.slot_rule ? W : gates;
      for (int32_t i = 0; i < factors; ++i) out.inverse[t * factors + i] = 1 / out.factor[t * factors + i];
      const Real* pushed = (in.slot_rule ? in.value : plan->error) + cell * in.channels;
      out.size[t] = (in.slot_rule ? Real(1) : std::abs(in.beta[cell])) * size_of(pushed, in.channels);
    }
  }
}

// Gives slots their rows, as a compiler gives variables its registers: one pass finds the last visit of every slot,
// the next deals out rows and takes them back. Rows that have just become free are the first to be dealt again, while
// they are still in the nearest cache.
template <class Real>
class RowNumbering {
 public:
  RowNumbering(PreparedStream<Real>& prepared, const Filled<Real>& filled, int64_t slots, bool recycles,
               bool starts_at_zero)
      : prepared_(prepared), filled_(filled), slots_(slots), starts_at_zero_(starts_at_zero) {
    const Stream<Real>& stream = prepared.stream;
    const int64_t visits = stream.tokens * (int64_t{stream.writes} + stream.reads);
    recycles_ = recycles && visits < std::numeric_limits<int32_t>::max();
    const int64_t most = std::min(slots, visits);
    born_before_ = allocate<int32_t>(prepared, stream.tokens + 1);
    born_row_ = allocate<int32_t>(prepared, most);
    born_slot_ = allocate<int32_t>(prepared, most);
    row_of_slot_ = allocate<int32_t>(prepared, slots);
    std::fill(row_of_slot_, row_of_slot_ + slots, kNowhere);
    if (!recycles_) return;
    left_before_ = allocate<int32_t>(prepared, stream.tokens + 1);
    kept_before_ = allocate<int32_t>(prepared, stream.tokens + 1);
    left_row_ = allocate<int32_t>(prepared, most);
    last_visit_ = allocate<int32_t>(prepared, slots);
  }

  void run() {
    Stream<Real>& stream = prepared_.stream;
    const int32_t W = stream.writes, R = stream.reads;
    if (recycles_) find_last_visits();
    std::vector<int32_t> unneeded;
    int64_t visit = 0;
    for (int64_t t = 0; t < stream.tokens; ++t) {
      born_before_[t] = born_;
      if (recycles_) left_before_[t] = left_, kept_before_[t] = kept_;
      for (int32_t i = 0; i < W; ++i, ++visit) {
        int32_t& cell = filled_.write_row[t * W + i];
        const int32_t slot = cell;
        const bool is_new = row_of_slot_[slot] == kNowhere;
        const int32_t row = cell = is_new ? bear(slot) : row_of_slot_[slot];
        const bool was_zero = is_new && starts_at_zero_;
        if (filled_.restore) filled_.restore[t * W + i] = was_zero ? Restore::kZero : Restore::kInvert;
        if (!recycles_ || last_visit_[slot] != visit) continue;
        // Nobody reads what this write makes, and what was there before is known.
        if (was_zero) {
          unneeded.push_back(row);
        } else {
          left_row_[left_++] = row;
        }
      }
      for (int32_t j = 0; j < R; ++j, ++visit) {
        int32_t& cell = filled_.read_row[t * R + j];
        const int32_t slot = cell;
        const bool is_new = row_of_slot_[slot] == kNowhere;
        if (is_new && starts_at_zero_) {
          cell = kZeroRow;
          continue;
        }
        const int32_t row = cell = is_new ? bear(slot) : row_of_slot_[slot];
        if (recycles_ && last_visit_[slot] == visit) left_row_[left_++] = row;
      }
      if (!recycles_) continue;
      kept_ += left_ - left_before_[t];
      for (const int32_t row : unneeded) left_row_[left_++] = row;
      unneeded.clear();
      free_.insert(free_.end(), left_row_ + left_before_[t], left_row_ + left_);
    }
    born_before_[stream.tokens] = born_;
    if (recycles_) left_before_[stream.tokens] = left_, kept_before_[stream.tokens] = kept_;
    stream.born_before = born_before_;
    stream.born_row = born_row_;
    stream.born_slot = born_slot_;
    stream.left_before = left_before_;
    stream.left_row = left_row_;
    stream.kept_before = kept_before_;
    prepared_.row_count = next_;
    prepared_.born_count = born_;
    prepared_.kept_count = kept_;
    prepared_.row_of_slot = row_of_slot_;
    if (!recycles_) list_touched();
  }

 private:
  static constexpr int32_t kNowhere = -1, kZeroRow = 0;

  void find_last_visits() {
    const Stream<Real>& stream = prepared_.stream;
    int32_t visit = 0;
    for (int64_t t = 0; t < stream.tokens; ++t) {
      const int32_t *write = filled_.write_row + t * stream.writes, *read = filled_.read_row + t * stream.reads;
      for (int32_t i = 0; i < stream.writes; ++i) last_visit_[write[i]] = visit++;
      for (int32_t j = 0; j < stream.reads; ++j) last_visit_[read[j]] = visit++;
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
    born_slot_[born_++] = slot;
    return row_of_slot_[slot] = row;
  }

  void list_touched() {
    // One place more than there are: the loop writes before it knows whether to keep.
    prepared_.touched_slots = allocate<int32_t>(prepared_, int64_t{born_} + 1);
    int64_t count = 0;
    for (int64_t slot = 0; slot < slots_; ++slot) {
      prepared_.touched_slots[count] = static_cast<int32_t>(slot);
      count += row_of_slot_[slot] != kNowhere;
    }
  }

  PreparedStream<Real>& prepared_;
  const Filled<Real>& filled_;
  const int64_t slots_;
  const bool starts_at_zero_;
  bool recycles_;
  int32_t *born_before_ = nullptr, *born_row_ = nullptr, *born_slot_ = nullptr;
  int32_t *left_before_ = nullptr, *left_row_ = nullptr, *kept_before_ = nullptr;
  int32_t *row_of_slot_ = nullptr, *last_visit_ = nullptr;
  std::vector<int32_t> free_;
  int32_t next_ = kZeroRow + 1, born_ = 0, left_ = 0, kept_ = 0;
};

}  // namespace

template <class Real>
int64_t SparseDeltaInputs<Real>::longest() const {
  int64_t most = 0;
  for (int64_t s = 0; s < sequences; ++s) most = std::max(most, length(s));
  return most;
}

template <class Real>
int64_t SparseDeltaInputs<Real>::most_rows() const {
  const int64_t visits = longest() * (int64_t{writes} + reads);
  return std::min(slots, visits);
}

template <class Real>
std::vector<PreparedStream<Real>> prepare(const SparseDeltaInputs<Real>& in, int64_t first, int64_t count, Rows rows,
                                          bool starts_at_zero, const InversionPlan<Real>* plan) {
  const int32_t W = in.writes, R = in.reads;
  std::vector<PreparedStream<Real>> set(count);
  std::vector<Filled<Real>> filled(count);
  struct Piece {
    int64_t stream, first, last;
  };
  std::vector<Piece> pieces;
  for (int64_t n = 0; n < count; ++n) {
    PreparedStream<Real>& prepared = set[n];
    prepared.sequence = (first + n) / in.heads;
    prepared.head = (first + n) % in.heads;
    const int64_t tokens = in.length(prepared.sequence);
    const int64_t cell = in.begin(prepared.sequence) * in.heads + prepared.head;
    const bool per_write = in.slot_rule || in.decay_per_write;
    const int64_t factors = tokens * (per_write ? W : 1);
    Filled<Real>& out = filled[n];
    out.write_row = allocate<int32_t>(prepared, tokens * W);
    out.read_row = allocate<int32_t>(prepared, tokens * R);
    out.factor = allocate<Real>(prepared, factors);
    out.inverse = plan ? allocate<Real>(prepared, factors) : nullptr;
    out.restore = plan ? allocate<Restore>(prepared, tokens * W) : nullptr;
    out.push = in.slot_rule ? allocate<Real>(prepared, tokens * W) : nullptr;
    out.size = plan ? allocate<Real>(prepared, tokens) : nullptr;
    Stream<Real>& stream = prepared.stream;
    stream = {};
    stream.tokens = tokens;
    stream.heads = in.heads;
    stream.channels = in.channels;
    stream.writes = W;
    stream.reads = R;
    stream.retrieves = !in.slot_rule;
    stream.factor_per_write = per_write;
    stream.write_row = out.write_row;
    stream.read_row = out.read_row;
    stream.factor = out.factor;
    stream.inverse = out.inverse;
    stream.restore = out.restore;
    stream.push = in.slot_rule ? out.push : in.write_weight + cell * W;
    stream.push_stride = in.slot_rule ? W : in.heads * W;
    stream.read_weight = in.read_weight + cell * R;
    stream.beta = in.beta + cell;
    stream.value = in.value + cell * in.channels;
    for (int64_t t = 0; t < tokens; t += kTokensPerTask) pieces.push_back({n, t, std::min(t + kTokensPerTask, tokens)});
  }
  FirstError error;
  const auto pieces_count = static_cast<int64_t>(pieces.size());
  parallel_for(pieces_count, in.threads, [&](int64_t p) {
    const Piece& piece = pieces[p];
    const auto run = in.wide_index ? &fill<Real, int64_t> : &fill<Real, int32_t>;
    run(in, set[piece.stream], filled[piece.stream], piece.first, piece.last, plan, error);
  });
  error.rethrow();
  if (rows == Rows::kSlots) return set;
  parallel_for(count, in.threads, [&](int64_t n) {
    RowNumbering<Real>(set[n], filled[n], in.slots, rows == Rows::kRecycled, starts_at_zero).run();
    if (!plan) return;
    Stream<Real>& stream = set[n].stream;
    auto* saved_before = allocate<int64_t>(set[n], stream.tokens + 1);
    set[n].saved_count = InversionPlanner<Real>(in, set[n], *plan, filled[n].size).run(filled[n].restore, saved_before);
    stream.saved_before = saved_before;
  });
  return set;
}

template struct SparseDeltaInputs<float>;
template struct SparseDeltaInputs<double>;
template std::vector<PreparedStream<float>> prepare(const SparseDeltaInputs<float>&, int64_t, int64_t, Rows, bool,
                                                    const InversionPlan<float>*);
template std::vector<PreparedStream<double>> prepare(const SparseDeltaInputs<double>&, int64_t, int64_t, Rows, bool,
                                                     const InversionPlan<double>*);

}  // namespace sdm

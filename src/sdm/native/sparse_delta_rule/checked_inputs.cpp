#include "sparse_delta_rule/checked_inputs.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "checks.h"

namespace sdm {

void FirstError::report(int64_t position, bool is_index, std::string message) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (position >= position_) return;
  position_ = position;
  is_index_ = is_index;
  message_ = std::move(message);
}

void FirstError::rethrow() const {
  if (position_ == kNone) return;
  if (is_index_) throw std::out_of_range(message_);
  throw std::invalid_argument(message_);
}

namespace {

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
void check_tokens_of(const SparseDeltaCall<Real>& call, const SparseDeltaPlan<Real>* plan,
                     const PreparedStream<Real>& prepared, int64_t first, int64_t last, const CheckedTokens<Real>& out,
                     FirstError& error) {
  const int32_t W = call.writes, R = call.reads, gates = call.decay_per_write ? W : 1;
  for (int64_t t = first; t < last; ++t) {
    const int64_t cell = prepared.cell(call, t);
    int32_t *write_row = out.write_row + t * W, *read_row = out.read_row + t * R;
    bool ascending;
    int64_t bad;
    const auto here = [&] { return where(call.begin(prepared.sequence) + t, prepared.head); };
    const auto outside = [&](const char* name) {
      return std::string(name) + " must lie in [0, num_slots) = [0, " + std::to_string(call.slots) + "), got " +
             std::to_string(bad) + here();
    };
    if (!narrow(static_cast<const Index*>(call.write_index) + cell * W, W, call.slots, write_row, &ascending, &bad)) {
      return error.report(cell, true, outside("write_index"));
    }
    if (!ascending && (bad = repeated_slot(write_row, W)) >= 0) {
      return error.report(cell, false,
                          "write_index names slot " + std::to_string(bad) +
                              " more than once within a token; the slots of a token must be distinct (add up the "
                              "weights of repeated slots first)" +
                              here());
    }
    if (!narrow(static_cast<const Index*>(call.read_index) + cell * R, R, call.slots, read_row, &ascending, &bad)) {
      return error.report(cell, true, outside("read_index"));
    }
    const Real* log_decay = call.log_decay + cell * gates;
    for (int32_t i = 0; i < gates; ++i) {
      if (!(log_decay[i] <= 0)) return error.report(cell, false, wrong_decay(log_decay[i]) + here());
    }
    if (call.slot_rule) {
      const Real beta = call.beta[cell];
      for (int32_t i = 0; i < W; ++i) {
        const Real push = beta * call.write_weight[cell * W + i];
        out.push[t * W + i] = push;
        out.factor[t * W + i] = std::exp(log_decay[call.decay_per_write ? i : 0]) * (1 - push);
      }
    } else {
      for (int32_t i = 0; i < gates; ++i) out.factor[t * gates + i] = std::exp(log_decay[i]);
    }
    if (plan) {
      const int32_t factors = call.slot_rule ? W : gates;
      for (int32_t i = 0; i < factors; ++i) out.inverse[t * factors + i] = 1 / out.factor[t * factors + i];
      const Real* pushed = (call.slot_rule ? call.value : plan->residual) + cell * call.channels;
      out.size[t] = (call.slot_rule ? Real(1) : std::abs(call.beta[cell])) * size_of(pushed, call.channels);
    }
  }
}

}  // namespace

template <class Real>
void check_sizes(SparseDeltaCall<Real>& call) {
  if (call.slots >= std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("num_slots must be below 2^31 - 1");
  }
  if (call.cu_seqlens) check_offsets(call.cu_seqlens, call.sequences, call.tokens);
  // Below this, a decode step for instance, waking threads takes longer than the work.
  constexpr int64_t kLeastWork = int64_t{1} << 18;
  const int64_t tokens = (call.cu_seqlens ? 1 : call.sequences) * call.tokens;
  if (tokens * call.heads * call.channels * (call.writes + call.reads) < kLeastWork) call.threads = 1;
}

template <class Real>
void check_tokens(const SparseDeltaCall<Real>& call, const SparseDeltaPlan<Real>* plan,
                  const PreparedStream<Real>& prepared, int64_t first, int64_t last, const CheckedTokens<Real>& out,
                  FirstError& error) {
  const auto run = call.wide_index ? &check_tokens_of<Real, int64_t> : &check_tokens_of<Real, int32_t>;
  run(call, plan, prepared, first, last, out, error);
}

template void check_sizes(SparseDeltaCall<float>&);
template void check_sizes(SparseDeltaCall<double>&);
template void check_tokens(const SparseDeltaCall<float>&, const SparseDeltaPlan<float>*, const PreparedStream<float>&,
                           int64_t, int64_t, const CheckedTokens<float>&, FirstError&);
template void check_tokens(const SparseDeltaCall<double>&, const SparseDeltaPlan<double>*,
                           const PreparedStream<double>&, int64_t, int64_t, const CheckedTokens<double>&, FirstError&);

}  // namespace sdm

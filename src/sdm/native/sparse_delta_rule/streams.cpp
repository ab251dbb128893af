#include "sparse_delta_rule/streams.h"

#include <algorithm>

#include "parallel.h"
#include "sparse_delta_rule/checked_inputs.h"
#include "sparse_delta_rule/inversion_plan.h"
#include "sparse_delta_rule/row_numbering.h"

namespace sdm {
namespace {

constexpr int64_t kTokensPerTask = 256;

template <class Real>
CheckedTokens<Real> room_for_tokens(const SparseDeltaCall<Real>& call, bool planned, PreparedStream<Real>& prepared) {
  const int64_t tokens = call.length(prepared.sequence), writes = tokens * call.writes;
  const int64_t factors = call.slot_rule || call.decay_per_write ? writes : tokens;
  CheckedTokens<Real> out = {};
  out.write_row = prepared.template allocate<int32_t>(writes);
  out.read_row = prepared.template allocate<int32_t>(tokens * call.reads);
  out.factor = prepared.template allocate<Real>(factors);
  if (call.slot_rule) out.push = prepared.template allocate<Real>(writes);
  if (planned) {
    out.inverse = prepared.template allocate<Real>(factors);
    out.restore = prepared.template allocate<Restore>(writes);
    out.size = prepared.template allocate<Real>(tokens);
  }
  return out;
}

template <class Real>
Stream<Real> stream_of(const SparseDeltaCall<Real>& call, const PreparedStream<Real>& prepared,
                       const CheckedTokens<Real>& tokens) {
  const int64_t cell = prepared.cell(call, 0);
  Stream<Real> stream = {};
  stream.tokens = call.length(prepared.sequence);
  stream.heads = call.heads;
  stream.channels = call.channels;
  stream.writes = call.writes;
  stream.reads = call.reads;
  stream.retrieves = !call.slot_rule;
  stream.factor_per_write = call.slot_rule || call.decay_per_write;
  stream.write_row = tokens.write_row;
  stream.read_row = tokens.read_row;
  stream.factor = tokens.factor;
  stream.inverse = tokens.inverse;
  stream.restore = tokens.restore;
  stream.push = call.slot_rule ? tokens.push : call.write_weight + cell * call.writes;
  stream.push_stride = call.slot_rule ? call.writes : call.heads * call.writes;
  stream.read_weight = call.read_weight + cell * call.reads;
  stream.beta = call.beta + cell;
  stream.value = call.value + cell * call.channels;
  return stream;
}

}  // namespace

template <class Real>
std::vector<PreparedStream<Real>> prepare(const SparseDeltaCall<Real>& call, int64_t first, int64_t count, Rows rows,
                                          const SparseDeltaPlan<Real>* plan) {
  std::vector<PreparedStream<Real>> set(count);
  std::vector<CheckedTokens<Real>> tokens(count);
  struct Piece {
    int64_t stream, first, last;
  };
  std::vector<Piece> pieces;
  for (int64_t n = 0; n < count; ++n) {
    set[n].sequence = (first + n) / call.heads;
    set[n].head = (first + n) % call.heads;
    tokens[n] = room_for_tokens(call, plan != nullptr, set[n]);
    set[n].stream = stream_of(call, set[n], tokens[n]);
    const int64_t length = set[n].stream.tokens;
    for (int64_t t = 0; t < length; t += kTokensPerTask) pieces.push_back({n, t, std::min(t + kTokensPerTask, length)});
  }
  FirstError error;
  parallel_for(static_cast<int64_t>(pieces.size()), call.threads, [&](int64_t p) {
    const auto [n, begin, end] = pieces[p];
    check_tokens(call, plan, set[n], begin, end, tokens[n], error);
  });
  error.rethrow();
  if (rows == Rows::kSlots) return set;
  parallel_for(count, call.threads, [&](int64_t n) {
    RowNumbering<Real>(set[n], tokens[n], call.slots, rows, !call.initial_state).run();
    if (!plan) return;
    auto* saved_before = set[n].template allocate<int64_t>(set[n].stream.tokens + 1);
    set[n].saved_count = InversionPlanner<Real>(*plan, set[n], tokens[n].size).run(tokens[n].restore, saved_before);
    set[n].stream.saved_before = saved_before;
  });
  return set;
}

template std::vector<PreparedStream<float>> prepare(const SparseDeltaCall<float>&, int64_t, int64_t, Rows,
                                                    const SparseDeltaPlan<float>*);
template std::vector<PreparedStream<double>> prepare(const SparseDeltaCall<double>&, int64_t, int64_t, Rows,
                                                     const SparseDeltaPlan<double>*);

}  // namespace sdm

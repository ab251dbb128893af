// The backward of the dense gated delta rule, token after token from the last. Included by kernels.cpp only.
//
// With M' = decay M_before the decayed state, G the gradient of the state after the token but for this token's output,
// u = value - retrieved and delta = beta u, the gradients of one token are
//
//     ddelta = G^T k + (q . k) dy              dvalue = beta ddelta,  dbeta = ddelta . u,  dr = -dvalue
//     dq     = M' dy + k (delta . dy)
//     dk     = G delta + q (delta . dy) + M' dr
//     G'     = G + q dy^T + k dr^T             dlog_decay = <G', M'>,  G_before = decay G'
//
// so that the state after the token is not needed. With a decay of each row (ByRow), dlog_decay of a row is the product
// of this row of G' and of M'. The states before the tokens of one segment are recomputed from the
// saved one and kept in the workspace. Channels meet only in sums over rows; a slab is worked through in groups of a few
// vectors, whose part of the state and of its gradient fit the first-level cache together.
#pragma once

#include <cmath>

#include "gated_delta_rule/kernels.h"

namespace sdm {
namespace SDM_ISA {

template <class Real>
SDM_INLINE int64_t round_up(int64_t rows) {
  return (rows + kLanes<Real> - 1) / kLanes<Real> * kLanes<Real>;
}

template <class Real>
SDM_INLINE Real dot(const Real* a, const Real* b, int64_t count) {
  constexpr int L = kLanes<Real>;
  const int64_t whole = count - count % L;
  Vector<Real> sum{};
  for (int64_t i = 0; i < whole; i += L) sum += load(a + i) * load(b + i);
  Real rest = 0;
  for (int64_t i = whole; i < count; ++i) rest += a[i] * b[i];
  return horizontal_sum<Real>(sum) + rest;
}

// A group of channels of one slab. V vectors of channels, K rows.
template <class Real>
struct Group {
  int64_t channel, width;
  Real* states;      // [segment, K, V] before each token
  Real* grad_state;  // [K, V]
  Real* tokens;      // [segment, 3, V] output gradient, residual and delta of each token
};

// Sums over the channels of a slab, for one token. Rows are K rounded up to a multiple of the lanes.
template <class Real>
struct TokenSums {
  Real* lanes;   // [4, rows, lanes] what the rows of the state and of its gradient give, still to be summed over lanes
  Real* totals;  // [4, rows]; the fourth only with a decay of each row
  Real inner, delta_output, grad_beta;
};

template <class Real>
int64_t gated_delta_backward_workspace(int64_t key_size) {
  return ((kGatedDeltaSegment + 1) * key_size + 3 * kGatedDeltaSegment) * kGatedDeltaSlab<Real> +
         4 * round_up<Real>(key_size) * (kLanes<Real> + 1);
}

// R rows of the first pass.
template <class Real, int V, int R, bool ByRow>
SDM_INLINE Vector<Real> first_pass_rows(const Real* state, const Real* grad_state, const Real* key,
                                        const Real* grad_output, const Real* delta, Vector<Real>* column,
                                        Real* state_sums, Real* grad_sums, Real* both_sums, bool add) {
  constexpr int L = kLanes<Real>;
  // Each row has sums of its own, also of what is summed over all rows: a single running sum would wait for itself.
  Vector<Real> from_state[R], from_grad[R], from_both[R];
  for (int r = 0; r < R; ++r) from_state[r] = from_grad[r] = from_both[r] = Vector<Real>{};
  for (int v = 0; v < V; ++v) {
    const Vector<Real> dy = load(grad_output + v * L), d = load(delta + v * L);
    for (int r = 0; r < R; ++r) {
      const Vector<Real> m = load(state + (r * V + v) * L), g = load(grad_state + (r * V + v) * L);
      column[v] += g * key[r];
      from_state[r] += m * dy;
      from_grad[r] += g * d;
      from_both[r] += m * g;
    }
  }
  Vector<Real> inner{};
  for (int r = 0; r < R; ++r) {
    if (add) {
      from_state[r] += load(state_sums + r * L);
      from_grad[r] += load(grad_sums + r * L);
    }
    store(state_sums + r * L, from_state[r]);
    store(grad_sums + r * L, from_grad[r]);
    if (ByRow) {
      store<Real>(both_sums + r * L, add ? load(both_sums + r * L) + from_both[r] : from_both[r]);
    } else {
      inner += from_both[r];
    }
  }
  return inner;
}

// The sums over the state that do not need dr: G^T k, and per row M' dy / decay, G delta; returns <G, M'> / decay, which
// is kept per row in `both_sums` instead with a decay of each row.
template <class Real, int V, bool ByRow>
SDM_INLINE Real first_pass(const Real* state, const Real* grad_state, const Real* key, int64_t rows,
                           const Real* grad_output, const Real* delta, Real* grad_delta, Real* state_sums,
                           Real* grad_sums, Real* both_sums, bool add) {
  constexpr int L = kLanes<Real>;
  Vector<Real> inner{}, column[V] = {};
  int64_t i = 0;
  for (; i + 2 <= rows; i += 2) {
    inner += first_pass_rows<Real, V, 2, ByRow>(state + i * V * L, grad_state + i * V * L, key + i, grad_output, delta,
                                                column, state_sums + i * L, grad_sums + i * L, both_sums + i * L, add);
  }
  if (i < rows) {
    inner += first_pass_rows<Real, V, 1, ByRow>(state + i * V * L, grad_state + i * V * L, key + i, grad_output, delta,
                                                column, state_sums + i * L, grad_sums + i * L, both_sums + i * L, add);
  }
  for (int v = 0; v < V; ++v) store(grad_delta + v * L, column[v]);
  return horizontal_sum<Real>(inner);
}

// Per row M' dr / decay, and G <- decay (G + q dy^T + k dr^T).
template <class Real, int V, bool ByRow>
SDM_INLINE void second_pass(const Real* state, Real* grad_state, const Real* key, const Real* query, int64_t rows,
                            const Real* decay, const Real* grad_output, const Real* grad_retrieved, Real* state_sums,
                            bool add) {
  constexpr int L = kLanes<Real>;
  Vector<Real> dy[V], dr[V];
  for (int v = 0; v < V; ++v) {
    dy[v] = load(grad_output + v * L) * (ByRow ? 1 : *decay);
    dr[v] = load(grad_retrieved + v * L);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const Real* m = state + i * V * L;
    Real* g = grad_state + i * V * L;
    const Real kept = ByRow ? decay[i] : *decay, k = key[i] * kept, q = ByRow ? query[i] * kept : query[i];
    Vector<Real> from_state = add ? load(state_sums + i * L) : Vector<Real>{};
    for (int v = 0; v < V; ++v) {
      from_state += load(m + v * L) * dr[v];
      store<Real>(g + v * L, load(g + v * L) * kept + dy[v] * q + dr[v] * k);
    }
    store(state_sums + i * L, from_state);
  }
}

// One token, one group: the gradient of its values, and its share of the sums.
template <class Real, int V, bool ByRow>
void backward_group(const GatedDeltaBackward<Real>& args, const Group<Real>& group, TokenSums<Real>& sums, int64_t at,
                    int64_t in_segment, const Real* decay, Real query_key, bool add) {
  constexpr int64_t kPadded = V * kLanes<Real>;
  const int64_t K = args.key_size, lanes = round_up<Real>(K) * kLanes<Real>;
  const Real* state = group.states + in_segment * K * kPadded;
  const Real* key = args.key + at * K;
  const Real* grad_output = group.tokens + in_segment * 3 * kPadded;
  const Real* residual = grad_output + kPadded;
  const Real* delta = residual + kPadded;
  const Real beta = args.beta[at];
  Real grad_retrieved[kPadded], grad_delta[kPadded];
  const Real inner = first_pass<Real, V, ByRow>(state, group.grad_state, key, K, grad_output, delta, grad_delta,
                                                sums.lanes, sums.lanes + lanes, sums.lanes + 3 * lanes, add);
  for (int64_t c = 0; c < kPadded; ++c) {
    grad_delta[c] += query_key * grad_output[c];
    grad_retrieved[c] = -beta * grad_delta[c];
  }
  second_pass<Real, V, ByRow>(state, group.grad_state, key, args.query + at * K, K, decay, grad_output, grad_retrieved,
                              sums.lanes + 2 * lanes, add);
  sums.inner = (add ? sums.inner : 0) + inner;
  sums.delta_output = (add ? sums.delta_output : 0) + dot(delta, grad_output, kPadded);
  sums.grad_beta = (add ? sums.grad_beta : 0) + dot<Real>(grad_delta, residual, kPadded);
  Real* grad_value = args.grad_value + at * args.channels + group.channel;
  for (int64_t c = 0; c < group.width; ++c) grad_value[c] = beta * grad_delta[c];
}

// The gradients that are sums over channels; `partial` is the token's place in the buffers of the slab.
template <class Real, bool ByRow>
void finish_token(const GatedDeltaBackward<Real>& args, const TokenSums<Real>& sums, int64_t at, int64_t partial,
                  const Real* decay) {
  const int64_t K = args.key_size, rows = round_up<Real>(K);
  const Real* key = args.key + at * K;
  const Real* query = args.query + at * K;
  sum_each(sums.lanes, static_cast<int>((ByRow ? 4 : 3) * rows), false, sums.totals);
  const Real* from_output = sums.totals;
  const Real* from_grad = sums.totals + rows;
  const Real* from_retrieved = sums.totals + 2 * rows;
  Real* grad_query = args.grad_query + partial * K;
  Real* grad_key = args.grad_key + partial * K;
  for (int64_t i = 0; i < K; ++i) {
    const Real kept = ByRow ? decay[i] : *decay;
    grad_query[i] = kept * from_output[i] + key[i] * sums.delta_output;
    grad_key[i] = from_grad[i] + query[i] * sums.delta_output + kept * from_retrieved[i];
  }
  args.grad_beta[partial] = sums.grad_beta;
  if (!ByRow) {
    args.grad_log_decay[partial] = *decay * (sums.inner + dot(query, from_output, K) + dot(key, from_retrieved, K));
    return;
  }
  const Real* inner = sums.totals + 3 * rows;
  for (int64_t i = 0; i < K; ++i) {
    args.grad_log_decay[partial * K + i] =
        decay[i] * (inner[i] + query[i] * from_output[i] + key[i] * from_retrieved[i]);
  }
}

// Fills in what the tokens [begin, end) of a segment need: their rows, and the state before each of them.
template <class Real, int V, bool ByRow>
void recompute_segment(const GatedDeltaBackward<Real>& args, const Group<Real>& group, int64_t segment, int64_t h,
                       int64_t begin, int64_t end) {
  constexpr int L = kLanes<Real>;
  constexpr int64_t kPadded = V * L;
  const int64_t K = args.key_size, D = args.channels, H = args.heads;
  load_tile<Real>(args.saved_states + (segment * H + h) * K * D + group.channel, D, group.states, K, group.width,
                  kPadded);
  for (int64_t x = begin; x < end; ++x) {
    const int64_t at = x * H + h, row = at * D + group.channel;
    Real* grad_output = group.tokens + (x - begin) * 3 * kPadded;
    Real* residual = grad_output + kPadded;
    Real* delta = residual + kPadded;
    copy_row(args.grad_y + row, grad_output, group.width, kPadded);
    copy_row<Real>(args.residual + row, residual, group.width, kPadded);
    for (int64_t c = 0; c < kPadded; ++c) delta[c] = args.beta[at] * residual[c];
    if (x + 1 == end) break;
    const Real decay = ByRow ? 1 : std::exp(args.log_decay[at]);
    const Real* before = group.states + (x - begin) * K * kPadded;
    Real* after = group.states + (x - begin + 1) * K * kPadded;
    Vector<Real> d[V];
    for (int v = 0; v < V; ++v) d[v] = load(delta + v * L);
    for (int64_t i = 0; i < K; ++i) {
      const Real k = args.key[at * K + i], kept = ByRow ? args.decay[at * K + i] : decay;
      for (int v = 0; v < V; ++v) {
        store<Real>(after + (i * V + v) * L, load(before + (i * V + v) * L) * kept + d[v] * k);
      }
    }
  }
}

template <class Real, int V, bool ByRow>
void backward_slab(const GatedDeltaBackward<Real>& args, const GatedDeltaTask& task, int64_t channel, int64_t width,
                   Real* workspace) {
  constexpr int64_t kPadded = V * kLanes<Real>;
  constexpr int kMostGroups = kSlabVectors / V;
  const int64_t K = args.key_size, D = args.channels, H = args.heads, h = task.head;
  const int64_t state_offset = (task.sequence * H + h) * K * D;
  Group<Real> groups[kMostGroups];
  int count = 0;
  for (int64_t c = 0; c < width; c += kPadded) {
    Group<Real>& group = groups[count++];
    group.channel = channel + c;
    group.width = width - c < kPadded ? width - c : kPadded;
    group.states = workspace;
    group.grad_state = group.states + kGatedDeltaSegment * K * kPadded;
    group.tokens = group.grad_state + K * kPadded;
    workspace = group.tokens + 3 * kGatedDeltaSegment * kPadded;
    const Real* grad_final = args.grad_final_state ? args.grad_final_state + state_offset + group.channel : nullptr;
    load_tile(grad_final, D, group.grad_state, K, group.width, kPadded);
  }
  TokenSums<Real> sums{workspace, workspace + 4 * round_up<Real>(K) * kLanes<Real>, 0, 0, 0};
  const int64_t segments = (task.end - task.begin + kGatedDeltaSegment - 1) / kGatedDeltaSegment;
  for (int64_t segment = segments - 1; segment >= 0; --segment) {
    const int64_t begin = task.begin + segment * kGatedDeltaSegment;
    const int64_t end = begin + kGatedDeltaSegment < task.end ? begin + kGatedDeltaSegment : task.end;
    for (int g = 0; g < count; ++g) {
      recompute_segment<Real, V, ByRow>(args, groups[g], task.first_segment + segment, h, begin, end);
    }
    for (int64_t x = end - 1; x >= begin; --x) {
      const int64_t at = x * H + h;
      const Real single = ByRow ? 1 : std::exp(args.log_decay[at]);
      const Real* decay = ByRow ? args.decay + at * K : &single;
      const Real query_key = dot(args.query + at * K, args.key + at * K, K);
      for (int g = 0; g < count; ++g) {
        backward_group<Real, V, ByRow>(args, groups[g], sums, at, x - begin, decay, query_key, g > 0);
      }
      finish_token<Real, ByRow>(args, sums, at, task.slab * args.tokens * H + at, decay);
    }
  }
  for (int g = 0; g < count; ++g) {
    Real* grad_initial = args.grad_initial_state + state_offset + groups[g].channel;
    store_tile(grad_initial, D, groups[g].grad_state, K, groups[g].width, kPadded);
  }
}

template <class Real>
void gated_delta_backward_slab(const GatedDeltaBackward<Real>& args, const GatedDeltaTask& task, Real* workspace) {
  with_slab<Real>(task.slab, args.channels, [&](int64_t channel, int64_t width, auto vectors, auto) {
    constexpr int V = decltype(vectors)::value < 4 ? decltype(vectors)::value : 4;
    if (args.by_channel()) {
      backward_slab<Real, V, true>(args, task, channel, width, workspace);
    } else {
      backward_slab<Real, V, false>(args, task, channel, width, workspace);
    }
  });
}

}  // namespace SDM_ISA
}  // namespace sdm

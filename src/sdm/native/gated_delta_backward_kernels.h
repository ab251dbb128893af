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
// so that the state after the token is not needed. The states before the tokens of one segment are recomputed from the
// saved one and kept in the workspace.
#pragma once

#include <cmath>

#include "gated_delta_kernels.h"

namespace sdm {
namespace SDM_ISA {

// Vectors of channels in one slab.
constexpr int kSlabVectors = 256 / SDM_VECTOR_BYTES;

// Sums over the lanes of each of `rows` vectors, lane after lane in the order of a tree.
template <class Real>
SDM_INLINE void sum_lanes(const Real* vectors, Real* sums, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) sums[i] = horizontal_sum<Real>(load(vectors + i * kLanes<Real>));
}

template <class Real>
struct BackwardWorkspace {
  Real* states;      // [segment, K, tile] before each token
  Real* grad_state;  // [K, tile]
  Real* row_sums;    // [3, K, lanes]
  Real* totals;      // [3, K]
  Real* rows;        // [segment, 3, tile] output gradient, residual and delta of each token
  BackwardWorkspace(Real* memory, int64_t key_size, int64_t padded) {
    states = memory;
    grad_state = states + kGatedDeltaSegment * key_size * padded;
    row_sums = grad_state + key_size * padded;
    totals = row_sums + 3 * key_size * kLanes<Real>;
    rows = totals + 3 * key_size;
  }
};

template <class Real>
int64_t gated_delta_backward_workspace(int64_t key_size) {
  constexpr int64_t kPadded = kGatedDeltaSlab<Real>;
  return (kGatedDeltaSegment + 1) * key_size * kPadded + 3 * key_size * (kLanes<Real> + 1) +
         3 * kGatedDeltaSegment * kPadded;
}

// The sums over the state that do not need dr: G^T k, and per row M' dy / decay, G delta; returns <G, M'> / decay.
template <class Real, int V>
SDM_INLINE Vector<Real> first_pass(const Real* state, const Real* grad_state, const Real* key, int64_t rows,
                                   const Real* grad_output, const Real* delta, Vector<Real>* grad_delta, Real* state_sums,
                                   Real* grad_sums) {
  constexpr int L = kLanes<Real>;
  Vector<Real> column[V], inner{};
  for (int v = 0; v < V; ++v) column[v] = Vector<Real>{};
  for (int64_t i = 0; i < rows; ++i) {
    const Real* m = state + i * V * L;
    const Real* g = grad_state + i * V * L;
    const Real k = key[i];
    Vector<Real> from_state{}, from_grad{};
    for (int v = 0; v < V; ++v) {
      const Vector<Real> mv = load(m + v * L), gv = load(g + v * L);
      column[v] += gv * k;
      from_state += mv * load(grad_output + v * L);
      from_grad += gv * load(delta + v * L);
      inner += gv * mv;
    }
    store(state_sums + i * L, from_state);
    store(grad_sums + i * L, from_grad);
  }
  for (int v = 0; v < V; ++v) grad_delta[v] = column[v];
  return inner;
}

// Per row M' dr / decay, and G <- decay (G + q dy^T + k dr^T).
template <class Real, int V>
SDM_INLINE void second_pass(const Real* state, Real* grad_state, const Real* key, const Real* query, int64_t rows,
                            Real decay, const Real* grad_output, const Real* grad_retrieved, Real* state_sums) {
  constexpr int L = kLanes<Real>;
  for (int64_t i = 0; i < rows; ++i) {
    const Real* m = state + i * V * L;
    Real* g = grad_state + i * V * L;
    const Real k = key[i] * decay, q = query[i] * decay;
    Vector<Real> from_state{};
    for (int v = 0; v < V; ++v) {
      const Vector<Real> dr = load(grad_retrieved + v * L);
      from_state += load(m + v * L) * dr;
      store<Real>(g + v * L, load(g + v * L) * decay + load(grad_output + v * L) * q + dr * k);
    }
    store(state_sums + i * L, from_state);
  }
}

template <class Real, int V>
SDM_INLINE Real dot(const Real* a, const Real* b) {
  constexpr int L = kLanes<Real>;
  Vector<Real> sum{};
  for (int v = 0; v < V; ++v) sum += load(a + v * L) * load(b + v * L);
  return horizontal_sum<Real>(sum);
}

template <class Real, int V>
void backward_token(const GatedDeltaArgs<Real>& args, const BackwardWorkspace<Real>& w, int64_t x, int64_t h,
                    int64_t slab, int64_t channel, int64_t width, int64_t in_segment) {
  constexpr int L = kLanes<Real>;
  constexpr int64_t kPadded = V * L;
  const int64_t K = args.key_size, at = x * args.heads + h;
  const Real* state = w.states + in_segment * K * kPadded;
  const Real* key = args.key + at * K;
  const Real* query = args.query + at * K;
  const Real decay = std::exp(args.log_decay[at]), beta = args.beta[at];
  const Real* grad_output = w.rows + in_segment * 3 * kPadded;
  const Real* residual = grad_output + kPadded;
  const Real* delta = residual + kPadded;
  Real* row_sums = w.row_sums;
  Vector<Real> grad_delta[V];
  const Vector<Real> inner = first_pass<Real, V>(state, w.grad_state, key, K, grad_output, delta, grad_delta, row_sums,
                                                 row_sums + K * L);
  Real query_key = 0;
  for (int64_t i = 0; i < K; ++i) query_key += query[i] * key[i];
  Real grad_retrieved[kPadded], grad_delta_row[kPadded];
  for (int v = 0; v < V; ++v) {
    grad_delta[v] += load(grad_output + v * L) * query_key;
    store(grad_delta_row + v * L, grad_delta[v]);
    store<Real>(grad_retrieved + v * L, grad_delta[v] * -beta);
  }
  second_pass<Real, V>(state, w.grad_state, key, query, K, decay, grad_output, grad_retrieved, row_sums + 2 * K * L);
  sum_lanes(row_sums, w.totals, 3 * K);

  const Real* from_output = w.totals;
  const Real* from_grad = w.totals + K;
  const Real* from_retrieved = w.totals + 2 * K;
  const int64_t partial = slab * args.tokens * args.heads + at;
  Real* grad_query = args.grad_query + partial * K;
  Real* grad_key = args.grad_key + partial * K;
  const Real delta_output = dot<Real, V>(delta, grad_output);
  Real grad_log_decay = horizontal_sum<Real>(inner);
  for (int64_t i = 0; i < K; ++i) {
    grad_query[i] = decay * from_output[i] + key[i] * delta_output;
    grad_key[i] = from_grad[i] + query[i] * delta_output + decay * from_retrieved[i];
    grad_log_decay += query[i] * from_output[i] + key[i] * from_retrieved[i];
  }
  args.grad_log_decay[partial] = decay * grad_log_decay;
  args.grad_beta[partial] = dot<Real, V>(grad_delta_row, residual);
  for (int64_t c = 0; c < width; ++c) args.grad_value[at * args.channels + channel + c] = beta * grad_delta_row[c];
}

template <class Real, int V>
void backward_tile(const GatedDeltaArgs<Real>& args, const GatedDeltaTask& task, int64_t channel, int64_t width,
                   Real* workspace) {
  constexpr int L = kLanes<Real>;
  constexpr int64_t kPadded = V * L;
  const int64_t K = args.key_size, D = args.channels, H = args.heads, h = task.head;
  const BackwardWorkspace<Real> w(workspace, K, kPadded);
  const int64_t state_offset = (task.sequence * H + h) * K * D + channel;
  load_tile<Real>(args.grad_final_state ? args.grad_final_state + state_offset : nullptr, D, w.grad_state, K, width,
                  kPadded);
  const int64_t segments = (task.end - task.begin + kGatedDeltaSegment - 1) / kGatedDeltaSegment;
  for (int64_t segment = segments - 1; segment >= 0; --segment) {
    const int64_t begin = task.begin + segment * kGatedDeltaSegment;
    const int64_t end = begin + kGatedDeltaSegment < task.end ? begin + kGatedDeltaSegment : task.end;
    const int64_t saved = (task.first_segment + segment) * H + h;
    load_tile<Real>(args.saved_states + saved * K * D + channel, D, w.states, K, width, kPadded);
    for (int64_t x = begin; x < end; ++x) {
      const int64_t at = x * H + h;
      Real* grad_output = w.rows + (x - begin) * 3 * kPadded;
      Real* residual = grad_output + kPadded;
      Real* delta = residual + kPadded;
      copy_row(args.grad_output + at * D + channel, grad_output, width, kPadded);
      copy_row<Real>(args.residual + at * D + channel, residual, width, kPadded);
      for (int64_t c = 0; c < kPadded; ++c) delta[c] = args.beta[at] * residual[c];
      if (x + 1 == end) break;
      const Real decay = std::exp(args.log_decay[at]);
      const Real* before = w.states + (x - begin) * K * kPadded;
      Real* after = w.states + (x - begin + 1) * K * kPadded;
      for (int64_t i = 0; i < K; ++i) {
        const Real k = args.key[at * K + i];
        for (int v = 0; v < V; ++v) {
          const int64_t place = i * kPadded + v * L;
          store<Real>(after + place, load(before + place) * decay + load(delta + v * L) * k);
        }
      }
    }
    for (int64_t x = end - 1; x >= begin; --x) {
      backward_token<Real, V>(args, w, x, h, task.slab, channel, width, x - begin);
    }
  }
  store_tile(args.grad_initial_state + state_offset, D, w.grad_state, K, width, kPadded);
}

template <class Real>
void gated_delta_backward_slab(const GatedDeltaArgs<Real>& args, const GatedDeltaTask& task, Real* workspace) {
  // One tile for the whole slab: its sums over channels are written, not added to.
  constexpr int L = kLanes<Real>;
  const int64_t channel = task.slab * kGatedDeltaSlab<Real>;
  const int64_t left = args.channels - channel;
  const int64_t width = left < kGatedDeltaSlab<Real> ? left : kGatedDeltaSlab<Real>;
  int64_t vectors = 1;
  while (vectors * L < width) vectors *= 2;
  with_vectors<kSlabVectors>(vectors, [&](auto constant) {
    backward_tile<Real, decltype(constant)::value>(args, task, channel, width, workspace);
  });
}

}  // namespace SDM_ISA
}  // namespace sdm

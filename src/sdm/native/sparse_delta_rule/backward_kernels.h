// Inner loops of the backward of the sparse delta rule. Included by kernels.cpp only.
//
// Time runs in reverse over a table that holds, for every row, the memory and the gradient G of the loss with respect
// to it. For the delta rule, with e = v - retrieved, u = beta e and dr the gradient of `retrieved`:
//
//     reads:   dq_j = <M_j, dy>                G_j += q_j dy
//     du    =  sum_i k_i G_i                   dv = beta du = -dr         dbeta = <du, e>
//     M_i  <-  the row before the write: its saved copy, or (M_i - k_i u) / exp(g)
//     dk_i  =  <G_i, u> + exp(g) <M_i, dr>     dg_i = exp(g) <M_i, G_i + k_i dr>
//     G_i  <-  exp(g) (G_i + k_i dr)
//
// The slot rule has no `retrieved`: dr = 0, and its callers make dk, dbeta and dg of <G_i, v> and <G_i, M_i>.
#pragma once

#include "sparse_delta_rule/kernels.h"

namespace sdm {
namespace SDM_ISA {

// u of token t: what the rows are pushed by.
template <class Real, int S, bool Retrieves>
SDM_INLINE Tile<Real, S> pushed(const Stream<Real>& stream, const BackwardSlab<Real>& slab, int64_t t, int64_t at) {
  if constexpr (!Retrieves) return load_channels<Real, S>(stream.value + at, slab.channels);
  Tile<Real, S> u = load_channels<Real, S>(slab.residual + at, slab.channels);
  return u *= stream.beta[t * stream.heads];
}

// Slots that left after token t come back: the memory as it was then, and no gradient yet.
template <class Real, int S>
SDM_INLINE void return_rows(const Stream<Real>& stream, const BackwardSlab<Real>& slab, int64_t t) {
  const int32_t first = stream.left_before[t], last = stream.left_before[t + 1];
  const int32_t kept = stream.kept_before[t + 1] - stream.kept_before[t];
  const Real* from = slab.kept_rows + int64_t{stream.kept_before[t]} * S;
  for (int32_t n = first; n < last; ++n) {
    Real* row = slab.table + int64_t{stream.left_row[n]} * (2 * S);
    if (n - first < kept) {
      Tile<Real, S>::load_from(from).store_to(row);
      from += S;
    }
    clear<Real, S>(row + S);
  }
}

// Slots that were born at token t hand over the gradient of the initial state.
template <class Real, int S>
SDM_INLINE void hand_over_gradient(const Stream<Real>& stream, const BackwardSlab<Real>& slab, int64_t t) {
  for (int32_t n = stream.born_before[t]; n < stream.born_before[t + 1]; ++n) {
    Real* to = slab.grad_initial + int64_t{stream.born_slot[n]} * stream.channels;
    const Real* from = slab.table + int64_t{stream.born_row[n]} * (2 * S) + S;
    Tile<Real, S> tile = Tile<Real, S>::load_from(from);
    if (slab.adds_initial) tile += load_channels<Real, S>(to, slab.channels);
    const bool aligned = reinterpret_cast<uintptr_t>(to) % SDM_VECTOR_BYTES == 0;
    if (slab.past_caches && aligned && slab.channels == S) {
      tile.stream_to(to);
    } else {
      store_channels<Real, S>(to, tile, slab.channels);
    }
  }
}

// Runs the writes forward again, from the initial rows to the final ones, and copies the rows that the plan saves and
// those that leave.
template <class Real, int S, int Stride, bool Retrieves, bool PerWrite>
SDM_INLINE void replay_slab(const Stream<Real>& stream, const BackwardSlab<Real>& slab) {
  using T = Tile<Real, S>;
  constexpr int kBytes = S * static_cast<int>(sizeof(Real));
  const int W = stream.writes;
  const int64_t token_stride = stream.heads * stream.channels;
  const RowTable<Real, Stride> rows = {slab.table, Stride};
  Real* copy = slab.saved_rows;
  Real* kept = slab.kept_rows;
  for (int64_t t = 0; t < stream.tokens; ++t) {
    const int32_t* write_row = stream.write_row + t * W;
    const int32_t* next = t + 1 < stream.tokens ? write_row + W : write_row;
    const Real* push = stream.push + t * stream.push_stride;
    const Real* factor = stream.factor + (PerWrite ? t * W : t);
    const int64_t at = t * token_stride + slab.first_channel;
    if (t + kTokenRowsAhead < stream.tokens) {
      prefetch<kBytes>((Retrieves ? slab.residual : stream.value) + at + kTokenRowsAhead * token_stride);
    }
    fill_new_rows<S>(stream, t, slab.initial, slab.channels, rows);
    const T u = pushed<Real, S, Retrieves>(stream, slab, t, at);
    if (stream.saved_before[t] < stream.saved_before[t + 1]) {
      const Restore* restore = stream.restore + t * W;
      for (int i = 0; i < W; ++i) {
        if (restore[i] != Restore::kCopy) continue;
        T::load_from(rows[write_row[i]]).store_to(copy);
        copy += S;
      }
    }
    const Real decay = factor[0];
    for (int i = 0; i < W; ++i) {
      prefetch<kBytes>(rows[next[i]]);
      u.write_into(rows[write_row[i]], PerWrite ? factor[i] : decay, push[i]);
    }
    if (!stream.left_before) continue;
    const int32_t* left_row = stream.left_row + stream.left_before[t];
    for (int32_t n = stream.kept_before[t]; n < stream.kept_before[t + 1]; ++n, ++left_row, kept += S) {
      T::load_from(rows[*left_row]).stream_to(kept);
    }
  }
  finish_streaming();
}

template <class Real, int S, bool Retrieves, bool PerWrite>
SDM_INLINE void backward_slab(const Stream<Real>& stream, const BackwardSlab<Real>& slab) {
  using T = Tile<Real, S>;
  constexpr int L = kLanes<Real>, kBytes = S * static_cast<int>(sizeof(Real));
  const int W = stream.writes, R = stream.reads;
  const int64_t token_stride = stream.heads * stream.channels;
  const int64_t partial_stride = partial_width(W, R, PerWrite);
  const RowTable<Real, 2 * S> rows = {slab.table, 2 * S}, gradients = {slab.table + S, 2 * S};
  Real* const lanes = slab.lanes;
  Real* const factor_lanes = slab.lanes + int64_t{W} * L;
  for (int64_t t = stream.tokens - 1; t >= 0; --t) {
    const int32_t* write_row = stream.write_row + t * W;
    const int32_t* read_row = stream.read_row + t * R;
    const int32_t* next_write = t > 0 ? write_row - W : write_row;
    const int32_t* next_read = t > 0 ? read_row - R : read_row;
    const Restore* restore = stream.restore + t * W;
    const Real* push = stream.push + t * stream.push_stride;
    const Real* factor = stream.factor + (PerWrite ? t * W : t);
    const Real* inverse = stream.inverse + (PerWrite ? t * W : t);
    const Real* read_weight = stream.read_weight + t * stream.heads * R;
    const int64_t at = t * token_stride + slab.first_channel;
    Real* partial = slab.partial + t * partial_stride;

    if (t >= kTokenRowsAhead) {
      const int64_t ahead = at - kTokenRowsAhead * token_stride;
      prefetch<kBytes>(slab.grad_y + ahead);
      if constexpr (Retrieves) prefetch<kBytes>(slab.residual + ahead);
      prefetch<kBytes>(slab.grad_value + ahead);
      // Within a token these go forward, from token to token back: no processor foresees that.
      prefetch_array(read_row - kTokenRowsAhead * R, R);
      prefetch_array(read_weight - kTokenRowsAhead * stream.heads * R, R);
      prefetch_array(write_row - kTokenRowsAhead * W, W);
      prefetch_array(push - kTokenRowsAhead * stream.push_stride, W);
      prefetch_array(restore - kTokenRowsAhead * W, W);
      prefetch_array(partial - kTokenRowsAhead * partial_stride, partial_stride);
    }
    if (stream.left_before) return_rows<Real, S>(stream, slab, t);
    const T dy = load_channels<Real, S>(slab.grad_y + at, slab.channels);
    for (int j = 0; j < R; ++j) {
      Real* memory = rows[read_row[j]];
      Real* gradient = memory + S;
      prefetch<2 * kBytes>(rows[next_read[j]]);
      const Vector<Real> q = broadcast<Real>(read_weight[j]);
      Vector<Real> dot = {};
#pragma GCC unroll 16
      for (int v = 0; v < T::V; ++v) {
        dot += load(memory + v * L) * dy.v[v];
        store(gradient + v * L, load(gradient + v * L) + q * dy.v[v]);
      }
      store(lanes + j * L, dot);
    }
    sum_each<Real>(lanes, R, slab.accumulate, partial + W);

    const T u = pushed<Real, S, Retrieves>(stream, slab, t, at);
    T du;
#pragma GCC unroll 16
    for (int v = 0; v < T::V; ++v) du.v[v] = Vector<Real>{};
    for (int i = 0; i < W; ++i) {
      const Real* gradient = gradients[write_row[i]];
      prefetch<kBytes>(gradients[next_write[i]]);
      const Vector<Real> k = broadcast<Real>(push[i]);
      Vector<Real> dot = {};
#pragma GCC unroll 16
      for (int v = 0; v < T::V; ++v) {
        const Vector<Real> g = load(gradient + v * L);
        dot += g * u.v[v];
        du.v[v] += k * g;
      }
      store(lanes + i * L, dot);
    }

    T dr = {};
    Vector<Real> beta_lanes = {};
    if constexpr (Retrieves) {
      beta_lanes = dot_lanes(du, load_channels<Real, S>(slab.residual + at, slab.channels));
      du *= stream.beta[t * stream.heads];
      dr = -du;
    }
    store_channels<Real, S>(slab.grad_value + at, du, slab.channels);

    // A push that is not finite is never inverted, and must not spoil the copies: 0 times NaN is NaN.
    Vector<Real> finite = {};
    for (int v = 0; v < T::V; ++v) finite += u.v[v] - u.v[v];
    const T undone = horizontal_sum<Real>(finite) == 0 ? u : T{};
    const Real* copy = slab.saved_rows + stream.saved_before[t] * S;
    Vector<Real> decay_lanes = {};
    const Real decay = factor[0], grown = inverse[0];
    for (int i = 0; i < W; ++i) {
      Real* memory = rows[write_row[i]];
      Real* gradient = memory + S;
      prefetch<kBytes>(rows[next_write[i]]);
      const Real* from = memory;
      Real scale = PerWrite ? inverse[i] : grown, undone_push = push[i] * scale;
      if (__builtin_expect(restore[i] != Restore::kInvert, 0)) {
        const bool is_copy = restore[i] == Restore::kCopy;
        from = is_copy ? copy : slab.table;  // row 0 is zero
        copy += is_copy * S;
        scale = 1;
        undone_push = 0;
      }
      const Vector<Real> grow = broadcast<Real>(scale), undo = broadcast<Real>(undone_push);
      const Vector<Real> f = broadcast<Real>(PerWrite ? factor[i] : decay), k = broadcast<Real>(push[i]);
      Vector<Real> dot = {}, factor_dot = {};
#pragma GCC unroll 16
      for (int v = 0; v < T::V; ++v) {
        const Vector<Real> before = grow * load(from + v * L) - undo * undone.v[v];
        Vector<Real> g = load(gradient + v * L);
        if constexpr (Retrieves) {
          dot += before * dr.v[v];
          g += k * dr.v[v];
        }
        factor_dot += before * g;
        store(memory + v * L, before);
        store(gradient + v * L, f * g);
      }
      if constexpr (Retrieves) store(lanes + i * L, load(lanes + i * L) + f * dot);
      if constexpr (!Retrieves) {
        store(factor_lanes + i * L, factor_dot);
      } else if constexpr (PerWrite) {
        store(factor_lanes + i * L, f * factor_dot);
      } else {
        decay_lanes += factor_dot;
      }
    }
    sum_each<Real>(lanes, W, slab.accumulate, partial);
    if constexpr (PerWrite) {
      sum_each<Real>(factor_lanes, W, slab.accumulate, partial + W + R);
    } else {
      const Real sum = factor[0] * horizontal_sum<Real>(decay_lanes);
      partial[W + R] = slab.accumulate ? partial[W + R] + sum : sum;
    }
    const Real beta_sum = horizontal_sum<Real>(beta_lanes);
    Real& beta_partial = partial[partial_stride - 1];
    beta_partial = slab.accumulate ? beta_partial + beta_sum : beta_sum;
    if (slab.grad_initial) hand_over_gradient<Real, S>(stream, slab, t);
  }
  finish_streaming();
}

template <class Real, int S, int Stride>
void replay_rules(const Stream<Real>& stream, const BackwardSlab<Real>& slab) {
  if (!stream.retrieves) return replay_slab<Real, S, Stride, false, true>(stream, slab);
  if (stream.factor_per_write) return replay_slab<Real, S, Stride, true, true>(stream, slab);
  return replay_slab<Real, S, Stride, true, false>(stream, slab);
}

// Rows of the replay need no room for gradients where the walk back gets all of them from the kept ones.
template <class Real, int S>
void replay(const Stream<Real>& stream, const BackwardSlab<Real>& slab) {
  if (slab.keeps_all) return replay_rules<Real, S, S>(stream, slab);
  return replay_rules<Real, S, 2 * S>(stream, slab);
}

template <class Real, int S>
void backward(const Stream<Real>& stream, const BackwardSlab<Real>& slab) {
  if (!stream.retrieves) return backward_slab<Real, S, false, true>(stream, slab);
  if (stream.factor_per_write) return backward_slab<Real, S, true, true>(stream, slab);
  return backward_slab<Real, S, true, false>(stream, slab);
}

}  // namespace SDM_ISA
}  // namespace sdm

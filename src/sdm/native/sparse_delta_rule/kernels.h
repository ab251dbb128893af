// Inner loops of the sparse delta rule: one slab of channels through the whole of time. Included by kernels.cpp only.
// slabs.h has the letters and the recurrence.
#pragma once

#include <type_traits>

#include "sparse_delta_rule/tile.h"

namespace sdm {
namespace SDM_ISA {

// Rows that are visited soon. L3 is far away, so each loop over rows asks for the rows of the loop after it, one
// request per row of its own: a burst of requests would fill the miss buffers and stall.
template <class Stored, int Bytes>
struct Ahead {
  const Stored* table;
  int64_t stride;
  const int32_t* rows;
  int count;

  SDM_INLINE void fetch(int i) const {
    if (i < count) prefetch_range<Bytes>(table + rows[i] * stride);
  }
  SDM_INLINE void fetch_from(int i) const {
    for (; i < count; ++i) prefetch_range<Bytes>(table + rows[i] * stride);
  }
};

// The sums of a token are made of this many partial sums, row i going to partial sum i mod kPartialSums. It is the same
// for every width of slab, and so is the order of additions: how channels and time are cut does not change a bit.
// Several rows are summed side by side because a single chain of additions would leave the multipliers waiting.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kAccumulators = 16;  // half of the registers
#else
constexpr int kAccumulators = 8;
#endif
template <class Real>
constexpr int kPartialSums = SDM_VECTOR_BYTES == 64 && sizeof(Real) == 4 ? 4 : 2;

// A row of which the table has only the first `channels`, continued by zeros in `room`.
template <int S, class Stored>
SDM_INLINE Stored* padded_row(const Stored* row, int64_t channels, Stored* room) {
  for (int64_t c = 0; c < channels; ++c) room[c] = row[c];
  return room;
}

// sum_i weight_i * scale_i * row_i. A wide tile is summed in strips whose partial sums fit into the registers. With
// Partial, rows have only `channels` channels.
template <class Real, class Stored, int S, bool Partial, class Next>
SDM_INLINE Tile<Real, S> weighted_rows(const Stored* table, int64_t stride, const int32_t* rows, const Real* weight,
                                       const Real* scale, int count, int64_t channels, const Next& next) {
  constexpr int K = kPartialSums<Real>, L = kLanes<Real>, V = Tile<Real, S>::V;
  constexpr int kStrip = V < kAccumulators / K ? V : kAccumulators / K;
  static_assert(V % kStrip == 0, "a tile is a whole number of strips");
  Tile<Real, S> total;
  Stored room[Partial ? S : 1] = {};
  for (int first = 0; first < V; first += kStrip) {
    Tile<Real, kStrip * L> sum[K] = {};
    const bool last_strip = first + kStrip == V;
    const auto add = [&](int n, int i) __attribute__((always_inline)) {
      const Stored* row = table + rows[i] * stride;
      if constexpr (Partial) row = padded_row<S>(row, channels, room);
      if (last_strip) next.fetch(i);
      sum[n].add(scale ? weight[i] * scale[i] : weight[i], row + first * L);
    };
    int i = 0;
    for (; i + K <= count; i += K) {
      for (int n = 0; n < K; ++n) add(n, i + n);
    }
    for (; i < count; ++i) add(0, i);
    for (int half = K / 2; half > 0; half /= 2) {
      for (int n = 0; n < half; ++n) sum[n] += sum[n + half];
    }
    for (int i = 0; i < kStrip; ++i) total.v[first + i] = sum[0].v[i];
  }
  next.fetch_from(count);
  return total;
}

// How many tokens ahead a loop asks for the rows of the initial state that it will need: a token takes microseconds, a
// row from far memory, with the walk through the page tables, a good part of one.
constexpr int64_t kTokensAhead = 3;

// Fills the rows of the slots that are born at token t, with S channels of the initial state or zeros, and zeros up to
// Columns.
template <int S, int Columns, class Real>
SDM_INLINE void fill_new_rows(const Stream<Real>& stream, int64_t t, const Real* initial, int64_t channels,
                              Real* table) {
  const int32_t first = stream.born_before[t], last = stream.born_before[t + 1];
  if (!initial) {
    for (int32_t n = first; n < last; ++n) clear<Real, Columns>(table + int64_t{stream.born_row[n]} * Columns);
    return;
  }
  if (t + kTokensAhead < stream.tokens) {
    const int32_t far_last = stream.born_before[t + kTokensAhead + 1];
    for (int32_t n = stream.born_before[t + kTokensAhead]; n < far_last; ++n) {
      const char* from = reinterpret_cast<const char*>(initial + int64_t{stream.born_slot[n]} * stream.channels);
      for (int b = 0; b < S * static_cast<int>(sizeof(Real)); b += 64) __builtin_prefetch(from + b, 0, 2);
    }
  }
  for (int32_t n = first; n < last; ++n) {
    Real* to = table + int64_t{stream.born_row[n]} * Columns;
    load_channels<Real, S>(initial + int64_t{stream.born_slot[n]} * stream.channels, channels).store_to(to);
    clear<Real, Columns - S>(to + S);
  }
}

// ---- forward ------------------------------------------------------------------------------------------------------

template <class Real, class Stored, int S, bool Retrieves, bool PerWrite, bool Partial>
SDM_INLINE void forward_slab(const Stream<Real>& stream, const ForwardSlab<Real>& slab) {
  using T = Tile<Real, S>;
  const int W = stream.writes, R = stream.reads;
  const int64_t token_stride = stream.heads * stream.channels;
  const int64_t stride = slab.row_stride;
  Stored* const table = static_cast<Stored*>(slab.table);
  for (int64_t t = 0; t < stream.tokens; ++t) {
    const int32_t* write_row = stream.write_row + t * W;
    const int32_t* read_row = stream.read_row + t * R;
    const Real* push = stream.push + t * stream.push_stride;
    const Real* factor = stream.factor + (PerWrite ? t * W : t);
    const Real* read_weight = stream.read_weight + t * stream.heads * R;
    const int64_t at = t * token_stride + slab.first_channel;
    using Rows = Ahead<Stored, S * static_cast<int>(sizeof(Stored))>;
    const Rows none = {table, stride, nullptr, 0}, reads = {table, stride, read_row, R};
    const Rows next_writes = {table, stride, write_row + W, t + 1 < stream.tokens ? W : 0};

    if constexpr (std::is_same_v<Real, Stored>) {
      if (slab.fills) fill_new_rows<S, S>(stream, t, slab.initial, slab.channels, table);
    }
    if (t + 1 < stream.tokens) prefetch_range<S * static_cast<int>(sizeof(Real))>(stream.value + at + token_stride);
    T u = load_channels<Real, S>(stream.value + at, slab.channels);
    if constexpr (Retrieves) {
      const T retrieved = weighted_rows<Real, Stored, S, Partial>(table, stride, write_row, push,
                                                                  PerWrite ? factor : nullptr, W, slab.channels, none);
      u.subtract(PerWrite ? Real(1) : factor[0], retrieved);
      if (slab.residual) store_channels<Real, S>(slab.residual + at, u, slab.channels);
      u *= stream.beta[t * stream.heads];
    }
    for (int i = 0; i < W; ++i) {
      reads.fetch(i);
      Stored* row = table + write_row[i] * stride;
      if constexpr (Partial) {
        Stored room[S] = {};
        u.write_into(padded_row<S>(row, slab.channels, room), factor[PerWrite ? i : 0], push[i]);
        for (int64_t c = 0; c < slab.channels; ++c) row[c] = room[c];
      } else {
        u.write_into(row, factor[PerWrite ? i : 0], push[i]);
      }
    }
    reads.fetch_from(W);
    const T y = weighted_rows<Real, Stored, S, Partial>(table, stride, read_row, read_weight, nullptr, R,
                                                        slab.channels, next_writes);
    store_channels<Real, S>(slab.y + at, y, slab.channels);
  }
}

template <class Real, class Stored, int S, bool Partial = false>
void forward(const Stream<Real>& stream, const ForwardSlab<Real>& slab) {
  if (!stream.retrieves) return forward_slab<Real, Stored, S, false, true, Partial>(stream, slab);
  if (stream.factor_per_write) return forward_slab<Real, Stored, S, true, true, Partial>(stream, slab);
  return forward_slab<Real, Stored, S, true, false, Partial>(stream, slab);
}

// Any number of channels below kSmallestSlab, in place: rows pass through a padded copy.
template <class Real, class Stored>
void forward_rest(const Stream<Real>& stream, const ForwardSlab<Real>& slab) {
  forward<Real, Stored, kSmallestSlab, true>(stream, slab);
}

// ---- copies -------------------------------------------------------------------------------------------------------

constexpr int kCopyAhead = 48;

template <class Real, class Stored>
void gather(const RowCopy& copy, const Stored* state, Real* table) {
  constexpr int L = kLanes<Real>;
  for (int64_t r = 0; r < copy.count; ++r) {
    const int64_t ahead = r + kCopyAhead < copy.count ? r + kCopyAhead : r;
    const Stored* from = state + copy.slots[r] * copy.state_stride;
    const char* next = reinterpret_cast<const char*>(state + copy.slots[ahead] * copy.state_stride);
    for (int64_t b = 0; b < copy.channels * static_cast<int64_t>(sizeof(Stored)); b += 64) {
      __builtin_prefetch(next + b, 0, 0);
    }
    Real* to = table + copy.rows[r] * copy.table_stride;
    int64_t c = 0;
    for (; c + L <= copy.channels; c += L) store(to + c, load_row(from + c));
    for (; c < copy.channels; ++c) to[c] = to_real(from[c]);
    for (; c < copy.channels + copy.cleared; ++c) to[c] = 0;
  }
}

template <class Real>
void scatter(const RowCopy& copy, const Real* table, Real* state) {
  constexpr int L = kLanes<Real>;
  for (int64_t r = 0; r < copy.count; ++r) {
    Real* to = state + copy.slots[r] * copy.state_stride;
    const Real* from = table + copy.rows[r] * copy.table_stride;
    int64_t c = 0;
    for (; c + L <= copy.channels; c += L) store(to + c, load(from + c));
    for (; c < copy.channels; ++c) to[c] = from[c];
  }
}

}  // namespace SDM_ISA
}  // namespace sdm

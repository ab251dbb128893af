// Inner loops of the sparse delta rule: one slab of channels through the whole of time. Included by kernels.cpp only.
// slabs.h has the letters and the recurrence.
#pragma once

#include <type_traits>

#include "sparse_delta_rule/tile.h"

namespace sdm {
namespace SDM_ISA {

// The rows of a table. Stride: elements between rows, or 0 where only the caller knows.
template <class Stored, int Stride>
struct RowTable {
  Stored* first;
  int64_t stride;

  SDM_INLINE Stored* operator[](int32_t row) const { return first + row * (Stride ? int64_t{Stride} : stride); }
};

// The last cache is far away: a loop over the rows of a token asks for row i of the next token when it is at row i, so that
// requests are spread over the time of a token. Arrays with a row per token are asked for earlier, because each of their
// rows is on another page.
constexpr int64_t kTokenRowsAhead = 4;

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

// sum_i weight_i * scale_i * row_i, scale by write or 1. A wide tile is summed in strips whose partial sums fit into the
// registers. With Partial, rows have only `channels` channels. Row i of `next` is asked for on the way.
template <class Real, class Stored, int S, bool Scaled, bool Partial, class Table>
SDM_INLINE Tile<Real, S> weighted_rows(const Table& rows, const int32_t* index, const Real* weight, const Real* scale,
                                       int count, int64_t channels, const int32_t* next) {
  constexpr int K = kPartialSums<Real>, L = kLanes<Real>, V = Tile<Real, S>::V;
  constexpr int kBytes = S * static_cast<int>(sizeof(Stored));
  constexpr int kStrip = V < kAccumulators / K ? V : kAccumulators / K;
  static_assert(V % kStrip == 0, "a tile is a whole number of strips");
  Tile<Real, S> total;
  Stored room[Partial ? S : 1] = {};
#pragma GCC unroll 8
  for (int first = 0; first < V; first += kStrip) {
    Vector<Real> sum[K][kStrip];
#pragma GCC unroll 8
    for (int n = 0; n < K; ++n) {
#pragma GCC unroll 16
      for (int v = 0; v < kStrip; ++v) sum[n][v] = Vector<Real>{};
    }
    int i = 0;
    for (; i + K <= count; i += K) {
#pragma GCC unroll 8
      for (int n = 0; n < K; ++n) {
        const Stored* row = rows[index[i + n]];
        if constexpr (Partial) row = padded_row<S>(row, channels, room);
        if (first == 0) prefetch<kBytes>(rows[next[i + n]]);
        const Vector<Real> w = broadcast<Real>(Scaled ? weight[i + n] * scale[i + n] : weight[i + n]);
#pragma GCC unroll 16
        for (int v = 0; v < kStrip; ++v) sum[n][v] += w * load_row(row + (first + v) * L);
      }
    }
    for (; i < count; ++i) {
      const Stored* row = rows[index[i]];
      if constexpr (Partial) row = padded_row<S>(row, channels, room);
      if (first == 0) prefetch<kBytes>(rows[next[i]]);
      const Vector<Real> w = broadcast<Real>(Scaled ? weight[i] * scale[i] : weight[i]);
#pragma GCC unroll 16
      for (int v = 0; v < kStrip; ++v) sum[0][v] += w * load_row(row + (first + v) * L);
    }
#pragma GCC unroll 4
    for (int half = K / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
      for (int n = 0; n < half; ++n) {
#pragma GCC unroll 16
        for (int v = 0; v < kStrip; ++v) sum[n][v] += sum[n + half][v];
      }
    }
#pragma GCC unroll 16
    for (int v = 0; v < kStrip; ++v) total.v[first + v] = sum[0][v];
  }
  return total;
}

// How many tokens ahead a loop asks for the rows of the initial state that it will need: a token takes microseconds, a
// row from far memory, with the walk through the page tables, a good part of one.
constexpr int64_t kTokensAhead = 3;


// Fills the rows of the slots that are born at token t, with S channels of the initial state or zeros.
template <int S, class Real, class Table>
SDM_INLINE void fill_new_rows(const Stream<Real>& stream, int64_t t, const Real* initial, int64_t channels,
                              const Table& rows) {
  const int32_t first = stream.born_before[t], last = stream.born_before[t + 1];
  if (!initial) {
    for (int32_t n = first; n < last; ++n) clear<Real, S>(rows[stream.born_row[n]]);
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
    const Real* from = initial + int64_t{stream.born_slot[n]} * stream.channels;
    load_channels<Real, S>(from, channels).store_to(rows[stream.born_row[n]]);
  }
}

// ---- forward ------------------------------------------------------------------------------------------------------

template <class Real, class Stored, int S, int Stride, bool Retrieves, bool PerWrite, bool Partial>
SDM_INLINE void forward_slab(const Stream<Real>& stream, const ForwardSlab<Real>& slab) {
  using T = Tile<Real, S>;
  const int W = stream.writes, R = stream.reads;
  const int64_t token_stride = stream.heads * stream.channels;
  Stored* const table = static_cast<Stored*>(slab.table);
  const RowTable<Stored, Stride> rows = {table, slab.row_stride};
  constexpr int kBytes = S * static_cast<int>(sizeof(Real));
  for (int64_t t = 0; t < stream.tokens; ++t) {
    const int32_t* write_row = stream.write_row + t * W;
    const int32_t* read_row = stream.read_row + t * R;
    // The last token, the only one of a decode step, asks for its own reads instead.
    const bool last = t + 1 == stream.tokens;
    const int32_t* next_writes = !last ? write_row + W : W <= R ? read_row : write_row;
    const int32_t* next_reads = !last ? read_row + R : read_row;
    const Real* push = stream.push + t * stream.push_stride;
    const Real* factor = stream.factor + (PerWrite ? t * W : t);
    const Real* read_weight = stream.read_weight + t * stream.heads * R;
    const int64_t at = t * token_stride + slab.first_channel;

    if constexpr (std::is_same_v<Real, Stored>) {
      if (slab.fills) fill_new_rows<S>(stream, t, slab.initial, slab.channels, rows);
    }
    if (t + kTokenRowsAhead < stream.tokens) {
      const int64_t ahead = at + kTokenRowsAhead * token_stride;
      prefetch<kBytes>(stream.value + ahead);
      prefetch<kBytes>(slab.y + ahead);
      if (slab.residual) prefetch<kBytes>(slab.residual + ahead);
    }
    T u = load_channels<Real, S>(stream.value + at, slab.channels);
    if constexpr (Retrieves) {
      const T retrieved = weighted_rows<Real, Stored, S, PerWrite, Partial>(rows, write_row, push, factor, W, slab.channels,
                                                                            next_writes);
      u.subtract(PerWrite ? Real(1) : factor[0], retrieved);
      if (slab.residual) store_channels<Real, S>(slab.residual + at, u, slab.channels);
      u *= stream.beta[t * stream.heads];
    }
    const Real decay = factor[0];
    for (int i = 0; i < W; ++i) {
      Stored* row = rows[write_row[i]];
      if constexpr (Partial) {
        Stored room[S] = {};
        u.write_into(padded_row<S>(row, slab.channels, room), PerWrite ? factor[i] : decay, push[i]);
        for (int64_t c = 0; c < slab.channels; ++c) row[c] = room[c];
      } else {
        u.write_into(row, PerWrite ? factor[i] : decay, push[i]);
      }
    }
    const T y = weighted_rows<Real, Stored, S, false, Partial>(rows, read_row, read_weight, nullptr, R, slab.channels,
                                                               next_reads);
    store_channels<Real, S>(slab.y + at, y, slab.channels);
  }
}

template <class Real, class Stored, int S, int Stride, bool Partial>
void forward_rules(const Stream<Real>& stream, const ForwardSlab<Real>& slab) {
  if (!stream.retrieves) return forward_slab<Real, Stored, S, Stride, false, true, Partial>(stream, slab);
  if (stream.factor_per_write) return forward_slab<Real, Stored, S, Stride, true, true, Partial>(stream, slab);
  return forward_slab<Real, Stored, S, Stride, true, false, Partial>(stream, slab);
}

template <class Real, class Stored, int S, bool Partial = false>
void forward(const Stream<Real>& stream, const ForwardSlab<Real>& slab) {
  if (!Partial && slab.row_stride == S) return forward_rules<Real, Stored, S, S, false>(stream, slab);
  return forward_rules<Real, Stored, S, 0, Partial>(stream, slab);
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

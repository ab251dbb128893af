// The dense gated delta rule, token after token. Included by kernels.cpp only.
//
// Channels are independent, so a slab of channels runs through time with its part of the state, which stays in the
// first-level cache. The pass over the state that writes a token also reads what the next token's key retrieves: each
// row is loaded and stored once per token.
#pragma once

#include <cmath>
#include <type_traits>

#include "gated_delta_rule/rule.h"
#include "simd.h"

namespace sdm {
namespace SDM_ISA {

// Vectors of channels in one slab.
constexpr int kSlabVectors = 256 / SDM_VECTOR_BYTES;

template <class Real>
SDM_INLINE void copy_row(const Real* from, Real* to, int64_t count, int64_t padded) {
  for (int64_t c = 0; c < count; ++c) to[c] = from[c];
  for (int64_t c = count; c < padded; ++c) to[c] = 0;
}

// Rows of `width` channels between a state [K, D] and a tile [K, padded].
template <class Real>
SDM_INLINE void load_tile(const Real* state, int64_t stride, Real* tile, int64_t rows, int64_t width, int64_t padded) {
  for (int64_t i = 0; i < rows; ++i) {
    if (state) {
      copy_row(state + i * stride, tile + i * padded, width, padded);
    } else {
      for (int64_t c = 0; c < padded; ++c) tile[i * padded + c] = 0;
    }
  }
}

template <class Real>
SDM_INLINE void store_tile(Real* state, int64_t stride, const Real* tile, int64_t rows, int64_t width, int64_t padded) {
  for (int64_t i = 0; i < rows; ++i) copy_row(tile + i * padded, state + i * stride, width, width);
}

// V vectors of channels. A slab that fills them needs no padding, and its rows are read and written in place.
template <class Real, int V, bool Full>
struct RowOf {
  static constexpr int64_t kPadded = V * kLanes<Real>;
  Real padded[Full ? 1 : kPadded];

  SDM_INLINE const Real* read(const Real* row, int64_t width) {
    if (Full) return row;
    copy_row(row, padded, width, kPadded);
    return padded;
  }
  SDM_INLINE Real* to_write(Real* row) { return Full ? row : padded; }
  SDM_INLINE void write(Real* row, int64_t width) {
    if (!Full) copy_row(padded, row, width, width);
  }
};

// M <- decay M + key delta^T; reads M^T query into `output` and M^T next_key into `retrieved`. Four vectors at a time:
// three registers each. `decay` is of each row, or a single one.
template <class Real, int V, bool ByRow>
SDM_INLINE void write_and_read(Real* tile, int64_t rows, const Real* decay, const Real* key, const Real* query,
                               const Real* next_key, const Real* delta, Real* output, Real* retrieved) {
  const Real same = ByRow ? 1 : *decay;
  constexpr int L = kLanes<Real>, kGroup = V < 4 ? V : 4;
  for (int group = 0; group < V; group += kGroup) {
    Vector<Real> d[kGroup], y[kGroup], r[kGroup];
    for (int v = 0; v < kGroup; ++v) {
      d[v] = load(delta + (group + v) * L);
      y[v] = r[v] = Vector<Real>{};
    }
    for (int64_t i = 0; i < rows; ++i) {
      Real* row = tile + (i * V + group) * L;
      const Real k = key[i], q = query[i], n = next_key[i], kept = ByRow ? decay[i] : same;
      for (int v = 0; v < kGroup; ++v) {
        const Vector<Real> m = load(row + v * L) * kept + d[v] * k;
        store(row + v * L, m);
        y[v] += m * q;
        r[v] += m * n;
      }
    }
    for (int v = 0; v < kGroup; ++v) {
      store(output + (group + v) * L, y[v]);
      store(retrieved + (group + v) * L, r[v]);
    }
  }
}

// What the key of token `at` retrieves is read before the decay. With a decay for all rows the result is decayed; with
// one of each row the key is, in `decayed_key`.
template <class Real, bool ByRow>
SDM_INLINE const Real* retrieving_key(const GatedDeltaForward<Real>& args, int64_t at, Real* decayed_key) {
  const int64_t K = args.key_size;
  if (!ByRow) return args.key + at * K;
  for (int64_t i = 0; i < K; ++i) decayed_key[i] = args.key[at * K + i] * args.decay[at * K + i];
  return decayed_key;
}

template <class Real, int V, bool Full, bool ByRow>
void forward_tile(const GatedDeltaForward<Real>& args, const GatedDeltaTask& task, int64_t channel, int64_t width,
                  Real* tile) {
  constexpr int64_t kPadded = V * kLanes<Real>;
  const int64_t K = args.key_size, D = args.channels, H = args.heads, h = task.head;
  const int64_t state_offset = (task.sequence * H + h) * K * D + channel;
  load_tile<Real>(args.initial_state ? args.initial_state + state_offset : nullptr, D, tile, K, width, kPadded);

  Real retrieved[kPadded] = {}, delta[kPadded];
  Real* decayed_key = tile + K * kPadded;
  if (task.begin < task.end) {
    const Real* key = retrieving_key<Real, ByRow>(args, task.begin * H + h, decayed_key);
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t c = 0; c < kPadded; ++c) retrieved[c] += key[i] * tile[i * kPadded + c];
    }
  }
  RowOf<Real, V, Full> value_row, residual_row, output_row;
  for (int64_t x = task.begin; x < task.end; ++x) {
    const int64_t since = x - task.begin;
    if (args.saved_states && since % kGatedDeltaSegment == 0) {
      const int64_t segment = task.first_segment + since / kGatedDeltaSegment;
      store_tile(args.saved_states + (segment * H + h) * K * D + channel, D, tile, K, width, kPadded);
    }
    const int64_t at = x * H + h, row = at * D + channel;
    const Real decay = ByRow ? 1 : std::exp(args.log_decay[at]), beta = args.beta[at];
    const Real* value = value_row.read(args.value + row, width);
    for (int64_t c = 0; c < kPadded; ++c) delta[c] = beta * (value[c] - decay * retrieved[c]);
    if (args.residual) {
      Real* residual = residual_row.to_write(args.residual + row);
      for (int64_t c = 0; c < kPadded; ++c) residual[c] = value[c] - decay * retrieved[c];
      residual_row.write(args.residual + row, width);
    }
    const Real* key = args.key + at * K;
    const Real* next_key = retrieving_key<Real, ByRow>(args, x + 1 < task.end ? at + H : at, decayed_key);
    write_and_read<Real, V, ByRow>(tile, K, ByRow ? args.decay + at * K : &decay, key, args.query + at * K, next_key,
                                   delta, output_row.to_write(args.y + row), retrieved);
    output_row.write(args.y + row, width);
  }
  if (args.final_state) store_tile(args.final_state + state_offset, D, tile, K, width, kPadded);
}

template <class Real>
int64_t gated_delta_forward_workspace(int64_t key_size) {
  return key_size * (kGatedDeltaSlab<Real> + 1);
}

// Calls run(channel, width, V, Full) for the channels of a slab, V vectors, a power of two, and Full as constants.
template <class Real, int V = 1, class Run>
SDM_INLINE void with_slab(int64_t slab, int64_t channels, const Run& run) {
  constexpr int64_t kPadded = V * kLanes<Real>;
  const int64_t channel = slab * kGatedDeltaSlab<Real>;
  const int64_t width = channels - channel < kGatedDeltaSlab<Real> ? channels - channel : kGatedDeltaSlab<Real>;
  using Vectors = std::integral_constant<int, V>;
  if (width == kPadded) return run(channel, width, Vectors{}, std::true_type{});
  if constexpr (V < kSlabVectors) {
    if (width > kPadded) return with_slab<Real, 2 * V>(slab, channels, run);
  }
  run(channel, width, Vectors{}, std::false_type{});
}

template <class Real>
void gated_delta_forward_slab(const GatedDeltaForward<Real>& args, const GatedDeltaTask& task, Real* workspace) {
  with_slab<Real>(task.slab, args.channels, [&](int64_t channel, int64_t width, auto vectors, auto full) {
    constexpr int V = decltype(vectors)::value;
    constexpr bool kFull = decltype(full)::value;
    if (args.by_channel()) {
      forward_tile<Real, V, kFull, true>(args, task, channel, width, workspace);
    } else {
      forward_tile<Real, V, kFull, false>(args, task, channel, width, workspace);
    }
  });
}

}  // namespace SDM_ISA
}  // namespace sdm

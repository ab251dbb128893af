// The dense gated delta rule, token after token. Included by kernels.cpp only.
//
// Channels are independent, so a tile of a few vectors of channels runs through time with its part of the state, which
// stays in the first-level cache. The pass over the state that writes a token also reads what the next token's key
// retrieves: each row is loaded and stored once per token.
#pragma once

#include <cmath>
#include <type_traits>

#include "gated_delta.h"
#include "simd.h"

namespace sdm {
namespace SDM_ISA {

// Vectors per tile; each takes three registers.
constexpr int kForwardVectors = 4;

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

// M <- decay M + key delta^T; reads M^T query into `output` and M^T next_key into `retrieved`.
template <class Real, int V>
SDM_INLINE void write_and_read(Real* tile, int64_t rows, Real decay, const Real* key, const Real* query,
                               const Real* next_key, const Vector<Real>* delta, Vector<Real>* output,
                               Vector<Real>* retrieved) {
  constexpr int L = kLanes<Real>;
  Vector<Real> d[V], y[V], r[V];
  for (int v = 0; v < V; ++v) {
    d[v] = delta[v];
    y[v] = r[v] = Vector<Real>{};
  }
  for (int64_t i = 0; i < rows; ++i) {
    Real* row = tile + i * V * L;
    const Real k = key[i], q = query[i], n = next_key[i];
    for (int v = 0; v < V; ++v) {
      const Vector<Real> m = load(row + v * L) * decay + d[v] * k;
      store(row + v * L, m);
      y[v] += m * q;
      r[v] += m * n;
    }
  }
  for (int v = 0; v < V; ++v) {
    output[v] = y[v];
    retrieved[v] = r[v];
  }
}

template <class Real, int V>
void forward_tile(const GatedDeltaArgs<Real>& args, const GatedDeltaTask& task, int64_t channel, int64_t width,
                  Real* tile) {
  constexpr int L = kLanes<Real>;
  constexpr int64_t kPadded = V * L;
  const int64_t K = args.key_size, D = args.channels, H = args.heads, h = task.head;
  const int64_t state_offset = (task.sequence * H + h) * K * D + channel;
  load_tile<Real>(args.initial_state ? args.initial_state + state_offset : nullptr, D, tile, K, width, kPadded);

  Vector<Real> retrieved[V] = {}, delta[V], output[V];
  if (task.begin < task.end) {
    const Real* key = args.key + (task.begin * H + h) * K;
    for (int64_t i = 0; i < K; ++i) {
      for (int v = 0; v < V; ++v) retrieved[v] += load(tile + i * kPadded + v * L) * key[i];
    }
  }
  for (int64_t x = task.begin; x < task.end; ++x) {
    const int64_t since = x - task.begin;
    if (args.saved_states && since % kGatedDeltaSegment == 0) {
      const int64_t segment = task.first_segment + since / kGatedDeltaSegment;
      store_tile(args.saved_states + (segment * H + h) * K * D + channel, D, tile, K, width, kPadded);
    }
    const int64_t at = x * H + h;
    const Real decay = std::exp(args.log_decay[at]), beta = args.beta[at];
    Real padded[kPadded];
    copy_row(args.value + at * D + channel, padded, width, kPadded);
    for (int v = 0; v < V; ++v) {
      const Vector<Real> residual = load(padded + v * L) - retrieved[v] * decay;
      delta[v] = residual * beta;
      store(padded + v * L, residual);
    }
    if (args.residual) copy_row(padded, args.residual + at * D + channel, width, width);
    const Real* key = args.key + at * K;
    const Real* next_key = x + 1 < task.end ? key + H * K : key;
    write_and_read<Real, V>(tile, K, decay, key, args.query + at * K, next_key, delta, output, retrieved);
    for (int v = 0; v < V; ++v) store(padded + v * L, output[v]);
    copy_row(padded, args.output + at * D + channel, width, width);
  }
  if (args.final_state) store_tile(args.final_state + state_offset, D, tile, K, width, kPadded);
}

template <class Real>
int64_t gated_delta_forward_workspace(int64_t key_size) {
  return key_size * kForwardVectors * kLanes<Real>;
}

// Calls run with the number of vectors, rounded down to a power of two and at most `Most`, as a constant.
template <int Most, class Run>
SDM_INLINE void with_vectors(int64_t vectors, const Run& run) {
  if constexpr (Most > 1) {
    if (vectors < Most) return with_vectors<Most / 2>(vectors, run);
  }
  run(std::integral_constant<int, Most>{});
}

template <class Real>
void gated_delta_forward_slab(const GatedDeltaArgs<Real>& args, const GatedDeltaTask& task, Real* workspace) {
  constexpr int L = kLanes<Real>;
  const int64_t first = task.slab * kGatedDeltaSlab<Real>;
  const int64_t last = first + kGatedDeltaSlab<Real> < args.channels ? first + kGatedDeltaSlab<Real> : args.channels;
  for (int64_t channel = first; channel < last;) {
    const int64_t left = last - channel;
    with_vectors<kForwardVectors>((left + L - 1) / L, [&](auto vectors) {
      constexpr int V = decltype(vectors)::value;
      const int64_t width = left < V * L ? left : V * L;
      forward_tile<Real, V>(args, task, channel, width, workspace);
      channel += width;
    });
  }
}

}  // namespace SDM_ISA
}  // namespace sdm

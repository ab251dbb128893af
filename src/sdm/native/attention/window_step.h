// One token of attention to the last `window` tokens, from its projections to its gated readings.
//
// Keys and values lie in a ring: position p in place p mod window. A token sees itself and what the ring holds of the
// tokens before it.
#pragma once

#include <cstdint>

namespace sdm {

template <class Real>
struct WindowStep {
  int threads;
  int64_t streams, heads, key_heads, channels, window;
  double rope_scale;
  const double* turns;     // [channels / 2] whole turns per position of the pair of channels i and i + channels / 2
  const int64_t* length;   // [streams] tokens before this one
  const Real* projected;   // [streams, (2 heads + 2 key_heads) channels] query, key, value, gate
  Real* keys;              // [streams, key_heads, window, channels]
  Real* values;            // the same
  Real* y;                 // [streams, heads, channels]

  template <class Visit>
  void each_field(const Visit& field) {
    field("threads", threads), field("streams", streams), field("heads", heads), field("key_heads", key_heads);
    field("channels", channels), field("window", window), field("rope_scale", rope_scale), field("turns", turns);
    field("length", length), field("projected", projected), field("keys", keys), field("values", values), field("y", y);
  }
};

template <class Real>
struct AttentionKernels {
  // y = softmax(scale <query, key>) values over `count` places; `scores` has room for as many.
  void (*attend)(const Real* query, const Real* keys, const Real* values, int64_t count, int64_t channels, Real scale,
                 Real* scores, Real* y);
};

// Sizes that do not fit together and negative lengths throw std::invalid_argument.
template <class Real>
void window_step(const WindowStep<Real>& call);

}  // namespace sdm

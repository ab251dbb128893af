#include "attention/window_step.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "kernel_table.h"
#include "memory.h"
#include "parallel.h"

namespace sdm {
namespace {

template <class Real>
const AttentionKernels<Real>& attention_kernels();
template <>
const AttentionKernels<float>& attention_kernels() {
  return kernels().attention_float;
}
template <>
const AttentionKernels<double>& attention_kernels() {
  return kernels().attention_double;
}

// Channels i and i + channels / 2 make a pair.
template <class Real>
void rotate(const Real* from, const Real* cosine, const Real* sine, int64_t channels, Real* to) {
  const int64_t half = channels / 2;
  for (int64_t i = 0; i < half; ++i) {
    const Real first = from[i], second = from[i + half];
    to[i] = first * cosine[i] - second * sine[i];
    to[i + half] = second * cosine[i] + first * sine[i];
  }
}

}  // namespace

template <class Real>
void window_step(const WindowStep<Real>& call) {
  const int64_t S = call.streams, H = call.heads, G = call.key_heads, D = call.channels, W = call.window;
  if (S < 0 || H < 1 || G < 1 || H % G || D < 2 || D % 2 || W < 1) {
    throw std::invalid_argument("heads must be a multiple of key_heads, channels even, window positive");
  }
  for (int64_t s = 0; s < S; ++s) {
    if (call.length[s] < 0) throw std::invalid_argument("lengths must not be negative");
  }
  const int64_t half = D / 2, row = 2 * (H + G) * D;
  // Of each stream the cosines and sines, of each head the rotated query and the scores.
  Scratch angles(static_cast<std::size_t>(S * D) * sizeof(Real));
  Scratch work(static_cast<std::size_t>(S * H * (D + W)) * sizeof(Real));
  for (int64_t s = 0; s < S; ++s) {
    Real* cosine = angles.template as<Real>() + s * D;
    for (int64_t i = 0; i < half; ++i) {
      // Whole turns are dropped in double: far from the start a float has no digits left for the angle.
      const double turns = static_cast<double>(call.length[s]) * call.turns[i];
      const auto angle = static_cast<Real>((turns - std::trunc(turns)) * 6.283185307179586);
      cosine[i] = std::cos(angle) * static_cast<Real>(call.rope_scale);
      cosine[half + i] = std::sin(angle) * static_cast<Real>(call.rope_scale);
    }
    const Real* key = call.projected + s * row + H * D;
    const int64_t place = call.length[s] % W;
    for (int64_t g = 0; g < G; ++g) {
      const int64_t at = ((s * G + g) * W + place) * D;
      rotate(key + g * D, cosine, cosine + half, D, call.keys + at);
      std::copy(key + (G + g) * D, key + (G + g + 1) * D, call.values + at);
    }
  }
  const auto attend = attention_kernels<Real>().attend;
  const Real scale = 1 / std::sqrt(static_cast<Real>(D));
  // A thread takes whole heads, and is not worth waking for a small one.
  const int threads = D * W >= (1 << 12) ? call.threads : 1;
  parallel_for(S * H, threads, [&](int64_t task) {
    const int64_t s = task / H, h = task % H, ring = (s * G + h / (H / G)) * W * D;
    Real* query = work.template as<Real>() + task * (D + W);
    const Real *cosine = angles.template as<Real>() + s * D, *from = call.projected + s * row;
    rotate(from + h * D, cosine, cosine + half, D, query);
    Real* y = call.y + task * D;
    attend(query, call.keys + ring, call.values + ring, std::min(call.length[s] + 1, W), D, scale, query + D, y);
    const Real* gate = from + (H + 2 * G + h) * D;
    for (int64_t c = 0; c < D; ++c) y[c] *= 1 / (1 + std::exp(-gate[c]));
  });
}

template void window_step(const WindowStep<float>&);
template void window_step(const WindowStep<double>&);

}  // namespace sdm

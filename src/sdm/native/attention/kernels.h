// The inner loops of attention of one query. Included by kernels.cpp only.
#pragma once

#include "attention/window_step.h"
#include "simd.h"

namespace sdm {
namespace SDM_ISA {

SDM_INLINE float exponential(float x) { return __builtin_expf(x); }
SDM_INLINE double exponential(double x) { return __builtin_exp(x); }

template <class Real>
void attend(const Real* query, const Real* keys, const Real* values, int64_t count, int64_t channels, Real scale,
            Real* scores, Real* y) {
  constexpr int L = kLanes<Real>;
  Real largest = 0;
  for (int64_t j = 0; j < count; ++j) {
    const Real* key = keys + j * channels;
    Vector<Real> sum = {};
    int64_t c = 0;
    for (; c + L <= channels; c += L) sum += load(query + c) * load(key + c);
    Real total = horizontal_sum<Real>(sum);
    for (; c < channels; ++c) total += query[c] * key[c];
    scores[j] = scale * total;
    if (j == 0 || scores[j] > largest) largest = scores[j];
  }
  Real norm = 0;
  for (int64_t j = 0; j < count; ++j) norm += scores[j] = exponential(scores[j] - largest);
  for (int64_t j = 0; j < count; ++j) scores[j] /= norm;
  int64_t c = 0;
  for (; c + L <= channels; c += L) {
    Vector<Real> sum = {};
    for (int64_t j = 0; j < count; ++j) sum += broadcast<Real>(scores[j]) * load(values + j * channels + c);
    store(y + c, sum);
  }
  for (; c < channels; ++c) {
    y[c] = 0;
    for (int64_t j = 0; j < count; ++j) y[c] += scores[j] * values[j * channels + c];
  }
}

}  // namespace SDM_ISA
}  // namespace sdm

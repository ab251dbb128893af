// Product-key selection, row after row. Included by kernels.cpp only.
//
// The order among slots: the exact sum of the two scores, larger first; then the slot, lower first. Nothing is sorted:
//   1. each half gives its m best scores, found by a threshold, and ranks them by counting;
//   2. the sums of the rank pairs (a, b) with (a+1)(b+1) <= k are cut by a threshold as well;
//   3. the selected pairs form a staircase (whoever is selected, all pairs of better ranks are), so that the number of
//      selected pairs per rank says everything, and counting places each pair at its position in slot order.
// Rounded sums decide as long as no two of them tie at the threshold; otherwise their rounding errors do.
#pragma once

#include <type_traits>

#include "product_key/topk.h"
#include "simd.h"

namespace sdm {
namespace SDM_ISA {

template <class Real>
struct RealTraits;
template <>
struct RealTraits<float> {
  using Int = int32_t;
  using Unsigned = uint32_t;
  static constexpr float kLargest = 1.70141173e38f;  // half the largest finite number, so that sums stay finite
};
template <>
struct RealTraits<double> {
  using Int = int64_t;
  using Unsigned = uint64_t;
  static constexpr double kLargest = 8.9884656743115785e307;
};

// One half's share of a row.
template <class Real>
struct Half {
  Real* ranking;    // [n + pad] the scores, made finite
  int32_t* at;      // [m + pad] index of the chosen scores, ascending
  Real* chosen;     // [m + pad] their ranking scores
  int32_t* rank;    // [m + pad] their ranks
  Real* by_rank;    // [m + pad] ranking scores, descending
  Real* score;      // [m + pad] the scores themselves, by rank
};

struct Tie {
  double error;
  int64_t slot;
  int32_t column;
};

template <class Real>
struct Workspace {
  Half<Real> half[2];
  Real* sums;       // [candidates + pad]
  int32_t* width;   // [m + 1] k / (b + 1), capped by m: how many ranks a can pair with rank b
  int32_t* height;  // [m + 1] how many of them are selected
  int64_t* base;    // [m + pad] n times the index of rank a
  int64_t* place;   // [m + pad] where the next slot of rank a goes
  Tie* ties;        // [k + 1]
};

// Returns the bytes in use; an address of zero only counts them.
template <class Real>
SDM_INLINE int64_t lay_out(Workspace<Real>& w, uintptr_t memory, int64_t n, int64_t k, int64_t candidates) {
  constexpr int64_t kPad = 2 * kLanes<Real>;
  const int64_t m = n < k ? n : k;
  int64_t used = 0;
  const auto take = [&](auto*& pointer, int64_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(memory + static_cast<uintptr_t>(used));
    used += (count * static_cast<int64_t>(sizeof *pointer) + 63) / 64 * 64;
  };
  for (Half<Real>& half : w.half) {
    take(half.ranking, n + kPad);
    take(half.at, m + kPad);
    take(half.chosen, m + kPad);
    take(half.rank, m + kPad);
    take(half.by_rank, m + kPad);
    take(half.score, m + kPad);
  }
  take(w.sums, candidates + kPad);
  take(w.width, m + 1);
  take(w.height, m + 1);
  take(w.base, m + kPad);
  take(w.place, m + kPad);
  take(w.ties, k + 1);
  return used;
}

// Integers in the order of the finite numbers.
template <class Real>
SDM_INLINE typename RealTraits<Real>::Int to_ordered(Real x) {
  typename RealTraits<Real>::Int bits;
  std::memcpy(&bits, &x, sizeof x);
  constexpr int kShift = 8 * sizeof(Real) - 1;
  constexpr typename RealTraits<Real>::Unsigned kAll = ~typename RealTraits<Real>::Unsigned{0} >> 1;
  return bits ^ ((bits >> kShift) & static_cast<typename RealTraits<Real>::Int>(kAll));
}

template <class Real>
SDM_INLINE Real from_ordered(typename RealTraits<Real>::Int key) {
  constexpr int kShift = 8 * sizeof(Real) - 1;
  constexpr typename RealTraits<Real>::Unsigned kAll = ~typename RealTraits<Real>::Unsigned{0} >> 1;
  key ^= (key >> kShift) & static_cast<typename RealTraits<Real>::Int>(kAll);
  Real x;
  std::memcpy(&x, &key, sizeof x);
  return x;
}

template <class Real>
SDM_INLINE int64_t sum_of_lanes(decltype(Vector<Real>{} >= Vector<Real>{}) v) {
  typename RealTraits<Real>::Int lanes[kLanes<Real>];
  std::memcpy(lanes, &v, sizeof v);
  int64_t sum = 0;
  for (int lane = 0; lane < kLanes<Real>; ++lane) sum += lanes[lane];
  return sum;
}

// How many of the numbers reach the bound. The last vector is filled up with numbers that never do.
template <class Real>
SDM_INLINE int64_t count_reaching(const Real* numbers, int64_t count, Real bound) {
  const Vector<Real> limit = broadcast(bound);
  decltype(limit >= limit) first{}, second{};
  for (int64_t i = 0; i < count; i += 2 * kLanes<Real>) {
    first += load(numbers + i) >= limit;
    second += load(numbers + i + kLanes<Real>) >= limit;
  }
  return -sum_of_lanes<Real>(first + second);
}

template <class Real>
struct Threshold {
  Real bound;
  bool exact;  // exactly k numbers reach the bound; otherwise it is the k-th largest number and others equal it
};

// `numbers` is padded with at least two vectors' worth of -infinity behind the last one.
template <class Real>
SDM_INLINE Threshold<Real> find_threshold(const Real* numbers, int64_t count, int64_t k, Real low, Real high) {
  if (count == k) return {low, true};
  int64_t reaching = count_reaching(numbers, count, high);
  if (reaching >= k) return {high, reaching == k};
  // k or more numbers reach `low`, fewer reach `high`. Halving the values closes in fast where the numbers are alike in
  // size; halving the ordered bit patterns ends after a fixed number of steps whatever they are.
  constexpr int kByValue = 10;
  for (int step = 0;; ++step) {
    const auto low_key = to_ordered(low), high_key = to_ordered(high);
    using Unsigned = typename RealTraits<Real>::Unsigned;
    const Unsigned gap = static_cast<Unsigned>(high_key) - static_cast<Unsigned>(low_key);
    if (gap <= 1) return {low, false};
    Real middle = low / 2 + high / 2;
    if (step >= kByValue || !(middle > low && middle < high)) {
      middle = from_ordered<Real>(
          static_cast<typename RealTraits<Real>::Int>(static_cast<Unsigned>(low_key) + gap / 2));
    }
    reaching = count_reaching(numbers, count, middle);
    if (reaching == k) return {middle, true};
    (reaching > k ? low : high) = middle;
  }
}

// Writes the scores as finite numbers and returns their least and greatest through `low` and `high`.
template <class Real>
SDM_INLINE void make_finite(const Real* scores, Real* ranking, int64_t n, Real& low, Real& high) {
  constexpr Real kLargest = RealTraits<Real>::kLargest;
  Real least = kLargest, greatest = -kLargest;
  for (int64_t i = 0; i < n; ++i) {
    Real x = scores[i] < kLargest ? scores[i] : kLargest;  // NaN is not less: it counts as the largest
    x = x > -kLargest ? x : -kLargest;
    ranking[i] = x;
    least = x < least ? x : least;
    greatest = x > greatest ? x : greatest;
  }
  for (int i = 0; i < 2 * kLanes<Real>; ++i) ranking[n + i] = -__builtin_inf();
  low = least;
  high = greatest;
}

// Counts, for every chosen score, how many precede it: all that are larger, and those equal with a lower index.
template <class Real>
SDM_INLINE void rank_by_counting(Half<Real>& half, int64_t m) {
  using Mask = decltype(Vector<Real>{} >= Vector<Real>{});
  for (int i = 0; i < kLanes<Real>; ++i) half.chosen[m + i] = -__builtin_inf();
  Mask lane_number;
  for (int lane = 0; lane < kLanes<Real>; ++lane) lane_number[lane] = lane;
  for (int64_t block = 0; block < m; block += kLanes<Real>) {
    const Vector<Real> mine = load(half.chosen + block);
    const int64_t end = block + kLanes<Real> < m ? block + kLanes<Real> : m;
    Mask before{}, after{};
    for (int64_t j = 0; j < block; ++j) before += broadcast(half.chosen[j]) >= mine;
    for (int64_t j = end; j < m; ++j) after += broadcast(half.chosen[j]) > mine;
    for (int64_t j = block; j < end; ++j) {
      const Vector<Real> other = broadcast(half.chosen[j]);
      const Mask later = lane_number > static_cast<typename RealTraits<Real>::Int>(j - block);
      before += (other > mine) | ((other == mine) & later);
    }
    const Mask total = before + after;
    for (int64_t i = block; i < end; ++i) half.rank[i] = static_cast<int32_t>(-total[i - block]);
  }
}

template <class Real>
SDM_INLINE void choose_half(Half<Real>& half, const Real* scores, int64_t n, int64_t m) {
  Real low, high;
  make_finite(scores, half.ranking, n, low, high);
  const Threshold<Real> threshold = find_threshold(half.ranking, n, m, low, high);
  int64_t count = 0;
  if (threshold.exact) {
    for (int64_t i = 0; i < n; ++i) {
      // One place more than m is written: no branch, and the padding takes it.
      half.at[count] = static_cast<int32_t>(i);
      half.chosen[count] = half.ranking[i];
      count += half.ranking[i] >= threshold.bound;
    }
  } else {
    int64_t equal = m;
    for (int64_t i = 0; i < n; ++i) equal -= half.ranking[i] > threshold.bound;
    for (int64_t i = 0; i < n; ++i) {
      const bool ties = half.ranking[i] == threshold.bound && equal > 0;
      half.at[count] = static_cast<int32_t>(i);
      half.chosen[count] = half.ranking[i];
      count += half.ranking[i] > threshold.bound || ties;
      equal -= ties;
    }
  }
  rank_by_counting(half, m);
  for (int64_t i = 0; i < m; ++i) {
    half.by_rank[half.rank[i]] = half.chosen[i];
    half.score[half.rank[i]] = scores[half.at[i]];
  }
}

// The sums of all rank pairs that can be selected, in no particular order.
template <class Real>
SDM_INLINE void candidate_sums(Workspace<Real>& w, int64_t m, int64_t split) {
  const Real* first = w.half[0].by_rank;
  const Real* second = w.half[1].by_rank;
  Real* to = w.sums;
  // Whole vectors are written and the next run overwrites what is too much. Long runs come from the columns of the best
  // ranks b and, for all others, from the rows of the best ranks a.
  const auto add_run = [&](Real fixed, const Real* run, int64_t length) {
    const Vector<Real> all = broadcast(fixed);
    for (int64_t i = 0; i < length; i += kLanes<Real>) store<Real>(to + i, all + load(run + i));
    to += length;
  };
  for (int64_t b = 0; b < split; ++b) add_run(second[b], first, w.width[b]);
  for (int64_t a = 0; a < m && w.width[a] > split; ++a) add_run(first[a], second + split, w.width[a] - split);
  for (int i = 0; i < 2 * kLanes<Real>; ++i) to[i] = -__builtin_inf();
}

// Among the pairs whose rounded sum equals the bound, the first `wanted` in order; their columns grow.
template <class Real>
inline void select_ties(Workspace<Real>& w, Real bound, int64_t wanted, int64_t m) {
  const Real* first = w.half[0].by_rank;
  const Real* second = w.half[1].by_rank;
  int64_t held = 0;
  for (int64_t b = 0; b < m; ++b) {
    for (int64_t a = w.height[b]; a < w.width[b] && first[a] + second[b] == bound; ++a) {
      const Real part = bound - first[a];  // TwoSum
      const Real error = (first[a] - (bound - part)) + (second[b] - part);
      const Tie tie{static_cast<double>(error), w.base[a] + w.place[b], static_cast<int32_t>(b)};
      int64_t i = held;
      for (; i > 0; --i) {
        const Tie& other = w.ties[i - 1];
        if (other.error > tie.error || (other.error == tie.error && other.slot < tie.slot)) break;
        w.ties[i] = other;
      }
      w.ties[i] = tie;
      if (held < wanted) ++held;
    }
  }
  for (int64_t i = 0; i < held; ++i) ++w.height[w.ties[i].column];
}

// How many ranks a are selected with each rank b.
template <class Real>
SDM_INLINE void select_pairs(Workspace<Real>& w, int64_t k, int64_t m, int64_t candidates) {
  const Real* first = w.half[0].by_rank;
  const Real* second = w.half[1].by_rank;
  // The largest sum is the first; the least is no larger than any other, and only bounds the search.
  const Real least = first[m - 1] + second[m - 1];
  const Threshold<Real> threshold = find_threshold(w.sums, candidates, k, least, first[0] + second[0]);
  int64_t selected = 0, a = m;
  for (int64_t b = 0; b < m; ++b) {
    a = a < w.width[b] ? a : w.width[b];
    if (threshold.exact) {
      while (a > 0 && first[a - 1] + second[b] < threshold.bound) --a;
    } else {
      while (a > 0 && first[a - 1] + second[b] <= threshold.bound) --a;
    }
    w.height[b] = static_cast<int32_t>(a);
    selected += a;
  }
  w.height[m] = 0;
  if (!threshold.exact) {
    for (int64_t i = 0; i < m; ++i) w.place[w.half[1].rank[i]] = w.half[1].at[i];
    select_ties(w, threshold.bound, k - selected, m);
  }
}

template <class Real>
SDM_INLINE void write_in_slot_order(Workspace<Real>& w, Real* values, int64_t* index, int64_t m) {
  // Heights fall with b: rank a is selected with all b whose height exceeds a. Its count goes to `place` first.
  for (int64_t a = w.height[0]; a < m; ++a) w.place[a] = 0;
  for (int64_t b = 0; b < m && w.height[b] > 0; ++b) {
    for (int64_t a = w.height[b + 1]; a < w.height[b]; ++a) w.place[a] = b + 1;
  }
  int64_t next = 0;
  for (int64_t i = 0; i < m; ++i) {
    const int64_t a = w.half[0].rank[i];
    const int64_t count = w.place[a];
    w.place[a] = next;
    next += count;
  }
  for (int64_t i = 0; i < m; ++i) {
    const int64_t b = w.half[1].rank[i], column = w.half[1].at[i];
    const Real score = w.half[1].score[b];
    for (int64_t a = 0; a < w.height[b]; ++a) {
      const int64_t to = w.place[a]++;
      index[to] = w.base[a] + column;
      values[to] = w.half[0].score[a] + score;
    }
  }
}

template <class Real>
int64_t product_key_workspace(int64_t n, int64_t k, int64_t candidates) {
  Workspace<Real> w;
  return lay_out(w, 0, n, k, candidates);
}

template <class Real>
void product_key_rows(const ProductKeyForward<Real>& args, int64_t candidates, int64_t begin, int64_t end, void* memory) {
  const int64_t n = args.n, k = args.k, m = n < k ? n : k;
  Workspace<Real> w;
  lay_out(w, reinterpret_cast<uintptr_t>(memory), n, k, candidates);
  int64_t split = 0;
  for (int64_t b = 0; b < m; ++b) {
    w.width[b] = static_cast<int32_t>(k / (b + 1) < m ? k / (b + 1) : m);
    split += (b + 1) * (b + 1) <= k;
  }
  for (int64_t row = begin; row < end; ++row) {
    const Real* scores = args.scores + row * 2 * n;
    choose_half(w.half[0], scores, n, m);
    choose_half(w.half[1], scores + n, n, m);
    for (int64_t i = 0; i < m; ++i) w.base[w.half[0].rank[i]] = w.half[0].at[i] * n;
    candidate_sums(w, m, split);
    select_pairs(w, k, m, candidates);
    write_in_slot_order(w, args.values + row * k, args.index + row * k, m);
  }
}

}  // namespace SDM_ISA
}  // namespace sdm

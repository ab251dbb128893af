// Threads: OpenMP where the build has it (torch's own runtime, when torch is imported first), std::thread elsewhere.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#ifndef _OPENMP
#include <thread>
#include <vector>
#endif

namespace sdm {

// Calls task(i) for i in [0, count), each exactly once, in any order, on up to `threads` threads. `task` must not
// throw. Results may not depend on which thread runs what: all ops are bit-identical for every thread count.
template <class Task>
void parallel_for(int64_t count, int threads, const Task& task) {
  const int team = static_cast<int>(std::min<int64_t>(count, std::max(threads, 1)));
  if (team <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) num_threads(team)
  for (int64_t i = 0; i < count; ++i) task(i);
#else
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) task(i);
  };
  std::vector<std::thread> helpers;
  for (int i = 1; i < team; ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
#endif
}

}  // namespace sdm

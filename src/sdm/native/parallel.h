// Threads: OpenMP where the build has it (torch's own runtime, when torch is imported first), std::thread elsewhere and
// in forked children.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "fork.h"

namespace sdm {

// Calls work() on `team` threads, this one included.
template <class Work>
void run_on_new_threads(int team, const Work& work) {
  std::vector<std::thread> helpers;
  helpers.reserve(static_cast<std::size_t>(team));
  try {
    for (int i = 1; i < team; ++i) helpers.emplace_back(work);
  } catch (const std::system_error&) {
    // The system gives no more threads: those that run do the work.
  }
  work();
  for (std::thread& helper : helpers) helper.join();
}

// Calls task(i) for i in [0, count), each once, in any order, on up to `threads` threads; rethrows what a task throws.
// Results may not depend on which thread runs what: all ops are bit-identical for every thread count.
template <class Task>
void parallel_for(int64_t count, int threads, const Task& task) {
  const int team = static_cast<int>(std::min<int64_t>(count, std::max(threads, 1)));
  if (team <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  std::mutex mutex;
  std::exception_ptr thrown;
  const auto guarded = [&](int64_t i) {
    try {
      task(i);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex);
      if (!thrown) thrown = std::current_exception();
    }
  };
  bool with_openmp = false;
#ifdef _OPENMP
  with_openmp = !is_forked_child();
  if (with_openmp) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(team)
    for (int64_t i = 0; i < count; ++i) guarded(i);
  }
#endif
  if (!with_openmp) {
    std::atomic<int64_t> next{0};
    run_on_new_threads(team, [&] {
      for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) guarded(i);
    });
  }
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace sdm

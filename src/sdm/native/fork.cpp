#include "fork.h"

#include <pthread.h>

#include <atomic>

namespace sdm {
namespace {

std::atomic<bool> forked{false};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });

}  // namespace

bool is_forked_child() { return forked.load(std::memory_order_relaxed); }

}  // namespace sdm

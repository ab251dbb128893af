#include "memory.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <new>
#include <string>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace sdm {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kSmallAlignment = 64;

}  // namespace

#ifdef SDM_EXACT_SCRATCH

std::atomic<int> ScratchFault::blocks{0}, ScratchFault::number{-1};
std::atomic<std::size_t> ScratchFault::missing{0};

Scratch::Scratch(std::size_t bytes) : data_(nullptr), bytes_(bytes) {
  if (bytes >= ScratchFault::kRowBlock && ScratchFault::blocks++ == ScratchFault::number) bytes_ -= ScratchFault::missing;
  if (posix_memalign(&data_, kSmallAlignment, bytes_)) throw std::bad_alloc();
  std::memset(data_, 0xFF, bytes_);
}

Scratch::~Scratch() { std::free(data_); }

#else

namespace {

constexpr std::size_t kKeptBytes = std::size_t{256} << 20;

struct Block {
  void* data;
  std::size_t bytes;
};

struct Pool {
  std::mutex mutex;
  std::vector<Block> blocks;
  std::size_t bytes = 0;
};

// Never destroyed: threads of the host program may still release blocks while static objects are torn down. Made when
// the core is loaded: a child that is forked during a first use would find it half made.
Pool& pool = *new Pool;

// A thread that holds the mutex does not exist in a forked child, so nobody may hold it during a fork.
[[maybe_unused]] const int registered = pthread_atfork([] { pool.mutex.lock(); }, [] { pool.mutex.unlock(); },
                                                       [] { pool.mutex.unlock(); });

// Sizes are rounded so that calls of slightly different size share blocks.
std::size_t rounded(std::size_t bytes) {
  const std::size_t unit = bytes >= kHugePage ? kHugePage : std::size_t{64} << 10;
  return (bytes / unit + (bytes % unit != 0 || bytes == 0)) * unit;
}

}  // namespace

Scratch::Scratch(std::size_t bytes) : data_(nullptr), bytes_(rounded(bytes)) {
  {
    std::lock_guard<std::mutex> lock(pool.mutex);
    auto& blocks = pool.blocks;
    std::size_t best = blocks.size();
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const bool fits = blocks[i].bytes >= bytes_ && blocks[i].bytes / 2 <= bytes_;
      if (fits && (best == blocks.size() || blocks[i].bytes < blocks[best].bytes)) best = i;
    }
    if (best != blocks.size()) {
      data_ = blocks[best].data;
      bytes_ = blocks[best].bytes;
      pool.bytes -= bytes_;
      blocks[best] = blocks.back();
      blocks.pop_back();
      return;
    }
  }
  data_ = std::aligned_alloc(bytes_ >= kHugePage ? kHugePage : kSmallAlignment, bytes_);
  if (!data_) throw std::bad_alloc();
  advise_huge_pages(data_, bytes_);
}

Scratch::~Scratch() {
  {
    std::lock_guard<std::mutex> lock(pool.mutex);
    if (pool.bytes + bytes_ <= kKeptBytes) {
      pool.blocks.push_back({data_, bytes_});
      pool.bytes += bytes_;
      return;
    }
  }
  std::free(data_);
}

#endif  // SDM_EXACT_SCRATCH

#if defined(__linux__) && !defined(MADV_COLLAPSE)
#define MADV_COLLAPSE 25
#endif

#if defined(__linux__)
namespace {

constexpr std::size_t kLargeBlock = std::size_t{16} << 20;
constexpr int kUsesBefore = 2;  // a state that is passed on is used by one forward and one backward pass

struct Use {
  const void* data;
  std::size_t bytes;
  int count;
};

// The blocks used last. Whoever finds the list in use does without: a flag that is set in a forked child harms nobody.
Use uses[64] = {};
int oldest_use = 0;
std::atomic_flag list_is_used = ATOMIC_FLAG_INIT;

// Whether this use of a block is the one that moves it.
bool pays_now(const void* data, std::size_t bytes) {
  if (list_is_used.test_and_set(std::memory_order_acquire)) return false;
  Use* use = std::find_if(std::begin(uses), std::end(uses), [&](const Use& x) { return x.data == data && x.bytes == bytes; });
  if (use == std::end(uses)) {
    use = &uses[oldest_use++ % std::size(uses)];
    *use = {data, bytes, 0};
  }
  const bool pays = use->count == kUsesBefore;
  use->count += use->count <= kUsesBefore;
  list_is_used.clear(std::memory_order_release);
  return pays;
}

bool system_has_huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string modes;
  return std::getline(file, modes) && modes.find("[never]") == std::string::npos;
}

}  // namespace
#endif

void move_to_huge_pages_when_reused(const void* data, std::size_t bytes) {
#if defined(__linux__)
  if (bytes < kLargeBlock || !pays_now(data, bytes) || !system_has_huge_pages()) return;
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t first = (address + kHugePage - 1) / kHugePage * kHugePage;
  const std::size_t count = (address + bytes - first) / kHugePage, small = kHugePage / 4096;
  std::vector<unsigned char> resident(count * small);
  const auto at = [&](std::size_t page) { return reinterpret_cast<void*>(first + page * kHugePage); };
  if (sysconf(_SC_PAGESIZE) != 4096 || mincore(at(0), count * kHugePage, resident.data())) return;
  // Pages that nobody has touched take no memory, and stay like that.
  const auto is_whole = [&](std::size_t page) {
    const auto begin = resident.begin() + static_cast<std::ptrdiff_t>(page * small);
    return std::all_of(begin, begin + small, [](unsigned char x) { return x & 1; });
  };
  for (std::size_t page = 0, end; page < count; page = end + 1) {
    for (end = page; end < count && is_whole(end);) ++end;
    // Kernels before 6.1 refuse, and so does one that has no huge page left.
    if (end > page) madvise(at(page), (end - page) * kHugePage, MADV_COLLAPSE);
  }
#else
  (void)data;
  (void)bytes;
#endif
}

void advise_huge_pages(void* data, std::size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + 4095) & ~std::uintptr_t{4095};
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + bytes) & ~std::uintptr_t{4095};
  if (bytes >= kHugePage && end > begin) {
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace sdm

#include "memory.h"

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sdm {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kSmallAlignment = 64;
constexpr std::size_t kKeptBytes = std::size_t{256} << 20;

struct Block {
  void* data;
  std::size_t bytes;
};

// Never destroyed: threads of the host program may still release blocks while static objects are torn down.
struct Pool {
  std::mutex mutex;
  std::vector<Block> blocks;
  std::size_t bytes = 0;
};

Pool& pool() {
  static Pool* instance = new Pool;
  return *instance;
}

// Sizes are rounded so that calls of slightly different size share blocks.
std::size_t rounded(std::size_t bytes) {
  const std::size_t unit = bytes >= kHugePage ? kHugePage : std::size_t{64} << 10;
  return (bytes / unit + (bytes % unit != 0 || bytes == 0)) * unit;
}

}  // namespace

Scratch::Scratch(std::size_t bytes) : data_(nullptr), bytes_(rounded(bytes)) {
  {
    std::lock_guard<std::mutex> lock(pool().mutex);
    auto& blocks = pool().blocks;
    std::size_t best = blocks.size();
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const bool fits = blocks[i].bytes >= bytes_ && blocks[i].bytes / 2 <= bytes_;
      if (fits && (best == blocks.size() || blocks[i].bytes < blocks[best].bytes)) best = i;
    }
    if (best != blocks.size()) {
      data_ = blocks[best].data;
      bytes_ = blocks[best].bytes;
      pool().bytes -= bytes_;
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
    std::lock_guard<std::mutex> lock(pool().mutex);
    if (pool().bytes + bytes_ <= kKeptBytes) {
      pool().blocks.push_back({data_, bytes_});
      pool().bytes += bytes_;
      return;
    }
  }
  std::free(data_);
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

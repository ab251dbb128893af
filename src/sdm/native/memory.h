// Working memory of the kernels.
#pragma once

#ifdef SDM_EXACT_SCRATCH
#include <atomic>
#endif
#include <cstddef>

namespace sdm {

// Uninitialised memory, aligned to a huge page when it is large, and backed by huge pages where the system allows it:
// the kernels visit rows at random, and with 4 KiB pages nearly every visit would miss the TLB. Blocks are kept
// for the next call up to a bound, because fresh pages cost as much as the work done in them.
//
// With SDM_EXACT_SCRATCH a block has the size that was asked for, is new, and holds NaN (integers: -1), so that
// AddressSanitizer sees each byte beyond it and a comparison each number that nobody wrote.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* data() const { return data_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_;
  std::size_t bytes_;  // of the block, at least what was asked for
};

#ifdef SDM_EXACT_SCRATCH
// A planted fault, which the sanitizer must report: of the blocks that hold rows, that is of kRowBlock bytes or more,
// the one with this number (counted in the order of allocation) is `missing` bytes too short.
struct ScratchFault {
  static constexpr std::size_t kRowBlock = 1024;
  static std::atomic<int> blocks, number;
  static std::atomic<std::size_t> missing;
};
#endif

// Asks for huge pages behind memory that somebody else allocated and nobody has touched yet. A hint: never fails.
void advise_huge_pages(void* data, std::size_t bytes);

// Tells that a call reads pieces from all over a block of the caller. A large block that calls come back to is moved to
// huge pages, once: looking up the addresses of small ones takes longer than reading the pieces.
void move_to_huge_pages_when_reused(const void* data, std::size_t bytes);

}  // namespace sdm

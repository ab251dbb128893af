// Working memory of the kernels.
#pragma once

#include <cstddef>

namespace sdm {

// Uninitialised memory, aligned to a huge page when it is large, and backed by huge pages where the system allows it:
// the kernels visit rows at random, and with 4 KiB pages nearly every visit would miss the TLB. Blocks are kept
// for the next call up to a bound, because fresh pages cost as much as the work done in them.
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
  std::size_t bytes_;
};

// Asks for huge pages behind memory that somebody else allocated and nobody has touched yet. A hint: never fails.
void advise_huge_pages(void* data, std::size_t bytes);

}  // namespace sdm

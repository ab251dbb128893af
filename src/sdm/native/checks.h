// What several ops refuse, in the same words.
#pragma once

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace sdm {

// Offsets [sequences + 1] of the documents in `tokens` tokens.
inline void check_offsets(const int64_t* cu_seqlens, int64_t sequences, int64_t tokens) {
  const auto number = [](int64_t x) { return std::to_string(x); };
  if (cu_seqlens[0] != 0 || cu_seqlens[sequences] != tokens) {
    throw std::invalid_argument("cu_seqlens must start at 0 and end at T = " + number(tokens) + ", got " +
                                number(cu_seqlens[0]) + " and " + number(cu_seqlens[sequences]));
  }
  for (int64_t s = 0; s < sequences; ++s) {
    if (cu_seqlens[s] <= cu_seqlens[s + 1]) continue;
    throw std::invalid_argument("cu_seqlens must not decrease, got " + number(cu_seqlens[s]) + " then " +
                                number(cu_seqlens[s + 1]) + ": document " + number(s) + " would overlap the next");
  }
}

// For a log decay that is not at most 0.
inline std::string wrong_decay(double log_decay) {
  char got[32];
  std::snprintf(got, sizeof got, "%g", log_decay);
  return std::string("log_decay must be at most 0 (a decay factor of at most 1), got ") + got;
}

}  // namespace sdm

// The sparse delta rule on CPUs: what the inner loops (kernels.h, backward_kernels.h) and their callers share.
//
// Letters: H heads, N slots, D value channels, W writes and R reads per token, S channels of one slab.
//
// Every value channel runs its own recurrence, so the work of one sequence and head (a "stream") is cut into slabs of
// S channels. A slab keeps the slots that are in use in the rows of one contiguous table, small enough to stay in the
// cache while time runs. A slot gets a row when a token first comes to it (it is "born"), and where nobody asks for the
// final state it gives the row to another slot after the last token that comes to it (it "leaves"). Without an initial
// state a slot is zero until it is written: it is born then, and reads before that go to row 0, which is always zero.
//
// Both update rules are one affine step per row:  M[i] <- factor_i M[i] + push_i u
//     delta:  factor = exp(g),                push = k,         u = beta (v - sum_i k_i exp(g) M[i])
//     slot:   factor = exp(g)(1 - beta k),    push = beta k,    u = v
#pragma once

#include <cstdint>

namespace sdm {

struct BFloat16 {
  uint16_t bits;
};

enum class Restore : uint8_t {
  kInvert,  // from the row after the write
  kCopy,    // from a copy that the replay made
  kZero,    // it was zero
};

// The tokens of one stream, as the inner loops see them. Per-token arrays of the caller are strided over the heads.
template <class Real>
struct Stream {
  int64_t tokens;
  int64_t heads;
  int64_t channels;  // D
  int32_t writes;
  int32_t reads;
  bool retrieves;         // the delta rule; the slot rule does not look at the memory before it writes
  bool factor_per_write;  // factor is [tokens, W]; else [tokens]
  const int32_t* write_row;   // [tokens, W]
  const int32_t* read_row;    // [tokens, R]
  const int32_t* born_before;  // [tokens + 1] how many slots are born before token t
  const int32_t* born_row;     // [born] in the order of time
  const int32_t* born_slot;    // [born]
  const int32_t* left_before;  // [tokens + 1] how many slots have left before token t; null: not listed
  const int32_t* left_row;     // [left] in the order of time
  const int32_t* kept_before;  // [tokens + 1] of those that have left, how many rows backward needs again
  const Real* factor;         // [tokens] or [tokens, W]
  const Real* inverse;        // 1 / factor, same shape; backward only
  const Real* push;           // [tokens, W], token t at push + t * push_stride
  int64_t push_stride;
  const Real* read_weight;    // token t at read_weight + t * heads * R
  const Real* beta;           // token t at beta + t * heads
  const Real* value;          // token t at value + t * heads * D; y, residual and their gradients alike
  const Restore* restore;     // [tokens, W] how backward comes by the row before a write
  const int64_t* saved_before;  // [tokens + 1] how many rows are saved before token t
};

// Forward over one slab. Row r of the table starts at table + r * row_stride.
template <class Real>
struct ForwardSlab {
  int64_t first_channel;
  int64_t channels;  // at most S; a table of its own is padded to S
  int64_t row_stride;
  void* table;
  bool fills;           // the loop fills a row of the table when it first comes to it; else the table is ready
  const Real* initial;  // what it fills it with: the initial state from the slab's first channel on; null: zeros
  Real* y;         // all channels, like value
  Real* residual;  // v - retrieved, like value; null: not wanted
};

// Backward over one slab. Row r holds S channels of the memory, then S channels of its gradient.
template <class Real>
struct BackwardSlab {
  int64_t first_channel;
  int64_t channels;
  Real* table;            // [rows, 2, S]
  const Real* initial;    // as in ForwardSlab; the gradient starts as zeros when a slot that left comes back
  bool keeps_all;         // every row leaves and is kept if it is needed: nobody looks at the table after the replay
  Real* saved_rows;       // [saved, S] rows before a write, for Restore::kCopy
  Real* kept_rows;        // [kept, S] rows as they left
  const Real* residual;
  const Real* grad_y;
  Real* grad_value;
  Real* grad_initial;  // from the slab's first channel on; null: not wanted
  bool adds_initial;   // add to `grad_initial` instead of setting it
  bool past_caches;    // it is too large for the caches: write around them
  // Sums over the channels of the slab, [tokens, W + R + (factor_per_write ? W : 1) + 1]: for push, read weight, log of
  // the factor, beta. For the slot rule: <G, u>, read weight, <G, M>, unused.
  Real* partial;
  bool accumulate;  // add to `partial` instead of setting it
  Real* lanes;      // room for max(2 W, R) vectors
};

inline int64_t partial_width(int64_t writes, int64_t reads, bool factor_per_write) {
  return writes + reads + (factor_per_write ? writes : 1) + 1;
}

constexpr int kSlabWidths[] = {64, 32, 16};
constexpr int kSlabKinds = 3;
// Channels left over by the slabs of an in-place table go through a slower loop of any width below this.
constexpr int kSmallestSlab = 16;

// Copies between the caller's states and a slab's table, in the order of the slots.
struct RowCopy {
  const int32_t* slots;  // [count] ascending
  const int32_t* rows;   // [count] their rows
  int64_t count;
  int64_t channels;      // copied per row
  int64_t cleared;       // set to zero in the table behind them (gather only)
  int64_t state_stride;  // elements between slots
  int64_t table_stride;  // elements between rows
};

template <class Real>
struct SparseDeltaKernels {
  void (*forward[kSlabKinds])(const Stream<Real>&, const ForwardSlab<Real>&);
  void (*forward_rest)(const Stream<Real>&, const ForwardSlab<Real>&);
  void (*forward_bf16[kSlabKinds])(const Stream<Real>&, const ForwardSlab<Real>&);
  void (*forward_bf16_rest)(const Stream<Real>&, const ForwardSlab<Real>&);
  void (*replay[kSlabKinds])(const Stream<Real>&, const BackwardSlab<Real>&);
  void (*backward[kSlabKinds])(const Stream<Real>&, const BackwardSlab<Real>&);
  void (*gather)(const RowCopy&, const Real* state, Real* table);
  void (*gather_bf16)(const RowCopy&, const BFloat16* state, Real* table);
  void (*scatter)(const RowCopy&, const Real* table, Real* state);
};

// How a pass over tables of `rows` rows is cut, so that a table takes no more than `limit` bytes: the index into
// kSlabWidths.
int slab_kind(int64_t rows, int64_t channels, int64_t bytes_per_row_and_channel, int64_t limit);

}  // namespace sdm

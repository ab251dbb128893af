// The map from reading tokens to writing tokens of a sparse delta memory: which write each reading consists of.
//
//   S[t,l] = sum over slots j that t reads and l wrote of  q[t,j] k[l,j] L_j(l,t)
//
// L_j(l,t) is the product of the factors by which the writes to slot j after l, up to t, scale what it holds.
#pragma once

#include <cstdint>

namespace sdm {

// As Python names it. A row is a token of a stream, in the order [B,H,T].
template <class Real>
struct SparseDeltaMap {
  int threads;
  int64_t batch, time, heads, slots, writes, reads, documents;
  bool decay_per_write, slot_update;
  double threshold;            // pairs below this share of their row's mass are left out
  const int64_t* write_index;  // [B,T,H,W]
  const Real* write_weight;    // [B,T,H,W]
  const Real* beta;            // [B,T,H]
  const Real* log_decay;       // [B,T,H] or [B,T,H,W]
  const int64_t* read_index;   // [B,T,H,R]
  const Real* read_weight;     // [B,T,H,R]
  const int64_t* cu_seqlens;   // [documents + 1]
  int64_t* row_offsets;        // [B*H*T + 1], read where `source` is given
  int64_t* row_pairs;          // [B*H*T], written where `source` is null: the pairs of a row
  int32_t* source;             // [pairs] the writing tokens of each row, ascending; null to count them only
  double* weight;              // [pairs] S
  double* initial_weight;      // [B,T,H,R] q[t,j] L_j(start,t): the weight of the initial row of each read slot
  double* dropped;             // [B,H,T] the mass of the pairs that are left out

  template <class Visit>
  void each_field(const Visit& field) {
    field("threads", threads), field("batch", batch), field("time", time), field("heads", heads);
    field("slots", slots), field("writes", writes), field("reads", reads), field("documents", documents);
    field("decay_per_write", decay_per_write), field("slot_update", slot_update), field("threshold", threshold);
    field("write_index", write_index), field("write_weight", write_weight), field("beta", beta);
    field("log_decay", log_decay), field("read_index", read_index), field("read_weight", read_weight);
    field("cu_seqlens", cu_seqlens), field("row_offsets", row_offsets), field("row_pairs", row_pairs);
    field("source", source), field("weight", weight), field("initial_weight", initial_weight);
    field("dropped", dropped);
  }
};

// Slots out of range throw std::out_of_range.
template <class Real>
void sparse_delta_map(const SparseDeltaMap<Real>& call);

}  // namespace sdm

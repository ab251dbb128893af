#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kernel_table.h"
#include "memory.h"
#include "parallel.h"
#include "sparse_delta_rule/checked_inputs.h"

namespace sdm {

// A table that fits at no width is cut wide: then the price is the number of visits to memory, not their length.
int slab_kind(int64_t rows, int64_t channels, int64_t bytes_per_row_and_channel, int64_t limit) {
  const auto bytes = [&](int kind) { return rows * kSlabWidths[kind] * bytes_per_row_and_channel; };
  int kind = 0;
  while (kind + 1 < kSlabKinds && bytes(kind) > limit) ++kind;
  if (bytes(kind) > limit) kind = 0;
  // Two slabs at least, where there are channels for it, so that two threads have work.
  while (kind + 1 < kSlabKinds && kSlabWidths[kind] >= channels) ++kind;
  return kind;
}

namespace {

// What a table may take of the last cache. Small tables leave more of it to everybody else, wide rows make better use of
// the memory behind it: so tables are small unless most visits go to rows that come from the initial state.
constexpr int64_t kTableBytes = int64_t{5} << 20, kFreshTableBytes = int64_t{10} << 20;
constexpr int64_t kVisitsPerRow = 4;

template <class Real>
class Forward {
 public:
  explicit Forward(const SparseDeltaForward<Real>& call) : call_(call) {}

  void run() {
    if (call_.streams() == 0) return;
    if (call_.final_state && call_.final_state == call_.initial_state) return run_in_place();
    if (call_.initial_state) move_to_huge_pages_when_reused(call_.initial_state, call_.initial_bytes());
    if (call_.final_state) {
      advise_huge_pages(call_.final_state, call_.streams() * call_.slots * call_.channels * sizeof(Real));
    }
    const Rows rows = call_.final_state || call_.initial_bf16 ? Rows::kOwn : Rows::kRecycled;
    const int64_t fewest_slabs = (call_.channels + kSlabWidths[0] - 1) / kSlabWidths[0];
    const int64_t wave = streams_at_once(call_.streams(), fewest_slabs, call_.threads);
    for (int64_t first = 0; first < call_.streams(); first += wave) {
      const int64_t count = std::min(wave, call_.streams() - first);
      const auto set = prepare<Real>(call_, first, count, rows, nullptr);
      struct Slab {
        const PreparedStream<Real>* prepared;
        int kind;
        int64_t first_channel;
      };
      std::vector<Slab> slabs;
      for (const auto& prepared : set) {
        const int kind = slab_kind(prepared.row_count, call_.channels, sizeof(Real), table_bytes(prepared.stream));
        for (int64_t c = 0; c < call_.channels; c += kSlabWidths[kind]) slabs.push_back({&prepared, kind, c});
      }
      parallel_for(static_cast<int64_t>(slabs.size()), call_.threads, [&](int64_t task) {
        const auto& [prepared, kind, first_channel] = slabs[task];
        run_slab(*prepared, kind, first_channel);
      });
      if (call_.final_state) copy_untouched(set);
    }
  }

 private:
  int64_t table_bytes(const Stream<Real>& stream) const {
    const int64_t visits = stream.tokens * (int64_t{stream.writes} + stream.reads);
    const bool mostly_fresh = call_.initial_state && visits < kVisitsPerRow * stream.born_before[stream.tokens];
    return mostly_fresh ? kFreshTableBytes : kTableBytes;
  }

  // y and residual of the stream's first token.
  Real* tokens_of(Real* array, const PreparedStream<Real>& prepared) const {
    return array ? array + prepared.cell(call_, 0) * call_.channels : nullptr;
  }

  void gather(const RowCopy& copy, int64_t offset, Real* table) const {
    if (call_.initial_bf16) {
      kernels_.gather_bf16(copy, static_cast<const BFloat16*>(call_.initial_state) + offset, table);
    } else {
      kernels_.gather(copy, static_cast<const Real*>(call_.initial_state) + offset, table);
    }
  }

  void run_slab(const PreparedStream<Real>& prepared, int kind, int64_t first_channel) {
    const int64_t width = kSlabWidths[kind];
    const int64_t channels = std::min(width, call_.channels - first_channel);
    const RowCopy copy = {prepared.touched_slots, prepared.touched_rows, prepared.born_count, channels,
                          width - channels,       call_.channels,        width};
    Scratch memory(static_cast<std::size_t>(prepared.row_count * width) * sizeof(Real));
    Real* table = memory.template as<Real>();
    std::fill(table, table + width, Real(0));
    const int64_t start = prepared.state_offset(call_, call_.initial_per_sequence) + first_channel;
    const Real* initial = nullptr;
    if (call_.initial_bf16) {
      gather(copy, start, table);
    } else if (call_.initial_state) {
      initial = static_cast<const Real*>(call_.initial_state) + start;
    }
    kernels_.forward[kind](prepared.stream, {first_channel, channels, width, table, !call_.initial_bf16, initial,
                                             tokens_of(call_.y, prepared), tokens_of(call_.residual, prepared)});
    if (!call_.final_state) return;
    const int64_t end = prepared.state_offset(call_, true) + first_channel;
    kernels_.scatter(copy, table, static_cast<Real*>(call_.final_state) + end);
  }

  void copy_untouched(const std::vector<PreparedStream<Real>>& set) {
    constexpr int64_t kSlotsPerTask = 1024;
    const int64_t tasks = (call_.slots + kSlotsPerTask - 1) / kSlotsPerTask;
    parallel_for(static_cast<int64_t>(set.size()) * tasks, call_.threads, [&](int64_t task) {
      const PreparedStream<Real>& prepared = set[task / tasks];
      const int64_t begin = task % tasks * kSlotsPerTask, end = std::min(begin + kSlotsPerTask, call_.slots);
      Real* to = static_cast<Real*>(call_.final_state) + prepared.state_offset(call_, true);
      const int64_t from = prepared.state_offset(call_, call_.initial_per_sequence), D = call_.channels;
      const int32_t first = 0;
      const RowCopy copy = {&first, &first, 1, D, 0, D, D};
      prepared.each_untouched(begin, end, [&](int64_t slot) {
        if (call_.initial_state) {
          gather(copy, from + slot * D, to + slot * D);
        } else {
          std::memset(to + slot * D, 0, static_cast<std::size_t>(D) * sizeof(Real));
        }
      });
    });
  }

  // The caller's state is the table. All tokens are checked before the first of them changes it.
  void run_in_place() {
    struct Piece {
      int64_t first_channel, channels;
      void (*run)(const Stream<Real>&, const ForwardSlab<Real>&);
    };
    std::vector<Piece> pieces;
    const auto& slab_loops = call_.initial_bf16 ? kernels_.forward_bf16 : kernels_.forward;
    for (int64_t c = 0; c < call_.channels;) {
      const int64_t left = call_.channels - c;
      int kind = 0;
      while (kind < kSlabKinds && kSlabWidths[kind] > left) ++kind;
      const int64_t channels = kind < kSlabKinds ? kSlabWidths[kind] : left;
      const auto rest = call_.initial_bf16 ? kernels_.forward_bf16_rest : kernels_.forward_rest;
      pieces.push_back({c, channels, kind < kSlabKinds ? slab_loops[kind] : rest});
      c += channels;
    }
    const auto count = static_cast<int64_t>(pieces.size());
    const auto set = prepare<Real>(call_, 0, call_.streams(), Rows::kSlots, nullptr);
    // Each thread takes neighbouring channels of one stream, whose rows share pages.
    const int64_t shares = std::min<int64_t>(count, std::max(1, call_.threads));
    parallel_for(call_.streams() * shares, call_.threads, [&](int64_t task) {
      const PreparedStream<Real>& prepared = set[task / shares];
      const int64_t share = task % shares;
      for (int64_t p = count * share / shares; p < count * (share + 1) / shares; ++p) {
        const Piece& piece = pieces[p];
        const int64_t offset = prepared.state_offset(call_, true) + piece.first_channel;
        const auto bytes = static_cast<int64_t>(call_.initial_bf16 ? sizeof(BFloat16) : sizeof(Real));
        void* table = static_cast<char*>(call_.final_state) + offset * bytes;
        piece.run(prepared.stream, {piece.first_channel, piece.channels, call_.channels, table, false, nullptr,
                                    tokens_of(call_.y, prepared), tokens_of(call_.residual, prepared)});
      }
    });
  }

  const SparseDeltaKernels<Real>& kernels_ = sparse_delta_kernels<Real>();
  const SparseDeltaForward<Real>& call_;
};

}  // namespace

template <class Real>
void sparse_delta_forward(const SparseDeltaForward<Real>& call) {
  Forward<Real>(call).run();
}

template <class Real>
void sparse_delta_rule_forward(SparseDeltaForward<Real> call) {
  check_sizes<Real>(call);
  if (call.initial_bf16 && sizeof(Real) != sizeof(float)) {
    throw std::invalid_argument("a bfloat16 state computes in float32");
  }
  sparse_delta_forward(call);
}

template void sparse_delta_forward(const SparseDeltaForward<float>&);
template void sparse_delta_forward(const SparseDeltaForward<double>&);
template void sparse_delta_rule_forward(SparseDeltaForward<float>);
template void sparse_delta_rule_forward(SparseDeltaForward<double>);

}  // namespace sdm

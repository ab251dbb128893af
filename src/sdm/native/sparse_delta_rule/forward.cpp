#include <algorithm>
#include <cstring>

#include "kernel_table.h"
#include "memory.h"
#include "parallel.h"
#include "sparse_delta_rule/streams.h"

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
  Forward(const SparseDeltaInputs<Real>& in, const InitialState& initial, Real* y, Real* error, void* final_state,
          bool final_bf16)
      : in_(in), initial_(initial), y_(y), error_(error), final_(final_state), final_bf16_(final_bf16) {}

  void run() {
    if (in_.streams() == 0) return;
    if (final_ && final_ == initial_.data) return run_in_place();
    if (final_) advise_huge_pages(final_, in_.streams() * in_.slots * in_.channels * sizeof(Real));
    const Rows rows = final_ || initial_.bf16 ? Rows::kOwn : Rows::kRecycled;
    const int64_t fewest_slabs = (in_.channels + kSlabWidths[0] - 1) / kSlabWidths[0];
    const int64_t wave = streams_at_once(in_.streams(), fewest_slabs, in_.threads);
    for (int64_t first = 0; first < in_.streams(); first += wave) {
      const int64_t count = std::min(wave, in_.streams() - first);
      const auto set = prepare<Real>(in_, first, count, rows, !initial_.data, nullptr);
      struct Slab {
        const PreparedStream<Real>* prepared;
        int kind;
        int64_t first_channel;
      };
      std::vector<Slab> slabs;
      for (const auto& prepared : set) {
        const int kind = slab_kind(prepared.row_count, in_.channels, sizeof(Real), table_bytes(prepared.stream));
        for (int64_t c = 0; c < in_.channels; c += kSlabWidths[kind]) slabs.push_back({&prepared, kind, c});
      }
      parallel_for(static_cast<int64_t>(slabs.size()), in_.threads, [&](int64_t task) {
        const auto& [prepared, kind, first_channel] = slabs[task];
        run_slab(*prepared, kind, first_channel);
      });
      if (final_) copy_untouched(set);
    }
  }

 private:
  int64_t table_bytes(const Stream<Real>& stream) const {
    const int64_t visits = stream.tokens * (int64_t{stream.writes} + stream.reads);
    const bool mostly_fresh = initial_.data && visits < kVisitsPerRow * stream.born_before[stream.tokens];
    return mostly_fresh ? kFreshTableBytes : kTableBytes;
  }

  int64_t state_offset(const PreparedStream<Real>& prepared, bool per_sequence) const {
    const int64_t table = (per_sequence ? prepared.sequence * in_.heads : 0) + prepared.head;
    return table * in_.slots * in_.channels;
  }

  // y and error of the stream's first token.
  Real* tokens_of(Real* array, const PreparedStream<Real>& prepared) const {
    if (!array) return nullptr;
    return array + (in_.begin(prepared.sequence) * in_.heads + prepared.head) * in_.channels;
  }

  void gather(const RowCopy& copy, int64_t offset, Real* table) const {
    if (initial_.bf16) {
      kernels_.gather_bf16(copy, static_cast<const BFloat16*>(initial_.data) + offset, table);
    } else {
      kernels_.gather(copy, static_cast<const Real*>(initial_.data) + offset, table);
    }
  }

  void run_slab(const PreparedStream<Real>& prepared, int kind, int64_t first_channel) {
    const int64_t width = kSlabWidths[kind];
    const int64_t channels = std::min(width, in_.channels - first_channel);
    const RowCopy copy = {prepared.touched_slots, prepared.born_count, prepared.row_of_slot, channels,
                          width - channels,       in_.channels,        width};
    Scratch memory(static_cast<std::size_t>(prepared.row_count * width) * sizeof(Real));
    Real* table = memory.template as<Real>();
    std::fill(table, table + width, Real(0));
    const int64_t start = state_offset(prepared, initial_.per_sequence) + first_channel;
    const Real* initial = nullptr;
    if (initial_.bf16) {
      gather(copy, start, table);
    } else if (initial_.data) {
      initial = static_cast<const Real*>(initial_.data) + start;
    }
    kernels_.forward[kind](prepared.stream, {first_channel, channels, width, table, !initial_.bf16, initial,
                                             tokens_of(y_, prepared), tokens_of(error_, prepared)});
    if (!final_) return;
    kernels_.scatter(copy, table, static_cast<Real*>(final_) + state_offset(prepared, true) + first_channel);
  }

  void copy_untouched(const std::vector<PreparedStream<Real>>& set) {
    constexpr int64_t kSlotsPerTask = 1024;
    const int64_t tasks = (in_.slots + kSlotsPerTask - 1) / kSlotsPerTask;
    parallel_for(static_cast<int64_t>(set.size()) * tasks, in_.threads, [&](int64_t task) {
      const PreparedStream<Real>& prepared = set[task / tasks];
      const int64_t begin = task % tasks * kSlotsPerTask, end = std::min(begin + kSlotsPerTask, in_.slots);
      Real* to = static_cast<Real*>(final_) + state_offset(prepared, true);
      for (int64_t n = begin; n < end; ++n) {
        if (prepared.row_of_slot[n] >= 0) continue;
        const int32_t first = 0;
        const RowCopy copy = {&first, 1, &first, in_.channels, 0, in_.channels, in_.channels};
        if (initial_.data) {
          gather(copy, state_offset(prepared, initial_.per_sequence) + n * in_.channels, to + n * in_.channels);
        } else {
          std::memset(to + n * in_.channels, 0, static_cast<std::size_t>(in_.channels) * sizeof(Real));
        }
      }
    });
  }

  // The caller's state is the table. All tokens are checked before the first of them changes it.
  void run_in_place() {
    struct Piece {
      int64_t first_channel, channels;
      void (*run)(const Stream<Real>&, const ForwardSlab<Real>&);
    };
    std::vector<Piece> pieces;
    const auto& slab_loops = final_bf16_ ? kernels_.forward_bf16 : kernels_.forward;
    for (int64_t c = 0; c < in_.channels;) {
      const int64_t left = in_.channels - c;
      int kind = 0;
      while (kind < kSlabKinds && kSlabWidths[kind] > left) ++kind;
      const int64_t channels = kind < kSlabKinds ? kSlabWidths[kind] : left;
      const auto rest = final_bf16_ ? kernels_.forward_bf16_rest : kernels_.forward_rest;
      pieces.push_back({c, channels, kind < kSlabKinds ? slab_loops[kind] : rest});
      c += channels;
    }
    const auto count = static_cast<int64_t>(pieces.size());
    const auto set = prepare<Real>(in_, 0, in_.streams(), Rows::kSlots, false, nullptr);
    // Each thread takes neighbouring channels of one stream, whose rows share pages.
    const int64_t shares = std::min<int64_t>(count, std::max(1, in_.threads));
    parallel_for(in_.streams() * shares, in_.threads, [&](int64_t task) {
      const PreparedStream<Real>& prepared = set[task / shares];
      const int64_t share = task % shares;
      for (int64_t p = count * share / shares; p < count * (share + 1) / shares; ++p) {
        const Piece& piece = pieces[p];
        const int64_t offset = state_offset(prepared, true) + piece.first_channel;
        void* table = final_bf16_ ? static_cast<void*>(static_cast<BFloat16*>(final_) + offset)
                                  : static_cast<void*>(static_cast<Real*>(final_) + offset);
        piece.run(prepared.stream, {piece.first_channel, piece.channels, in_.channels, table, false, nullptr,
                                    tokens_of(y_, prepared), tokens_of(error_, prepared)});
      }
    });
  }

  const SparseDeltaKernels<Real>& kernels_ = sparse_delta_kernels<Real>();
  const SparseDeltaInputs<Real>& in_;
  const InitialState initial_;
  Real* const y_;
  Real* const error_;
  void* const final_;
  const bool final_bf16_;
};

}  // namespace

template <class Real>
void sparse_delta_forward(const SparseDeltaInputs<Real>& inputs, const InitialState& initial, Real* y, Real* error,
                          void* final_state, bool final_bf16) {
  Forward<Real>(inputs, initial, y, error, final_state, final_bf16).run();
}

template void sparse_delta_forward(const SparseDeltaInputs<float>&, const InitialState&, float*, float*, void*, bool);
template void sparse_delta_forward(const SparseDeltaInputs<double>&, const InitialState&, double*, double*, void*,
                                   bool);

}  // namespace sdm

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "kernel_table.h"
#include "memory.h"
#include "parallel.h"
#include "sparse_delta_rule/checked_inputs.h"

namespace sdm {
namespace {

// Slabs are dealt to at most this many groups. A group runs its slabs one after the other and adds up their sums over
// channels; the groups' sums are added at the end, in order.
constexpr int64_t kGroups = 16;

// A table larger than this does not stay in any cache until somebody reads it.
constexpr int64_t kCachedBytes = int64_t{16} << 20;

template <class Real>
class Backward {
 public:
  explicit Backward(const SparseDeltaBackward<Real>& call) : call_(call) {}

  void run() {
    if (call_.initial_state) move_to_huge_pages_when_reused(call_.initial_state, call_.initial_bytes());
    if (call_.grad_initial_state) {
      const std::size_t bytes = call_.initial_bytes();
      advise_huge_pages(call_.grad_initial_state, bytes);
      if (call_.streams() == 0) std::memset(call_.grad_initial_state, 0, bytes);
    }
    // Rows that leave must be kept for the way back. That pays where not all of them would stay in the cache.
    const int64_t narrow_table = call_.most_rows() * kSlabWidths[1] * 2 * sizeof(Real);
    recycles_ = !call_.grad_final_state && narrow_table > call_.table_bytes;
    const Rows rows = recycles_ ? Rows::kRecycled : call_.grad_final_state ? Rows::kOwn : Rows::kOwnUntilLeft;
    const int64_t fewest_slabs = (call_.channels + kSlabWidths[0] - 1) / kSlabWidths[0];
    const int64_t wanted = streams_at_once(call_.streams(), std::min(fewest_slabs, kGroups), call_.threads);
    for (int64_t first = 0, count; first < call_.streams(); first += count) {
      count = std::min(wanted, call_.streams() - first);
      // The gradient of a shared initial state is summed over the sequences in their order: one sequence at a time.
      if (call_.grad_initial_state && !call_.initial_per_sequence) count = std::min(count, call_.heads - first % call_.heads);
      run_wave(prepare<Real>(call_, first, count, rows, &call_));
    }
  }

 private:
  // How the channels of a stream are cut.
  struct Cut {
    int kind;
    int64_t slabs, groups;
  };

  Cut cut(const PreparedStream<Real>& prepared) const {
    const int kind = slab_kind(prepared.row_count, call_.channels, 2 * sizeof(Real), call_.table_bytes);
    const int64_t slabs = (call_.channels + kSlabWidths[kind] - 1) / kSlabWidths[kind];
    return {kind, slabs, std::min(slabs, kGroups)};
  }

  bool adds_to_initial(const PreparedStream<Real>& prepared) const {
    return !call_.initial_per_sequence && prepared.sequence > 0;
  }

  void run_wave(const std::vector<PreparedStream<Real>>& set) {
    const auto count = static_cast<int64_t>(set.size());
    const int64_t partials = partial_width(call_.writes, call_.reads, call_.slot_rule || call_.decay_per_write);
    std::vector<std::unique_ptr<Scratch>> sums;
    struct Group {
      int64_t stream, group;
    };
    std::vector<Group> groups;
    for (int64_t n = 0; n < count; ++n) {
      const int64_t wanted = cut(set[n]).groups, size = wanted * set[n].stream.tokens * partials;
      sums.push_back(std::make_unique<Scratch>(static_cast<std::size_t>(size) * sizeof(Real)));
      for (int64_t group = 0; group < wanted; ++group) groups.push_back({n, group});
    }
    parallel_for(static_cast<int64_t>(groups.size()), call_.threads, [&](int64_t task) {
      const auto [n, group] = groups[task];
      run_group(set[n], group, sums[n]->template as<Real>() + group * set[n].stream.tokens * partials);
    });
    constexpr int64_t kTokensPerTask = 128;
    const int64_t pieces = (call_.longest() + kTokensPerTask - 1) / kTokensPerTask;
    parallel_for(count * pieces, call_.threads, [&](int64_t task) {
      const PreparedStream<Real>& prepared = set[task / pieces];
      const int64_t begin = task % pieces * kTokensPerTask;
      const int64_t end = std::min(begin + kTokensPerTask, prepared.stream.tokens);
      for (int64_t t = begin; t < end; ++t) add_groups(prepared, t, partials, sums[task / pieces]->template as<Real>());
    });
    if (call_.grad_initial_state) pass_untouched(set);
  }

  void run_group(const PreparedStream<Real>& prepared, int64_t group, Real* partial) {
    const Stream<Real>& stream = prepared.stream;
    const auto [kind, slabs, groups] = cut(prepared);
    const int64_t first_slab = slabs * group / groups, last_slab = slabs * (group + 1) / groups;
    const int64_t S = kSlabWidths[kind];
    Scratch table_memory(static_cast<std::size_t>(prepared.row_count * 2 * S) * sizeof(Real));
    Scratch saved_memory(static_cast<std::size_t>(prepared.saved_count * S) * sizeof(Real));
    Scratch kept_memory(static_cast<std::size_t>(prepared.kept_count * S) * sizeof(Real));
    constexpr std::size_t kVectorBytes = 64;
    Scratch lanes(kVectorBytes * static_cast<std::size_t>(std::max<int64_t>(2 * int64_t{call_.writes}, call_.reads)));
    const int64_t tokens_at = prepared.cell(call_, 0) * call_.channels;
    const auto shifted = [&](auto* array) { return array ? array + tokens_at : nullptr; };
    for (int64_t slab = first_slab; slab < last_slab; ++slab) {
      BackwardSlab<Real> args = {};
      args.first_channel = slab * S;
      args.channels = std::min(S, call_.channels - args.first_channel);
      args.table = table_memory.template as<Real>();
      args.keeps_all = recycles_;
      args.saved_rows = saved_memory.template as<Real>();
      args.kept_rows = kept_memory.template as<Real>();
      std::fill(args.table, args.table + 2 * S, Real(0));
      args.residual = shifted(call_.residual);
      args.grad_y = shifted(call_.grad_y);
      args.grad_value = shifted(call_.grad_value);
      args.partial = partial;
      args.accumulate = slab > first_slab;
      args.lanes = lanes.template as<Real>();
      const int64_t offset = prepared.state_offset(call_, call_.initial_per_sequence) + args.first_channel;
      if (call_.initial_state) args.initial = static_cast<const Real*>(call_.initial_state) + offset;
      if (call_.grad_initial_state) {
        args.grad_initial = call_.grad_initial_state + offset;
        args.adds_initial = adds_to_initial(prepared);
        args.past_caches = call_.slots * call_.channels * static_cast<int64_t>(sizeof(Real)) > kCachedBytes;
      }
      kernels_.replay[kind](stream, args);
      if (call_.grad_final_state) {
        const RowCopy copy = {prepared.touched_slots, prepared.touched_rows, prepared.born_count, args.channels,
                              S - args.channels,      call_.channels,        2 * S};
        const int64_t from = prepared.state_offset(call_, true) + args.first_channel;
        kernels_.gather(copy, call_.grad_final_state + from, args.table + S);
      }
      kernels_.backward[kind](stream, args);
    }
  }

  // Adds the groups' sums for one token and turns them into the gradients of the caller's tensors.
  void add_groups(const PreparedStream<Real>& prepared, int64_t t, int64_t partials, Real* sums) {
    const Stream<Real>& stream = prepared.stream;
    const int32_t W = call_.writes, R = call_.reads;
    Real* sum = sums + t * partials;
    const int64_t groups = cut(prepared).groups;
    for (int64_t group = 1; group < groups; ++group) {
      const Real* more = sum + group * stream.tokens * partials;
      for (int64_t i = 0; i < partials; ++i) sum[i] += more[i];
    }
    const int64_t at = prepared.cell(call_, t);
    std::copy(sum + W, sum + W + R, call_.grad_read_weight + at * R);
    const Real* by_factor = sum + W + R;
    if (!call_.slot_rule) {
      std::copy(sum, sum + W, call_.grad_write_weight + at * W);
      const int32_t gates = call_.decay_per_write ? W : 1;
      std::copy(by_factor, by_factor + gates, call_.grad_log_decay + at * gates);
      call_.grad_beta[at] = sum[partials - 1];
      return;
    }
    // push = beta k and factor = exp(g) (1 - push), with `sum` the gradient of push where it stands alone.
    const Real beta = call_.beta[at];
    Real grad_beta = 0, grad_decay = 0;
    for (int32_t i = 0; i < W; ++i) {
      const Real decay = std::exp(call_.log_decay[call_.decay_per_write ? at * W + i : at]);
      const Real grad_push = sum[i] - decay * by_factor[i];
      const Real grad_log = stream.factor[t * W + i] * by_factor[i];
      call_.grad_write_weight[at * W + i] = beta * grad_push;
      grad_beta += call_.write_weight[at * W + i] * grad_push;
      grad_decay += grad_log;
      if (call_.decay_per_write) call_.grad_log_decay[at * W + i] = grad_log;
    }
    call_.grad_beta[at] = grad_beta;
    if (!call_.decay_per_write) call_.grad_log_decay[at] = grad_decay;
  }

  // Slots that no token touched hand the gradient of the final state on as it is.
  void pass_untouched(const std::vector<PreparedStream<Real>>& set) {
    constexpr int64_t kSlotsPerTask = 1024;
    const int64_t tasks = (call_.slots + kSlotsPerTask - 1) / kSlotsPerTask, D = call_.channels;
    parallel_for(static_cast<int64_t>(set.size()) * tasks, call_.threads, [&](int64_t task) {
      const PreparedStream<Real>& prepared = set[task / tasks];
      const bool add = adds_to_initial(prepared);
      if (add && !call_.grad_final_state) return;
      const int64_t begin = task % tasks * kSlotsPerTask, end = std::min(begin + kSlotsPerTask, call_.slots);
      Real* to = call_.grad_initial_state + prepared.state_offset(call_, call_.initial_per_sequence);
      const Real* from = call_.grad_final_state ? call_.grad_final_state + prepared.state_offset(call_, true) : nullptr;
      prepared.each_untouched(begin, end, [&](int64_t slot) {
        for (int64_t c = slot * D; c < (slot + 1) * D; ++c) to[c] = (add ? to[c] : 0) + (from ? from[c] : 0);
      });
    });
  }

  const SparseDeltaKernels<Real>& kernels_ = sparse_delta_kernels<Real>();
  const SparseDeltaBackward<Real>& call_;
  bool recycles_ = false;
};

template <class Real>
void check_plan(SparseDeltaPlan<Real>& call) {
  check_sizes<Real>(call);
  if (!call.slot_rule && !call.residual && call.sequences * call.tokens > 0) {
    throw std::invalid_argument("backward needs the residual of forward");
  }
  if (call.initial_bf16) throw std::invalid_argument("backward starts from a state of the type that it computes in");
}

}  // namespace

template <class Real>
void sparse_delta_backward(const SparseDeltaBackward<Real>& call) {
  Backward<Real>(call).run();
}

template <class Real>
void sparse_delta_rule_backward(SparseDeltaBackward<Real> call) {
  check_plan(call);
  sparse_delta_backward(call);
}

template <class Real>
int64_t sparse_delta_rule_saved_rows(SparseDeltaPlan<Real> call) {
  check_plan(call);
  int64_t saved = 0;
  for (const auto& prepared : prepare<Real>(call, 0, call.streams(), Rows::kOwn, &call)) saved += prepared.saved_count;
  return saved;
}

template void sparse_delta_backward(const SparseDeltaBackward<float>&);
template void sparse_delta_backward(const SparseDeltaBackward<double>&);
template void sparse_delta_rule_backward(SparseDeltaBackward<float>);
template void sparse_delta_rule_backward(SparseDeltaBackward<double>);
template int64_t sparse_delta_rule_saved_rows(SparseDeltaPlan<float>);
template int64_t sparse_delta_rule_saved_rows(SparseDeltaPlan<double>);

}  // namespace sdm

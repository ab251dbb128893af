#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernel_table.h"
#include "memory.h"
#include "parallel.h"
#include "sparse_delta_rule/streams.h"

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
  Backward(const SparseDeltaInputs<Real>& in, const InitialState& initial, const InversionPlan<Real>& plan,
           const SparseDeltaGradients<Real>& grad)
      : in_(in), initial_(initial), plan_(plan), grad_(grad) {
    plan_.error = grad.error;
    plan_.initial = initial;
  }

  void run() {
    if (grad_.initial_state) {
      const int64_t tables = initial_.per_sequence ? in_.streams() : in_.heads;
      const auto bytes = static_cast<std::size_t>(tables * in_.slots * in_.channels) * sizeof(Real);
      advise_huge_pages(grad_.initial_state, bytes);
      if (in_.streams() == 0) std::memset(grad_.initial_state, 0, bytes);
    }
    // Rows that leave must be kept for the way back. That pays where not all of them would stay in the cache.
    const int64_t narrow_table = in_.most_rows() * kSlabWidths[1] * 2 * sizeof(Real);
    const Rows rows = !grad_.final_state && narrow_table > plan_.table_bytes ? Rows::kRecycled : Rows::kOwn;
    const int64_t fewest_slabs = (in_.channels + kSlabWidths[0] - 1) / kSlabWidths[0];
    const int64_t wanted = streams_at_once(in_.streams(), std::min(fewest_slabs, kGroups), in_.threads);
    for (int64_t first = 0, count; first < in_.streams(); first += count) {
      count = std::min(wanted, in_.streams() - first);
      // The gradient of a shared initial state is summed over the sequences in their order: one sequence at a time.
      if (grad_.initial_state && !initial_.per_sequence) count = std::min(count, in_.heads - first % in_.heads);
      run_wave(prepare(in_, first, count, rows, !initial_.data, &plan_));
    }
  }

 private:
  // How the channels of a stream are cut.
  struct Cut {
    int kind;
    int64_t slabs, groups;
  };

  Cut cut(const PreparedStream<Real>& prepared) const {
    const int kind = slab_kind(prepared.row_count, in_.channels, 2 * sizeof(Real), plan_.table_bytes);
    const int64_t slabs = (in_.channels + kSlabWidths[kind] - 1) / kSlabWidths[kind];
    return {kind, slabs, std::min(slabs, kGroups)};
  }

  bool adds_to_initial(const PreparedStream<Real>& prepared) const {
    return !initial_.per_sequence && prepared.sequence > 0;
  }

  int64_t state_offset(const PreparedStream<Real>& prepared, bool per_sequence) const {
    const int64_t table = (per_sequence ? prepared.sequence * in_.heads : 0) + prepared.head;
    return table * in_.slots * in_.channels;
  }

  int64_t cell(const PreparedStream<Real>& prepared, int64_t token) const {
    return (in_.begin(prepared.sequence) + token) * in_.heads + prepared.head;
  }

  void run_wave(const std::vector<PreparedStream<Real>>& set) {
    const auto count = static_cast<int64_t>(set.size());
    const int64_t partials = partial_width(in_.writes, in_.reads, in_.slot_rule || in_.decay_per_write);
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
    parallel_for(static_cast<int64_t>(groups.size()), in_.threads, [&](int64_t task) {
      const auto [n, group] = groups[task];
      run_group(set[n], group, sums[n]->template as<Real>() + group * set[n].stream.tokens * partials);
    });
    constexpr int64_t kTokensPerTask = 128;
    const int64_t pieces = (in_.longest() + kTokensPerTask - 1) / kTokensPerTask;
    parallel_for(count * pieces, in_.threads, [&](int64_t task) {
      const PreparedStream<Real>& prepared = set[task / pieces];
      const int64_t begin = task % pieces * kTokensPerTask;
      const int64_t end = std::min(begin + kTokensPerTask, prepared.stream.tokens);
      for (int64_t t = begin; t < end; ++t) add_groups(prepared, t, partials, sums[task / pieces]->template as<Real>());
    });
    if (grad_.initial_state) pass_untouched(set);
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
    Scratch lanes(kVectorBytes * static_cast<std::size_t>(std::max<int64_t>(2 * int64_t{in_.writes}, in_.reads)));
    const int64_t tokens_at = cell(prepared, 0) * in_.channels;
    const auto shifted = [&](auto* array) { return array ? array + tokens_at : nullptr; };
    for (int64_t slab = first_slab; slab < last_slab; ++slab) {
      BackwardSlab<Real> args = {};
      args.first_channel = slab * S;
      args.channels = std::min(S, in_.channels - args.first_channel);
      args.table = table_memory.template as<Real>();
      args.saved_rows = saved_memory.template as<Real>();
      args.kept_rows = kept_memory.template as<Real>();
      std::fill(args.table, args.table + 2 * S, Real(0));
      args.error = shifted(grad_.error);
      args.grad_y = shifted(grad_.y);
      args.grad_value = shifted(grad_.value);
      args.partial = partial;
      args.accumulate = slab > first_slab;
      args.lanes = lanes.template as<Real>();
      const int64_t offset = state_offset(prepared, initial_.per_sequence) + args.first_channel;
      if (initial_.data) args.initial = static_cast<const Real*>(initial_.data) + offset;
      if (grad_.initial_state) {
        args.grad_initial = grad_.initial_state + offset;
        args.adds_initial = adds_to_initial(prepared);
        args.past_caches = in_.slots * in_.channels * static_cast<int64_t>(sizeof(Real)) > kCachedBytes;
      }
      kernels_.replay[kind](stream, args);
      if (grad_.final_state) {
        const RowCopy copy = {
            prepared.touched_slots, prepared.born_count, prepared.row_of_slot, args.channels, 0, in_.channels, 2 * S};
        const int64_t from = state_offset(prepared, true) + args.first_channel;
        kernels_.gather(copy, grad_.final_state + from, args.table + S);
      }
      kernels_.backward[kind](stream, args);
    }
  }

  // Adds the groups' sums for one token and turns them into the gradients of the caller's tensors.
  void add_groups(const PreparedStream<Real>& prepared, int64_t t, int64_t partials, Real* sums) {
    const Stream<Real>& stream = prepared.stream;
    const int32_t W = in_.writes, R = in_.reads;
    Real* sum = sums + t * partials;
    const int64_t groups = cut(prepared).groups;
    for (int64_t group = 1; group < groups; ++group) {
      const Real* more = sum + group * stream.tokens * partials;
      for (int64_t i = 0; i < partials; ++i) sum[i] += more[i];
    }
    const int64_t at = cell(prepared, t);
    std::copy(sum + W, sum + W + R, grad_.read_weight + at * R);
    const Real* by_factor = sum + W + R;
    if (!in_.slot_rule) {
      std::copy(sum, sum + W, grad_.write_weight + at * W);
      const int32_t gates = in_.decay_per_write ? W : 1;
      std::copy(by_factor, by_factor + gates, grad_.log_decay + at * gates);
      grad_.beta[at] = sum[partials - 1];
      return;
    }
    // push = beta k and factor = exp(g) (1 - push), with `sum` the gradient of push where it stands alone.
    const Real beta = in_.beta[at];
    Real grad_beta = 0, grad_decay = 0;
    for (int32_t i = 0; i < W; ++i) {
      const Real decay = std::exp(in_.log_decay[in_.decay_per_write ? at * W + i : at]);
      const Real grad_push = sum[i] - decay * by_factor[i];
      const Real grad_log = stream.factor[t * W + i] * by_factor[i];
      grad_.write_weight[at * W + i] = beta * grad_push;
      grad_beta += in_.write_weight[at * W + i] * grad_push;
      grad_decay += grad_log;
      if (in_.decay_per_write) grad_.log_decay[at * W + i] = grad_log;
    }
    grad_.beta[at] = grad_beta;
    if (!in_.decay_per_write) grad_.log_decay[at] = grad_decay;
  }

  // Slots that no token touched hand the gradient of the final state on as it is.
  void pass_untouched(const std::vector<PreparedStream<Real>>& set) {
    constexpr int64_t kSlotsPerTask = 1024;
    const int64_t tasks = (in_.slots + kSlotsPerTask - 1) / kSlotsPerTask, D = in_.channels;
    parallel_for(static_cast<int64_t>(set.size()) * tasks, in_.threads, [&](int64_t task) {
      const PreparedStream<Real>& prepared = set[task / tasks];
      const bool add = adds_to_initial(prepared);
      if (add && !grad_.final_state) return;
      const int64_t begin = task % tasks * kSlotsPerTask, end = std::min(begin + kSlotsPerTask, in_.slots);
      Real* to = grad_.initial_state + state_offset(prepared, initial_.per_sequence);
      const Real* from = grad_.final_state ? grad_.final_state + state_offset(prepared, true) : nullptr;
      for (int64_t n = begin; n < end; ++n) {
        if (prepared.row_of_slot[n] >= 0) continue;
        for (int64_t c = n * D; c < (n + 1) * D; ++c) to[c] = (add ? to[c] : 0) + (from ? from[c] : 0);
      }
    });
  }

  const SparseDeltaKernels<Real>& kernels_ = sparse_delta_kernels<Real>();
  const SparseDeltaInputs<Real>& in_;
  const InitialState initial_;
  InversionPlan<Real> plan_;
  const SparseDeltaGradients<Real> grad_;
};

}  // namespace

template <class Real>
void sparse_delta_backward(const SparseDeltaInputs<Real>& inputs, const InitialState& initial,
                           const InversionPlan<Real>& plan, const SparseDeltaGradients<Real>& grad) {
  Backward<Real>(inputs, initial, plan, grad).run();
}

template void sparse_delta_backward(const SparseDeltaInputs<float>&, const InitialState&, const InversionPlan<float>&,
                                    const SparseDeltaGradients<float>&);
template void sparse_delta_backward(const SparseDeltaInputs<double>&, const InitialState&, const InversionPlan<double>&,
                                    const SparseDeltaGradients<double>&);

}  // namespace sdm

#include "gated_delta_rule/rule.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "checks.h"
#include "kernel_table.h"
#include "memory.h"
#include "parallel.h"

namespace sdm {

namespace {

template <class Real>
const GatedDeltaKernels<Real>& gated_delta_kernels();
template <>
const GatedDeltaKernels<float>& gated_delta_kernels() {
  return kernels().gated_delta_float;
}
template <>
const GatedDeltaKernels<double>& gated_delta_kernels() {
  return kernels().gated_delta_double;
}

template <class Real>
int64_t slabs_of(int64_t channels) {
  return (channels + kGatedDeltaSlab<Real> - 1) / kGatedDeltaSlab<Real>;
}

template <class Real>
std::vector<GatedDeltaTask> make_tasks(const GatedDeltaCall<Real>& call, int64_t slabs) {
  if (call.cu_seqlens) check_offsets(call.cu_seqlens, call.sequences, call.tokens);
  std::vector<GatedDeltaTask> tasks;
  tasks.reserve(static_cast<std::size_t>(call.sequences * call.heads * slabs));
  for (int64_t s = 0; s < call.sequences; ++s) {
    const int64_t length = call.tokens / call.sequences;
    const int64_t begin = call.cu_seqlens ? call.cu_seqlens[s] : s * length;
    const int64_t end = call.cu_seqlens ? call.cu_seqlens[s + 1] : begin + length;
    // Rounding down loses at most one segment per sequence, and one per sequence is added.
    const int64_t first_segment = begin / kGatedDeltaSegment + s;
    for (int64_t h = 0; h < call.heads; ++h) {
      for (int64_t slab = 0; slab < slabs; ++slab) tasks.push_back({s, h, slab, begin, end, first_segment});
    }
  }
  return tasks;
}

// Each worker has working memory of its own and takes the next task; which worker runs a task changes nothing.
template <class Real, template <class> class Call>
void run_tasks(const Call<Real>& call, const std::vector<GatedDeltaTask>& tasks,
               void (*kernel)(const Call<Real>&, const GatedDeltaTask&, Real*), int64_t workspace) {
  const int64_t count = static_cast<int64_t>(tasks.size());
  // Below this, a single decode step for instance, waking threads takes longer than the work.
  constexpr int64_t kWorthAThread = 1 << 16;
  const int64_t work = call.tokens * call.heads * call.key_size * call.channels;
  const int64_t most = std::max<int64_t>(1, std::min<int64_t>(call.threads, work / kWorthAThread));
  const int64_t workers = std::min(count, most);
  const int64_t stride = (workspace + 63) / 64 * 64;
  const Scratch scratch(static_cast<std::size_t>(std::max<int64_t>(workers, 1) * stride) * sizeof(Real));
  std::atomic<int64_t> next{0};
  parallel_for(workers, static_cast<int>(workers), [&](int64_t worker) {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      kernel(call, tasks[static_cast<std::size_t>(i)], scratch.as<Real>() + worker * stride);
    }
  });
}

template <class Real>
void add_partials(const Real* partials, int64_t slabs, int64_t count, Real* sum, int threads) {
  constexpr int64_t kBlock = 4096;
  parallel_for((count + kBlock - 1) / kBlock, count > 16 * kBlock ? threads : 1, [&](int64_t block) {
    const int64_t begin = block * kBlock, end = std::min(count, begin + kBlock);
    for (int64_t i = begin; i < end; ++i) sum[i] = partials[i];
    for (int64_t slab = 1; slab < slabs; ++slab) {
      for (int64_t i = begin; i < end; ++i) sum[i] += partials[slab * count + i];
    }
  });
}

// The decays of all channels, once and not for each slab; nothing with a decay per head. Element by element, so that
// neither threads nor the cut of time change a bit.
template <class Real>
class ChannelDecays {
 public:
  explicit ChannelDecays(const GatedDeltaCall<Real>& call)
      : count_(call.by_channel() ? call.tokens * call.heads * call.key_size : 0),
        scratch_(static_cast<std::size_t>(std::max<int64_t>(count_, 1)) * sizeof(Real)) {
    constexpr int64_t kBlock = 4096;
    Real* to = scratch_.as<Real>();
    parallel_for((count_ + kBlock - 1) / kBlock, count_ > 4 * kBlock ? call.threads : 1, [&](int64_t block) {
      const int64_t begin = block * kBlock, end = std::min(count_, begin + kBlock);
      for (int64_t i = begin; i < end; ++i) to[i] = std::exp(call.log_decay[i]);
    });
  }
  const Real* data() const { return scratch_.as<Real>(); }

 private:
  int64_t count_;
  Scratch scratch_;
};

}  // namespace

template <class Real>
void gated_delta_forward(const GatedDeltaForward<Real>& given) {
  const std::vector<GatedDeltaTask> tasks = make_tasks<Real>(given, slabs_of<Real>(given.channels));
  for (int64_t i = 0; i < given.tokens * given.heads * given.decay_size; ++i) {
    if (!(given.log_decay[i] <= 0)) throw std::invalid_argument(wrong_decay(given.log_decay[i]));
  }
  const GatedDeltaKernels<Real>& inner = gated_delta_kernels<Real>();
  GatedDeltaForward<Real> call = given;
  const ChannelDecays<Real> decays(call);
  call.decay = decays.data();
  run_tasks<Real>(call, tasks, inner.forward, inner.forward_workspace(call.key_size));
}

template <class Real>
void gated_delta_backward(const GatedDeltaBackward<Real>& given) {
  GatedDeltaBackward<Real> call = given;
  const GatedDeltaKernels<Real>& inner = gated_delta_kernels<Real>();
  const int64_t slabs = slabs_of<Real>(call.channels), workspace = inner.backward_workspace(call.key_size);
  const std::vector<GatedDeltaTask> tasks = make_tasks<Real>(call, slabs);
  const int64_t rows = call.tokens * call.heads, keys = rows * call.key_size;
  if (rows > 0 && (!call.residual || !call.saved_states)) {
    throw std::invalid_argument("backward needs the residual and the states that forward saved");
  }
  const ChannelDecays<Real> decays(call);
  call.decay = decays.data();
  if (slabs == 1) return run_tasks<Real>(call, tasks, inner.backward, workspace);

  const int64_t gates = rows * call.decay_size;
  const Scratch scratch(static_cast<std::size_t>(slabs * (2 * keys + rows + gates)) * sizeof(Real));
  GatedDeltaBackward<Real> partial = call;
  partial.grad_query = scratch.as<Real>();
  partial.grad_key = partial.grad_query + slabs * keys;
  partial.grad_beta = partial.grad_key + slabs * keys;
  partial.grad_log_decay = partial.grad_beta + slabs * rows;
  run_tasks<Real>(partial, tasks, inner.backward, workspace);
  add_partials(partial.grad_query, slabs, keys, call.grad_query, call.threads);
  add_partials(partial.grad_key, slabs, keys, call.grad_key, call.threads);
  add_partials(partial.grad_beta, slabs, rows, call.grad_beta, call.threads);
  add_partials(partial.grad_log_decay, slabs, gates, call.grad_log_decay, call.threads);
}

template void gated_delta_forward(const GatedDeltaForward<float>&);
template void gated_delta_forward(const GatedDeltaForward<double>&);
template void gated_delta_backward(const GatedDeltaBackward<float>&);
template void gated_delta_backward(const GatedDeltaBackward<double>&);

}  // namespace sdm

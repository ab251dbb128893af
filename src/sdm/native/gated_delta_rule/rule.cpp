#include "gated_delta_rule/rule.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

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

struct Sizes {
  int64_t sequences, tokens, heads, key_size, channels;
};

void check_offsets(const int64_t* cu_seqlens, const Sizes& sizes) {
  const auto number = [](int64_t x) { return std::to_string(x); };
  if (cu_seqlens[0] != 0 || cu_seqlens[sizes.sequences] != sizes.tokens) {
    throw std::invalid_argument("cu_seqlens must start at 0 and end at T = " + number(sizes.tokens) + ", got " +
                                number(cu_seqlens[0]) + " and " + number(cu_seqlens[sizes.sequences]));
  }
  for (int64_t s = 0; s < sizes.sequences; ++s) {
    if (cu_seqlens[s + 1] < cu_seqlens[s]) {
      throw std::invalid_argument("cu_seqlens must not decrease, got " + number(cu_seqlens[s]) + " then " +
                                  number(cu_seqlens[s + 1]) + ": document " + number(s) + " would overlap the next");
    }
  }
}

template <class Real>
void check_decay(const Real* log_decay, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (log_decay[i] <= 0) continue;
    char text[32];
    std::snprintf(text, sizeof text, "%g", static_cast<double>(log_decay[i]));
    throw std::invalid_argument(std::string("log_decay must be at most 0 (a decay factor of at most 1), got ") + text);
  }
}

template <class Real>
int64_t slabs_of(int64_t channels) {
  return (channels + kGatedDeltaSlab<Real> - 1) / kGatedDeltaSlab<Real>;
}

std::vector<GatedDeltaTask> make_tasks(const Sizes& sizes, int64_t slabs, const int64_t* cu_seqlens) {
  std::vector<GatedDeltaTask> tasks;
  tasks.reserve(static_cast<std::size_t>(sizes.sequences * sizes.heads * slabs));
  for (int64_t s = 0; s < sizes.sequences; ++s) {
    const int64_t length = sizes.tokens / sizes.sequences;
    const int64_t begin = cu_seqlens ? cu_seqlens[s] : s * length;
    const int64_t end = cu_seqlens ? cu_seqlens[s + 1] : begin + length;
    // Rounding down loses at most one segment per sequence, and one per sequence is added.
    const int64_t first_segment = begin / kGatedDeltaSegment + s;
    for (int64_t h = 0; h < sizes.heads; ++h) {
      for (int64_t slab = 0; slab < slabs; ++slab) tasks.push_back({s, h, slab, begin, end, first_segment});
    }
  }
  return tasks;
}

// Each worker has working memory of its own and takes the next task; which worker runs a task changes nothing.
template <class Real, class Kernel>
void run_tasks(const GatedDeltaArgs<Real>& args, const std::vector<GatedDeltaTask>& tasks, Kernel kernel,
               int64_t workspace, int threads) {
  const int64_t count = static_cast<int64_t>(tasks.size());
  // Below this, a single decode step for instance, waking threads takes longer than the work.
  constexpr int64_t kWorthAThread = 1 << 16;
  const int64_t work = args.tokens * args.heads * args.key_size * args.channels;
  const int64_t most = std::max<int64_t>(1, std::min<int64_t>(threads, work / kWorthAThread));
  const int64_t workers = std::min(count, most);
  const int64_t stride = (workspace + 63) / 64 * 64;
  const Scratch scratch(static_cast<std::size_t>(std::max<int64_t>(workers, 1) * stride) * sizeof(Real));
  std::atomic<int64_t> next{0};
  parallel_for(workers, static_cast<int>(workers), [&](int64_t worker) {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      kernel(args, tasks[static_cast<std::size_t>(i)], scratch.as<Real>() + worker * stride);
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

template <class Real>
void forward(GatedDeltaArgs<Real> args, const Sizes& sizes, const int64_t* cu_seqlens, int threads) {
  if (cu_seqlens) check_offsets(cu_seqlens, sizes);
  check_decay(args.log_decay, sizes.tokens * sizes.heads);
  const GatedDeltaKernels<Real>& inner = gated_delta_kernels<Real>();
  run_tasks(args, make_tasks(sizes, slabs_of<Real>(sizes.channels), cu_seqlens), inner.forward,
            inner.forward_workspace(sizes.key_size), threads);
}

template <class Real>
void backward(GatedDeltaArgs<Real> args, const Sizes& sizes, const int64_t* cu_seqlens, int threads) {
  if (cu_seqlens) check_offsets(cu_seqlens, sizes);
  const GatedDeltaKernels<Real>& inner = gated_delta_kernels<Real>();
  const int64_t slabs = slabs_of<Real>(sizes.channels), workspace = inner.backward_workspace(sizes.key_size);
  const std::vector<GatedDeltaTask> tasks = make_tasks(sizes, slabs, cu_seqlens);
  if (slabs == 1) return run_tasks(args, tasks, inner.backward, workspace, threads);

  const int64_t rows = sizes.tokens * sizes.heads, keys = rows * sizes.key_size;
  const Scratch scratch(static_cast<std::size_t>(slabs * (2 * keys + 2 * rows)) * sizeof(Real));
  GatedDeltaArgs<Real> partial = args;
  partial.grad_query = scratch.as<Real>();
  partial.grad_key = partial.grad_query + slabs * keys;
  partial.grad_beta = partial.grad_key + slabs * keys;
  partial.grad_log_decay = partial.grad_beta + slabs * rows;
  run_tasks(partial, tasks, inner.backward, workspace, threads);
  add_partials(partial.grad_query, slabs, keys, args.grad_query, threads);
  add_partials(partial.grad_key, slabs, keys, args.grad_key, threads);
  add_partials(partial.grad_beta, slabs, rows, args.grad_beta, threads);
  add_partials(partial.grad_log_decay, slabs, rows, args.grad_log_decay, threads);
}

// Calls run with a null pointer of the element type.
template <class Run>
void with_real(bool is_double, const Run& run) {
  is_double ? run(static_cast<double*>(nullptr)) : run(static_cast<float*>(nullptr));
}

}  // namespace

void gated_delta_forward(const void* query, const void* key, const void* value, const void* beta, const void* log_decay,
                         const void* initial_state, const int64_t* cu_seqlens, void* output, void* final_state,
                         void* residual, void* saved_states, int64_t sequences, int64_t tokens, int64_t heads,
                         int64_t key_size, int64_t channels, bool is_double, int threads) {
  with_real(is_double, [&](auto* real) {
    using Pointer = decltype(real);
    using Real = std::remove_pointer_t<Pointer>;
    GatedDeltaArgs<Real> args{};
    args.heads = heads;
    args.key_size = key_size;
    args.channels = channels;
    args.tokens = tokens;
    args.query = static_cast<const Real*>(query);
    args.key = static_cast<const Real*>(key);
    args.value = static_cast<const Real*>(value);
    args.beta = static_cast<const Real*>(beta);
    args.log_decay = static_cast<const Real*>(log_decay);
    args.initial_state = static_cast<const Real*>(initial_state);
    args.output = static_cast<Pointer>(output);
    args.final_state = static_cast<Pointer>(final_state);
    args.residual = static_cast<Pointer>(residual);
    args.saved_states = static_cast<Pointer>(saved_states);
    forward(args, Sizes{sequences, tokens, heads, key_size, channels}, cu_seqlens, threads);
  });
}

void gated_delta_backward(const void* query, const void* key, const void* beta, const void* log_decay,
                          const int64_t* cu_seqlens, const void* residual, const void* saved_states,
                          const void* grad_output, const void* grad_final_state, void* grad_query, void* grad_key,
                          void* grad_value, void* grad_beta, void* grad_log_decay, void* grad_initial_state,
                          int64_t sequences, int64_t tokens, int64_t heads, int64_t key_size, int64_t channels,
                          bool is_double, int threads) {
  with_real(is_double, [&](auto* real) {
    using Pointer = decltype(real);
    using Real = std::remove_pointer_t<Pointer>;
    GatedDeltaArgs<Real> args{};
    args.heads = heads;
    args.key_size = key_size;
    args.channels = channels;
    args.tokens = tokens;
    args.query = static_cast<const Real*>(query);
    args.key = static_cast<const Real*>(key);
    args.beta = static_cast<const Real*>(beta);
    args.log_decay = static_cast<const Real*>(log_decay);
    if (tokens * heads > 0 && (!residual || !saved_states)) {
      throw std::invalid_argument("backward needs the residual and the states that forward saved");
    }
    // Backward only reads these two.
    args.residual = static_cast<Pointer>(const_cast<void*>(residual));
    args.saved_states = static_cast<Pointer>(const_cast<void*>(saved_states));
    args.grad_output = static_cast<const Real*>(grad_output);
    args.grad_final_state = static_cast<const Real*>(grad_final_state);
    args.grad_query = static_cast<Pointer>(grad_query);
    args.grad_key = static_cast<Pointer>(grad_key);
    args.grad_value = static_cast<Pointer>(grad_value);
    args.grad_beta = static_cast<Pointer>(grad_beta);
    args.grad_log_decay = static_cast<Pointer>(grad_log_decay);
    args.grad_initial_state = static_cast<Pointer>(grad_initial_state);
    backward(args, Sizes{sequences, tokens, heads, key_size, channels}, cu_seqlens, threads);
  });
}

}  // namespace sdm

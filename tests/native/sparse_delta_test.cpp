// The sparse delta rule in float, double and bfloat16 against the recurrence as it is written down.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "sparse_delta_rule/call.h"
#include "testing.h"

namespace testing {
namespace {

struct Case {
  int64_t B, T, H, N, D, W, R;
  bool packed, per_write, slot_rule, shared, has_initial;
  std::vector<int64_t> cu_seqlens;
  std::vector<int32_t> write_index, read_index;
  Numbers write_weight, value, beta, log_decay, read_weight, initial;

  int64_t sequences() const { return packed ? static_cast<int64_t>(cu_seqlens.size()) - 1 : B; }
  int64_t cells() const { return B * T * H; }
};

Case draw_case() {
  Case c;
  c.packed = integer(0, 3) == 0;
  c.B = c.packed ? 1 : integer(0, 3);
  c.T = integer(0, 40);
  c.H = integer(1, 3);
  c.N = integer(1, 60);
  if (integer(0, 7) == 0) {  // far more slots than visits
    c.T = integer(0, 3);
    c.N = integer(4000, 5000);
  }
  c.D = integer(1, 3) == 1 ? integer(1, 20) : integer(1, 150);
  c.W = integer(1, std::min<int64_t>(c.N, 20));
  c.R = integer(1, 20);
  c.per_write = integer(0, 1);
  c.slot_rule = integer(0, 1);
  c.shared = integer(0, 1);
  c.has_initial = integer(0, 3) > 0;
  if (c.packed) {
    c.cu_seqlens = documents(c.T);
  }
  std::vector<int32_t> slots(c.N);
  for (int64_t n = 0; n < c.N; ++n) slots[n] = static_cast<int32_t>(n);
  for (int64_t cell = 0; cell < c.cells(); ++cell) {
    std::shuffle(slots.begin(), slots.end(), generator());
    c.write_index.insert(c.write_index.end(), slots.begin(), slots.begin() + c.W);
    for (int64_t r = 0; r < c.R; ++r) c.read_index.push_back(static_cast<int32_t>(integer(0, c.N - 1)));
  }
  c.write_weight = uniforms(c.cells() * c.W, 0, 0.5);
  c.read_weight = uniforms(c.cells() * c.R, 0, 0.5);
  c.value = uniforms(c.cells() * c.D, -1, 1);
  c.beta = uniforms(c.cells(), 0, 1);
  c.log_decay = uniforms(c.cells() * (c.per_write ? c.W : 1), integer(0, 4) == 0 ? -30 : -0.4, 0);
  if (c.has_initial) c.initial = uniforms((c.shared ? 1 : c.sequences()) * c.H * c.N * c.D, -1, 1);
  return c;
}

// The inputs of a case in the type of the computation.
template <class Real>
struct Typed {
  explicit Typed(const Case& from)
      : c(from),
        write_weight(converted<Real>(c.write_weight)),
        value(converted<Real>(c.value)),
        beta(converted<Real>(c.beta)),
        log_decay(converted<Real>(c.log_decay)),
        read_weight(converted<Real>(c.read_weight)),
        initial(converted<Real>(c.initial)) {}

  template <template <class> class Call>
  Call<Real> call(int threads) const {
    Call<Real> call = {};
    call.threads = threads;
    call.sequences = c.sequences();
    call.tokens = c.T;
    call.heads = c.H;
    call.slots = c.N;
    call.channels = c.D;
    call.writes = static_cast<int32_t>(c.W);
    call.reads = static_cast<int32_t>(c.R);
    call.decay_per_write = c.per_write;
    call.slot_rule = c.slot_rule;
    call.cu_seqlens = c.packed ? c.cu_seqlens.data() : nullptr;
    call.write_index = c.write_index.data();
    call.write_weight = write_weight.data();
    call.value = value.data();
    call.beta = beta.data();
    call.log_decay = log_decay.data();
    call.read_index = c.read_index.data();
    call.read_weight = read_weight.data();
    call.initial_state = c.has_initial ? initial.data() : nullptr;
    call.initial_per_sequence = c.has_initial && !c.shared;
    return call;
  }

  const Case& c;
  const std::vector<Real> write_weight, value, beta, log_decay, read_weight, initial;
};

struct Outputs {
  Numbers y, residual, final_state;
};

template <class Real>
Outputs forward(const Case& c, int threads, bool with_final = true) {
  const Typed<Real> typed(c);
  std::vector<Real> y(c.value.size()), residual(y.size());
  std::vector<Real> final_state(with_final ? c.sequences() * c.H * c.N * c.D : 0);
  auto call = typed.template call<sdm::SparseDeltaForward>(threads);
  call.y = y.data();
  call.residual = with_final ? residual.data() : nullptr;
  call.final_state = with_final ? final_state.data() : nullptr;
  sdm::sparse_delta_forward(call);
  return {converted<double>(y), converted<double>(residual), converted<double>(final_state)};
}

// The recurrence as it is written down.
Outputs token_loop(const Case& c) {
  Outputs out = {Numbers(c.value.size()), {}, Numbers(c.sequences() * c.H * c.N * c.D)};
  for (int64_t s = 0; s < c.sequences(); ++s) {
    for (int64_t h = 0; h < c.H; ++h) {
      double* M = out.final_state.data() + (s * c.H + h) * c.N * c.D;
      const double* start = c.has_initial ? c.initial.data() + ((c.shared ? 0 : s) * c.H + h) * c.N * c.D : nullptr;
      for (int64_t i = 0; i < c.N * c.D; ++i) M[i] = start ? start[i] : 0;
      const int64_t begin = c.packed ? c.cu_seqlens[s] : s * c.T, end = c.packed ? c.cu_seqlens[s + 1] : begin + c.T;
      for (int64_t t = begin; t < end; ++t) {
        const int64_t cell = t * c.H + h;
        for (int64_t d = 0; d < c.D; ++d) {
          const double v = c.value[cell * c.D + d], beta = c.beta[cell];
          double retrieved = 0, y = 0;
          const auto decay = [&](int64_t i) { return std::exp(c.log_decay[c.per_write ? cell * c.W + i : cell]); };
          const auto row = [&](int32_t slot) -> double& { return M[slot * c.D + d]; };
          for (int64_t i = 0; i < c.W; ++i) {
            retrieved += c.write_weight[cell * c.W + i] * decay(i) * row(c.write_index[cell * c.W + i]);
          }
          for (int64_t i = 0; i < c.W; ++i) {
            double& m = row(c.write_index[cell * c.W + i]);
            m *= decay(i);
            m += c.write_weight[cell * c.W + i] * beta * (v - (c.slot_rule ? m : retrieved));
          }
          for (int64_t j = 0; j < c.R; ++j) y += c.read_weight[cell * c.R + j] * row(c.read_index[cell * c.R + j]);
          out.y[cell * c.D + d] = y;
        }
      }
    }
  }
  return out;
}

struct Gradients {
  Numbers write_weight, value, beta, log_decay, read_weight, initial;
  std::vector<Numbers*> all() { return {&write_weight, &value, &beta, &log_decay, &read_weight, &initial}; }
};

struct Plan {
  double rounding_limit;
  int64_t table_bytes;
};

// An empty grad_final: the final state was not used.
template <class Real>
Gradients backward(const Case& c, int threads, const Numbers& residual, const Numbers& grad_y,
                   const Numbers& grad_final, const Plan& plan) {
  const Typed<Real> typed(c);
  const auto from_residual = converted<Real>(residual), from_y = converted<Real>(grad_y);
  const auto from_final = converted<Real>(grad_final);
  auto write_weight = typed.write_weight, value = typed.value, beta = typed.beta, log_decay = typed.log_decay,
       read_weight = typed.read_weight, initial = typed.initial;
  auto call = typed.template call<sdm::SparseDeltaBackward>(threads);
  call.rounding_limit = plan.rounding_limit;
  call.table_bytes = plan.table_bytes;
  call.residual = from_residual.data();
  call.grad_y = from_y.data();
  call.grad_final_state = grad_final.empty() ? nullptr : from_final.data();
  call.grad_write_weight = write_weight.data();
  call.grad_value = value.data();
  call.grad_beta = beta.data();
  call.grad_log_decay = log_decay.data();
  call.grad_read_weight = read_weight.data();
  call.grad_initial_state = c.has_initial ? initial.data() : nullptr;
  sdm::sparse_delta_backward(call);
  return {converted<double>(write_weight), converted<double>(value),       converted<double>(beta),
          converted<double>(log_decay),    converted<double>(read_weight), converted<double>(initial)};
}

template <class Real>
Outputs test_forward(const Case& c, const std::string& name, double tolerance) {
  const Outputs out = forward<Real>(c, 1), threaded = forward<Real>(c, 3), expected = token_loop(c);
  require(deviation(out.y, expected.y) < tolerance, name + "y");
  require(deviation(out.final_state, expected.final_state) < tolerance, name + "final state");
  require(identical(out.y, threaded.y) && identical(out.final_state, threaded.final_state), name + "threads, forward");
  const Outputs only_y = forward<Real>(c, 1, false), only_y_threaded = forward<Real>(c, 3, false);
  require(deviation(only_y.y, expected.y) < tolerance, name + "y without the final state");
  require(identical(only_y.y, only_y_threaded.y), name + "threads, forward without the final state");
  return out;
}

template <class Real>
Gradients test_backward(const Case& c, const Numbers& residual, const Numbers& grad_y, const Numbers& grad_final,
                        const Plan& plan, const std::string& name) {
  Gradients grad = backward<Real>(c, 1, residual, grad_y, grad_final, plan);
  Gradients threaded = backward<Real>(c, 3, residual, grad_y, grad_final, plan);
  for (std::size_t i = 0; i < grad.all().size(); ++i) {
    require(identical(*grad.all()[i], *threaded.all()[i]), name + "threads, gradient " + std::to_string(i));
  }
  return grad;
}

void test_case(int number) {
  Case c = draw_case();
  const std::string name = "sparse delta, case " + std::to_string(number) + ": ", single = name + "float: ";
  const Outputs out = test_forward<double>(c, name, 1e-11), out_single = test_forward<float>(c, single, 1e-4);

  const Numbers grad_y = uniforms(out.y.size(), -1, 1);
  const Numbers grad_final = integer(0, 1) ? uniforms(out.final_state.size(), -1, 1) : Numbers();
  const int64_t table_bytes = integer(0, 2) ? 0 : int64_t{1} << 20;
  const double limits[] = {192, 0, 8};
  const double limit = limits[integer(0, 2)];
  Gradients grad = test_backward<double>(c, out.residual, grad_y, grad_final, {limit, table_bytes}, name);
  const auto loss = [&] {
    const Outputs o = token_loop(c);
    return dot(o.y, grad_y) + (grad_final.empty() ? 0 : dot(o.final_state, grad_final));
  };
  require_gradients({&c.write_weight, &c.value, &c.beta, &c.log_decay, &c.read_weight, &c.initial}, grad.all(), loss,
                    name);
  Gradients grad_single =
      test_backward<float>(c, out_single.residual, grad_y, grad_final, {limit, table_bytes}, single);
  for (std::size_t i = 0; i < grad.all().size(); ++i) {
    const Numbers &actual = *grad_single.all()[i], &expected = *grad.all()[i];
    require(deviation(actual, expected) < 1e-4 * (1 + largest(expected)), single + "gradient " + std::to_string(i));
  }
}

std::vector<uint16_t> rounded_to_bf16(Numbers& numbers) {
  std::vector<uint16_t> bits;
  for (double& x : numbers) {
    const float single = static_cast<float>(x);
    uint32_t word;
    std::memcpy(&word, &single, sizeof word);
    bits.push_back(static_cast<uint16_t>(word >> 16));
    word &= 0xFFFF0000u;
    float kept;
    std::memcpy(&kept, &word, sizeof kept);
    x = kept;
  }
  return bits;
}

Numbers from_bf16(const std::vector<uint16_t>& bits) {
  Numbers out;
  for (const uint16_t half : bits) {
    const uint32_t word = uint32_t{half} << 16;
    float single;
    std::memcpy(&single, &word, sizeof single);
    out.push_back(single);
  }
  return out;
}

// A state of bfloat16, read as it is or changed in place.
void test_bf16() {
  Case c = draw_case();
  while (c.B == 0) c = draw_case();
  c.has_initial = true;
  c.initial = uniforms((c.shared ? 1 : c.sequences()) * c.H * c.N * c.D, -1, 1);
  auto state = rounded_to_bf16(c.initial);
  const Outputs expected = token_loop(c);
  std::vector<float> y(c.value.size()), final_state(expected.final_state.size());
  const Typed<float> typed(c);
  auto call = typed.call<sdm::SparseDeltaForward>(3);
  call.initial_state = state.data();
  call.initial_bf16 = true;
  call.y = y.data();
  call.final_state = final_state.data();
  sdm::sparse_delta_forward(call);
  require(deviation(converted<double>(y), expected.y) < 1e-4, "bfloat16, y");
  require(deviation(converted<double>(final_state), expected.final_state) < 1e-4, "bfloat16, final state");
  if (c.packed || c.shared || c.T != 1) return;
  call.final_state = state.data();
  sdm::sparse_delta_forward(call);
  require(deviation(converted<double>(y), expected.y) < 0.1, "bfloat16 in place, y");
  require(deviation(from_bf16(state), expected.final_state) < 0.02, "bfloat16 in place, state");
}

template <class Real>
void test_in_place(double tolerance) {
  Case c = draw_case();
  while (c.packed || c.B == 0 || c.T == 0) c = draw_case();
  c.shared = false;
  c.has_initial = true;
  c.initial = uniforms(c.B * c.H * c.N * c.D, -1, 1);
  const Outputs expected = token_loop(c);
  const Typed<Real> typed(c);
  std::vector<Real> y(c.value.size()), state = typed.initial;
  auto call = typed.template call<sdm::SparseDeltaForward>(3);
  call.initial_state = call.final_state = state.data();
  call.y = y.data();
  sdm::sparse_delta_forward(call);
  require(deviation(converted<double>(y), expected.y) < tolerance, "in place, y");
  require(deviation(converted<double>(state), expected.final_state) < tolerance, "in place, state");
}

void test_bad_input() {
  Case c = draw_case();
  while (c.cells() < 2 || c.W < 2) c = draw_case();
  const auto refuses = [&](Case bad, bool index_error) {
    try {
      forward<double>(bad, 3);
    } catch (const std::out_of_range&) {
      return index_error;
    } catch (const std::invalid_argument&) {
      return !index_error;
    }
    return false;
  };
  Case bad = c;
  bad.write_index.back() = static_cast<int32_t>(c.N);
  require(refuses(bad, true), "slot beyond the table");
  bad = c;
  bad.read_index.front() = -1;
  require(refuses(bad, true), "negative slot");
  bad = c;
  bad.write_index[1] = bad.write_index[0];
  require(refuses(bad, false), "repeated slot");
  bad = c;
  bad.log_decay.back() = std::nan("");
  require(refuses(bad, false), "decay that is not a number");
}

}  // namespace

void test_sparse_delta(int number) {
  test_case(number);
  test_bf16();
  if (number % 8) return;
  test_in_place<double>(1e-11);
  test_in_place<float>(1e-4);
  test_bad_input();
}

namespace {

// Every token writes and reads other slots than the one before, and more rows than numbers in any list of indices.
Case fixed_case() {
  Case c = draw_case();
  c.B = c.H = 1;
  c.T = 12;
  c.N = 40;
  c.D = 64;
  c.W = c.R = 4;
  c.packed = c.per_write = c.slot_rule = false;
  c.shared = c.has_initial = true;
  c.write_index.clear();
  for (int64_t i = 0; i < c.T * c.W; ++i) c.write_index.push_back(static_cast<int32_t>(i * 7 % c.N));
  c.read_index = c.write_index;
  c.write_weight = c.read_weight = Numbers(c.T * c.W, 0.25);
  c.value = Numbers(c.T * c.D, 1);
  c.beta = Numbers(c.T, 0.5);
  c.log_decay = Numbers(c.T, -0.25);
  c.initial = Numbers(c.N * c.D, 1);
  return c;
}

template <class Real>
void backward_of_fixed_size() {
  const Case c = fixed_case();
  const Numbers ones(c.value.size(), 1);
  // All rows are saved, and no table is small enough to keep its rows.
  backward<Real>(c, 1, ones, ones, {}, {0, 0});
}

}  // namespace

void sparse_delta_forward_of_fixed_size(bool is_double) {
  is_double ? forward<double>(fixed_case(), 1) : forward<float>(fixed_case(), 1);
}

void sparse_delta_backward_of_fixed_size(bool is_double) {
  is_double ? backward_of_fixed_size<double>() : backward_of_fixed_size<float>();
}

}  // namespace testing

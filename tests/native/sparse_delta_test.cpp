// The sparse delta rule against the recurrence as it is written down.
#include <algorithm>
#include <stdexcept>

#include "sparse_delta_streams.h"
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

sdm::SparseDeltaInputs<double> inputs_of(const Case& c, int threads) {
  return {threads,
          c.sequences(),
          c.T,
          c.H,
          c.N,
          c.D,
          static_cast<int32_t>(c.W),
          static_cast<int32_t>(c.R),
          false,
          c.per_write,
          c.slot_rule,
          c.packed ? c.cu_seqlens.data() : nullptr,
          c.write_index.data(),
          c.read_index.data(),
          c.write_weight.data(),
          c.value.data(),
          c.beta.data(),
          c.log_decay.data(),
          c.read_weight.data()};
}

sdm::InitialState initial_of(const Case& c) {
  return {c.has_initial ? c.initial.data() : nullptr, false, c.has_initial && !c.shared};
}

struct Outputs {
  Numbers y, error, final_state;
};

Outputs forward(const Case& c, int threads) {
  Outputs out = {Numbers(c.value.size()), Numbers(c.value.size()), Numbers(c.sequences() * c.H * c.N * c.D)};
  sdm::sparse_delta_forward<double>(inputs_of(c, threads), initial_of(c), out.y.data(), out.error.data(),
                                    out.final_state.data(), false);
  return out;
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

// An empty grad_final: the final state was not used.
Gradients backward(const Case& c, int threads, const Numbers& error, const Numbers& grad_y, const Numbers& grad_final,
                   const sdm::InversionPlan<double>& plan) {
  Gradients g = {Numbers(c.write_weight.size()), Numbers(c.value.size()),       Numbers(c.beta.size()),
                 Numbers(c.log_decay.size()),    Numbers(c.read_weight.size()), Numbers(c.initial.size())};
  sdm::sparse_delta_backward<double>(
      inputs_of(c, threads), initial_of(c), plan,
      {error.data(), grad_y.data(), grad_final.empty() ? nullptr : grad_final.data(), g.write_weight.data(), g.value.data(), g.beta.data(),
       g.log_decay.data(), g.read_weight.data(), c.has_initial ? g.initial.data() : nullptr});
  return g;
}

void test_case(int number) {
  Case c = draw_case();
  const std::string name = "sparse delta, case " + std::to_string(number) + ": ";
  const Outputs out = forward(c, 1), threaded = forward(c, 3), expected = token_loop(c);
  require(deviation(out.y, expected.y) < 1e-11, name + "y");
  require(deviation(out.final_state, expected.final_state) < 1e-11, name + "final state");
  require(identical(out.y, threaded.y) && identical(out.final_state, threaded.final_state), name + "threads, forward");

  Numbers y(out.y.size()), y_threaded(out.y.size());
  sdm::sparse_delta_forward<double>(inputs_of(c, 1), initial_of(c), y.data(), nullptr, nullptr, false);
  sdm::sparse_delta_forward<double>(inputs_of(c, 3), initial_of(c), y_threaded.data(), nullptr, nullptr, false);
  require(deviation(y, expected.y) < 1e-11, name + "y without the final state");
  require(identical(y, y_threaded), name + "threads, forward without the final state");

  const Numbers grad_y = uniforms(out.y.size(), -1, 1);
  const Numbers grad_final = integer(0, 1) ? uniforms(out.final_state.size(), -1, 1) : Numbers();
  const int64_t table_bytes = integer(0, 2) ? 0 : int64_t{1} << 20;
  const sdm::InversionPlan<double> plans[] = {{3, 1024, table_bytes}, {-1, 1024, table_bytes}, {1, 2, table_bytes}};
  const sdm::InversionPlan<double> plan = plans[integer(0, 2)];
  Gradients grad = backward(c, 1, out.error, grad_y, grad_final, plan);
  Gradients grad_threaded = backward(c, 3, out.error, grad_y, grad_final, plan);
  for (std::size_t i = 0; i < grad.all().size(); ++i) {
    require(identical(*grad.all()[i], *grad_threaded.all()[i]), name + "threads, gradient " + std::to_string(i));
  }
  const auto loss = [&] {
    const Outputs o = token_loop(c);
    return dot(o.y, grad_y) + (grad_final.empty() ? 0 : dot(o.final_state, grad_final));
  };
  require_gradients({&c.write_weight, &c.value, &c.beta, &c.log_decay, &c.read_weight, &c.initial}, grad.all(), loss,
                    name);
}

void test_in_place() {
  Case c = draw_case();
  while (c.packed || c.B == 0 || c.T == 0) c = draw_case();
  c.shared = false;
  c.has_initial = true;
  c.initial = uniforms(c.B * c.H * c.N * c.D, -1, 1);
  const Outputs expected = token_loop(c);
  Numbers y(c.value.size());
  sdm::sparse_delta_forward<double>(inputs_of(c, 3), initial_of(c), y.data(), nullptr, c.initial.data(), false);
  require(deviation(y, expected.y) < 1e-11 && deviation(c.initial, expected.final_state) < 1e-11, "in place");
}

void test_bad_input() {
  Case c = draw_case();
  while (c.cells() < 2 || c.W < 2) c = draw_case();
  const auto refuses = [&](Case bad, bool index_error) {
    try {
      forward(bad, 3);
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
  if (number % 8) return;
  test_in_place();
  test_bad_input();
}

}  // namespace testing

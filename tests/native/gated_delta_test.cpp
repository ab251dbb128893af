// The dense gated delta rule against the recurrence as it is written down.
#include "gated_delta.h"

#include "testing.h"

namespace testing {
namespace {

struct Case {
  int64_t S, T, H, K, D;  // T: of all documents, or of each of S rows
  std::vector<int64_t> cu_seqlens;
  Numbers query, key, value, beta, log_decay, initial;

  bool packed() const { return !cu_seqlens.empty(); }
  int64_t tokens() const { return packed() ? T : S * T; }
  int64_t begin(int64_t s) const { return packed() ? cu_seqlens[s] : s * T; }
  int64_t end(int64_t s) const { return packed() ? cu_seqlens[s + 1] : (s + 1) * T; }
  int64_t segments() const { return tokens() / sdm::kGatedDeltaSegment + S; }
};

Case draw_case() {
  Case c;
  c.T = integer(0, 80);
  c.S = integer(1, 3);
  if (integer(0, 2) == 0) {
    c.cu_seqlens = documents(c.T);
    c.S = static_cast<int64_t>(c.cu_seqlens.size()) - 1;
  }
  c.H = integer(1, 3);
  c.K = integer(1, 20);
  c.D = integer(1, 80);
  const int64_t cells = c.tokens() * c.H;
  c.query = uniforms(cells * c.K, -0.5, 0.5);
  c.key = uniforms(cells * c.K, -0.3, 0.3);
  c.value = uniforms(cells * c.D, -1, 1);
  c.beta = uniforms(cells, 0, 1);
  c.log_decay = uniforms(cells, -0.4, 0);
  c.initial = uniforms(c.S * c.H * c.K * c.D, -1, 1);
  return c;
}

struct Outputs {
  Numbers y, final_state, residual, saved;
};

Outputs forward(const Case& c, int threads) {
  Outputs out = {Numbers(c.value.size()), Numbers(c.initial.size()), Numbers(c.value.size()),
                 Numbers(c.segments() * c.H * c.K * c.D)};
  sdm::gated_delta_forward(c.query.data(), c.key.data(), c.value.data(), c.beta.data(), c.log_decay.data(),
                           c.initial.data(), c.packed() ? c.cu_seqlens.data() : nullptr, out.y.data(),
                           out.final_state.data(), out.residual.data(), out.saved.data(), c.S, c.tokens(), c.H, c.K, c.D,
                           true, threads);
  return out;
}

Outputs token_loop(const Case& c) {
  Outputs out = {Numbers(c.value.size()), c.initial, {}, {}};
  for (int64_t s = 0; s < c.S; ++s) {
    for (int64_t h = 0; h < c.H; ++h) {
      for (int64_t t = c.begin(s); t < c.end(s); ++t) {
        const int64_t cell = t * c.H + h;
        const double *query = c.query.data() + cell * c.K, *key = c.key.data() + cell * c.K;
        for (int64_t d = 0; d < c.D; ++d) {
          double* M = out.final_state.data() + (s * c.H + h) * c.K * c.D + d;
          double retrieved = 0, y = 0;
          for (int64_t i = 0; i < c.K; ++i) retrieved += key[i] * (M[i * c.D] *= std::exp(c.log_decay[cell]));
          const double u = c.beta[cell] * (c.value[cell * c.D + d] - retrieved);
          for (int64_t i = 0; i < c.K; ++i) y += query[i] * (M[i * c.D] += key[i] * u);
          out.y[cell * c.D + d] = y;
        }
      }
    }
  }
  return out;
}

struct Gradients {
  Numbers query, key, value, beta, log_decay, initial;
  std::vector<Numbers*> all() { return {&query, &key, &value, &beta, &log_decay, &initial}; }
};

Gradients backward(const Case& c, int threads, const Outputs& out, const Numbers& grad_y, const Numbers& grad_final) {
  Gradients g = {Numbers(c.query.size()), Numbers(c.key.size()),       Numbers(c.value.size()),
                 Numbers(c.beta.size()),  Numbers(c.log_decay.size()), Numbers(c.initial.size())};
  sdm::gated_delta_backward(c.query.data(), c.key.data(), c.beta.data(), c.log_decay.data(),
                            c.packed() ? c.cu_seqlens.data() : nullptr, out.residual.data(), out.saved.data(),
                            grad_y.data(), grad_final.empty() ? nullptr : grad_final.data(), g.query.data(),
                            g.key.data(), g.value.data(), g.beta.data(), g.log_decay.data(), g.initial.data(), c.S,
                            c.tokens(), c.H, c.K, c.D, true, threads);
  return g;
}

}  // namespace

void test_gated_delta(int number) {
  const std::string name = "gated delta, case " + std::to_string(number) + ": ";
  Case c = draw_case();
  const Outputs out = forward(c, 1), threaded = forward(c, 3), expected = token_loop(c);
  require(deviation(out.y, expected.y) < 1e-11, name + "y");
  require(deviation(out.final_state, expected.final_state) < 1e-11, name + "final state");
  require(identical(out.y, threaded.y) && identical(out.final_state, threaded.final_state), name + "threads, forward");

  const Numbers grad_y = uniforms(static_cast<int64_t>(out.y.size()), -1, 1);
  const Numbers grad_final =
      integer(0, 1) ? uniforms(static_cast<int64_t>(out.final_state.size()), -1, 1) : Numbers();
  Gradients grad = backward(c, 1, out, grad_y, grad_final), grad_threaded = backward(c, 3, out, grad_y, grad_final);
  for (std::size_t i = 0; i < grad.all().size(); ++i) {
    require(identical(*grad.all()[i], *grad_threaded.all()[i]), name + "threads, gradient " + std::to_string(i));
  }
  const auto loss = [&] {
    const Outputs o = token_loop(c);
    return dot(o.y, grad_y) + (grad_final.empty() ? 0 : dot(o.final_state, grad_final));
  };
  require_gradients({&c.query, &c.key, &c.value, &c.beta, &c.log_decay, &c.initial}, grad.all(), loss, name);
}

}  // namespace testing

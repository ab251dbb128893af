// The dense gated delta rule in float and double against the recurrence as it is written down.
#include "gated_delta_rule/rule.h"

#include "testing.h"

namespace testing {
namespace {

struct Case {
  int64_t S, T, H, K, D;  // T: of all documents, or of each of S rows
  int64_t decays;         // of a token and head: 1 or K
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
  c.decays = integer(0, 1) ? c.K : 1;
  c.log_decay = uniforms(cells * c.decays, -0.4, 0);
  c.initial = uniforms(c.S * c.H * c.K * c.D, -1, 1);
  return c;
}

struct Outputs {
  Numbers y, final_state, residual, saved;
};

template <class Call>
Call call_of(const Case& c, int threads) {
  Call call = {};
  call.threads = threads;
  call.sequences = c.S;
  call.tokens = c.tokens();
  call.heads = c.H;
  call.key_size = c.K;
  call.channels = c.D;
  call.decay_size = c.decays;
  call.cu_seqlens = c.packed() ? c.cu_seqlens.data() : nullptr;
  return call;
}

template <class Real>
Outputs forward(const Case& c, int threads) {
  const auto query = converted<Real>(c.query), key = converted<Real>(c.key), value = converted<Real>(c.value),
             beta = converted<Real>(c.beta), log_decay = converted<Real>(c.log_decay),
             initial = converted<Real>(c.initial);
  std::vector<Real> y(value.size()), final_state(initial.size()), residual(value.size()),
      saved(c.segments() * c.H * c.K * c.D);
  auto call = call_of<sdm::GatedDeltaForward<Real>>(c, threads);
  call.query = query.data();
  call.key = key.data();
  call.beta = beta.data();
  call.log_decay = log_decay.data();
  call.value = value.data();
  call.initial_state = initial.data();
  call.y = y.data();
  call.final_state = final_state.data();
  call.residual = residual.data();
  call.saved_states = saved.data();
  sdm::gated_delta_forward(call);
  return {converted<double>(y), converted<double>(final_state), converted<double>(residual), converted<double>(saved)};
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
          for (int64_t i = 0; i < c.K; ++i) {
            const double log_decay = c.log_decay[cell * c.decays + (c.decays > 1 ? i : 0)];
            retrieved += key[i] * (M[i * c.D] *= std::exp(log_decay));
          }
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

template <class Real>
Gradients backward(const Case& c, int threads, const Outputs& out, const Numbers& grad_y, const Numbers& grad_final) {
  const auto query = converted<Real>(c.query), key = converted<Real>(c.key), beta = converted<Real>(c.beta),
             log_decay = converted<Real>(c.log_decay), residual = converted<Real>(out.residual),
             saved = converted<Real>(out.saved), from_y = converted<Real>(grad_y),
             from_final = converted<Real>(grad_final);
  auto g_query = query, g_key = key, g_beta = beta, g_log_decay = log_decay, g_value = converted<Real>(c.value),
       g_initial = converted<Real>(c.initial);
  auto call = call_of<sdm::GatedDeltaBackward<Real>>(c, threads);
  call.query = query.data();
  call.key = key.data();
  call.beta = beta.data();
  call.log_decay = log_decay.data();
  call.residual = residual.data();
  call.saved_states = saved.data();
  call.grad_y = from_y.data();
  call.grad_final_state = grad_final.empty() ? nullptr : from_final.data();
  call.grad_query = g_query.data();
  call.grad_key = g_key.data();
  call.grad_value = g_value.data();
  call.grad_beta = g_beta.data();
  call.grad_log_decay = g_log_decay.data();
  call.grad_initial_state = g_initial.data();
  sdm::gated_delta_backward(call);
  return {converted<double>(g_query), converted<double>(g_key),       converted<double>(g_value),
          converted<double>(g_beta),  converted<double>(g_log_decay), converted<double>(g_initial)};
}

template <class Real>
Outputs test_forward(const Case& c, const std::string& name, double tolerance) {
  const Outputs out = forward<Real>(c, 1), threaded = forward<Real>(c, 3), expected = token_loop(c);
  require(deviation(out.y, expected.y) < tolerance, name + "y");
  require(deviation(out.final_state, expected.final_state) < tolerance, name + "final state");
  require(identical(out.y, threaded.y) && identical(out.final_state, threaded.final_state), name + "threads, forward");
  return out;
}

template <class Real>
Gradients test_backward(const Case& c, const Outputs& out, const Numbers& grad_y, const Numbers& grad_final,
                        const std::string& name) {
  Gradients grad = backward<Real>(c, 1, out, grad_y, grad_final);
  Gradients threaded = backward<Real>(c, 3, out, grad_y, grad_final);
  for (std::size_t i = 0; i < grad.all().size(); ++i) {
    require(identical(*grad.all()[i], *threaded.all()[i]), name + "threads, gradient " + std::to_string(i));
  }
  return grad;
}

}  // namespace

void test_gated_delta(int number) {
  const std::string name = "gated delta, case " + std::to_string(number) + ": ", single = name + "float: ";
  Case c = draw_case();
  const Outputs out = test_forward<double>(c, name, 1e-11), out_single = test_forward<float>(c, single, 1e-4);

  const Numbers grad_y = uniforms(static_cast<int64_t>(out.y.size()), -1, 1);
  const Numbers grad_final =
      integer(0, 1) ? uniforms(static_cast<int64_t>(out.final_state.size()), -1, 1) : Numbers();
  Gradients grad = test_backward<double>(c, out, grad_y, grad_final, name);
  const auto loss = [&] {
    const Outputs o = token_loop(c);
    return dot(o.y, grad_y) + (grad_final.empty() ? 0 : dot(o.final_state, grad_final));
  };
  require_gradients({&c.query, &c.key, &c.value, &c.beta, &c.log_decay, &c.initial}, grad.all(), loss, name);
  Gradients grad_single = test_backward<float>(c, out_single, grad_y, grad_final, single);
  for (std::size_t i = 0; i < grad.all().size(); ++i) {
    const Numbers &actual = *grad_single.all()[i], &expected = *grad.all()[i];
    require(deviation(actual, expected) < 1e-4 * (1 + largest(expected)), single + "gradient " + std::to_string(i));
  }
}

}  // namespace testing

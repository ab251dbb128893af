// A step of sliding-window attention and several linear layers at once, against plain loops in double.
#include "attention/window_step.h"

#include "linear/linear.h"
#include "testing.h"

namespace testing {
namespace {

template <class Real>
void test_window(const std::string& name) {
  const int64_t S = integer(0, 3), G = integer(1, 3), H = G * integer(1, 3), D = 2 * integer(1, 20), W = integer(1, 9);
  const int64_t row = 2 * (H + G) * D, ring = S * G * W * D;
  const double rope_scale = 1.25;
  const Numbers projected = uniforms(S * row, -1, 1), keys = uniforms(ring, -1, 1), values = uniforms(ring, -1, 1);
  const Numbers turns = uniforms(D / 2, 0, 0.5);
  std::vector<int64_t> length(static_cast<std::size_t>(S));
  for (int64_t& tokens : length) tokens = integer(0, 2 * W);
  const auto run = [&](int threads, std::vector<Real>& new_keys, std::vector<Real>& new_values) {
    const std::vector<Real> real = converted<Real>(projected);
    std::vector<Real> y(static_cast<std::size_t>(S * H * D));
    new_keys = converted<Real>(keys), new_values = converted<Real>(values);
    sdm::window_step(sdm::WindowStep<Real>{threads, S, H, G, D, W, rope_scale, turns.data(), length.data(), real.data(),
                                           new_keys.data(), new_values.data(), y.data()});
    return y;
  };
  std::vector<Real> new_keys, new_values, again_keys, again_values;
  const std::vector<Real> y = run(1, new_keys, new_values);
  require(identical(y, run(4, again_keys, again_values)), name + ": threads");
  require(identical(new_keys, again_keys) && identical(new_values, again_values), name + ": rings, threads");

  Numbers expected(y.size()), expected_keys = keys, expected_values = values;
  for (int64_t s = 0; s < S; ++s) {
    const auto rotated = [&](const double* from, int64_t c) {
      const int64_t i = c % (D / 2);
      const double angle = 2 * M_PI * static_cast<double>(length[s]) * turns[i];
      const double other = c < D / 2 ? -from[c + D / 2] : from[c - D / 2];
      return rope_scale * (from[c] * std::cos(angle) + other * std::sin(angle));
    };
    const double* token = projected.data() + s * row;
    for (int64_t g = 0; g < G; ++g) {
      for (int64_t c = 0; c < D; ++c) {
        const int64_t at = ((s * G + g) * W + length[s] % W) * D + c;
        expected_keys[at] = rotated(token + (H + g) * D, c);
        expected_values[at] = token[(H + G + g) * D + c];
      }
    }
    for (int64_t h = 0; h < H; ++h) {
      const int64_t first = (s * G + h * G / H) * W * D, seen = std::min(length[s] + 1, W);
      Numbers weight(seen);
      double norm = 0;
      for (int64_t j = 0; j < seen; ++j) {
        double score = 0;
        for (int64_t c = 0; c < D; ++c) score += rotated(token + h * D, c) * expected_keys[first + j * D + c];
        norm += weight[j] = std::exp(score / std::sqrt(static_cast<double>(D)));
      }
      for (int64_t c = 0; c < D; ++c) {
        double sum = 0;
        for (int64_t j = 0; j < seen; ++j) sum += weight[j] / norm * expected_values[first + j * D + c];
        expected[(s * H + h) * D + c] = sum / (1 + std::exp(-token[(H + 2 * G + h) * D + c]));
      }
    }
  }
  const double most = sizeof(Real) == sizeof(float) ? 1e-4 : 1e-11;
  require(deviation(expected, converted<double>(y)) <= most, name + ": y");
  require(deviation(expected_keys, converted<double>(new_keys)) <= most, name + ": keys");
  require(deviation(expected_values, converted<double>(new_values)) <= most, name + ": values");
}

template <class Real>
std::vector<Real> one_layer(int64_t rows, int64_t inputs, int64_t outputs, const std::vector<Real>& x,
                            const std::vector<Real>& weight, const Real* bias = nullptr) {
  std::vector<Real> y(static_cast<std::size_t>(rows * outputs));
  sdm::linear(sdm::LinearCall<Real>{1, rows, inputs, outputs, 0, x.data(), weight.data(), nullptr, bias, y.data()});
  return y;
}

template <class Real>
void test_group(const std::string& name) {
  const int64_t rows = integer(0, 9), inputs = integer(0, 50), count = integer(0, 4);
  const std::vector<Real> x = converted<Real>(uniforms(rows * inputs, -1, 1));
  std::vector<std::vector<Real>> weights, biases;
  std::vector<int64_t> layers, outputs;
  int64_t total = 0;
  for (int64_t n = 0; n < count; ++n) {
    outputs.push_back(integer(0, 60));
    total += outputs.back();
    weights.push_back(converted<Real>(uniforms(inputs * outputs.back(), -1, 1)));
    biases.push_back(converted<Real>(uniforms(outputs.back(), -1, 1)));
    const auto address = [](const Real* array) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(array)); };
    const int64_t fields[] = {outputs.back(), 0, address(weights.back().data()), 0, address(biases.back().data())};
    layers.insert(layers.end(), fields, fields + 5);
  }
  for (const int threads : {1, 4}) {
    std::vector<Real> y(static_cast<std::size_t>(rows * total));
    sdm::linear_group(sdm::LinearGroup<Real>{threads, rows, inputs, count, layers.data(), x.data(), y.data()});
    int64_t before = 0;
    for (int64_t n = 0; n < count; before += outputs[n++]) {
      const std::vector<Real> own = one_layer(rows, inputs, outputs[n], x, weights[n], biases[n].data());
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t o = 0; o < outputs[n]; ++o) {
          require(y[r * total + before + o] == own[r * outputs[n] + o], name + ": differs from one layer");
        }
      }
    }
  }
}

template <class Real>
void test_mlp(const std::string& name) {
  const int64_t rows = integer(0, 9), inputs = integer(0, 50), hidden = integer(0, 60), outputs = integer(0, 50);
  const std::vector<Real> x = converted<Real>(uniforms(rows * inputs, -1, 1));
  const std::vector<Real> gate = converted<Real>(uniforms(inputs * hidden, -1, 1));
  const std::vector<Real> up = converted<Real>(uniforms(inputs * hidden, -1, 1));
  const std::vector<Real> down = converted<Real>(uniforms(hidden * outputs, -1, 1));
  std::vector<Real> gated = one_layer(rows, inputs, hidden, x, gate), raised = one_layer(rows, inputs, hidden, x, up);
  for (std::size_t i = 0; i < gated.size(); ++i) gated[i] = gated[i] / (1 + std::exp(-gated[i])) * raised[i];
  const std::vector<Real> expected = one_layer(rows, hidden, outputs, gated, down);
  for (const int threads : {1, 4}) {
    std::vector<Real> y(expected.size());
    sdm::gated_mlp(sdm::GatedMLP<Real>{threads, rows, inputs, hidden, outputs, 0, x.data(), gate.data(), up.data(),
                                       down.data(), nullptr, nullptr, nullptr, y.data()});
    const double difference = deviation(converted<double>(expected), converted<double>(y));
    require(difference <= 1e-5 * std::max(1.0, largest(converted<double>(expected))), name);
  }
}

template <class Real>
void test_norm(const std::string& name) {
  const int64_t rows = integer(0, 4), size = integer(1, 70);
  const Numbers x = uniforms(rows * size, -1, 1), weight = uniforms(size, -1, 1);
  const std::vector<Real> real_x = converted<Real>(x), real_weight = converted<Real>(weight);
  std::vector<Real> y(x.size());
  sdm::rms_norm(sdm::RMSNorm<Real>{1, rows, size, 0.25, real_x.data(), real_weight.data(), y.data()});
  Numbers expected(x.size());
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t i = row * size; i < (row + 1) * size; ++i) squares += x[i] * x[i];
    for (int64_t i = 0; i < size; ++i) {
      expected[row * size + i] = x[row * size + i] * weight[i] / std::sqrt(squares / static_cast<double>(size) + 0.25);
    }
  }
  require(deviation(expected, converted<double>(y)) <= (sizeof(Real) == sizeof(float) ? 1e-6 : 1e-14), name);
}

}  // namespace

void test_decode_step(int number) {
  const std::string name = "decode step, case " + std::to_string(number);
  test_window<float>(name + ", window, float"), test_window<double>(name + ", window, double");
  test_group<float>(name + ", group, float"), test_group<double>(name + ", group, double");
  test_norm<float>(name + ", norm, float"), test_norm<double>(name + ", norm, double");
  test_mlp<float>(name + ", mlp, float"), test_mlp<double>(name + ", mlp, double");
}

}  // namespace testing

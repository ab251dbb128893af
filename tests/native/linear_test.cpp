// Matrix products of few rows, in every format of weights, against a plain loop in double.
#include "linear/linear.h"

#include "testing.h"

namespace testing {
namespace {

// A weight of each format, and the number that it stands for.
float bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float out;
  std::memcpy(&out, &wide, sizeof out);
  return out;
}

template <class Real>
void test(int64_t format, const std::string& name) {
  const int64_t rows = integer(0, 9), inputs = integer(0, 70), outputs = integer(0, 70);
  const Numbers x = uniforms(rows * inputs, -1, 1), scale = uniforms(outputs, 0.1, 1), bias = uniforms(outputs, -1, 1);
  const bool scaled = integer(0, 1) == 1, biased = integer(0, 1) == 1;
  Numbers weight = uniforms(inputs * outputs, -1, 1);
  std::vector<Real> reals;
  std::vector<uint16_t> halves(weight.size());
  std::vector<int8_t> bytes(weight.size());
  for (std::size_t i = 0; i < weight.size(); ++i) {
    const float number = static_cast<float>(weight[i]);
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    halves[i] = static_cast<uint16_t>(bits >> 16);
    bytes[i] = static_cast<int8_t>(weight[i] * 127);
    if (format == 1) weight[i] = bfloat16(halves[i]);
    if (format == 2) weight[i] = bytes[i];
  }
  reals = converted<Real>(weight);
  const void* weights[] = {reals.data(), halves.data(), bytes.data()};

  const auto run = [&](int threads) {
    const std::vector<Real> real_x = converted<Real>(x), real_scale = converted<Real>(scale), real_bias = converted<Real>(bias);
    std::vector<Real> y(static_cast<std::size_t>(rows * outputs));
    sdm::linear(sdm::LinearCall<Real>{threads, rows, inputs, outputs, format, real_x.data(), weights[format],
                                      scaled ? real_scale.data() : nullptr, biased ? real_bias.data() : nullptr, y.data()});
    return y;
  };
  const std::vector<Real> y = run(1);
  require(identical(y, run(4)), name + ": threads");
  Numbers expected(y.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < outputs; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < inputs; ++i) sum += x[r * inputs + i] * weight[o * inputs + i];
      expected[r * outputs + o] = (scaled ? sum * scale[o] : sum) + (biased ? bias[o] : 0);
    }
  }
  const double most = sizeof(Real) == sizeof(float) ? 1e-5 : 1e-12;
  require(deviation(expected, converted<double>(y)) <= most * std::max(1.0, largest(expected)), name);
}

}  // namespace

void test_linear(int number) {
  const std::string name = "linear, case " + std::to_string(number);
  for (int64_t format = 0; format < 3; ++format) test<float>(format, name + ", float, format " + std::to_string(format));
  test<double>(0, name + ", double");
}

}  // namespace testing

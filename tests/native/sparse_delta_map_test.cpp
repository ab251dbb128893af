// The map from reading to writing tokens against one number per slot and token.
#include "sparse_delta_map/map.h"

#include <numeric>
#include <stdexcept>

#include "testing.h"

namespace testing {
namespace {

template <class Real>
void test_case(const std::string& name) {
  const int64_t batch = integer(1, 2), time = integer(0, 30), heads = integer(1, 2), slots = integer(1, 20);
  const int64_t writes = integer(1, std::min<int64_t>(slots, 6)), reads = integer(1, 6), tokens = batch * time * heads;
  const bool per_write = integer(0, 1), slot_update = integer(0, 1);
  const std::vector<int64_t> offsets = batch == 1 ? documents(time) : std::vector<int64_t>{0, time};
  std::vector<int64_t> write_index, read_index(tokens * reads);
  for (int64_t i = 0; i < tokens; ++i) {
    std::vector<int64_t> order(slots);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), generator());
    write_index.insert(write_index.end(), order.begin(), order.begin() + writes);
  }
  for (int64_t& slot : read_index) slot = integer(0, slots - 1);
  const Numbers k = uniforms(tokens * writes, -0.2, 1), q = uniforms(tokens * reads, -1, 1);
  const Numbers beta = uniforms(tokens, 0, 1), g = uniforms(tokens * (per_write ? writes : 1), -2, 0);
  const auto k_real = converted<Real>(k), q_real = converted<Real>(q), beta_real = converted<Real>(beta);
  const auto g_real = converted<Real>(g);

  struct Result {
    std::vector<int64_t> offsets, pairs;
    std::vector<int32_t> source;
    std::vector<double> weight, initial, dropped;
  };
  const auto run = [&](int threads, const std::vector<int64_t>& reading) {
    Result out;
    out.offsets.resize(tokens + 1), out.pairs.resize(tokens);
    out.initial.resize(tokens * reads), out.dropped.resize(tokens);
    sdm::SparseDeltaMap<Real> call{threads, batch, time, heads, slots, writes, reads,
                                   static_cast<int64_t>(offsets.size()) - 1, per_write, slot_update, 0.0,
                                   write_index.data(), k_real.data(), beta_real.data(), g_real.data(), reading.data(),
                                   q_real.data(), offsets.data(), out.offsets.data(), out.pairs.data(), nullptr,
                                   nullptr, out.initial.data(), out.dropped.data()};
    sdm::sparse_delta_map(call);
    std::partial_sum(out.pairs.begin(), out.pairs.end(), out.offsets.begin() + 1);
    out.source.resize(out.offsets.back()), out.weight.resize(out.offsets.back());
    call.source = out.source.data(), call.weight = out.weight.data();
    if (!out.source.empty()) sdm::sparse_delta_map(call);
    return out;
  };
  const Result result = run(1, read_index), threaded = run(3, read_index);
  require(identical(result.source, threaded.source) && identical(result.weight, threaded.weight) &&
              identical(result.initial, threaded.initial),
          name + "threads");

  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      std::vector<Numbers> share(slots, Numbers(time));
      Numbers initial(slots, 1.0);
      for (int64_t t = 0; t < time; ++t) {
        if (std::find(offsets.begin(), offsets.end(), t) != offsets.end()) {
          for (Numbers& row : share) std::fill(row.begin(), row.end(), 0.0);
          std::fill(initial.begin(), initial.end(), 1.0);
        }
        const int64_t token = (b * time + t) * heads + h;
        for (int64_t w = 0; w < writes; ++w) {
          const int64_t at = token * writes + w, slot = write_index[at];
          const double decay = std::exp(g[per_write ? at : token]);
          const double factor = slot_update ? decay * (1 - beta[token] * k[at]) : decay;
          for (double& x : share[slot]) x *= factor;
          initial[slot] *= factor;
          share[slot][t] += k[at];
        }
        Numbers expected(time), got(time);
        for (int64_t r = 0; r < reads; ++r) {
          const int64_t at = token * reads + r, slot = read_index[at];
          for (int64_t l = 0; l < time; ++l) expected[l] += q[at] * share[slot][l];
          require(std::abs(result.initial[at] - q[at] * initial[slot]) < 1e-9, name + "initial weight");
        }
        const int64_t row = (b * heads + h) * time + t;
        for (int64_t i = result.offsets[row]; i < result.offsets[row + 1]; ++i) {
          got[result.source[i]] = result.weight[i];
        }
        require(deviation(expected, got) < 1e-9, name + "map");
      }
    }
  }
  if (tokens == 0) return;
  std::vector<int64_t> bad = read_index;
  bad[integer(0, tokens * reads - 1)] = integer(0, 1) ? -1 : slots;
  try {
    run(3, bad);
    require(false, name + "a slot out of range was accepted");
  } catch (const std::out_of_range&) {
  }
}

}  // namespace

void test_sparse_delta_map(int number) {
  const std::string name = "map, case " + std::to_string(number) + ": ";
  number % 2 ? test_case<float>(name) : test_case<double>(name);
}

}  // namespace testing

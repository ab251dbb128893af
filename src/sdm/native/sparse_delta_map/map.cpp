#include "sparse_delta_map/map.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "checks.h"
#include "parallel.h"

namespace sdm {

namespace {

// One write to one slot.
struct Write {
  double weight;    // k
  double log_size;  // sum of log |factor| over the writes to this slot so far, this one's included
  int32_t token;
  int32_t first;        // place in the list of the first write to this slot that is not yet scaled to zero
  bool scaled_to_zero;  // whether a factor of zero has erased what the slot held at the start of its document
  bool negative;        // sign of the product of the factors so far
};

// The writes of one stream, by slot and then by time.
struct Writes {
  std::vector<int64_t> begin;  // [slots + 1]
  std::vector<Write> list;     // [time * writes]
};

template <class Real>
class Stream {
 public:
  Stream(const SparseDeltaMap<Real>& call, int64_t b, int64_t h, const std::vector<int32_t>& document_start)
      : call_(call), b_(b), h_(h), document_start_(document_start) {
    index_writes();
  }

  // The rows [begin, end): their pairs are counted, or stored where `source` is given.
  void rows(int64_t begin, int64_t end) const {
    std::vector<double> sum(static_cast<std::size_t>(call_.time), 0.0);
    std::vector<int32_t> sources;
    std::vector<char> seen(static_cast<std::size_t>(call_.time), 0);
    for (int64_t t = begin; t < end; ++t) {
      sources.clear();
      for (int64_t r = 0; r < call_.reads; ++r) add_slot(t, r, sum, seen, sources);
      finish_row(t, sum, seen, sources);
    }
  }

 private:
  int64_t token(int64_t t) const { return (b_ * call_.time + t) * call_.heads + h_; }
  int64_t row(int64_t t) const { return (b_ * call_.heads + h_) * call_.time + t; }

  double factor(int64_t t, int64_t w) const {
    const int64_t at = token(t);
    const int64_t write = at * call_.writes + w;
    const double decay = std::exp(static_cast<double>(call_.log_decay[call_.decay_per_write ? write : at]));
    if (!call_.slot_update) return decay;
    return decay * (1.0 - static_cast<double>(call_.beta[at]) * static_cast<double>(call_.write_weight[write]));
  }

  void index_writes() {
    const int64_t entries = call_.time * call_.writes;
    writes_.begin.assign(static_cast<std::size_t>(call_.slots + 1), 0);
    for (int64_t t = 0; t < call_.time; ++t) {
      for (int64_t w = 0; w < call_.writes; ++w) ++writes_.begin[slot_of(call_.write_index, t, w, call_.writes) + 1];
    }
    for (int64_t slot = 0; slot < call_.slots; ++slot) writes_.begin[slot + 1] += writes_.begin[slot];
    writes_.list.resize(static_cast<std::size_t>(entries));
    std::vector<int64_t> next(writes_.begin.begin(), writes_.begin.end() - 1);
    for (int64_t t = 0; t < call_.time; ++t) {
      for (int64_t w = 0; w < call_.writes; ++w) {
        const int64_t slot = slot_of(call_.write_index, t, w, call_.writes);
        const int64_t place = next[slot]++;
        const Write* before = place > writes_.begin[slot] ? &writes_.list[place - 1] : nullptr;
        if (before && before->token < document_start_[t]) before = nullptr;
        writes_.list[place] = append(t, w, place, before);
      }
    }
  }

  Write append(int64_t t, int64_t w, int64_t place, const Write* before) const {
    const double factor = this->factor(t, w);
    Write write{};
    write.weight = static_cast<double>(call_.write_weight[token(t) * call_.writes + w]);
    write.token = static_cast<int32_t>(t);
    if (factor == 0.0) {  // nothing of before is left
      write.first = static_cast<int32_t>(place);
      write.scaled_to_zero = true;
      return write;
    }
    write.first = before ? before->first : static_cast<int32_t>(place);
    write.scaled_to_zero = before && before->scaled_to_zero;
    write.log_size = (before ? before->log_size : 0.0) + std::log(std::abs(factor));
    write.negative = (before && before->negative) != (factor < 0.0);
    return write;
  }

  int64_t slot_of(const int64_t* index, int64_t t, int64_t i, int64_t count) const {
    const int64_t slot = index[token(t) * count + i];
    if (slot < 0 || slot >= call_.slots) {
      throw std::out_of_range("slots must lie in [0, num_slots) = [0, " + std::to_string(call_.slots) + "), got " +
                              std::to_string(slot));
    }
    return slot;
  }

  void add_slot(int64_t t, int64_t r, std::vector<double>& sum, std::vector<char>& seen,
                std::vector<int32_t>& sources) const {
    const int64_t slot = slot_of(call_.read_index, t, r, call_.reads), at = token(t) * call_.reads + r;
    const double query = static_cast<double>(call_.read_weight[at]);
    const Write* begin = writes_.list.data() + writes_.begin[slot];
    const Write* end = std::upper_bound(begin, writes_.list.data() + writes_.begin[slot + 1], t,
                                        [](int64_t time, const Write& write) { return time < write.token; });
    const bool written = end > begin && (end - 1)->token >= document_start_[t];
    if (!call_.source) call_.initial_weight[at] = query;
    if (!written) return;
    const Write& last = *(end - 1);
    if (!call_.source) {
      const double left = last.scaled_to_zero ? 0.0 : std::exp(last.log_size) * (last.negative ? -1.0 : 1.0);
      call_.initial_weight[at] = query * left;
    }
    // Backwards in time. Decays only shrink, so that what is beyond the smallest number stays so.
    constexpr double kSmallest = -745.0;
    for (const Write* write = &last; write >= writes_.list.data() + last.first; --write) {
      const double log_left = last.log_size - write->log_size;
      if (!call_.slot_update && log_left < kSmallest) break;
      const double left = std::exp(log_left) * (last.negative != write->negative ? -1.0 : 1.0);
      const double part = query * write->weight * left;
      if (part == 0.0) continue;
      if (!seen[write->token]) {
        seen[write->token] = 1;
        sources.push_back(write->token);
      }
      sum[write->token] += part;
    }
  }

  void finish_row(int64_t t, std::vector<double>& sum, std::vector<char>& seen, std::vector<int32_t>& sources) const {
    std::sort(sources.begin(), sources.end());
    double mass = 0.0, dropped = 0.0;
    for (const int32_t source : sources) mass += std::abs(sum[source]);
    const double least = call_.threshold * mass;
    int64_t pairs = 0;
    for (const int32_t source : sources) {
      const double size = std::abs(sum[source]);
      if (size > 0.0 && !(size < least)) {
        if (call_.source) {
          const int64_t place = call_.row_offsets[row(t)] + pairs;
          if (place >= call_.row_offsets[row(t) + 1]) throw std::invalid_argument("row_offsets are of another map");
          call_.source[place] = source;
          call_.weight[place] = sum[source];
        }
        ++pairs;
      } else {
        dropped += size;
      }
      sum[source] = 0.0;
      seen[source] = 0;
    }
    if (call_.source) return;
    call_.row_pairs[row(t)] = pairs;
    call_.dropped[row(t)] = dropped;
  }

  const SparseDeltaMap<Real>& call_;
  const int64_t b_, h_;
  const std::vector<int32_t>& document_start_;
  Writes writes_;
};

}  // namespace

template <class Real>
void sparse_delta_map(const SparseDeltaMap<Real>& call) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (call.time > kMost || call.time * call.writes > kMost) {
    throw std::invalid_argument("a map has at most 2^31 - 1 writes in a stream, got T = " + std::to_string(call.time) +
                                " tokens of " + std::to_string(call.writes) + " writes: trace fewer tokens at a time");
  }
  check_offsets(call.cu_seqlens, call.documents, call.time);
  std::vector<int32_t> document_start(static_cast<std::size_t>(call.time), 0);
  for (int64_t d = 0; d < call.documents; ++d) {
    for (int64_t t = call.cu_seqlens[d]; t < call.cu_seqlens[d + 1]; ++t) {
      document_start[t] = static_cast<int32_t>(call.cu_seqlens[d]);
    }
  }
  // Later rows have more sources: many short cuts share them evenly.
  constexpr int64_t kTasks = 32;
  for (int64_t b = 0; b < call.batch; ++b) {
    for (int64_t h = 0; h < call.heads; ++h) {
      const Stream<Real> stream(call, b, h, document_start);
      parallel_for(kTasks, call.threads, [&](int64_t task) {
        stream.rows(call.time * task / kTasks, call.time * (task + 1) / kTasks);
      });
    }
  }
}

template void sparse_delta_map(const SparseDeltaMap<float>&);
template void sparse_delta_map(const SparseDeltaMap<double>&);

}  // namespace sdm

// The k most likely tokens of a row of logits, with their log-probabilities. The specification is topk_log_softmax in
// eagle_plugin/core/tree.py. The body is for a block; csrc/cpu/topk.h does the same with
// vectors.
#pragma once
#include "best.h"

namespace eagle {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

EAGLE_HD float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
EAGLE_HD float widen(float x) { return x; }
EAGLE_HD float widen(BFloat16 x) { return float_of_bits(uint32_t{x.bits} << 16); }
EAGLE_HD float widen(Float16 x) {  // by integer arithmetic: subnormals are scaled, inf and NaN kept
  const uint32_t sign = (x.bits & 0x8000u) << 16, magnitude = (x.bits & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) return float_of_bits(sign | magnitude | 0x7f800000u);
  const float scaled = float_of_bits(magnitude) * 0x1p112f;
  return sign ? -scaled : scaled;
}

// log p of a logit, where total is the sum of exp(x - top) over the row. NaN, from infinite logits, counts as -inf.
EAGLE_HD float log_probability(float logit, float top, double total) {
  const double p = static_cast<double>(logit) - top - log(total);
  return p != p ? -INFINITY : p < 0 ? static_cast<float>(p) : 0.0f;
}

template <class T>
struct LogitsRow {  // a source of items for find_best, read 16 bytes at a time
  static constexpr int kRun = 16 / sizeof(T);
  const T* logits;
  int64_t vocabulary;
  bool aligned;

  EAGLE_HD LogitsRow(const T* row, int64_t size)
      : logits(row), vocabulary(size), aligned(reinterpret_cast<uintptr_t>(row) % 16 == 0) {}

  // Calls f(score, index) for a run of items from `begin` on.
  template <class F>
  EAGLE_HD void visit(int64_t begin, F&& f) const {
    if (aligned && begin + kRun <= vocabulary) return visit_words(read(begin), begin, f);
    const int64_t end = begin + kRun < vocabulary ? begin + kRun : vocabulary;
    for (int64_t i = begin; i < end; ++i) f(widen(logits[i]), static_cast<int32_t>(i));
  }
  // The same for the runs at begin, begin + step ... below `end`. A thread waits for its reads hundreds of cycles, so
  // several are in flight before the first is used.
  template <class F>
  EAGLE_HD void visit_runs(int64_t begin, int64_t end, int64_t step, F&& f) const {
    constexpr int kInFlight = 4;
    int64_t i = begin;
    if (aligned) {
      const int64_t ahead = (kInFlight - 1) * step;
      for (; i + ahead < end && i + ahead + kRun <= vocabulary; i += kInFlight * step) {
        Words words[kInFlight];
        EAGLE_UNROLL
        for (int j = 0; j < kInFlight; ++j) words[j] = read(i + j * step);
        EAGLE_UNROLL
        for (int j = 0; j < kInFlight; ++j) visit_words(words[j], i + j * step, f);
      }
    }
    for (; i < end; i += step) visit(i, f);
  }

 private:
  struct alignas(16) Words {
    uint32_t words[4];
  };
  EAGLE_HD Words read(int64_t begin) const { return *reinterpret_cast<const Words*>(logits + begin); }
  template <class F>
  EAGLE_HD void visit_words(const Words& words, int64_t begin, F&& f) const {
    T run[kRun];
    memcpy(run, &words, sizeof run);
    for (int j = 0; j < kRun; ++j) f(widen(run[j]), static_cast<int32_t>(begin + j));
  }
};

// logp [k] and index [k]; 1 <= k <= min(vocabulary, 128). The terms of the sum are integers, 2^32 for the most likely
// token, so that the result does not depend on the size of the team.
template <class Team, class T>
EAGLE_HD void topk_log_softmax(const Team& team, BestScratch& scratch, const LogitsRow<T>& row, int32_t k, float* logp,
                               int64_t* index) {
  uint64_t mine = 0;
  find_best(team, scratch, row, static_cast<int32_t>(row.vocabulary), k, [&](float logit, float top) {
    const float weight = logit == top ? 1.0f : logit < top ? expf(logit - top) : 0.0f;  // NaN is neither
    mine += static_cast<uint64_t>(weight * 4294967296.0f + 0.5f);
  });
  const float top = score_of(scratch.best[0]);
  const double total = static_cast<double>(team.sum(mine)) / 4294967296.0;
  for (int32_t j = team.rank(); j < k; j += team.size()) {
    logp[j] = log_probability(score_of(scratch.best[j]), top, total);
    index[j] = index_of(scratch.best[j]);
  }
}

}  // namespace eagle

// The target distribution at one node: what a request samples from after temperature, top-k, top-p and min-p. The
// specification is target_distribution in eagle_plugin/core/sampling.py.
#pragma once
#include "team.h"
#include "weights.h"

namespace eagle {

constexpr int kBins = 2048;

struct Histogram {  // shared by the team
  uint64_t masses[kBins];
  uint32_t counts[kBins];

  template <class Team>
  EAGLE_HD void add(Team& team, uint32_t bin, int64_t weight) {
    team.add(&counts[bin], 1u);
    team.accumulate(&masses[bin], static_cast<uint64_t>(weight));
  }
};

struct Digit {  // the bits of a key that one step of a radix selection looks at
  int shift, width;
  uint32_t prefix;  // what the steps before found
  int64_t least;    // lighter tokens need not be counted

  EAGLE_HD bool counts(uint32_t key, int64_t weight) const {
    return weight >= least && (shift == 21 || key >> (shift + width) == prefix);
  }
  EAGLE_HD uint32_t bin(uint32_t key) const { return key >> shift & ((1u << width) - 1); }
};

// The weight that a kept token may have before it, where `total` is left of a row. A token with exactly the share top_p
// before it is kept by the joint filters and removed by the chained ones.
EAGLE_HD int64_t most_before(float top_p, int64_t total, bool chained) {
  const double share = top_p * static_cast<double>(total);
  const int64_t most = static_cast<int64_t>(share);
  return chained && most > 0 && static_cast<double>(most) == share ? most - 1 : most;
}

struct AllTokens {  // the tokens of a row, for the filters
  // The first digit of a selection, and the number and the weight of the tokens that come before all of these.
  EAGLE_HD Digit first_digit() const { return {21, 11, 0, 0}; }
  EAGLE_HD int64_t count_before() const { return 0; }
  EAGLE_HD int64_t mass_before() const { return 0; }
  template <class Team>
  EAGLE_HD void count(Team& team, Histogram& histogram, const TargetDistribution& target, const Digit& digit) const {
    for (int32_t block = team.rank() * Team::kTake; block < target.vocabulary; block += team.size() * Team::kTake) {
      const int here = target.vocabulary - block < Team::kTake ? target.vocabulary - block : Team::kTake;
      uint32_t keys[Team::kTake];
      int64_t weights[Team::kTake], heaviest = 0;
      for (int j = 0; j < here; ++j) weights[j] = target.raw_weight(without_nan(target.logits[block + j]));
      for (int j = 0; j < here; ++j) heaviest = weights[j] > heaviest ? weights[j] : heaviest;
      if (heaviest < digit.least) continue;
      for (int j = 0; j < here; ++j) keys[j] = descending_key(without_nan(target.logits[block + j]));
      for (int j = 0; j < here; ++j) {
        if (!digit.counts(keys[j], weights[j])) continue;
        histogram.add(team, digit.bin(keys[j]), weights[j]);
      }
    }
  }
  // The n-th token, by id, with the logit target.cut_value.
  template <class Team>
  EAGLE_HD int32_t nth_equal(Team& team, Histogram&, const TargetDistribution& target, int64_t n) const {
    const int32_t from = static_cast<int32_t>(int64_t{target.vocabulary} * team.rank() / team.size());
    const int32_t to = static_cast<int32_t>(int64_t{target.vocabulary} * (team.rank() + 1) / team.size());
    int64_t equal = 0;
    for (int32_t i = from; i < to; ++i) equal += without_nan(target.logits[i]) == target.cut_value;
    int64_t before = team.exclusive_sum(equal);
    int32_t last = target.vocabulary;
    for (int32_t i = from; i < to && before < n; ++i) {
      before += without_nan(target.logits[i]) == target.cut_value;
      if (before == n) last = i;
    }
    return team.min(last);
  }
  // Whether nothing is cut when these tokens passed no limit.
  template <class Team>
  EAGLE_HD bool are_all(Team&, const TargetDistribution&) const {
    return true;
  }
  // The weight of the kept tokens.
  template <class Team>
  EAGLE_HD int64_t kept(Team& team, const TargetDistribution& target) const {
    return team.sum(target.sum(team.rank(), target.vocabulary, team.size()));
  }
};

// Returns the most likely token, the lowest id among equals; sets target.highest.
template <class Team>
EAGLE_HD int32_t find_highest(Team& team, TargetDistribution& target) {
  uint32_t best = ~0u;
  int32_t token = target.vocabulary;
  for (int32_t block = team.rank() * Team::kTake; block < target.vocabulary; block += team.size() * Team::kTake) {
    const int32_t end = target.vocabulary - block < Team::kTake ? target.vocabulary : block + Team::kTake;
    uint32_t top = ~0u;
    for (int32_t i = block; i < end; ++i) {
      const uint32_t key = descending_key(without_nan(target.logits[i]));
      top = key < top ? key : top;
    }
    if (top >= best) continue;
    best = top;
    for (token = block; descending_key(without_nan(target.logits[token])) != top;) ++token;
  }
  const uint32_t highest = team.min(best);
  target.highest = value_of_key(highest);
  return team.min(best == highest ? token : target.vocabulary);
}

// Keeps the tokens that are before rank top_k and have a weight of at most `most` before them, in the order of (logit
// descending, id ascending). This is a radix selection over the bits of the logits, 11 at a time. Returns false, and
// nothing is cut, if these tokens pass neither limit.
template <class Team, class Tokens>
EAGLE_HD bool cut_tail(Team& team, Histogram& histogram, const Tokens& tokens, TargetDistribution& target,
                       int64_t top_k, int64_t most) {
  // All tokens lighter than `least` together weigh less than total - most. So they come after the cut and need not be
  // counted; nor do the tokens that min-p removed.
  Digit digit = tokens.first_digit();
  digit.least = (target.total - most) / target.vocabulary;
  if (digit.least < target.min_weight) digit.least = target.min_weight;
  int64_t count = tokens.count_before(), mass = tokens.mass_before();  // of the tokens before the current bin
  for (;;) {
    const int bins = 1 << digit.width;
    for (int j = team.rank(); j < bins; j += team.size()) histogram.masses[j] = histogram.counts[j] = 0;
    team.sync();
    tokens.count(team, histogram, target, digit);
    team.sync();
    // The first bin at whose end a limit is passed; each member searches a part of the bins.
    const int begin = bins * team.rank() / team.size(), end = bins * (team.rank() + 1) / team.size();
    int64_t c = 0, m = 0;
    for (int j = begin; j < end; ++j) c += histogram.counts[j], m += histogram.masses[j];
    c = count + team.exclusive_sum(c), m = mass + team.exclusive_sum(m);
    int first = bins;
    for (int j = begin; j < end && first == bins; ++j) {
      c += histogram.counts[j], m += histogram.masses[j];
      if (c > top_k || m > most) first = j;
    }
    first = team.min(first);
    if (first == bins) return false;
    c = m = 0;
    for (int j = team.rank(); j < first; j += team.size()) c += histogram.counts[j], m += histogram.masses[j];
    count += team.sum(c), mass += team.sum(m);
    digit.prefix = digit.prefix << digit.width | static_cast<uint32_t>(first);
    if (digit.shift == 0) {
      // One logit value is left; the first `ties` tokens with this value are kept.
      const int64_t n = histogram.counts[first], w = static_cast<int64_t>(histogram.masses[first]) / n;
      int64_t ties = top_k - count < n ? top_k - count : n;
      if (w > 0 && (most - mass) / w + 1 < ties) ties = (most - mass) / w + 1;
      target.cut_value = value_of_key(digit.prefix);
      target.cut_index = ties == n ? target.vocabulary : -1;
      team.sync();  // all have read the histogram
      if (ties > 0 && ties < n) target.cut_index = tokens.nth_equal(team, histogram, target, ties);
      return true;
    }
    digit.width = digit.shift < 11 ? digit.shift : 11;
    digit.shift -= digit.width;
  }
}

// Applies the filters to a distribution that keeps all tokens. `chained`: each filter sees what the filter before it
// left (vLLM's meaning); else each sees the probabilities before any filter (SGLang's). Returns false if `tokens` are
// too few to tell what is kept.
template <class Team, class Tokens>
EAGLE_HD bool apply_filters(Team& team, Histogram& histogram, const Tokens& tokens, const SamplingRow& params,
                            bool chained, TargetDistribution& target) {
  const int64_t min_weight = params.min_weight();
  bool cut_k = params.top_k < target.vocabulary, cut_p = params.top_p < 1.0f;
  while (cut_k || cut_p || target.min_weight < min_weight) {
    const bool min_p_alone = chained && target.min_weight < min_weight;
    if ((cut_k || cut_p) && !min_p_alone) {
      const bool top_k_alone = chained && cut_k;
      int64_t most = target.total;
      if (cut_p && !top_k_alone) most = most_before(params.top_p, target.total, chained);
      const int64_t top_k = cut_k ? params.top_k : target.vocabulary;
      if (!cut_tail(team, histogram, tokens, target, top_k, most) && !tokens.are_all(team, target)) return false;
      if (top_k_alone && target.cut_index >= 0) target.cut_index = target.vocabulary;  // ties at the k-th are all kept
      cut_p = cut_p && top_k_alone;
      cut_k = false;
    }
    target.min_weight = min_weight;
    target.total = tokens.kept(team, target);
  }
  return true;
}

// The target distribution of one row. Returns the most likely token. For a greedy row only that token is computed, and
// `total` only where top-k or top-p cut.
template <class Team>
EAGLE_HD int32_t find_target_distribution(Team& team, Histogram& histogram, const float* logits, int32_t vocabulary,
                                          const SamplingRow& params, bool chained, TargetDistribution& target) {
  target = {logits, vocabulary, 0, 1 / params.temperature, -INFINITY, vocabulary, 0, 0};
  const int32_t most_likely = find_highest(team, target);
  if (params.top_k == 1) return most_likely;
  if (!params.cuts(vocabulary)) {
    target.min_weight = params.min_weight();
    return most_likely;
  }
  const AllTokens tokens;
  target.total = tokens.kept(team, target);
  apply_filters(team, histogram, tokens, params, chained, target);
  return most_likely;
}

}  // namespace eagle

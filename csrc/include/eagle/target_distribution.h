// The target distribution at one node: what a request samples from after temperature, top-k, top-p and min-p. The
// specification is target_distribution in eagle_plugin/core/sampling.py.
//
// Probabilities are integer weights, 2^40 for the most likely token. An integer sum does not depend on its order, so a
// row gives the same token whatever the size of the team that works on it. A token whose probability is below 2^-40 of
// the most likely token's has weight 0. Nothing of the size of the vocabulary is stored: each pass computes the weights
// again from the logits.
#pragma once
#include <cstring>

#include "team.h"

namespace eagle {

constexpr float kWeightOfOne = 1099511627776.0f;  // 2^40
constexpr int kBins = 2048;
constexpr int kDrawBlock = 256;  // tokens whose weights a draw sums at once

struct Histogram {  // shared by the team
  uint64_t masses[kBins];
  uint32_t counts[kBins];
};

struct SamplingRow {  // the sampling parameters of one request
  float temperature;
  int32_t top_k;
  float top_p, min_p;
};

EAGLE_HD float without_nan(float x) { return x == x ? x + 0.0f : -INFINITY; }  // and -0 becomes 0

// e^x for x in [-28, 0], relative error below 2e-7, without branches, so that loops over it become vectors.
EAGLE_HD float exp_weight(float x) {
  const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

struct TargetDistribution {
  const float* logits;
  int32_t vocabulary;
  float highest, inverse_temperature;
  float cut_value;     // a token is kept if its logit is above this,
  int32_t cut_index;   // or equal to it and its id at most this,
  int64_t min_weight;  // and its weight is at least this
  int64_t total;       // weight of the kept tokens

  // Weight before the filters, 0 to 2^40.
  EAGLE_HD int64_t raw_weight(float x) const {
    const float z = (x - highest) * inverse_temperature;
    const float inside = z > -28.0f ? z : -28.0f;  // also when z is NaN: infinite logits, whose case follows
    const float e = z > -28.0f ? exp_weight(inside) : 0.0f;
    return static_cast<int64_t>((x == highest ? 1.0f : e) * kWeightOfOne);
  }
  EAGLE_HD int64_t weight(int32_t i) const {
    const float x = without_nan(logits[i]);
    const int64_t w = raw_weight(x);
    const bool kept = (x > cut_value || (x == cut_value && i <= cut_index)) && w >= min_weight;
    return kept ? w : 0;
  }
  EAGLE_HD int64_t sum(int32_t begin, int32_t end, int32_t step) const {
    int64_t s = 0;
    for (int32_t i = begin; i < end; i += step) s += weight(i);
    return s;
  }
};

// Ascending keys for descending logits.
EAGLE_HD uint32_t descending_key(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits >> 31 ? bits : ~(bits | 0x80000000u);
}
EAGLE_HD float value_of_key(uint32_t key) {
  const uint32_t bits = key >> 31 ? key : ~key & 0x7fffffffu;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

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
// descending, id ascending). This is a radix selection over the bits of the logits: 11, then 11, then 10 bits.
template <class Team>
EAGLE_HD void cut_tail(Team& team, Histogram& histogram, TargetDistribution& target, int64_t top_k, int64_t most) {
  // All tokens lighter than `least` together weigh less than total - most. So they come after the cut and need not be
  // counted; nor do the tokens that min-p removed.
  int64_t least = (target.total - most) / target.vocabulary;
  if (least < target.min_weight) least = target.min_weight;
  int64_t count = 0, mass = 0;  // of the tokens before the current bin
  uint32_t prefix = 0;
  for (int shift = 21, width = 11; shift >= 0; width = shift == 10 ? 10 : 11, shift = shift == 10 ? 0 : shift - 11) {
    const int bins = 1 << width;
    for (int j = team.rank(); j < bins; j += team.size()) histogram.masses[j] = histogram.counts[j] = 0;
    team.sync();
    for (int32_t block = team.rank() * Team::kTake; block < target.vocabulary; block += team.size() * Team::kTake) {
      const int here = target.vocabulary - block < Team::kTake ? target.vocabulary - block : Team::kTake;
      uint32_t keys[Team::kTake];
      int64_t weights[Team::kTake], heaviest = 0;
      for (int j = 0; j < here; ++j) weights[j] = target.raw_weight(without_nan(target.logits[block + j]));
      for (int j = 0; j < here; ++j) heaviest = weights[j] > heaviest ? weights[j] : heaviest;
      if (heaviest < least) continue;
      for (int j = 0; j < here; ++j) keys[j] = descending_key(without_nan(target.logits[block + j]));
      for (int j = 0; j < here; ++j) {
        if (weights[j] < least || (shift < 21 && keys[j] >> (shift + width) != prefix)) continue;
        const int bin = keys[j] >> shift & (bins - 1);
        team.add(&histogram.counts[bin], 1u);
        team.add(&histogram.masses[bin], static_cast<uint64_t>(weights[j]));
      }
    }
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
    if (first == bins) return;  // all are kept
    c = m = 0;
    for (int j = team.rank(); j < first; j += team.size()) c += histogram.counts[j], m += histogram.masses[j];
    count += team.sum(c), mass += team.sum(m);
    prefix = prefix << width | static_cast<uint32_t>(first);
    if (shift > 0) continue;
    // One logit value is left; the first `ties` tokens with this value are kept.
    const int64_t n = histogram.counts[first], w = static_cast<int64_t>(histogram.masses[first]) / n;
    int64_t ties = top_k - count < n ? top_k - count : n;
    if (w > 0 && (most - mass) / w + 1 < ties) ties = (most - mass) / w + 1;
    target.cut_value = value_of_key(prefix);
    target.cut_index = ties == n ? target.vocabulary : -1;
    team.sync();  // all have read the histogram
    if (ties == n || ties == 0) return;
    const int32_t from = static_cast<int32_t>(int64_t{target.vocabulary} * team.rank() / team.size());
    const int32_t to = static_cast<int32_t>(int64_t{target.vocabulary} * (team.rank() + 1) / team.size());
    int64_t equal = 0;
    for (int32_t i = from; i < to; ++i) equal += without_nan(target.logits[i]) == target.cut_value;
    int64_t before = team.exclusive_sum(equal);
    int32_t last = target.vocabulary;
    for (int32_t i = from; i < to && before < ties; ++i) {
      before += without_nan(target.logits[i]) == target.cut_value;
      if (before == ties) last = i;
    }
    target.cut_index = team.min(last);
    return;
  }
}

// The target distribution of one row. `chained`: each filter sees what the filter before it left (vLLM's meaning); else
// each sees the probabilities before any filter (SGLang's). Returns the most likely token. For a greedy row only that
// token is computed.
template <class Team>
EAGLE_HD int32_t find_target_distribution(Team& team, Histogram& histogram, const float* logits, int32_t vocabulary,
                                          const SamplingRow& params, bool chained, TargetDistribution& target) {
  target = {logits, vocabulary, 0, 1 / params.temperature, -INFINITY, vocabulary, 0, 0};
  const int32_t most_likely = find_highest(team, target);
  if (params.top_k == 1) return most_likely;
  int64_t min_weight = 0;
  if (params.min_p > 0) {
    const double least = static_cast<double>(params.min_p) * kWeightOfOne;
    min_weight = static_cast<int64_t>(least) + (static_cast<int64_t>(least) < least);
  }
  target.total = team.sum(target.sum(team.rank(), vocabulary, team.size()));
  bool cut_k = params.top_k < vocabulary, cut_p = params.top_p < 1.0f;
  while (cut_k || cut_p || target.min_weight < min_weight) {
    const bool min_p_alone = chained && target.min_weight < min_weight;
    if ((cut_k || cut_p) && !min_p_alone) {
      const bool top_k_alone = chained && cut_k;
      int64_t most = target.total;
      if (cut_p && !top_k_alone) {
        const double share = params.top_p * static_cast<double>(target.total);
        most = static_cast<int64_t>(share);
        // A token with exactly the share top_p before it is kept by the joint filters and removed by the chained ones.
        if (chained && most > 0 && static_cast<double>(most) == share) --most;
      }
      cut_tail(team, histogram, target, cut_k ? params.top_k : vocabulary, most);
      if (top_k_alone && target.cut_index >= 0) target.cut_index = vocabulary;  // ties at the k-th logit are all kept
      cut_p = cut_p && top_k_alone;
      cut_k = false;
    }
    target.min_weight = min_weight;
    target.total = team.sum(target.sum(team.rank(), vocabulary, team.size()));
  }
  return most_likely;
}

struct ProposalRow {  // q' of one draft node: `top_m` tokens, ascending ids
  const int64_t* tokens;
  const float* weights;
  int32_t top_m;
  // For each sampled child that was refused: the weight that was left of p at its test, over what was left of q'. Its
  // refusal takes weights[j] * shares[i] away from the weight of token j.
  int32_t refused;
  double shares[kMaxSampled];

  // The weight that is left of token j of the list. It is 0 for a refused child, because q' is above p there.
  EAGLE_HD int64_t left(const TargetDistribution& target, int32_t j) const {
    if (tokens[j] < 0 || tokens[j] >= target.vocabulary) return 0;
    int64_t p = target.weight(static_cast<int32_t>(tokens[j]));
    for (int32_t i = 0; i < refused; ++i) {
      const double q = static_cast<double>(weights[j]) * shares[i];
      p -= q < static_cast<double>(p) ? static_cast<int64_t>(q) : p;
    }
    return p;
  }
  EAGLE_HD int64_t taken(const TargetDistribution& target, int32_t j) const {
    if (refused == 0 || !(weights[j] > 0) || tokens[j] < 0 || tokens[j] >= target.vocabulary) return 0;
    return target.weight(static_cast<int32_t>(tokens[j])) - left(target, j);
  }
  // The weight that refusals took from the tokens of the list with ids in [begin, end).
  EAGLE_HD int64_t taken_within(const TargetDistribution& target, int32_t begin, int32_t end) const {
    int64_t s = 0;
    for (int32_t j = 0; refused > 0 && j < top_m && tokens[j] < end; ++j)
      s += tokens[j] >= begin ? taken(target, j) : 0;
    return s;
  }
  // The index of a token in the list, -1 when it is not there.
  EAGLE_HD int32_t find(int64_t token) const {
    for (int32_t j = 0; j < top_m; ++j) {
      if (tokens[j] == token) return j;
    }
    return -1;
  }
};

// The weight that is left of all tokens.
template <class Team>
EAGLE_HD int64_t total_left(Team& team, const TargetDistribution& target, const ProposalRow& q) {
  int64_t taken = 0;
  for (int32_t j = team.rank(); j < q.top_m; j += team.size()) taken += q.taken(target, j);
  return target.total - team.sum(taken);
}

// The token at the fraction u of the weight that is left.
template <class Team>
EAGLE_HD int32_t draw_token(Team& team, const TargetDistribution& target, ProposalRow& q, double u) {
  int64_t left = q.refused > 0 ? total_left(team, target, q) : target.total;
  if (left <= 0) q.refused = 0, left = target.total;  // p equals q' to the last bit: no child is refused then
  int64_t sought = static_cast<int64_t>(u * static_cast<double>(left));  // the weight before the token that is drawn
  if (sought >= left) sought = left - 1;

  const int32_t from = static_cast<int32_t>(int64_t{target.vocabulary} * team.rank() / team.size());
  const int32_t to = static_cast<int32_t>(int64_t{target.vocabulary} * (team.rank() + 1) / team.size());
  int64_t mine = left;
  if (team.size() > 1) mine = target.sum(from, to, 1) - q.taken_within(target, from, to);
  int64_t before = team.exclusive_sum(mine);
  int32_t found = target.vocabulary;
  if (before <= sought && sought < before + mine) {
    for (int32_t block = from; found == target.vocabulary; block += kDrawBlock) {
      const int32_t end = block + kDrawBlock < to ? block + kDrawBlock : to;
      const int64_t weight = target.sum(block, end, 1) - q.taken_within(target, block, end);
      if (before + weight <= sought) {
        before += weight;
        continue;
      }
      for (int32_t i = block; found == target.vocabulary; ++i) {
        before += target.weight(i) - q.taken_within(target, i, i + 1);
        if (before > sought) found = i;
      }
    }
  }
  return team.min(found);
}

}  // namespace eagle

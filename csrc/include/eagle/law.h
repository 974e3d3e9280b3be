// The distribution that a request samples from at one node: logits, temperature, top-k, top-p, min-p. The specification
// is eagle_plugin/core/sampling.py.
//
// Probabilities are integers, 2^40 for the likeliest token: their sums do not depend on the order of summation, so that
// a row gives the same token whatever the size of the team that works on it. What is below 2^-40 of the likeliest token
// is nothing. Nothing of the size of the vocabulary is stored: each pass computes the weights again from the logits.
#pragma once
#include <cstring>

#include "team.h"

namespace eagle {

constexpr float kWeightOfOne = 1099511627776.0f;  // 2^40
constexpr int kBins = 2048;
constexpr int kDrawBlock = 256;  // tokens summed at once while a draw is looked for

struct Histogram {  // shared by the team
  uint64_t masses[kBins];
  uint32_t counts[kBins];
};

struct SamplingRow {  // how one request samples
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

struct Law {
  const float* logits;
  int32_t vocabulary;
  float highest, inverse_temperature;
  float cut_value;     // kept are the logits above it, and those equal to it up to cut_index
  int32_t cut_index;   //
  int64_t min_weight;  // ... of at least this weight
  int64_t total;       // of what is kept

  // Weight before the filters, 0 .. 2^40.
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

// The likeliest token, the lowest id among equals; sets law.highest.
template <class Team>
EAGLE_HD int32_t find_highest(Team& team, Law& law) {
  uint32_t best = ~0u;
  int32_t token = law.vocabulary;
  for (int32_t block = team.rank() * Team::kTake; block < law.vocabulary; block += team.size() * Team::kTake) {
    const int32_t end = law.vocabulary - block < Team::kTake ? law.vocabulary : block + Team::kTake;
    uint32_t top = ~0u;
    for (int32_t i = block; i < end; ++i) {
      const uint32_t key = descending_key(without_nan(law.logits[i]));
      top = key < top ? key : top;
    }
    if (top >= best) continue;
    best = top;
    for (token = block; descending_key(without_nan(law.logits[token])) != top;) ++token;
  }
  const uint32_t highest = team.min(best);
  law.highest = value_of_key(highest);
  return team.min(best == highest ? token : law.vocabulary);
}

// Cuts the law to the tokens that stand before rank top_k and have at most `most` weight before them, in the order of
// (logit descending, id ascending): a radix selection over the logits' bits, 11 + 11 + 10 of them.
template <class Team>
EAGLE_HD void cut_tail(Team& team, Histogram& histogram, Law& law, int64_t top_k, int64_t most) {
  // Tokens this light weigh less than total - most all together: they stand behind the cut and need no counting, nor
  // do those that min-p took.
  int64_t least = (law.total - most) / law.vocabulary;
  if (least < law.min_weight) least = law.min_weight;
  int64_t count = 0, mass = 0;  // of the tokens before the bin at hand
  uint32_t prefix = 0;
  for (int shift = 21, width = 11; shift >= 0; width = shift == 10 ? 10 : 11, shift = shift == 10 ? 0 : shift - 11) {
    const int bins = 1 << width;
    for (int j = team.rank(); j < bins; j += team.size()) histogram.masses[j] = histogram.counts[j] = 0;
    team.sync();
    for (int32_t block = team.rank() * Team::kTake; block < law.vocabulary; block += team.size() * Team::kTake) {
      const int here = law.vocabulary - block < Team::kTake ? law.vocabulary - block : Team::kTake;
      uint32_t keys[Team::kTake];
      int64_t weights[Team::kTake], heaviest = 0;
      for (int j = 0; j < here; ++j) weights[j] = law.raw_weight(without_nan(law.logits[block + j]));
      for (int j = 0; j < here; ++j) heaviest = weights[j] > heaviest ? weights[j] : heaviest;
      if (heaviest < least) continue;
      for (int j = 0; j < here; ++j) keys[j] = descending_key(without_nan(law.logits[block + j]));
      for (int j = 0; j < here; ++j) {
        if (weights[j] < least || (shift < 21 && keys[j] >> (shift + width) != prefix)) continue;
        const int bin = keys[j] >> shift & (bins - 1);
        team.add(&histogram.counts[bin], 1u);
        team.add(&histogram.masses[bin], static_cast<uint64_t>(weights[j]));
      }
    }
    team.sync();
    // The first bin at whose end a limit is passed; each member looks at a stretch of the bins.
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
    // One value is left; of its equals the first `ties` are kept.
    const int64_t n = histogram.counts[first], w = static_cast<int64_t>(histogram.masses[first]) / n;
    int64_t ties = top_k - count < n ? top_k - count : n;
    if (w > 0 && (most - mass) / w + 1 < ties) ties = (most - mass) / w + 1;
    law.cut_value = value_of_key(prefix);
    law.cut_index = ties == n ? law.vocabulary : -1;
    team.sync();  // all have read the histogram
    if (ties == n || ties == 0) return;
    const int32_t from = static_cast<int32_t>(int64_t{law.vocabulary} * team.rank() / team.size());
    const int32_t to = static_cast<int32_t>(int64_t{law.vocabulary} * (team.rank() + 1) / team.size());
    int64_t equal = 0;
    for (int32_t i = from; i < to; ++i) equal += without_nan(law.logits[i]) == law.cut_value;
    int64_t before = team.exclusive_sum(equal);
    int32_t last = law.vocabulary;
    for (int32_t i = from; i < to && before < ties; ++i) {
      before += without_nan(law.logits[i]) == law.cut_value;
      if (before == ties) last = i;
    }
    law.cut_index = team.min(last);
    return;
  }
}

// The law of one row. `chained`: each filter looks at what the one before it left, not at the probabilities before any.
// Returns the likeliest token; of a greedy row nothing but that is computed.
template <class Team>
EAGLE_HD int32_t find_law(Team& team, Histogram& histogram, const float* logits, int32_t vocabulary,
                          const SamplingRow& params, bool chained, Law& law) {
  law = {logits, vocabulary, 0, 1 / params.temperature, -INFINITY, vocabulary, 0, 0};
  const int32_t likeliest = find_highest(team, law);
  if (params.top_k == 1) return likeliest;
  int64_t min_weight = 0;
  if (params.min_p > 0) {
    const double least = static_cast<double>(params.min_p) * kWeightOfOne;
    min_weight = static_cast<int64_t>(least) + (static_cast<int64_t>(least) < least);
  }
  law.total = team.sum(law.sum(team.rank(), vocabulary, team.size()));
  bool cut_k = params.top_k < vocabulary, cut_p = params.top_p < 1.0f;
  while (cut_k || cut_p || law.min_weight < min_weight) {
    const bool min_p_alone = chained && law.min_weight < min_weight;
    if ((cut_k || cut_p) && !min_p_alone) {
      const bool top_k_alone = chained && cut_k;
      int64_t most = law.total;
      if (cut_p && !top_k_alone) {
        const double share = params.top_p * static_cast<double>(law.total);
        most = static_cast<int64_t>(share);
        // A token that has exactly the share before it stays in the joint order and goes in the chained one.
        if (chained && most > 0 && static_cast<double>(most) == share) --most;
      }
      cut_tail(team, histogram, law, cut_k ? params.top_k : vocabulary, most);
      if (top_k_alone && law.cut_index >= 0) law.cut_index = vocabulary;  // all that equal the k-th stay
      cut_p = cut_p && top_k_alone;
      cut_k = false;
    }
    law.min_weight = min_weight;
    law.total = team.sum(law.sum(team.rank(), vocabulary, team.size()));
  }
  return likeliest;
}

constexpr int kMaxTests = 4;  // sampled children of a node that can be tested

struct ProposalRow {  // q' of one draft node: `size` tokens, ascending
  const int64_t* tokens;
  const float* weights;
  int32_t size;
  // Of every sampled child that was refused so far: what is left of p then, over what is left of q' then. So the next
  // refusal takes weights[j] * shares[i] away from token j, as a weight of the law.
  int32_t refused;
  double shares[kMaxTests];

  // What is left of token j of the list. A refused child has nothing left: it was refused because q' is above p there.
  EAGLE_HD int64_t left(const Law& law, int32_t j) const {
    if (tokens[j] < 0 || tokens[j] >= law.vocabulary) return 0;
    int64_t p = law.weight(static_cast<int32_t>(tokens[j]));
    for (int32_t i = 0; i < refused; ++i) {
      const double q = static_cast<double>(weights[j]) * shares[i];
      p -= q < static_cast<double>(p) ? static_cast<int64_t>(q) : p;
    }
    return p;
  }
  EAGLE_HD int64_t taken(const Law& law, int32_t j) const {
    if (refused == 0 || !(weights[j] > 0) || tokens[j] < 0 || tokens[j] >= law.vocabulary) return 0;
    return law.weight(static_cast<int32_t>(tokens[j])) - left(law, j);
  }
  // What is taken away from all tokens of the list within [begin, end).
  EAGLE_HD int64_t taken_within(const Law& law, int32_t begin, int32_t end) const {
    int64_t s = 0;
    for (int32_t j = 0; refused > 0 && j < size && tokens[j] < end; ++j) s += tokens[j] >= begin ? taken(law, j) : 0;
    return s;
  }
  // The place of a token in the list; -1 when it is not there.
  EAGLE_HD int32_t find(int64_t token) const {
    for (int32_t j = 0; j < size; ++j) {
      if (tokens[j] == token) return j;
    }
    return -1;
  }
};

// What is left of the law in all.
template <class Team>
EAGLE_HD int64_t total_left(Team& team, const Law& law, const ProposalRow& q) {
  int64_t taken = 0;
  for (int32_t j = team.rank(); j < q.size; j += team.size()) taken += q.taken(law, j);
  return law.total - team.sum(taken);
}

// The token at the fraction u of what is left of the law.
template <class Team>
EAGLE_HD int32_t draw_token(Team& team, const Law& law, ProposalRow& q, double u) {
  int64_t left = q.refused > 0 ? total_left(team, law, q) : law.total;
  if (left <= 0) q.refused = 0, left = law.total;  // p is q' to the last bit: then nothing that q' drew is refused
  int64_t target = static_cast<int64_t>(u * static_cast<double>(left));
  if (target >= left) target = left - 1;

  const int32_t from = static_cast<int32_t>(int64_t{law.vocabulary} * team.rank() / team.size());
  const int32_t to = static_cast<int32_t>(int64_t{law.vocabulary} * (team.rank() + 1) / team.size());
  int64_t mine = left;
  if (team.size() > 1) mine = law.sum(from, to, 1) - q.taken_within(law, from, to);
  int64_t before = team.exclusive_sum(mine);
  int32_t found = law.vocabulary;
  if (before <= target && target < before + mine) {
    for (int32_t block = from; found == law.vocabulary; block += kDrawBlock) {
      const int32_t end = block + kDrawBlock < to ? block + kDrawBlock : to;
      const int64_t weight = law.sum(block, end, 1) - q.taken_within(law, block, end);
      if (before + weight <= target) {
        before += weight;
        continue;
      }
      for (int32_t i = block; found == law.vocabulary; ++i) {
        before += law.weight(i) - q.taken_within(law, i, i + 1);
        if (before > target) found = i;
      }
    }
  }
  return team.min(found);
}

}  // namespace eagle

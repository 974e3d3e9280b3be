// What a walk needs of a row of logits, so that it reads little of the row itself: the most likely token, which tokens
// the filters keep, and the weight of the kept tokens by segment. The results are those of find_target_distribution, to
// the bit. The body is for a block of at least kSegments members.
//
// A row is read twice: for the highest logit, then for the weights. The second reading also collects the best tokens,
// about as many as the block has members, and the filters are applied to these. Only if what the filters keep goes
// beyond them, the filters read the row again.
#pragma once
#include "target_distribution.h"
#include "topk.h"

namespace eagle {

struct RowStatistics {
  float highest, cut_value;  // of TargetDistribution, as the following
  int32_t cut_index;
  int32_t most_likely;  // for a greedy row all else is undefined
  int64_t min_weight, total;
  int64_t masses[kSegments];
};

constexpr int64_t kStatisticsWords = sizeof(RowStatistics) / sizeof(int64_t);  // eagle_plugin/kernels/sampling.py

struct RowScratch {  // shared by the team
  Histogram histogram;
  uint64_t keys[kCollected];  // the collected tokens, see best_key
  uint64_t masses[kSegments];
  int64_t total, heavy;  // weight of all tokens, and of those that are as heavy as min-p wants
  uint32_t length;
};

struct CollectedTokens {  // all tokens from a certain logit on, for the filters
  const RowScratch& scratch;

  EAGLE_HD int32_t length() const { return static_cast<int32_t>(scratch.length); }
  EAGLE_HD float logit(int32_t j) const { return score_of(scratch.keys[j]); }
  EAGLE_HD int32_t token(int32_t j) const { return index_of(scratch.keys[j]); }
  template <class Team, class F>
  EAGLE_HD int64_t sum(Team& team, F&& f) const {
    int64_t s = 0;
    for (int32_t j = team.rank(); j < length(); j += team.size()) s += f(logit(j), token(j));
    return team.sum(s);
  }
  template <class Team>
  EAGLE_HD void count(Team& team, Histogram& histogram, const TargetDistribution& target, const Digit& digit) const {
    for (int32_t j = team.rank(); j < length(); j += team.size()) {
      const uint32_t key = descending_key(logit(j));
      const int64_t weight = target.raw_weight(logit(j));
      if (!digit.counts(key, weight)) continue;
      team.add(&histogram.counts[digit.bin(key)], 1u);
      team.add(&histogram.masses[digit.bin(key)], static_cast<uint64_t>(weight));
    }
  }
  template <class Team>
  EAGLE_HD int32_t nth_equal(Team& team, const TargetDistribution& target, int64_t n) const {
    int32_t found = target.vocabulary;
    for (int32_t j = team.rank(); j < length(); j += team.size()) {
      if (logit(j) != target.cut_value) continue;
      int64_t rank = 1;
      for (int32_t i = 0; i < length(); ++i) {
        rank += logit(i) == target.cut_value && token(i) < token(j);
      }
      if (rank == n) found = token(j);
    }
    return team.min(found);
  }
  // If these are all tokens with a weight, a cut among the others would change nothing.
  template <class Team>
  EAGLE_HD bool are_all(Team& team, const TargetDistribution& target) const {
    return target.total == sum(team, [&](float x, int32_t i) { return target.kept_weight(x, i); });
  }
  template <class Team>
  EAGLE_HD int64_t kept(Team& team, const TargetDistribution& target) const {
    if (target.cut_value == -INFINITY && target.cut_index == target.vocabulary) return scratch.heavy;  // nothing is cut
    return sum(team, [&](float x, int32_t i) { return target.kept_weight(x, i); });
  }
};

// A logit that at least half as many tokens reach as the team has members, and seldom many more: each member brings its
// best token, and half of these reach it. -inf if fewer members have a token with a weight.
template <class Team>
EAGLE_HD float find_floor(Team& team, Histogram& histogram, const TargetDistribution& target, uint64_t best) {
  constexpr float kBinsPerUnit = kBins / 28.0f;
  int bin = kBins;
  if (best) {
    const float x = score_of(best), z = target.exponent(x);
    if (x == target.highest) bin = 0;
    if (x != target.highest && z > -28.0f) bin = static_cast<int>(-z * kBinsPerUnit);
    if (bin == kBins && z > -28.0f) bin = kBins - 1;
  }
  for (int j = team.rank(); j < kBins; j += team.size()) histogram.counts[j] = 0;
  team.sync();
  if (bin < kBins) team.add(&histogram.counts[bin], 1u);
  team.sync();
  const int begin = kBins * team.rank() / team.size(), end = kBins * (team.rank() + 1) / team.size();
  int32_t count = 0;
  for (int j = begin; j < end; ++j) count += static_cast<int32_t>(histogram.counts[j]);
  count = team.exclusive_sum(count);
  int last = kBins;  // the bin in which half of the members are reached
  for (int j = begin; j < end && last == kBins; ++j) {
    count += static_cast<int32_t>(histogram.counts[j]);
    if (2 * count >= team.size()) last = j;
  }
  last = team.min(last);
  const float floor = team.min(bin <= last && bin < kBins ? score_of(best) : INFINITY);
  return last < kBins ? floor : -INFINITY;
}

// Calls f(logit, token) for all tokens, and writes the sum of what it returns for each segment. A group of members
// reads a segment.
template <class Team, class F>
EAGLE_HD void sum_segments(const Team& team, const LogitsRow<float>& row, uint64_t* masses, F&& f) {
  constexpr int64_t kRun = LogitsRow<float>::kRun;
  const int64_t length = segment_length(static_cast<int32_t>(row.vocabulary));
  const int32_t member = team.rank() % Team::kGroup, groups = team.size() / Team::kGroup;
  for (int32_t s = team.rank() / Team::kGroup; s < kSegments; s += groups) {
    const int64_t begin = length * s, end = begin + length < row.vocabulary ? begin + length : row.vocabulary;
    int64_t mine = 0;
    row.visit_runs(begin + kRun * member, end, kRun * Team::kGroup,
                   [&](float logit, int32_t token) { mine += f(without_nan(logit), token); });
    mine = team.group_sum(mine);
    if (member == 0) masses[s] = static_cast<uint64_t>(mine);
  }
}

template <class Team>
EAGLE_HD void describe_row(Team& team, RowScratch& scratch, const LogitsRow<float>& row, const SamplingRow& params,
                           bool chained, RowStatistics& out) {
  const int32_t vocabulary = static_cast<int32_t>(row.vocabulary);
  uint64_t best = 0;
  constexpr int64_t kRun = LogitsRow<float>::kRun;
  row.visit_runs(kRun * team.rank(), vocabulary, kRun * team.size(), [&](float logit, int32_t token) {
    const uint64_t key = best_key(logit, token);
    best = key > best ? key : best;
  });
  const uint64_t top = team.max(best);
  if (team.rank() == 0) out.most_likely = index_of(top);
  if (params.top_k == 1) return;

  TargetDistribution target{row.logits, vocabulary, score_of(top), 1 / params.temperature, 0, 0, 0, 0, nullptr};
  target.keep_all(0);
  const bool cuts = params.top_k < vocabulary || params.top_p < 1.0f;
  const float floor = cuts ? find_floor(team, scratch.histogram, target, best) : INFINITY;
  const int64_t min_weight = params.min_weight();
  if (team.rank() == 0) scratch.length = 0;
  team.sync();
  int64_t total = 0;
  sum_segments(team, row, scratch.masses, [&](float x, int32_t token) {
    const int64_t weight = target.raw_weight(x);
    total += weight;
    if (x >= floor && (x == target.highest || target.exponent(x) > -28.0f)) {
      const uint32_t place = team.add(&scratch.length, 1u);
      if (place < kCollected) scratch.keys[place] = best_key(x, token);
    }
    return weight >= min_weight ? weight : 0;
  });
  total = team.sum(total);  // the barrier, too
  if (team.rank() == 0) {
    scratch.total = total;
    scratch.heavy = 0;
    for (int32_t s = 0; s < kSegments; ++s) scratch.heavy += static_cast<int64_t>(scratch.masses[s]);
  }
  target.keep_all(total);
  team.sync();

  const CollectedTokens collected{scratch};
  const bool enough =
      scratch.length <= kCollected && apply_filters(team, scratch.histogram, collected, params, chained, target);
  if (!enough) {
    target.keep_all(scratch.total);
    apply_filters(team, scratch.histogram, AllTokens{}, params, chained, target);
  }
  // If nothing is cut, the masses are already those of the kept tokens.
  if (target.cut_value != -INFINITY || target.cut_index != vocabulary) {
    const auto kept = [&](float x, int32_t token) { return target.kept_weight(x, token); };
    team.sync();  // all have read the masses
    if (!enough) sum_segments(team, row, scratch.masses, kept);
    for (int32_t s = team.rank(); enough && s < kSegments; s += team.size()) scratch.masses[s] = 0;
    team.sync();
    for (int32_t j = team.rank(); enough && j < collected.length(); j += team.size()) {
      const int32_t token = collected.token(j);
      const int64_t weight = kept(collected.logit(j), token);
      team.add(&scratch.masses[token / segment_length(vocabulary)], static_cast<uint64_t>(weight));
    }
    team.sync();
  }
  for (int32_t s = team.rank(); s < kSegments; s += team.size())
    out.masses[s] = static_cast<int64_t>(scratch.masses[s]);
  if (team.rank() > 0) return;
  out.highest = target.highest;
  out.cut_value = target.cut_value;
  out.cut_index = target.cut_index;
  out.min_weight = target.min_weight;
  out.total = target.total;
}

struct DescribedNodes {  // a source of target distributions for verify_tree: the nodes of one request
  const RowStatistics* rows;
  const float* logits;  // [width, vocabulary], rows `step` elements apart
  int64_t step;
  int32_t vocabulary;
  SamplingRow params;

  template <class Team>
  EAGLE_HD int32_t find(Team&, int32_t node, TargetDistribution& target) const {
    const RowStatistics& row = rows[node];
    if (params.top_k != 1) {
      target = {logits + node * step, vocabulary, row.highest, 1 / params.temperature, row.cut_value, row.cut_index,
                row.min_weight,       row.total,  row.masses};
    }
    return row.most_likely;
  }
};

}  // namespace eagle

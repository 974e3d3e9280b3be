// Bins of the tokens of a row, by their distance from the highest logit, and the bins between which the filters cut.
//
// A bin is a 128th of a power of two of the distance, whatever its scale: a row with normally distributed logits has at
// most 1.3 % of its tokens in one bin, so that members seldom meet there and few tokens are left to compare.
#pragma once
#include "target_distribution.h"

namespace eagle {

constexpr int kUnitBits = 9;  // masses of bins are counted in units of 2^9, so that one token's fits in 32 bits

struct RowBins {  // of one row, in global memory
  uint64_t units[kBins];
  uint32_t counts[kBins];  // filled if top-k cuts
};

struct CutRange {        // what the bins say of the cut
  int32_t first, last;   // all tokens of bins before `first` are kept, none after `last`; first = kBins: all are kept
  int32_t ranked;        // whether top-k cuts anything
  int64_t count_before;  // tokens of bins before `first`, if top-k cuts
  EAGLE_HD bool cuts() const { return first < kBins; }
  EAGLE_HD bool reaches_end() const { return last == kBins - 1; }
};

EAGLE_HD int32_t bin_of(const TargetDistribution& target, float x) {
  if (x == target.highest) return 0;
  const float distance = -target.exponent(x);  // NaN and infinity: the last bin
  uint32_t bits;
  memcpy(&bits, &distance, sizeof bits);
  constexpr int32_t kLowest = (127 - 11) << 7;  // exponent and first 7 digits of 2^-11
  const int32_t bin = static_cast<int32_t>(bits >> 16) - kLowest;
  return bin < 0 ? 0 : bin < kBins ? bin : kBins - 1;
}

// The least weight of a token that the bins have to count. All lighter tokens together weigh less than half of what
// top-p cuts off, so they come after its cut.
EAGLE_HD int64_t least_counted(const SamplingRow& params, bool chained, int32_t vocabulary) {
  int64_t least = 1;
  if (params.top_p < 1.0f && !(chained && params.top_k < vocabulary)) {  // else top-p's cut depends on top-k's
    const double share = 1.0 - (params.top_p > 0 ? params.top_p : 0.0f);
    least = static_cast<int64_t>(share * kWeightOfOne / (2.0 * vocabulary));
  }
  if (chained && params.min_weight() > least) least = params.min_weight();
  return least > 1 ? least : 1;
}

// total: the weight of all tokens, or if the filters are chained of those that min-p keeps.
template <class Team>
EAGLE_HD CutRange find_range(Team& team, const RowBins& bins, const SamplingRow& params, bool chained,
                             int32_t vocabulary, int64_t total) {
  const bool cut_k = params.top_k < vocabulary, cut_p = params.top_p < 1.0f;
  const int begin = kBins * team.rank() / team.size(), end = kBins * (team.rank() + 1) / team.size();
  int64_t count = 0, units = 0;
  for (int j = begin; j < end; ++j) count += cut_k ? bins.counts[j] : 0, units += bins.units[j];
  const int64_t count_before = team.exclusive_sum(count), units_before = team.exclusive_sum(units);

  int32_t ranked = kBins;  // the bin of the token at rank top_k
  count = count_before;
  for (int j = begin; cut_k && j < end && ranked == kBins; ++j) {
    count += bins.counts[j];
    if (count > params.top_k) ranked = j;
  }
  ranked = team.min(ranked);

  // What top-p has a share of, if top-k cuts before it: known up to the weight of one bin.
  const int64_t slack = int64_t{vocabulary} << kUnitBits;
  int64_t low = total, high = total;
  if (chained && ranked < kBins) {
    int64_t before = 0, through = 0;
    if (begin <= ranked && ranked < end) {
      before = units_before;
      for (int j = begin; j < ranked; ++j) before += bins.units[j];
      through = before + bins.units[ranked];
    }
    low = team.max(before) << kUnitBits;
    high = (team.max(through) << kUnitBits) + slack;
    high = high < total ? high : total;
  }
  int32_t first = kBins, last = kBins;
  if (cut_p) {
    const int64_t least = most_before(params.top_p, low, chained) - 1, most = most_before(params.top_p, high, chained);
    units = units_before;
    for (int j = begin; j < end; ++j) {
      units += bins.units[j];
      const int64_t mass = units << kUnitBits;  // less than the true mass by at most the slack
      if (first == kBins && mass + slack > least) first = j;
      if (last == kBins && mass > most) last = j;
    }
  }
  first = team.min(first), last = team.min(last);
  if (ranked < first) first = ranked;
  if (ranked < last || (chained && ranked < kBins)) last = ranked;
  if (first < kBins && last == kBins) last = kBins - 1;
  count = 0;
  for (int j = begin; cut_k && j < end && j < first; ++j) count += bins.counts[j];
  return {first, last, ranked < kBins, team.sum(count)};
}

}  // namespace eagle

// What a walk needs of a row of logits, so that it reads little of the row itself: the most likely token, which tokens
// the filters keep, and the weight of the kept tokens by segment. The results are those of find_target_distribution, to
// the bit.
//
// A row is read at most three times, by four launches. Its parts may go to different blocks, of which each writes its
// own results, adds integers to what the row's blocks share, or appends to a list whose order does not matter:
//
//     find_part_best  reads the row for the most likely token; all that a greedy row needs
//     weigh_part      reads it for the weights: their sum, what min-p keeps by segment, and the mass of each bin
//     collect_part    reads it for the tokens in the bins between which the filters cut; others need no comparison
//     finish_row      applies the filters to the list of these tokens (row_filters.h)
//
// A row that top-k and top-p leave whole is done after the second. If the list overflows, because the tokens of a row
// are all but equal, finish_row reads the row five times more.
#pragma once
#include "row_bins.h"
#include "topk.h"

namespace eagle {

constexpr int kListSize = 4096;  // tokens of a row that are compared with each other

struct RowStatistics {
  float highest, cut_value;  // of TargetDistribution, as the following
  int32_t cut_index;
  int32_t most_likely;  // for a greedy row all else is undefined
  int64_t min_weight, total;
  int64_t masses[kSegments];
};

struct RowWork {  // what the launches leave to each other
  RowStatistics statistics;
  uint64_t best[kSegments];   // by part: the most likely token, see best_key
  int64_t totals[kSegments];  // by part: the weight of all tokens
  int64_t sure[kSegments];    // by part: the weight of the tokens that are before any cut; of all but if the filters
                              // are chained: then of those that min-p keeps
  int64_t sure_masses[kSegments];  // by segment: the weight of those that min-p keeps
  RowBins bins;
  CutRange range;
  uint64_t length;  // of the list, or what it would be
  uint64_t list[kListSize];
};

constexpr int64_t kWorkspaceWords = sizeof(RowWork) / sizeof(int64_t);  // eagle_plugin/kernels/sampling.py

struct RowPart {  // segments that a block reads; the row has `count` parts, a power of two up to kSegments
  int32_t index, count;

  EAGLE_HD int32_t segments() const { return kSegments / count; }
  EAGLE_HD int32_t first_segment() const { return index * segments(); }
};

struct WeighScratch {  // shared by the team, as the following
  Histogram histogram;
  uint64_t masses[kSegments];
};

struct CollectScratch {
  uint64_t list[kListSize], masses[kSegments];
  uint64_t place;  // of the block's list in the row's
  uint32_t length;
};

// Calls f(logit, token) for all tokens of a part, and adds what it returns to the sum of the token's segment. A group
// of members reads a segment, or a slice of one.
template <class Team, class F>
EAGLE_HD void sum_segments(const Team& team, const LogitsRow<float>& row, const RowPart& part, uint64_t* masses,
                           F&& f) {
  constexpr int64_t kRun = LogitsRow<float>::kRun;
  const int64_t length = segment_length(static_cast<int32_t>(row.vocabulary));
  const int32_t member = team.rank() % Team::kGroup, groups = team.size() / Team::kGroup;
  const int32_t slices = groups > part.segments() ? groups / part.segments() : 1;
  for (int32_t i = team.rank() / Team::kGroup; i < part.segments() * slices; i += groups) {
    const int32_t segment = part.first_segment() + i / slices;
    const int64_t begin = length * segment, end = begin + length < row.vocabulary ? begin + length : row.vocabulary;
    int64_t mine = 0;
    row.visit_runs(begin + kRun * (i % slices * Team::kGroup + member), end, kRun * Team::kGroup * slices,
                   [&](float logit, int32_t token) { mine += f(without_nan(logit), token); });
    mine = team.group_sum(mine);
    if (member == 0) team.accumulate(&masses[segment], static_cast<uint64_t>(mine));
  }
}

template <class Team>
EAGLE_HD void find_part_best(Team& team, const LogitsRow<float>& row, const RowPart& part, RowWork& work) {
  constexpr int64_t kRun = LogitsRow<float>::kRun;
  const int64_t length = segment_length(static_cast<int32_t>(row.vocabulary)) * int64_t{part.segments()};
  const int64_t begin = length * part.index, end = begin + length < row.vocabulary ? begin + length : row.vocabulary;
  float best = -INFINITY;
  int32_t token = static_cast<int32_t>(begin);
  row.visit_runs(begin + kRun * team.rank(), end, kRun * team.size(), [&](float logit, int32_t i) {
    if (logit > best) best = logit, token = i;  // never for NaN
  });
  const uint64_t top = team.max(begin < end ? best_key(best, token) : uint64_t{0});
  if (team.rank() == 0) work.best[part.index] = top;
  for (int j = team.rank() + part.index * team.size(); j < kBins; j += part.count * team.size()) {
    work.bins.units[j] = work.bins.counts[j] = 0;
  }
  if (team.rank() == 0 && part.index == 0) work.length = 0;
}

EAGLE_HD uint64_t best_of_parts(const RowWork& work, int32_t parts) {
  uint64_t top = 0;
  for (int32_t j = 0; j < parts; ++j) top = work.best[j] > top ? work.best[j] : top;
  return top;
}

EAGLE_HD TargetDistribution whole_row(const RowWork& work, const LogitsRow<float>& row, const SamplingRow& params,
                                      int32_t parts) {
  TargetDistribution target{row.logits,
                            static_cast<int32_t>(row.vocabulary),
                            score_of(best_of_parts(work, parts)),
                            1 / params.temperature,
                            0,
                            0,
                            0,
                            0,
                            nullptr};
  target.keep_all(0);
  return target;
}

EAGLE_HD int64_t sum_of(const int64_t* values, int32_t count) {
  int64_t sum = 0;
  for (int32_t j = 0; j < count; ++j) sum += values[j];
  return sum;
}

template <class Team>
EAGLE_HD void weigh_part(Team& team, WeighScratch& scratch, const LogitsRow<float>& row, const SamplingRow& params,
                         bool chained, const RowPart& part, RowWork& work) {
  const TargetDistribution target = whole_row(work, row, params, part.count);
  const bool cut_k = params.top_k < target.vocabulary, cut_p = params.top_p < 1.0f;
  const int64_t min_weight = params.min_weight();
  const int64_t least = least_counted(params, chained, target.vocabulary);
  Histogram& histogram = scratch.histogram;
  for (int j = team.rank(); j < kBins; j += team.size()) histogram.masses[j] = histogram.counts[j] = 0;
  for (int s = team.rank(); s < kSegments; s += team.size()) scratch.masses[s] = 0;
  team.sync();
  // Of equal logits one after another a member counts the last at the end, so that in a row of equals none meet.
  int32_t bin = -1;
  uint32_t count = 0;
  uint64_t units = 0;
  const auto flush = [&] {
    if (cut_k && count > 0) team.add(&histogram.counts[bin], count);
    if (cut_p && count > 0) team.accumulate(&histogram.masses[bin], units);
  };
  int64_t total = 0;
  sum_segments(team, row, part, scratch.masses, [&](float x, int32_t) {
    const int64_t weight = target.raw_weight(x);
    total += weight;
    if ((cut_k || cut_p) && weight >= least) {
      const int32_t here = bin_of(target, x);
      if (here != bin) {
        flush();
        bin = here, count = 0, units = 0;
      }
      ++count;
      units += static_cast<uint64_t>(weight) >> kUnitBits;
    }
    return weight >= min_weight ? weight : 0;
  });
  flush();
  total = team.sum(total);  // the barrier, too
  if (team.rank() == 0) work.totals[part.index] = total;
  for (int s = part.first_segment() + team.rank(); s < part.first_segment() + part.segments(); s += team.size()) {
    work.statistics.masses[s] = static_cast<int64_t>(scratch.masses[s]);
  }
  for (int j = team.rank(); j < kBins; j += team.size()) {
    if (histogram.counts[j]) team.add(&work.bins.counts[j], histogram.counts[j]);
    if (histogram.masses[j]) team.add(&work.bins.units[j], histogram.masses[j]);
  }
}

template <class Team>
EAGLE_HD void collect_part(Team& team, CollectScratch& scratch, const LogitsRow<float>& row, const SamplingRow& params,
                           bool chained, const RowPart& part, RowWork& work) {
  const TargetDistribution target = whole_row(work, row, params, part.count);
  if (!params.cuts(target.vocabulary)) return;
  const int64_t counted = chained ? sum_of(work.statistics.masses, kSegments) : sum_of(work.totals, part.count);
  const CutRange range = find_range(team, work.bins, params, chained, target.vocabulary, counted);
  if (team.rank() == 0 && part.index == 0) work.range = range;
  if (!range.cuts()) return;
  const int64_t min_weight = params.min_weight();
  const int64_t least = least_counted(params, chained, target.vocabulary);
  for (int s = team.rank(); s < kSegments; s += team.size()) scratch.masses[s] = 0;
  if (team.rank() == 0) scratch.length = 0;
  team.sync();
  int64_t sure = 0;
  sum_segments(team, row, part, scratch.masses, [&](float x, int32_t token) {
    const int32_t bin = bin_of(target, x);
    if (bin > range.last) return int64_t{0};
    const int64_t weight = target.raw_weight(x);
    if (bin >= range.first) {
      if (weight < least) return int64_t{0};
      const uint32_t place = team.add(&scratch.length, 1u);
      if (place < kListSize) scratch.list[place] = best_key(x, token);
      return int64_t{0};
    }
    const int64_t heavy = weight >= min_weight ? weight : 0;
    sure += chained ? heavy : weight;
    return heavy;
  });
  sure = team.sum(sure);  // the barrier, too
  if (team.rank() == 0) {
    work.sure[part.index] = sure;
    scratch.place = team.add(&work.length, uint64_t{scratch.length});
  }
  for (int s = part.first_segment() + team.rank(); s < part.first_segment() + part.segments(); s += team.size()) {
    work.sure_masses[s] = static_cast<int64_t>(scratch.masses[s]);
  }
  team.sync();
  for (uint64_t j = team.rank(); j < scratch.length && j < kListSize && scratch.place + j < kListSize;
       j += team.size()) {
    work.list[scratch.place + j] = scratch.list[j];
  }
}

}  // namespace eagle

// What a walk needs of a row of logits before it draws: the most likely token, and which tokens the filters keep. The
// results are those of find_target_distribution, to the bit.
//
// A row is read at most four times, by five launches. Its parts may go to different blocks, of which each writes its
// own results, adds integers to what the row's blocks share, or appends to a list whose order does not matter:
//
//     find_part_best  reads the row for the most likely token
//     weigh_part      reads it for the weights: their sum, that of what min-p keeps, and the mass of each bin
//     collect_part    reads it for the tokens in the bins between which the filters cut; others need no comparison
//     finish_row      applies the filters to the list of these tokens (row_filters.h)
//     draw_part       reads it once more for the draw (row_draw.h)
//
// Where top-k and top-p leave a row whole, it is read for the first and the last of them. If the list overflows,
// because the tokens of a row are all but equal, finish_row reads the row five times more.
#pragma once
#include "row_bins.h"
#include "topk.h"

namespace eagle {

constexpr int kListSize = 4096;    // tokens of a row that are compared with each other
constexpr int32_t kMaxParts = 32;  // of a row

struct RowStatistics {
  float highest, cut_value;  // of TargetDistribution, as the following
  int32_t cut_index;
  int32_t most_likely;  // for a greedy row all else is undefined
  int64_t min_weight;
};

struct RowWork {  // what the launches leave to each other
  RowStatistics statistics;
  // By part: the most likely token (see best_key); the weight of all tokens, and of those that min-p keeps; the same of
  // the tokens that are before any cut, but if the filters are chained `sure` has those that min-p keeps, too.
  uint64_t best[kMaxParts];
  int64_t totals[kMaxParts], heavy[kMaxParts], sure[kMaxParts], sure_heavy[kMaxParts];
  int64_t keys[kMaxParts];  // by part: what was drawn, see row_draw.h
  int32_t tokens[kMaxParts];
  RowBins bins;
  CutRange range;
  uint64_t length;  // of the list, or what it would be
  uint64_t list[kListSize];
};

constexpr int64_t kWorkspaceWords = sizeof(RowWork) / sizeof(int64_t);  // eagle_plugin/kernels/sampling.py

struct RowPart {  // what a block reads of a row, which has `count` parts, at most kMaxParts
  int32_t index, count;

  // Calls f(logit, token) for all of its tokens.
  template <class Team, class F>
  EAGLE_HD void visit(const Team& team, const LogitsRow<float>& row, F&& f) const {
    constexpr int64_t kRun = LogitsRow<float>::kRun;
    row.visit_runs(begin(row) + kRun * team.rank(), end(row), kRun * team.size(), f);
  }
  EAGLE_HD int64_t begin(const LogitsRow<float>& row) const { return length(row) * index; }
  EAGLE_HD int64_t end(const LogitsRow<float>& row) const {
    const int64_t next = length(row) * (index + 1);
    return next < row.vocabulary ? next : row.vocabulary;
  }

 private:
  // A multiple of 4, so that aligned reads of 16 bytes do not cross its borders.
  EAGLE_HD int64_t length(const LogitsRow<float>& row) const { return (row.vocabulary / count / 4 + 1) * 4; }
};

struct WeighScratch {  // shared by the team, as the following
  Histogram histogram;
};

struct CollectScratch {
  uint64_t list[kListSize];
  uint64_t place;  // of the block's list in the row's
  uint32_t length;
};

template <class Team>
EAGLE_HD void find_part_best(Team& team, const LogitsRow<float>& row, const RowPart& part, RowWork& work) {
  float best = -INFINITY;
  int32_t token = static_cast<int32_t>(part.begin(row));
  part.visit(team, row, [&](float logit, int32_t i) {
    if (logit > best) best = logit, token = i;  // never for NaN
  });
  const uint64_t top = team.max(part.begin(row) < part.end(row) ? best_key(best, token) : uint64_t{0});
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
                            0};
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
  team.sync();
  // Of equal logits one after another a member counts the last at the end, so that in a row of equals none meet.
  int32_t bin = -1;
  uint32_t count = 0;
  uint64_t units = 0;
  const auto flush = [&] {
    if (cut_k && count > 0) team.add(&histogram.counts[bin], count);
    if (cut_p && count > 0) team.accumulate(&histogram.masses[bin], units);
  };
  int64_t total = 0, heavy = 0;
  part.visit(team, row, [&](float logit, int32_t) {
    const float x = without_nan(logit);
    const int64_t weight = target.raw_weight(x);
    total += weight;
    heavy += weight >= min_weight ? weight : 0;
    if ((cut_k || cut_p) && weight >= least) {
      const int32_t here = bin_of(target, x);
      if (here != bin) {
        flush();
        bin = here, count = 0, units = 0;
      }
      ++count;
      units += static_cast<uint64_t>(weight) >> kUnitBits;
    }
  });
  flush();
  total = team.sum(total), heavy = team.sum(heavy);  // the barrier, too
  if (team.rank() == 0) work.totals[part.index] = total, work.heavy[part.index] = heavy;
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
  const int64_t counted = sum_of(chained ? work.heavy : work.totals, part.count);
  const CutRange range = find_range(team, work.bins, params, chained, target.vocabulary, counted);
  if (team.rank() == 0 && part.index == 0) work.range = range;
  if (!range.cuts()) return;
  const int64_t min_weight = params.min_weight();
  const int64_t least = least_counted(params, chained, target.vocabulary);
  if (team.rank() == 0) scratch.length = 0;
  team.sync();
  int64_t sure = 0, sure_heavy = 0;
  part.visit(team, row, [&](float logit, int32_t token) {
    const float x = without_nan(logit);
    const int32_t bin = bin_of(target, x);
    if (bin > range.last) return;
    const int64_t weight = target.raw_weight(x);
    if (bin >= range.first) {
      if (weight < least) return;
      const uint32_t place = team.add(&scratch.length, 1u);
      if (place < kListSize) scratch.list[place] = best_key(x, token);
      return;
    }
    const int64_t heavy = weight >= min_weight ? weight : 0;
    sure += chained ? heavy : weight;
    sure_heavy += heavy;
  });
  sure = team.sum(sure), sure_heavy = team.sum(sure_heavy);  // the barrier, too
  if (team.rank() == 0) {
    work.sure[part.index] = sure, work.sure_heavy[part.index] = sure_heavy;
    scratch.place = team.add(&work.length, uint64_t{scratch.length});
  }
  team.sync();
  for (uint64_t j = team.rank(); j < scratch.length && j < kListSize && scratch.place + j < kListSize;
       j += team.size()) {
    work.list[scratch.place + j] = scratch.list[j];
  }
}

}  // namespace eagle

// The last step of a row's statistics (row_statistics.h): the filters, applied to the few tokens that have to be
// compared.
#pragma once
#include "row_statistics.h"

namespace eagle {

struct FinishScratch {  // shared by the team
  Histogram histogram;
  uint32_t ties[kListSize];
  int64_t total, heavy;          // weight of all tokens of the row, and of those that min-p keeps
  int64_t sure, sure_heavy;      // the same of the tokens that come before the list; see RowWork
  uint32_t first_key, last_key;  // of the list, see descending_key
  uint32_t num_ties;
};

struct TokensInList {  // the tokens of the list, for the filters; all of the row if not `in_list`
  const RowWork& work;
  FinishScratch& scratch;
  bool in_list;

  EAGLE_HD int32_t length() const { return static_cast<int32_t>(work.length); }
  EAGLE_HD float logit(int32_t j) const { return score_of(work.list[j]); }
  EAGLE_HD int32_t token(int32_t j) const { return index_of(work.list[j]); }

  // The keys are close to each other: the bits that they have in common would put all of them in one bin.
  EAGLE_HD Digit first_digit() const {
    if (!in_list) return AllTokens{}.first_digit();
    int bits = 1;
    while (bits < 32 && (scratch.first_key ^ scratch.last_key) >> bits) ++bits;
    const int width = bits < 11 ? bits : 11;
    return {bits - width, width, bits < 32 ? scratch.first_key >> bits : 0, 0};
  }
  EAGLE_HD int64_t count_before() const { return in_list ? work.range.count_before : 0; }
  EAGLE_HD int64_t mass_before() const { return in_list ? scratch.sure : 0; }

  template <class Team>
  EAGLE_HD void count(Team& team, Histogram& histogram, const TargetDistribution& target, const Digit& digit) const {
    if (!in_list) return AllTokens{}.count(team, histogram, target, digit);
    for (int32_t j = team.rank(); j < length(); j += team.size()) {
      const uint32_t key = descending_key(logit(j));
      const int64_t weight = target.raw_weight(logit(j));
      if (digit.counts(key, weight)) histogram.add(team, digit.bin(key), weight);
    }
  }
  template <class Team>
  EAGLE_HD int32_t nth_equal(Team& team, Histogram& histogram, const TargetDistribution& target, int64_t n) const {
    if (!in_list) return AllTokens{}.nth_equal(team, histogram, target, n);
    if (team.rank() == 0) scratch.num_ties = 0;
    team.sync();
    for (int32_t j = team.rank(); j < length(); j += team.size()) {
      if (logit(j) == target.cut_value) scratch.ties[team.add(&scratch.num_ties, 1u)] = token(j);
    }
    team.sync();
    int32_t found = target.vocabulary;
    for (uint32_t j = team.rank(); j < scratch.num_ties; j += team.size()) {
      int64_t rank = 1;
      for (uint32_t i = 0; i < scratch.num_ties; ++i) rank += scratch.ties[i] < scratch.ties[j];
      if (rank == n) found = static_cast<int32_t>(scratch.ties[j]);
    }
    return team.min(found);
  }
  template <class Team>
  EAGLE_HD bool are_all(Team&, const TargetDistribution&) const {
    return !in_list || work.range.reaches_end();
  }
  template <class Team>
  EAGLE_HD int64_t kept(Team& team, const TargetDistribution& target) const {
    if (target.keeps_all()) return target.min_weight > 0 ? scratch.heavy : scratch.total;
    if (!in_list) return AllTokens{}.kept(team, target);
    int64_t s = 0;
    for (int32_t j = team.rank(); j < length(); j += team.size()) s += target.kept_weight(logit(j), token(j));
    return team.sum(s) + (target.min_weight > 0 ? scratch.sure_heavy : scratch.sure);
  }
};

template <class Team>
EAGLE_HD void finish_row(Team& team, FinishScratch& scratch, const LogitsRow<float>& row, SamplingRow params,
                         bool chained, int32_t parts, RowWork& work) {
  RowStatistics& out = work.statistics;
  if (team.rank() == 0) out.most_likely = index_of(best_of_parts(work, parts));
  if (params.top_k == 1) return;
  TargetDistribution target = whole_row(work, row, params, parts);
  if (params.cuts(target.vocabulary) && work.range.cuts()) {
    bool in_list = work.length <= kListSize;
    uint32_t first = ~0u, last = 0;
    for (int32_t j = team.rank(); in_list && j < static_cast<int32_t>(work.length); j += team.size()) {
      const uint32_t key = descending_key(score_of(work.list[j]));
      first = key < first ? key : first;
      last = key > last ? key : last;
    }
    first = team.min(first), last = team.max(last);
    if (team.rank() == 0) {
      scratch.total = sum_of(work.totals, parts);
      scratch.heavy = sum_of(work.heavy, parts);
      scratch.sure = sum_of(work.sure, parts);
      scratch.sure_heavy = sum_of(work.sure_heavy, parts);
      scratch.first_key = first, scratch.last_key = last;
    }
    team.sync();
    target.keep_all(scratch.total);
    while (!apply_filters(team, scratch.histogram, TokensInList{work, scratch, in_list}, params, chained, target)) {
      in_list = false;
      target.keep_all(scratch.total);
    }
  } else {
    target.min_weight = params.min_weight();
  }
  if (team.rank() > 0) return;
  out.highest = target.highest;
  out.cut_value = target.cut_value;
  out.cut_index = target.cut_index;
  out.min_weight = target.min_weight;
}

}  // namespace eagle

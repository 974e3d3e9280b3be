// Draws from what is left of the target distribution at a node after sampled children were refused.
#pragma once
#include "team.h"
#include "weights.h"

namespace eagle {

constexpr int kDrawBlock = 256;  // tokens whose weights a draw sums at once

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
  // The place of the first token of the list that is not below `token`.
  EAGLE_HD int32_t place(int64_t token) const {
    int32_t low = 0;
    for (int32_t high = top_m; low < high;) {
      const int32_t middle = (low + high) / 2;
      if (tokens[middle] < token) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
  // The weight that refusals took from the tokens of the list with ids in [begin, end).
  EAGLE_HD int64_t taken_within(const TargetDistribution& target, int64_t begin, int64_t end) const {
    int64_t s = 0;
    if (refused == 0) return s;
    for (int32_t j = place(begin); j < top_m && tokens[j] < end; ++j) s += taken(target, j);
    return s;
  }
  // The index of a token in the list, -1 when it is not there.
  EAGLE_HD int32_t find(int64_t token) const {
    const int32_t j = place(token);
    return j < top_m && tokens[j] == token ? j : -1;
  }
};

// The weight that is left of all tokens.
template <class Team>
EAGLE_HD int64_t total_left(Team& team, const TargetDistribution& target, const ProposalRow& q) {
  int64_t taken = 0;
  for (int32_t j = team.rank(); j < q.top_m; j += team.size()) taken += q.taken(target, j);
  return target.total - team.sum(taken);
}

struct Part {  // tokens of a row, and the weight that is left of all tokens before them
  int32_t begin, end;
  int64_t before;
};

// The segment with the token that has the weight `sought` before it. The team has at least kSegments members.
template <class Team>
EAGLE_HD Part find_segment(Team& team, const TargetDistribution& target, const ProposalRow& q, int64_t sought) {
  const int64_t length = segment_length(target.vocabulary), begin = length * team.rank();
  int64_t mine = 0;
  if (team.rank() < kSegments) mine = target.masses[team.rank()] - q.taken_within(target, begin, begin + length);
  const int64_t before = team.exclusive_sum(mine);
  const bool here = before <= sought && sought < before + mine;
  const int64_t found = team.min(here ? begin : int64_t{target.vocabulary});
  const int64_t end = found + length < target.vocabulary ? found + length : target.vocabulary;
  return {static_cast<int32_t>(found), static_cast<int32_t>(end), team.max(here ? before : int64_t{0})};
}

// The token at the fraction u of the weight that is left.
template <class Team>
EAGLE_HD int32_t draw_token(Team& team, const TargetDistribution& target, ProposalRow& q, double u) {
  int64_t left = q.refused > 0 ? total_left(team, target, q) : target.total;
  if (left <= 0) q.refused = 0, left = target.total;  // p equals q' to the last bit: no child is refused then
  int64_t sought = static_cast<int64_t>(u * static_cast<double>(left));  // the weight before the token that is drawn
  if (sought >= left) sought = left - 1;

  Part part{0, target.vocabulary, 0};
  if (target.masses) part = find_segment(team, target, q, sought);
  const int64_t size = part.end - part.begin;
  const int32_t from = part.begin + static_cast<int32_t>(size * team.rank() / team.size());
  const int32_t to = part.begin + static_cast<int32_t>(size * (team.rank() + 1) / team.size());
  int64_t mine = left;
  if (team.size() > 1) mine = target.sum(from, to, 1) - q.taken_within(target, from, to);
  int64_t before = part.before + team.exclusive_sum(mine);
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
        before += target.weight(i) - q.taken_within(target, i, int64_t{i} + 1);
        if (before > sought) found = i;
      }
    }
  }
  return team.min(found);
}

}  // namespace eagle

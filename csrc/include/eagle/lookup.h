// Looked-up branches, for one request. The specification is eagle_plugin/core/lookup.py.
#pragma once
#include <cmath>

#include "tree.h"

namespace eagle {

constexpr int kMinMatch = 2, kMaxMatch = 16;
constexpr int kLengthClasses = 4, kCells = 4 * kLengthClasses;
constexpr int kUnread = 0, kBest = 1, kBelow = 2, kUnlisted = 3;  // what the head says of a looked-up token
constexpr float kPriorWeight = 4.0f, kMostExpected = 32.0f, kLeastRatio = 0.02f;

struct HistoryRow {  // of one request
  int32_t* tokens;
  int64_t window;
  int64_t *begin, *end;
  int32_t *path, *cells;
  float* doubts;
  int32_t steps;  // P
  int64_t* start;
  int32_t* taken;
  float *expected, *missed;
  int64_t* counts;

  EAGLE_HD int32_t& at(int64_t position) const { return tokens[position % window]; }
};

// Notes `count` tokens at the positions from `first` on. Every member must call it; a barrier comes after it.
template <class Team>
EAGLE_HD void put_tokens(const Team& team, const HistoryRow& history, int64_t first, const int64_t* tokens,
                         int32_t count) {
  const bool follows = first <= *history.end + 1 && first >= *history.begin;
  team.sync();
  if (team.rank() == 0) {
    if (!follows) *history.begin = first;
    *history.end = first + count - 1;
  }
  const int32_t lost = count > history.window ? count - static_cast<int32_t>(history.window) : 0;  // to later ones
  for (int32_t i = lost + team.rank(); i < count; i += team.size()) {
    history.at(first + i) = static_cast<int32_t>(tokens[i]);
  }
  team.sync();
}

struct Match {
  int64_t at;      // position of its last token
  int32_t length;  // 0 without one
};

// The longest earlier occurrence of the last tokens up to position `last`, of equally long ones the newest.
template <class Team>
EAGLE_HD Match longest_match(const Team& team, const HistoryRow& history, int64_t last) {
  const int64_t window = history.window, oldest = last - window + 1;
  const int64_t begin = *history.begin > oldest ? *history.begin : oldest;
  const int32_t newest = history.at(last);
  uint64_t found = 0;  // the length, then the position from `begin` on: a greater one is the better
  const int64_t first = last - 1 - team.rank(), column = first >= 0 ? first % window : 0, step = team.size() % window;
  int64_t place = column;
  for (int64_t p = first; p >= begin && newest >= 0; p -= team.size()) {
    if (history.tokens[place] == newest) {
      int32_t length = 1;
      while (length < kMaxMatch && p - length >= begin) {
        const int32_t token = history.at(p - length);
        if (token < 0 || token != history.at(last - length)) break;
        ++length;
      }
      const uint64_t key = static_cast<uint64_t>(length) << 48 | static_cast<uint64_t>(p - begin);
      found = key > found ? key : found;
    }
    place -= step;
    if (place < 0) place += window;
  }
  found = team.max(found);
  const int32_t length = static_cast<int32_t>(found >> 48);
  return {begin + static_cast<int64_t>(found & ((uint64_t{1} << 48) - 1)), length < kMinMatch ? 0 : length};
}

EAGLE_HD int32_t length_class(int32_t length) { return length >= 9 ? 3 : length >= 5 ? 2 : length >= 3 ? 1 : 0; }

struct LookupScratch {           // shared by the team; the last head candidate of depth d on the path, and what
  int32_t nodes[kMaxWidth + 1];  // candidates that leave it there gain, and the score that they may not exceed
  float gains[kMaxWidth + 1], ceilings[kMaxWidth + 1];
  int32_t path[kMaxWidth];  // candidate of each step
  int32_t shared;           // nodes of the path that are candidates of the head, the root not counted
};

// Merges the path that was looked up into the candidates; the caller checks that steps <= 64 and that the table has
// candidates + steps places.
template <class Team>
EAGLE_HD void look_up(const Team& team, LookupScratch& scratch, const HistoryRow& history, const float* prior,
                      TableRow table, int32_t candidates, int32_t steps, int32_t width, int64_t prefix_len,
                      int64_t root) {
  put_tokens(team, history, prefix_len, &root, 1);
  const Match match = longest_match(team, history, prefix_len);
  const int64_t period = prefix_len - match.at;
  int32_t current = -1, count = 0, shared = 0;  // every member follows the path
  float before = 0, after = 0;                  // the score of its last node, without and with the path
  bool is_shared = true;
  if (team.rank() == 0) scratch.nodes[0] = -1, scratch.gains[0] = 0, scratch.ceilings[0] = 0;
  for (; match.length > 0 && count < steps; ++count) {
    const int32_t token = history.at(match.at + 1 + count % period);
    if (token < 0) break;
    int32_t child = -1;
    uint64_t best = 0;
    if (is_shared) {
      for (int32_t c = team.rank(); c < candidates; c += team.size()) {
        if (table.parents[c] != current || !(table.scores[c] > -INFINITY)) continue;
        const uint64_t key = best_key(table.scores[c], c);
        best = key > best ? key : best;
        if (table.tokens[c] == token && (child < 0 || c < child)) child = c;
      }
      best = team.max(best);
      child = team.min(child < 0 ? INT32_MAX : child);
      child = child == INT32_MAX ? -1 : child;
    }
    const int32_t kind = best == 0 ? kUnread : child < 0 ? kUnlisted : index_of(best) == child ? kBest : kBelow;
    const int32_t cell = kind * kLengthClasses + length_class(match.length + count);
    float ratio = (history.missed[cell] + kPriorWeight * prior[cell]) / (history.expected[cell] + kPriorWeight);
    ratio = ratio < kLeastRatio ? kLeastRatio : ratio > 1 ? 1 : ratio;
    float q = child < 0 ? 0 : expf(table.scores[child] - before);
    q = q > 1 ? 1 : q;
    const float doubt = 1 - q, next = after + log1pf(-ratio * doubt);
    const int32_t place = candidates + count;
    if (team.rank() == 0) {
      if (is_shared) scratch.gains[shared] = after - before + logf(ratio);
      table.scores[place] = child < 0 ? next : -INFINITY;
      table.tokens[place] = child < 0 ? token : 0;
      table.parents[place] = child < 0 ? current : -1;
      history.path[count] = token;
      history.cells[count] = cell;
      history.doubts[count] = doubt;
      scratch.path[count] = child < 0 ? place : child;
    }
    is_shared = child >= 0;
    if (is_shared) {
      before = table.scores[child];
      ++shared;
      if (team.rank() == 0) {
        scratch.nodes[shared] = child, scratch.gains[shared] = next - before, scratch.ceilings[shared] = next;
      }
    }
    after = next;
    current = is_shared ? child : place;
  }
  if (team.rank() == 0) {
    scratch.shared = shared;
    *history.start = count > 0 ? prefix_len + 1 : -1;
    *history.taken = 0;
    for (int32_t i = count; i < history.steps; ++i) {
      history.cells[i] = -1;
      if (i >= steps) continue;
      history.path[i] = 0, history.doubts[i] = 0;
      table.scores[candidates + i] = -INFINITY, table.tokens[candidates + i] = 0, table.parents[candidates + i] = -1;
    }
  }
  team.sync();  // nobody reads the head's scores from here on but to change its own
  if (count == 0) return;
  for (int32_t c = team.rank(); c < candidates; c += team.size()) {
    // The last node of the path on the way to the root: parents come before their children.
    int32_t depth = scratch.shared;
    for (int32_t at = c; depth > 0; at = table.parents[at]) {
      while (scratch.nodes[depth] > at) --depth;  // the root's -1 is above no candidate
      if (scratch.nodes[depth] == at) break;
    }
    if (depth > 0 && scratch.nodes[depth] == c) {
      table.scores[c] = scratch.ceilings[depth];
    } else {
      const float score = table.scores[c] + scratch.gains[depth];
      table.scores[c] = score < scratch.ceilings[depth] ? score : scratch.ceilings[depth];
    }
  }
  team.sync();
  // The steps that are among the width - 1 best candidates: each is better than the next.
  int32_t taken = 0;
  for (; taken < count; ++taken) {
    const int32_t node = scratch.path[taken];
    const uint64_t key = best_key(table.scores[node], node);
    int32_t better = 0;
    for (int32_t c = team.rank(); c < candidates + steps; c += team.size())
      better += best_key(table.scores[c], c) > key;
    if (team.sum(better) >= width - 1) break;
  }
  if (team.rank() == 0) *history.taken = taken;
}

// Notes the accepted tokens of a round, and how its looked-up path fared.
template <class Team>
EAGLE_HD void append_tokens(const Team& team, const HistoryRow& history, int64_t prefix_len, const int64_t* tokens,
                            int32_t length) {
  if (team.rank() == 0 && *history.start == prefix_len + 1) {
    bool right = true;
    for (int32_t i = 0; i < history.steps && history.cells[i] >= 0; ++i) {
      const int32_t cell = history.cells[i], kind = cell / kLengthClasses;
      const bool in_tree = (kind == kUnread || kind == kUnlisted) && i < *history.taken;
      history.counts[0] += in_tree;
      if (!right || i >= length) continue;
      right = tokens[i] == history.path[i];
      history.counts[1] += right && in_tree && i + 1 < length;
      history.expected[cell] += history.doubts[i];
      history.missed[cell] += right ? 0.0f : 1.0f;
    }
    for (int32_t cell = 0; cell < kCells; ++cell) {
      if (history.expected[cell] > kMostExpected) history.expected[cell] /= 2, history.missed[cell] /= 2;
    }
  }
  team.sync();
  if (team.rank() == 0) *history.start = -1;
  put_tokens(team, history, prefix_len + 1, tokens, length);
}

}  // namespace eagle

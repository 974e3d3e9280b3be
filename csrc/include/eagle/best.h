// The n best of many scored items: score descending, then index ascending, the order of a stable descending sort.
#pragma once
#include <cmath>
#include <cstring>

#include "team.h"

namespace eagle {

constexpr int kCollected = 2048;  // items that a block can hold at once
constexpr int kGroups = 256;      // groups of the members of a block, at least kMaxTopM

struct BestScratch {  // shared by the team
  uint64_t best[kMaxTopM];
  uint64_t keys[kCollected];
  uint32_t length;
};

// A greater key is a better item. No two items have the same key, so ranks can be counted. NaN counts as -inf and -0 as
// 0. No key is 0.
EAGLE_HD uint64_t best_key(float score, int32_t index) {
  const float x = score == score ? score + 0.0f : -INFINITY;
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t{bits} << 32 | ~static_cast<uint32_t>(index);
}

EAGLE_HD int32_t index_of(uint64_t key) { return static_cast<int32_t>(~static_cast<uint32_t>(key)); }

EAGLE_HD float score_of(uint64_t key) {
  uint32_t bits = static_cast<uint32_t>(key >> 32);
  bits = bits >> 31 ? bits & 0x7fffffffu : ~bits;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

struct ScoreList {  // a source of items: `visit` calls f(score, index) for kRun items from `begin` on
  static constexpr int kRun = 1;
  const float* scores;

  template <class F>
  EAGLE_HD void visit(int64_t begin, F&& f) const {
    f(scores[begin], static_cast<int32_t>(begin));
  }
  // The same for the runs at begin, begin + step ... below `end`.
  template <class F>
  EAGLE_HD void visit_runs(int64_t begin, int64_t end, int64_t step, F&& f) const {
    for (int64_t i = begin; i < end; i += step) visit(i, f);
  }
};

// find_best writes the keys of the best items, best first, into scratch.best and returns their number, the lesser of n
// and `count`; n <= 128.

#if !defined(__CUDACC__)
// A list of at most `capacity` keys, best first. Returns the new length.
inline int insert_best(uint64_t* keys, int length, int capacity, uint64_t key) {
  if (length == capacity) {
    if (capacity == 0 || key < keys[length - 1]) return length;
    --length;
  }
  int place = length;
  for (; place > 0 && key > keys[place - 1]; --place) keys[place] = keys[place - 1];
  keys[place] = key;
  return length + 1;
}

// One thread keeps a sorted list.
template <class Source>
inline int32_t find_best(const SerialTeam&, BestScratch& scratch, const Source& source, int32_t count, int32_t n) {
  int length = 0;
  for (int64_t i = 0; i < count; i += Source::kRun) {
    source.visit(
        i, [&](float score, int32_t index) { length = insert_best(scratch.best, length, n, best_key(score, index)); });
  }
  return length;
}
#endif

// A block collects the items that may be among the best and counts their ranks. Its members form groups, whose best
// items are compared with each other: the n-th best of these is a lower bound of the n best items. Few items reach it,
// unless the best items all belong to a few groups. When too many items reach it, the best are searched one by one.
// `each` is called once for every item with its score and the best score.
template <class Team, class Source, class F>
EAGLE_HD int32_t find_best(const Team& team, BestScratch& scratch, const Source& source, int32_t count, int32_t n,
                           F&& each) {
  const int32_t wanted = n < count ? n : count;
  if (wanted <= 0) return 0;
  const int64_t first = int64_t{Source::kRun} * team.rank(), step = int64_t{Source::kRun} * team.size();
  uint64_t mine = 0;
  source.visit_runs(first, count, step, [&](float score, int32_t index) {
    const uint64_t key = best_key(score, index);
    mine = key > mine ? key : mine;
  });
  scratch.keys[team.rank()] = mine;
  if (team.rank() == 0) scratch.length = 0;
  team.sync();
  const int32_t groups = team.size() < kGroups ? team.size() : kGroups;
  const bool leads = team.rank() < groups;
  for (int32_t j = team.rank() + groups; leads && j < team.size(); j += groups) {
    mine = scratch.keys[j] > mine ? scratch.keys[j] : mine;
  }
  team.sync();
  if (leads) scratch.keys[team.rank()] = mine;
  team.sync();
  const float top = score_of(team.max(mine));
  int32_t better = 0;
  for (int32_t j = 0; leads && j < groups; ++j) better += scratch.keys[j] > mine;
  const uint64_t floor = team.max(leads && better == wanted - 1 ? mine : uint64_t{0});  // 0 when fewer have an item

  source.visit_runs(first, count, step, [&](float score, int32_t index) {
    each(score, top);
    const uint64_t key = best_key(score, index);
    if (key < floor) return;
    const uint32_t place = team.add(&scratch.length, 1u);
    if (place < kCollected) scratch.keys[place] = key;
  });
  team.sync();
  const int32_t length = static_cast<int32_t>(scratch.length);
  if (length <= kCollected) {
    for (int32_t i = team.rank(); i < length; i += team.size()) {
      const uint64_t key = scratch.keys[i];
      int32_t rank = 0;
      for (int32_t j = 0; j < length; ++j) rank += scratch.keys[j] > key;
      if (rank < wanted) scratch.best[rank] = key;
    }
    team.sync();
    return wanted;
  }
  uint64_t last = ~uint64_t{0};
  for (int32_t rank = 0; rank < wanted; ++rank) {
    mine = 0;
    source.visit_runs(first, count, step, [&](float score, int32_t index) {
      const uint64_t key = best_key(score, index);
      if (key < last && key > mine) mine = key;
    });
    last = team.max(mine);
    if (team.rank() == 0) scratch.best[rank] = last;
  }
  team.sync();
  return wanted;
}

template <class Team, class Source>
EAGLE_HD int32_t find_best(const Team& team, BestScratch& scratch, const Source& source, int32_t count, int32_t n) {
  return find_best(team, scratch, source, count, n, [](float, float) {});
}

}  // namespace eagle

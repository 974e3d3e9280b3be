// Building a level of the draft tree and selecting its nodes, for one request. The specification is
// eagle_plugin/core/tree.py.
#pragma once
#include "best.h"

namespace eagle {

struct TableRow {  // one request's row of the candidate table
  float* scores;
  int64_t* tokens;
  int32_t* parents;
};

struct FrontierRow {  // one request's row of the frontier
  int32_t* candidates;
  float* scores;
  int64_t* tokens;
  int64_t* parent_rows;
  uint64_t* ancestors;
};

struct LevelRow {  // the children of one request's frontier
  const float* logp;
  const int64_t* tokens;
  int32_t rows, k;       // frontier nodes, children of each
  FrontierRow previous;  // all null at depth 1
  int32_t offset;        // of the children in the table
  int32_t first_slot;    // of the new frontier in the draft tail
};

// Writes the children into the table at `offset`; the best `keep` of them become the new frontier. The caller checks
// that first_slot + keep <= 64 and offset + rows * k <= C.
template <class Team>
EAGLE_HD void grow_level(const Team& team, BestScratch& scratch, TableRow table, const LevelRow& level, int32_t keep,
                         FrontierRow out) {
  const int32_t children = level.rows * level.k;
  const bool grows = level.previous.scores != nullptr;
  float* scores = table.scores + level.offset;
  for (int32_t child = team.rank(); child < children; child += team.size()) {
    const int32_t row = child / level.k;
    scores[child] = grows ? level.previous.scores[row] + level.logp[child] : level.logp[child];
    table.tokens[level.offset + child] = level.tokens[child];
    table.parents[level.offset + child] = grows ? level.previous.candidates[row] : -1;
  }
  team.sync();
  find_best(team, scratch, ScoreList{scores}, children, keep);
  for (int32_t j = team.rank(); j < keep; j += team.size()) {
    const int32_t child = index_of(scratch.best[j]), row = child / level.k;
    out.candidates[j] = level.offset + child;
    out.scores[j] = scores[child];
    out.tokens[j] = level.tokens[child];
    out.parent_rows[j] = row;
    out.ancestors[j] = uint64_t{1} << (level.first_slot + j) | (grows ? level.previous.ancestors[row] : 0);
  }
}

struct LevelsRow {  // the children of all levels of one request, whose tokens do not depend on the path to them
  const float* logp;
  const int64_t* tokens;
  int32_t depth, topk, k;  // of the tree, nodes per depth that have children, children of each; topk <= k
};

struct FrontierScratch {  // a frontier that only the team reads
  int32_t candidates[kMaxWidth];
  float scores[kMaxWidth];
  int64_t tokens[kMaxWidth], parent_rows[kMaxWidth];
  uint64_t ancestors[kMaxWidth];

  EAGLE_HD FrontierRow row() { return {candidates, scores, tokens, parent_rows, ancestors}; }
};

struct LevelsScratch {  // shared by the team
  BestScratch best;
  FrontierScratch frontiers[2];
};

// All levels of a tree, as grow_level writes them one after the other. The caller checks that (depth - 1) * topk <= 64
// and that the table has places for all rows.
template <class Team>
EAGLE_HD void grow_levels(const Team& team, LevelsScratch& scratch, TableRow table, const LevelsRow& levels) {
  FrontierRow previous{};
  int32_t first = 0, rows = 1;
  for (int32_t level = 0; level < levels.depth; ++level) {
    const int32_t at = first * levels.k, keep = level + 1 < levels.depth ? levels.topk : 0;
    const FrontierRow next = scratch.frontiers[level % 2].row();
    grow_level(team, scratch.best, table,
               {levels.logp + at, levels.tokens + at, rows, levels.k, previous, at, level * levels.topk}, keep, next);
    team.sync();
    previous = next;
    first += rows;
    rows = levels.topk;
  }
}

struct TreeRow {  // one request's row of the draft tree
  int64_t* tokens;
  int32_t* parents;
  int32_t* depths;
  uint64_t* ancestors;
};

struct SelectScratch {  // shared by the team
  BestScratch best;
  int32_t picked[kMaxWidth];   // candidate of node i + 1
  int32_t parents[kMaxWidth];  // node
};

// The node of a candidate among the nodes before `node`; 0, the root, when none of them is that candidate.
EAGLE_HD int32_t node_of(const int32_t* picked, int32_t node, int32_t candidate) {
  int32_t low = 0, high = node - 1;  // first index in picked[0, node - 1) with a value not below the candidate
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (picked[middle] < candidate) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < node - 1 && picked[low] == candidate ? low + 1 : 0;
}

// The best width - 1 of `candidates` candidates as a tree. When the parent of a picked candidate is not picked or comes
// after it, the table is corrupt: then the tree is the root alone, and the result is false.
template <class Team>
EAGLE_HD bool select_tree(const Team& team, SelectScratch& scratch, TableRow table, int32_t candidates,
                          int64_t root_token, int32_t width, TreeRow out) {
  int32_t length = find_best(team, scratch.best, ScoreList{table.scores}, candidates, width - 1);
  for (int32_t i = team.rank(); i < length; i += team.size()) {  // table order: parents before children
    const int32_t candidate = index_of(scratch.best.best[i]);
    int32_t place = 0;
    for (int32_t j = 0; j < length; ++j) place += index_of(scratch.best.best[j]) < candidate;
    scratch.picked[place] = candidate;
  }
  team.sync();
  int32_t strays = 0;
  for (int32_t node = 1 + team.rank(); node <= length; node += team.size()) {
    const int32_t parent = table.parents[scratch.picked[node - 1]];
    const int32_t found = parent < 0 ? 0 : node_of(scratch.picked, node, parent);
    strays += parent >= 0 && found == 0;
    scratch.parents[node - 1] = found;
  }
  const bool sound = team.sum(strays) == 0;
  if (!sound) length = 0;
  for (int32_t node = team.rank(); node < width; node += team.size()) {
    const bool drafted = node > 0 && node <= length;
    const int32_t candidate = drafted ? scratch.picked[node - 1] : 0;
    uint64_t ancestors = uint64_t{1} << node | 1;
    int32_t depth = 0;
    for (int32_t at = node; drafted && at > 0; at = scratch.parents[at - 1], ++depth) ancestors |= uint64_t{1} << at;
    out.tokens[node] = drafted ? table.tokens[candidate] : root_token;
    out.parents[node] = drafted ? scratch.parents[node - 1] : -1;
    out.depths[node] = depth;
    out.ancestors[node] = ancestors;
  }
  return sound;
}

}  // namespace eagle

// The walk over the draft tree of one request at any temperature. The specification is core/verify.py verify_tree.
#pragma once
#include "law.h"

namespace eagle {

struct DraftRow {  // one request's row of the draft tree
  const int64_t* tokens;
  const int32_t *parents, *draws;
  int32_t width;
};

struct ProposalTable {  // one request's proposals, `rows` of `size` tokens
  const int64_t* tokens;
  const float* weights;
  int32_t rows, size;

  EAGLE_HD ProposalRow row(int32_t i) const {
    return {tokens + int64_t{i} * size, weights + int64_t{i} * size, size, 0, {}};
  }
};

// The first child of `parent` behind node `after` that was drawn (sampled), or that was not and has this token; width
// when there is none.
template <class Team>
EAGLE_HD int32_t find_child(Team& team, const DraftRow& tree, int32_t parent, int32_t after, bool sampled,
                            bool any_kind, int64_t token) {
  int32_t first = tree.width;
  for (int32_t c = after + 1 + team.rank(); c < tree.width && c < first; c += team.size()) {
    if (tree.parents[c] != parent) continue;
    const bool drawn = tree.draws[c] >= 0;
    if (sampled ? drawn : (any_kind || !drawn) && tree.tokens[c] == token) first = c;
  }
  return team.min(first);
}

// Tests the sampled children of a node in turn. Returns the one that is accepted, or width; q holds the refusals.
template <class Team>
EAGLE_HD int32_t test_sampled(Team& team, const Law& law, const DraftRow& tree, int32_t parent,
                              const ProposalTable& proposals, const double* uniforms, int32_t tests, ProposalRow& q) {
  double undrawn = 1;  // of q', after the children before
  for (int32_t c = -1; q.refused < tests && q.refused < kMaxTests;) {
    c = find_child(team, tree, parent, c, true, false, 0);
    if (c == tree.width || tree.draws[c] >= proposals.rows) break;
    if (q.refused == 0) q = proposals.row(tree.draws[c]);
    const int32_t j = q.find(tree.tokens[c]);
    if (j < 0 || !(q.weights[j] > 0) || !(undrawn > 0)) break;  // q' cannot have drawn it
    const double share = static_cast<double>(total_left(team, law, q)) / undrawn;
    if (uniforms[q.refused] * q.weights[j] * share < static_cast<double>(q.left(law, j))) return c;
    q.shares[q.refused++] = share;
    undrawn -= q.weights[j];
  }
  return tree.width;
}

// logits [width, vocabulary], rows `step` elements apart; uniforms [stride, numbers]; index[stride] and out[stride] are
// written whole. Returns the accept length. Parents are compared and never followed, so that no value in the tree can
// lead the walk out of bounds; a draw that names no proposal row makes its child one that is never accepted.
template <class Team>
EAGLE_HD int32_t verify_tree(Team& team, Histogram& histogram, const DraftRow& tree, const float* logits, int64_t step,
                             int32_t vocabulary, const SamplingRow& params, bool chained,
                             const ProposalTable& proposals, const double* uniforms, int32_t numbers, int32_t stride,
                             int32_t* index, int64_t* out) {
  const bool greedy = params.top_k == 1;
  int32_t current = 0, length = 0;
  for (;;) {
    Law law;
    int32_t token = find_law(team, histogram, logits + current * step, vocabulary, params, chained, law);
    const bool inner = length + 1 < stride;
    int32_t child = tree.width;
    if (!greedy) {
      const double* u = uniforms + length * numbers;
      ProposalRow q{nullptr, nullptr, 0, 0, {}};
      if (inner) child = test_sampled(team, law, tree, current, proposals, u, numbers - 1, q);
      token = child < tree.width ? static_cast<int32_t>(tree.tokens[child]) : draw_token(team, law, q, u[numbers - 1]);
    }
    if (child == tree.width && inner) child = find_child(team, tree, current, -1, false, greedy, token);
    if (team.rank() == 0) {
      index[length] = current;
      out[length] = token;
    }
    ++length;
    if (child == tree.width) break;
    current = child;
  }
  for (int32_t j = length + team.rank(); j < stride; j += team.size()) {
    index[j] = -1;
    out[j] = 0;
  }
  return length;
}

}  // namespace eagle

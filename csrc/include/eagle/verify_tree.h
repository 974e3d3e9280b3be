// The walk over the draft tree of one request at any temperature. The specification is core/verify.py verify_tree.
#pragma once
#include "draw.h"
#include "target_distribution.h"

namespace eagle {

struct DraftRow {  // one request's row of the draft tree
  const int64_t* tokens;
  const int32_t *parents, *draws;
  int32_t width;
};

struct ProposalTable {  // one request's proposals, `rows` rows of `top_m` tokens
  const int64_t* tokens;
  const float* weights;
  int32_t rows, top_m;

  EAGLE_HD ProposalRow row(int32_t i) const {
    return {tokens + int64_t{i} * top_m, weights + int64_t{i} * top_m, top_m, 0, {}};
  }
};

// The first child of `parent` after node `after`, or width when there is none. `sampled`: a child that was drawn; else
// a child with this token that was not drawn, or (any_kind) drawn or not.
template <class Team>
EAGLE_HD int32_t find_child(Team& team, const DraftRow& tree, int32_t parent, int32_t after, bool sampled,
                            bool any_kind, int64_t token) {
  int32_t first = tree.width;
  for (int32_t c = after + 1 + team.rank(); c < tree.width && c < first; c += team.size()) {
    if (tree.parents[c] != parent) continue;
    if (any_kind) {
      if (tree.tokens[c] == token) first = c;
      continue;
    }
    const bool drawn = tree.draws[c] >= 0;
    if (sampled ? drawn : !drawn && tree.tokens[c] == token) first = c;
  }
  return team.min(first);
}

// Tests the sampled children of a node in node order. Returns the accepted child, or width; q records the refusals.
template <class Team>
EAGLE_HD int32_t test_sampled(Team& team, const TargetDistribution& target, const DraftRow& tree, int32_t parent,
                              const ProposalTable& proposals, const double* uniforms, int32_t tests, ProposalRow& q) {
  double undrawn = 1;  // the part of q' that the earlier children left
  for (int32_t c = -1; q.refused < tests && q.refused < kMaxSampled;) {
    c = find_child(team, tree, parent, c, true, false, 0);
    if (c == tree.width || tree.draws[c] >= proposals.rows) break;
    if (q.refused == 0) q = proposals.row(tree.draws[c]);
    const int32_t j = q.find(tree.tokens[c]);
    if (j < 0 || !(q.weights[j] > 0) || !(undrawn > 0)) break;  // q' cannot have drawn it
    const double share = static_cast<double>(total_left(team, target, q)) / undrawn;
    if (uniforms[q.refused] * q.weights[j] * share < static_cast<double>(q.left(target, j))) return c;
    q.shares[q.refused++] = share;
    undrawn -= q.weights[j];
  }
  return tree.width;
}

// The places after a path.
template <class Team>
EAGLE_HD void fill_rest(const Team& team, int32_t length, int32_t max_accept_length, int32_t* index, int64_t* out) {
  for (int32_t j = length + team.rank(); j < max_accept_length; j += team.size()) {
    index[j] = -1;
    out[j] = 0;
  }
}

struct LogitsOfNodes {  // a source of target distributions, computed for the nodes that the walk visits
  const float* logits;  // [width, vocabulary], rows `step` elements apart
  int64_t step;
  int32_t vocabulary;
  SamplingRow params;
  bool chained;
  Histogram& histogram;

  template <class Team>
  EAGLE_HD int32_t find(Team& team, int32_t node, TargetDistribution& target) const {
    return find_target_distribution(team, histogram, logits + node * step, vocabulary, params, chained, target);
  }
};

// nodes.find(team, node, target) returns the most likely token after a node, and unless `greedy` the distribution;
// uniforms [max_accept_length, num_uniforms]; index[max_accept_length] and out[max_accept_length] are filled to their
// end. Returns the accept length. Parents are compared and never followed, so no value in the tree can lead the walk
// out of bounds. A child whose draw names no proposal row is never accepted.
template <class Team, class Nodes>
EAGLE_HD int32_t verify_tree(Team& team, const DraftRow& tree, const Nodes& nodes, bool greedy,
                             const ProposalTable& proposals, const double* uniforms, int32_t num_uniforms,
                             int32_t max_accept_length, int32_t* index, int64_t* out) {
  int32_t current = 0, length = 0;
  for (;;) {
    TargetDistribution target;
    int32_t token = nodes.find(team, current, target);
    const bool inner = length + 1 < max_accept_length;
    int32_t child = tree.width;
    if (!greedy) {
      const double* u = uniforms + length * num_uniforms;
      ProposalRow q{nullptr, nullptr, 0, 0, {}};
      if (inner) child = test_sampled(team, target, tree, current, proposals, u, num_uniforms - 1, q);
      token = child < tree.width ? static_cast<int32_t>(tree.tokens[child])
                                 : draw_token(team, target, q, u[num_uniforms - 1]);
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
  fill_rest(team, length, max_accept_length, index, out);
  return length;
}

}  // namespace eagle

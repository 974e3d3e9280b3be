// The walk over the draft tree of one request at any temperature. The specification is verify_tree in
// eagle_plugin/core/verify.py.
#pragma once
#include <cmath>
#include <cstring>

#include "noise.h"
#include "target_distribution.h"

namespace eagle {

struct DraftRow {  // one request's row of the draft tree
  const int64_t* tokens;
  const int32_t* parents;
  int32_t width;
};

// The first child of `parent` with this token, or width when there is none.
template <class Team>
EAGLE_HD int32_t find_child(Team& team, const DraftRow& tree, int32_t parent, int64_t token) {
  int32_t first = tree.width;
  for (int32_t c = team.rank(); c < tree.width && c < first; c += team.size()) {
    if (tree.parents[c] == parent && tree.tokens[c] == token) first = c;
  }
  return team.min(first);
}

// Keys that are ordered as the values.
EAGLE_HD int64_t ascending_key(double x) {
  int64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits < 0 ? bits ^ 0x7fffffffffffffff : bits;
}

struct Drawn {  // the token with the most noise on its log-probability, and the key of that sum
  int64_t key;
  int32_t token;
};

// Of the tokens in [begin, end) that are kept, and the most likely one; the lowest id among equals. begin is a multiple
// of 4.
template <class Team>
EAGLE_HD Drawn draw_within(Team& team, const TargetDistribution& target, const Noise& noise, int32_t most_likely,
                           int32_t begin, int32_t end) {
  double best = noise.of_token(most_likely);  // beside its own log-probability, as all that follow
  int32_t token = most_likely;
  for (int32_t block = begin + 4 * team.rank(); block < end; block += 4 * team.size()) {
    const int here = end - block < 4 ? end - block : 4;
    double scores[4], highest = -INFINITY;
    for (int j = 0; j < here; ++j) {
      const float x = without_nan(target.logits[block + j]);
      scores[j] = target.keeps(x, block + j) ? target.score(x) : -INFINITY;
      highest = scores[j] > highest ? scores[j] : highest;
    }
    if (!(best - highest < kMostNoise)) continue;
    uint32_t words[4];
    noise.words(block / 4, words);
    for (int j = 0; j < here; ++j) {
      if (Noise::is_below(words[j], best - scores[j])) continue;
      const double value = scores[j] + Noise::of(words[j]);
      if (value > best || (value == best && block + j < token)) best = value, token = block + j;
    }
  }
  const int64_t key = ascending_key(best), top = team.max(key);
  return {top, team.min(key == top ? token : target.vocabulary)};
}

struct LogitsOfNodes {  // a source of draws, made at the nodes that the walk visits
  const float* logits;  // [width, vocabulary], rows `step` elements apart
  int64_t step;
  int32_t vocabulary;
  SamplingRow params;
  bool chained;
  Histogram& histogram;

  template <class Team>
  EAGLE_HD int32_t draw(Team& team, int32_t node, const Noise& noise) const {
    TargetDistribution target;
    const int32_t most_likely =
        find_target_distribution(team, histogram, logits + node * step, vocabulary, params, chained, target);
    if (params.top_k == 1) return most_likely;
    return draw_within(team, target, noise, most_likely, 0, vocabulary).token;
  }
};

// nodes.draw(team, node, noise) returns what the target draws after a node; key of the request, position of the root;
// index[max_accept_length] and out[max_accept_length] are filled to their end. Returns the accept length. Parents are
// compared and never followed, so no value in the tree can lead the walk out of bounds.
template <class Team, class Nodes>
EAGLE_HD int32_t verify_tree(Team& team, const DraftRow& tree, const Nodes& nodes, int64_t key, int64_t position,
                             int32_t max_accept_length, int32_t* index, int64_t* out) {
  int32_t current = 0, length = 0;
  for (;;) {
    const int32_t token = nodes.draw(team, current, Noise{key, position + length});
    int32_t child = tree.width;
    if (length + 1 < max_accept_length) child = find_child(team, tree, current, token);
    if (team.rank() == 0) {
      index[length] = current;
      out[length] = token;
    }
    ++length;
    if (child == tree.width) break;
    current = child;
  }
  for (int32_t j = length + team.rank(); j < max_accept_length; j += team.size()) {
    index[j] = -1;
    out[j] = 0;
  }
  return length;
}

}  // namespace eagle

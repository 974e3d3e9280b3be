// Drafts and draws that share their noise. The specification is eagle_plugin/core/gumbel.py.
#pragma once
#include <cmath>
#include <cstring>

#include "philox.h"
#include "propose.h"
#include "verify_tree.h"

namespace eagle {

constexpr uint32_t kNoiseStream = 3;
constexpr double kMostNoise = 22.9;

struct Noise {  // of the tokens that may come after one position
  int64_t key, position;

  // The numbers of the tokens 4 * block .. 4 * block + 3.
  EAGLE_HD void words(int64_t block, uint32_t* out) const {
    philox(key, position, kNoiseStream, static_cast<uint32_t>(block), out);
  }
  EAGLE_HD static double of(uint32_t word) { return -log(-log((word + 0.5) * (1.0 / 4294967296.0))); }
  EAGLE_HD double of_token(int64_t token) const {
    uint32_t all[4];
    words(token / 4, all);
    return of(all[token % 4]);
  }
  // Whether the noise of this number is below d for sure: it is below -log(1 - u), and e^-d below a power of 2.
  EAGLE_HD static bool is_below(uint32_t word, double d) {
    if (!(d > 0)) return false;
    const int bits = static_cast<int>(d * 1.4426950408889634);
    return bits < 32 && (uint64_t{1} << 32) - word > uint64_t{1} << (32 - bits);
  }
};

// Keys that are ordered as the values.
EAGLE_HD int64_t ascending_key(double x) {
  int64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits < 0 ? bits ^ 0x7fffffffffffffff : bits;
}

// The kept token with the most noise on its log-probability, the lowest id among equals.
template <class Team>
EAGLE_HD int32_t draw_token(Team& team, const TargetDistribution& target, const Noise& noise, int32_t most_likely) {
  double best = noise.of_token(most_likely);  // beside its own log-probability, as all that follow
  int32_t token = most_likely;
  for (int32_t begin = 4 * team.rank(); begin < target.vocabulary; begin += 4 * team.size()) {
    const int here = target.vocabulary - begin < 4 ? target.vocabulary - begin : 4;
    double scores[4], highest = -INFINITY;
    for (int j = 0; j < here; ++j) {
      const float x = without_nan(target.logits[begin + j]);
      scores[j] = target.keeps(x, begin + j) ? target.score(x) : -INFINITY;
      highest = scores[j] > highest ? scores[j] : highest;
    }
    if (!(best - highest < kMostNoise)) continue;
    uint32_t words[4];
    noise.words(begin / 4, words);
    for (int j = 0; j < here; ++j) {
      if (Noise::is_below(words[j], best - scores[j])) continue;
      const double value = scores[j] + Noise::of(words[j]);
      if (value > best || (value == best && begin + j < token)) best = value, token = begin + j;
    }
  }
  const int64_t key = ascending_key(best), top = team.max(key);
  return team.min(key == top ? token : target.vocabulary);
}

// As `verify_tree`, by draws that share their noise: a walk goes to the child that the target draws. position: of the
// root.
template <class Team, class Nodes>
EAGLE_HD int32_t verify_coupled(Team& team, const DraftRow& tree, const Nodes& nodes, bool greedy, int64_t key,
                                int64_t position, int32_t max_accept_length, int32_t* index, int64_t* out) {
  int32_t current = 0, length = 0;
  for (;;) {
    TargetDistribution target;
    int32_t token = nodes.find(team, current, target);
    if (!greedy) token = draw_token(team, target, Noise{key, position + length}, token);
    int32_t child = tree.width;
    if (length + 1 < max_accept_length) child = find_child(team, tree, current, -1, false, true, token);
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

// The k children of a node: the tokens of the list with the most noise on log q, and the log of their softmax.
template <class Team>
EAGLE_HD void propose_coupled(const Team& team, ProposeScratch& scratch, const float* logp, const int64_t* index,
                              int32_t M, const SamplingRow& params, const Noise& noise, double sharpness, int32_t k,
                              const int64_t* draft_to_target, float* out_scores, int64_t* out_tokens) {
  double *const noised = scratch.p, *const q = scratch.q;
  const int32_t rank = team.rank(), size = team.size();
  for (int32_t i = rank; i < M; i += size) {
    scratch.tokens[i] = draft_to_target ? draft_to_target[index[i]] : index[i];
  }
  if (params.top_k == 1) {
    team.sync();
    for (int32_t i = rank; i < k; i += size) {
      out_scores[i] = logp[i] < 0 ? logp[i] : 0.0f;
      out_tokens[i] = scratch.tokens[i];
    }
    return;
  }
  const int32_t kept = temper(team, logp, M, params, noised, q);
  for (int32_t i = rank; i < M; i += size) {
    noised[i] = i < kept ? sharpness * log(q[i]) + noise.of_token(scratch.tokens[i]) : -INFINITY;
  }
  team.sync();
  double highest = -INFINITY, sum = 0;
  for (int32_t i = 0; i < kept; ++i) highest = noised[i] > highest ? noised[i] : highest;
  for (int32_t i = 0; i < kept; ++i) sum += exp(noised[i] - highest);
  const double all = highest + log(sum);
  for (int32_t i = rank; i < M; i += size) {
    int32_t place = 0;  // among equals in the order of the list
    for (int32_t j = 0; j < M; ++j) place += noised[j] > noised[i] || (noised[j] == noised[i] && j < i);
    if (place >= k) continue;
    const double score = noised[i] - all;
    out_scores[place] = score < 0 ? static_cast<float>(score) : 0.0f;
    out_tokens[place] = scratch.tokens[i];
  }
}

}  // namespace eagle

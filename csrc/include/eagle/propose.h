// The children of one draft node. The specification is eagle_plugin/core/propose.py.
#pragma once
#include <cmath>

#include "noise.h"
#include "team.h"
#include "weights.h"

namespace eagle {

struct ProposeScratch {  // shared by the team
  double p[kMaxTopM], q[kMaxTopM];
  int64_t tokens[kMaxTopM];
};

// Writes q [M], the head's probabilities at the request's temperature, of the M most likely tokens, and returns how
// many of them the filters keep. p [M]: scratch. The tokens outside of the list are taken to be as flat as the last one
// in it. Sums are computed by every member, in the same order.
template <class Team>
EAGLE_HD int32_t temper(const Team& team, const float* logp, int32_t M, const SamplingRow& params, double* p,
                        double* q) {
  const int32_t rank = team.rank(), size = team.size();
  const double flat = 1.0 / params.temperature, highest = logp[0] > -700 ? logp[0] : -700, last = logp[M - 1];
  for (int32_t i = rank; i < M; i += size) {
    p[i] = exp(static_cast<double>(logp[i]));
    q[i] = exp((logp[i] - highest) * flat);
  }
  team.sync();
  double missing = 1, sum = 0;
  for (int32_t i = 0; i < M; ++i) missing -= p[i], sum += q[i];
  const double least = exp(last);
  if (missing > 0) sum += missing * exp((last - highest) * flat) / (least > 2.3e-308 ? least : 2.3e-308);
  team.sync();  // all have read q
  for (int32_t i = rank; i < M; i += size) q[i] /= sum > 2.3e-308 ? sum : 2.3e-308;
  team.sync();
  int32_t kept = 0;
  double before = 0;
  for (; kept < M; ++kept) {
    if (kept > 0 && (kept >= params.top_k || before > params.top_p || q[kept] < q[0] * params.min_p)) break;
    before += q[kept];
  }
  return kept;
}

// The k children of a node: the tokens of the list with the most noise on log q, and the log of their softmax. logp [M]
// (descending, at temperature 1) and index [M], k <= M <= 128. draft_to_target null: the draft's ids are the target's.
// What sums floating point numbers is done by every member, in the same order, so that the team's size changes no bit.
template <class Team>
EAGLE_HD void propose(const Team& team, ProposeScratch& scratch, const float* logp, const int64_t* index, int32_t M,
                      const SamplingRow& params, const Noise& noise, double sharpness, int32_t k,
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
  for (int32_t i = rank; i < kept; i += size) q[i] = exp(noised[i] - highest);  // nobody reads q any more
  team.sync();
  for (int32_t i = 0; i < kept; ++i) sum += q[i];
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

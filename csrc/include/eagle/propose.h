// The children of one draft node at temperature > 0. The specification is eagle_plugin/core/propose.py.
#pragma once
#include <cmath>

#include "team.h"
#include "weights.h"

namespace eagle {

struct SlotWeights {  // one for each of the S sampled children, see core/propose.py SLOT_WEIGHTS
  double values[kMaxSampled];
  int32_t count;
};

struct ChildrenRow {
  float* logp;        // [k + S]
  int64_t* tokens;    // [k + S]
  int32_t* draws;     // [k + S]
  int64_t* q_tokens;  // [M]
  float* q_weights;   // [M]
};

struct ProposeScratch {  // shared by the team
  double p[kMaxTopM], q[kMaxTopM];
  int64_t tokens[kMaxTopM];
  float weights[kMaxTopM];
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

// logp [M] (descending, at temperature 1) and index [M], M <= 128; u [S]; k <= M. draft_to_target null: the draft's ids
// are the target's. What sums floating point numbers is done by every member, in the same order, so that the team's
// size changes no bit.
template <class Team>
EAGLE_HD void propose(const Team& team, ProposeScratch& scratch, const float* logp, const int64_t* index, int32_t M,
                      const SamplingRow& params, const double* u, int32_t k, const SlotWeights& slot_weights,
                      int32_t row, const int64_t* draft_to_target, const ChildrenRow& out) {
  double *const p = scratch.p, *const q = scratch.q;
  const int32_t rank = team.rank(), size = team.size();
  for (int32_t i = rank; i < M; i += size) {
    scratch.tokens[i] = draft_to_target ? draft_to_target[index[i]] : index[i];
    scratch.weights[i] = 0;
  }
  team.sync();
  for (int32_t i = rank; i < k + slot_weights.count; i += size) {
    out.logp[i] = i < k ? logp[i] : -INFINITY;
    out.tokens[i] = scratch.tokens[i < M ? i : M - 1];
    out.draws[i] = -1;
  }
  if (params.top_k != 1) {
    const int32_t kept = temper(team, logp, M, params, p, q);
    double before = 0, rest = 0;
    for (int32_t i = 0; i < kept; ++i) {
      before += q[i];
      rest += i >= k ? q[i] : 0;
    }
    const double total = kept < M ? before : 1;
    for (int32_t i = rank; i < k; i += size) {
      const double score = i < kept ? log(q[i] / total) : -INFINITY;
      out.logp[i] = score < 0 ? static_cast<float>(score) : 0.0f;
    }
    if (rest > 0) {
      team.sync();  // all have read q
      for (int32_t i = k + rank; i < kept; i += size) q[i] = scratch.weights[i] = static_cast<float>(q[i] / rest);
      team.sync();
      double undrawn = 0;  // sum of the rounded weights: the stored weights are drawn from and verified against
      for (int32_t i = k; i < kept; ++i) undrawn += q[i];
      for (int32_t slot = 0; slot < slot_weights.count && undrawn > 0; ++slot) {
        int32_t drawn = -1;
        double passed = 0;
        for (int32_t i = k; i < kept && (drawn < 0 || passed <= u[slot] * undrawn); ++i) {
          if (!(q[i] > 0)) continue;  // also what an earlier slot drew
          passed += q[i];
          drawn = i;
        }
        if (drawn < 0) break;
        undrawn -= q[drawn];
        team.sync();  // all have read q
        if (rank == 0) {
          const double score = log(slot_weights.values[slot] * rest / total);
          out.logp[k + slot] = score < 0 ? static_cast<float>(score) : 0.0f;
          out.tokens[k + slot] = scratch.tokens[drawn];
          out.draws[k + slot] = row;
          q[drawn] = 0;
        }
        team.sync();
      }
    }
  }
  team.sync();
  for (int32_t i = rank; i < M; i += size) {  // sort by token
    const int64_t token = scratch.tokens[i];
    int32_t place = 0;
    for (int32_t j = 0; j < i; ++j) place += scratch.tokens[j] <= token;
    for (int32_t j = i + 1; j < M; ++j) place += scratch.tokens[j] < token;
    out.q_tokens[place] = token;
    out.q_weights[place] = scratch.weights[i];
  }
}

}  // namespace eagle

// The children of one draft node at temperature > 0. The specification is eagle_plugin/core/propose.py.
#pragma once
#include <cmath>

#include "target_distribution.h"

namespace eagle {

struct SlotWeights {  // one for each of the S sampled children, see core/policy.py SLOT_WEIGHTS
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

// logp [M] (descending, at temperature 1) and index [M], M <= 128; u [S]; k <= M. draft_to_target null: the draft's ids
// are the target's.
EAGLE_HD void propose(const float* logp, const int64_t* index, int32_t M, const SamplingRow& params, const double* u,
                      int32_t k, const SlotWeights& slot_weights, int32_t row, const int64_t* draft_to_target,
                      ChildrenRow out) {
  double q[kMaxTopM];
  for (int32_t i = 0; i < M; ++i) {
    out.q_tokens[i] = draft_to_target ? draft_to_target[index[i]] : index[i];
    out.q_weights[i] = 0;
  }
  for (int32_t i = 0; i < k + slot_weights.count; ++i) {
    out.logp[i] = i < k ? logp[i] : -INFINITY;
    out.tokens[i] = out.q_tokens[i < M ? i : M - 1];
    out.draws[i] = -1;
  }
  if (params.top_k != 1) {
    // q at the request's temperature. The tokens outside the top M are taken to be as flat as the last of the M.
    const double flat = 1.0 / params.temperature, highest = logp[0] > -700 ? logp[0] : -700, last = logp[M - 1];
    double missing = 1, sum = 0;
    for (int32_t i = 0; i < M; ++i) {
      missing -= exp(static_cast<double>(logp[i]));
      q[i] = exp((logp[i] - highest) * flat);
      sum += q[i];
    }
    const double least = exp(last);
    if (missing > 0) sum += missing * exp((last - highest) * flat) / (least > 2.3e-308 ? least : 2.3e-308);
    int32_t kept = 0;
    double before = 0, rest = 0;
    for (; kept < M; ++kept) {
      q[kept] /= sum > 2.3e-308 ? sum : 2.3e-308;
      if (kept > 0 && (kept >= params.top_k || before > params.top_p || q[kept] < q[0] * params.min_p)) break;
      before += q[kept];
      rest += kept >= k ? q[kept] : 0;
    }
    const double total = kept < M ? before : 1;
    for (int32_t i = 0; i < k; ++i) {
      const double score = i < kept ? log(q[i] / total) : -INFINITY;
      out.logp[i] = score < 0 ? static_cast<float>(score) : 0.0f;
    }
    if (rest > 0) {
      double undrawn = 0;  // sum of the rounded weights: the stored weights are drawn from and verified against
      for (int32_t i = k; i < kept; ++i) undrawn += q[i] = out.q_weights[i] = static_cast<float>(q[i] / rest);
      for (int32_t slot = 0; slot < slot_weights.count && undrawn > 0; ++slot) {
        int32_t drawn = -1;
        double passed = 0;
        for (int32_t i = k; i < kept && (drawn < 0 || passed <= u[slot] * undrawn); ++i) {
          if (!(q[i] > 0)) continue;  // also what an earlier slot drew
          passed += q[i];
          drawn = i;
        }
        if (drawn < 0) break;
        const double score = log(slot_weights.values[slot] * rest / total);
        out.logp[k + slot] = score < 0 ? static_cast<float>(score) : 0.0f;
        out.tokens[k + slot] = out.q_tokens[drawn];
        out.draws[k + slot] = row;
        undrawn -= q[drawn];
        q[drawn] = 0;
      }
    }
  }
  for (int32_t i = 1; i < M; ++i) {  // sort by token
    const int64_t token = out.q_tokens[i];
    const float weight = out.q_weights[i];
    int32_t place = i;
    for (; place > 0 && out.q_tokens[place - 1] > token; --place) {
      out.q_tokens[place] = out.q_tokens[place - 1];
      out.q_weights[place] = out.q_weights[place - 1];
    }
    out.q_tokens[place] = token;
    out.q_weights[place] = weight;
  }
}

}  // namespace eagle

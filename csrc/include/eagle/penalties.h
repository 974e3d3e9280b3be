// Penalties at the nodes of one request's tree. The specification is eagle_plugin/core/penalties.py.
#pragma once
#include <cmath>

#include "team.h"

namespace eagle {

constexpr int32_t kPenaltyTile = 2048;  // tokens that a team takes at once

struct PenaltyScratch {  // shared by the team
  int32_t tokens[kPenaltyTile];
  uint32_t length;
};

struct PenaltyRow {  // the row of one request in the tables
  const int32_t* counts;
  float frequency, presence, repetition;
  const int64_t* stops;
  int32_t num_stops;
  int64_t min_len;

  EAGLE_HD bool has_strengths() const { return frequency != 0.0f || presence != 0.0f || repetition != 1.0f; }
};

struct NodeRow {  // one request's tree, and the logits after its nodes, rows `step` elements apart
  const int64_t* tokens;
  const uint64_t* ancestors;
  const int32_t* depths;
  int32_t width;
  int64_t position;  // of the root
  float* logits;
  int64_t step;

  // The nodes on the path to a node, without the root, whose token the table has counted.
  EAGLE_HD uint64_t path(int32_t node) const {
    return ancestors[node] & (~uint64_t{0} >> (kMaxWidth - width)) & ~uint64_t{1};
  }
  // How often they have a token.
  EAGLE_HD int32_t times_on_path(int32_t node, int64_t token) const {
    int32_t times = 0;
    for (uint64_t bits = path(node); bits; bits &= bits - 1) times += tokens[lowest_bit(bits)] == token;
    return times;
  }
};

// The product is rounded before anything is added to it, as in the specification: no fused multiply-add.
EAGLE_HD float rounded_product(float a, float b) {
#if defined(__CUDACC__)
  return __fmul_rn(a, b);
#else
  const volatile float product = a * b;
  return product;
#endif
}

EAGLE_HD float penalize(float logit, int32_t times, const PenaltyRow& row) {
  const float lowered = logit - (rounded_product(row.frequency, static_cast<float>(times)) + row.presence);
  return lowered < 0.0f ? lowered * row.repetition : lowered / row.repetition;
}

// The tokens of [begin, end), at most kPenaltyTile, at all nodes. Each logit has one writer: a token that the table
// counts is penalised by the loop over the table's tokens, any other by the first node on the path that has it. Stop
// tokens come after both.
template <class Team>
EAGLE_HD void penalize_tile(const Team& team, PenaltyScratch& scratch, const PenaltyRow& row, const NodeRow& nodes,
                            int32_t begin, int32_t end) {
  if (row.has_strengths()) {
    if (team.rank() == 0) scratch.length = 0;
    team.sync();
    for (int32_t block = begin + team.rank() * Team::kTake; block < end; block += team.size() * Team::kTake) {
      const int32_t last = end - block < Team::kTake ? end : block + Team::kTake;
      int32_t any = 0;  // most blocks hold no counted token
      for (int32_t t = block; t < last; ++t) any |= row.counts[t];
      if (any == 0) continue;
      for (int32_t t = block; t < last; ++t) {
        if (row.counts[t] > 0) scratch.tokens[team.add(&scratch.length, 1u)] = t;
      }
    }
    team.sync();
    const int64_t pairs = int64_t{scratch.length} * nodes.width;
    for (int64_t pair = team.rank(); pair < pairs; pair += team.size()) {
      const int32_t node = static_cast<int32_t>(pair / scratch.length);
      const int32_t token = scratch.tokens[pair % scratch.length];
      float& logit = nodes.logits[node * nodes.step + token];
      logit = penalize(logit, row.counts[token] + nodes.times_on_path(node, token), row);
    }
    for (int32_t at = 1; at < nodes.width; ++at) {
      const int64_t token = nodes.tokens[at];
      if (token < begin || token >= end || row.counts[token] > 0) continue;
      for (int32_t node = team.rank(); node < nodes.width; node += team.size()) {
        const uint64_t path = nodes.path(node);
        if (!(path >> at & 1)) continue;
        bool first = true;
        for (uint64_t bits = path; lowest_bit(bits) < at; bits &= bits - 1) {
          first = first && nodes.tokens[lowest_bit(bits)] != token;
        }
        const int32_t times = row.counts[token] + nodes.times_on_path(node, token);
        float& logit = nodes.logits[node * nodes.step + token];
        if (first && times > 0) logit = penalize(logit, times, row);
      }
    }
    team.sync();
  }
  if (row.min_len <= nodes.position) return;  // the root is the node with the lowest position
  const int64_t ends = int64_t{row.num_stops} * nodes.width;
  for (int64_t pair = team.rank(); pair < ends; pair += team.size()) {
    const int32_t node = static_cast<int32_t>(pair / row.num_stops);
    const int64_t token = row.stops[pair % row.num_stops];
    if (token < begin || token >= end || nodes.position + nodes.depths[node] >= row.min_len) continue;
    nodes.logits[node * nodes.step + token] = -INFINITY;
  }
}

}  // namespace eagle

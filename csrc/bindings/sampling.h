// Bindings of uniforms, propose and verify_tree: the argument checks and the exported functions, the same in the CPU
// and the CUDA library. Each library defines `run` for the calls below and includes this header in one source file.
// Values are checked on the CPU only: on a GPU the host would have to wait for the device.
#pragma once
#include <eagle/gumbel.h>
#include <eagle/philox.h>
#include <eagle/propose.h>
#include <eagle/row_filters.h>
#include <eagle/verify_tree.h>
#include <tvm/ffi/optional.h>

#include "checks.h"
#include "sampling_params.h"

namespace eagle {
using tvm::ffi::Optional;

struct UniformsCall {
  const int64_t *rng_keys, *counters;
  double* out;
  int64_t b, n;
  uint32_t stream;
  DLDevice device;

  EAGLE_HD void fill(int64_t at) const {
    const int64_t i = at / n;
    out[at] = uniform(rng_keys[i], counters[i], stream, at % n);
  }
};

struct ProposeCall {
  const float* logp;
  const int64_t* index;
  SamplingTable params;
  const double* uniforms;
  const int64_t* draft_to_target;  // or null
  ChildrenRow out;                 // of row 0
  int64_t rows, first_row, rows_per_request;
  int32_t top_m, k;
  SlotWeights slot_weights;
  DLDevice device;

  template <class Team>
  EAGLE_HD void row(const Team& team, ProposeScratch& scratch, int64_t i) const {
    const int64_t list = i * top_m, children = i * (k + slot_weights.count);
    propose(
        team, scratch, logp + list, index + list, top_m, params.row(i), uniforms + i * slot_weights.count, k,
        slot_weights, static_cast<int32_t>(first_row + i % rows_per_request), draft_to_target,
        {out.logp + children, out.tokens + children, out.draws + children, out.q_tokens + list, out.q_weights + list});
  }
};

struct ProposeCoupledCall {
  const float* logp;
  const int64_t* index;
  SamplingTable params;
  const int64_t *rng_keys, *positions;
  const int64_t* draft_to_target;  // or null
  float* scores;
  int64_t* tokens;
  int64_t rows;
  double sharpness;
  int32_t top_m, k;
  DLDevice device;

  template <class Team>
  EAGLE_HD void row(const Team& team, ProposeScratch& scratch, int64_t i) const {
    propose_coupled(team, scratch, logp + i * top_m, index + i * top_m, top_m, params.row(i),
                    Noise{rng_keys[i], positions[i]}, sharpness, k, draft_to_target, scores + i * k, tokens + i * k);
  }
};

struct VerifyTreeCall {
  const int64_t* tokens;
  const int32_t *parents, *draws;
  const float* logits;
  int64_t step;  // elements from one row of logits to the next
  SamplingTable params;
  const int64_t* q_tokens;
  const float* q_weights;
  const double* uniforms;
  const int64_t *rng_keys, *roots;  // of draws that share their noise, [b]; null for sampled children and uniforms
  int32_t *index, *lengths;
  int64_t* out;
  int64_t b;
  int32_t width, vocabulary, rows, top_m, num_uniforms, max_accept_length;
  bool chained;   // each filter looks at what the one before it left
  RowWork* work;  // [b * width]; null where the walk reads the logits
  DLDevice device;

  EAGLE_HD const float* logits_of(int64_t i) const { return logits + i * width * step; }

  // The walk of request i, over distributions from this source.
  template <class Team, class Nodes>
  EAGLE_HD void walk(Team& team, const Nodes& nodes, int64_t i) const {
    const int64_t node = i * width, proposal = i * rows * top_m, to = i * max_accept_length;
    const DraftRow tree{tokens + node, parents + node, draws ? draws + node : nullptr, width};
    const bool greedy = params.row(i).top_k == 1;
    if (rng_keys) {
      const int32_t length =
          verify_coupled(team, tree, nodes, greedy, rng_keys[i], roots[i], max_accept_length, index + to, out + to);
      if (team.rank() == 0) lengths[i] = length;
      return;
    }
    const ProposalTable proposals{q_tokens + proposal, q_weights + proposal, rows, top_m};
    const int32_t length = verify_tree(team, tree, nodes, greedy, proposals, uniforms + num_uniforms * to, num_uniforms,
                                       max_accept_length, index + to, out + to);
    if (team.rank() == 0) lengths[i] = length;
  }
  // In one launch: the distributions of the nodes that are visited.
  template <class Team>
  EAGLE_HD void walk_logits(Team& team, Histogram& histogram, int64_t i) const {
    walk(team, LogitsOfNodes{logits_of(i), step, vocabulary, params.row(i), chained, histogram}, i);
  }
  // In several: the statistics of every node, all at the same time, then the walks. No walk reaches padding.
  EAGLE_HD bool is_padding(int64_t node) const { return node % width > 0 && parents[node] < 0; }
  EAGLE_HD LogitsRow<float> row(int64_t node) const { return {logits + node * step, vocabulary}; }
  EAGLE_HD SamplingRow params_of(int64_t node) const { return params.row(node / width); }

  template <class Team>
  EAGLE_HD void find_best(Team& team, int64_t node, const RowPart& part) const {
    if (!is_padding(node)) find_part_best(team, row(node), part, work[node]);
  }
  template <class Team>
  EAGLE_HD void weigh(Team& team, WeighScratch& scratch, int64_t node, const RowPart& part) const {
    if (is_padding(node) || params_of(node).top_k == 1) return;
    weigh_part(team, scratch, row(node), params_of(node), chained, part, work[node]);
  }
  template <class Team>
  EAGLE_HD void collect(Team& team, CollectScratch& scratch, int64_t node, const RowPart& part) const {
    if (is_padding(node) || params_of(node).top_k == 1) return;
    collect_part(team, scratch, row(node), params_of(node), chained, part, work[node]);
  }
  template <class Team>
  EAGLE_HD void finish(Team& team, FinishScratch& scratch, int64_t node, int32_t parts) const {
    if (!is_padding(node)) finish_row(team, scratch, row(node), params_of(node), chained, parts, work[node]);
  }
  template <class Team>
  EAGLE_HD void walk_described(Team& team, int64_t i) const {
    walk(team, DescribedNodes{work + i * width, logits_of(i), step, vocabulary, params.row(i)}, i);
  }
};

void run(const UniformsCall& call);
void run(const ProposeCall& call);
void run(const ProposeCoupledCall& call);
void run(const VerifyTreeCall& call);

namespace bindings {

inline void uniforms(TensorView rng_keys, TensorView counters, int64_t stream, TensorView out) {
  check(rng_keys, "rng_keys", kI64, {kAny});
  const int64_t b = rng_keys.size(0);
  check(counters, "counters", kI64, {b});
  check(out, "out", kF64, {b, kAny});
  const int64_t n = out.size(1);
  if (b == 0 || n == 0) return;
  run(UniformsCall{ptr<int64_t>(rng_keys), ptr<int64_t>(counters), ptr<double>(out), b, n,
                   static_cast<uint32_t>(stream), rng_keys.device()});
}

// Where the list of R rows may be drawn from, 1 <= k <= M <= 128, and the map of its ids; null without one.
inline const int64_t* check_list(TensorView logp, TensorView index, int64_t k, Optional<TensorView> draft_to_target) {
  check(logp, "logp", kF32, {kAny, kAny});
  const int64_t rows = logp.size(0), top_m = logp.size(1);
  check(index, "index", kI64, {rows, top_m});
  if (k < 1 || k > top_m || top_m > kMaxTopM) {
    TVM_FFI_THROW(ValueError) << "k is " << k << " of a list of " << top_m << ", wanted 1 <= k <= M <= " << kMaxTopM
                              << ": change k or the number of candidates";
  }
  if (!draft_to_target.has_value()) return nullptr;
  check(draft_to_target.value(), "draft_to_target", kI64, {kAny});
  for (int64_t i = 0; kChecksValues && i < rows * top_m; ++i) {
    const int64_t token = ptr<int64_t>(index)[i], size = draft_to_target.value().size(0);
    if (token < 0 || token >= size) {
      TVM_FFI_THROW(ValueError) << "index names draft token " << token << ", wanted 0 to " << size - 1
                                << ": draft_to_target must hold the whole draft vocabulary";
    }
  }
  return ptr<int64_t>(draft_to_target.value());
}

inline void propose_coupled(TensorView logp, TensorView index, Array<Tensor> params, TensorView rng_keys,
                            TensorView positions, Optional<TensorView> draft_to_target, double sharpness,
                            TensorView scores, TensorView tokens) {
  check(logp, "logp", kF32, {kAny, kAny});  // before what has its dtype
  check(scores, "scores", kF32, {kAny, kAny});
  const int64_t k = scores.size(1);
  const int64_t* map = check_list(logp, index, k, draft_to_target);
  const int64_t rows = logp.size(0);
  const SamplingTable table = check_params(params, rows);
  check(rng_keys, "rng_keys", kI64, {rows});
  check(positions, "positions", kI64, {rows});
  check(scores, "scores", kF32, {rows, k});
  check(tokens, "tokens", kI64, {rows, k});
  if (rows == 0) return;
  run(ProposeCoupledCall{ptr<float>(logp), ptr<int64_t>(index), table, ptr<int64_t>(rng_keys), ptr<int64_t>(positions),
                         map, ptr<float>(scores), ptr<int64_t>(tokens), rows, sharpness,
                         static_cast<int32_t>(logp.size(1)), static_cast<int32_t>(k), logp.device()});
}

inline void propose(TensorView logp, TensorView index, Array<Tensor> params, TensorView uniforms, int64_t first_row,
                    int64_t rows_per_request, Optional<TensorView> draft_to_target, Array<double> slot_weights,
                    TensorView out_logp, TensorView out_tokens, TensorView out_draws, TensorView q_tokens,
                    TensorView q_weights) {
  check(logp, "logp", kF32, {kAny, kAny});  // before what has its dtype
  check(out_logp, "out_logp", kF32, {kAny, kAny});
  const int64_t num_sampled = static_cast<int64_t>(slot_weights.size());
  const int64_t k = out_logp.size(1) - num_sampled;  // the last are the slots of the sampled children
  const int64_t* map = check_list(logp, index, k, draft_to_target);
  const int64_t rows = logp.size(0), top_m = logp.size(1);
  const SamplingTable table = check_params(params, rows);
  if (num_sampled > kMaxSampled) {
    TVM_FFI_THROW(ValueError) << "slot_weights has " << num_sampled << " weights, wanted at most " << kMaxSampled
                              << ": one per sampled child of a node";
  }
  check(uniforms, "uniforms", kF64, {rows, num_sampled});
  check(out_logp, "out_logp", kF32, {rows, k + num_sampled});
  check(out_tokens, "out_tokens", kI64, {rows, k + num_sampled});
  check(out_draws, "out_draws", kI32, {rows, k + num_sampled});
  check(q_tokens, "q_tokens", kI64, {rows, top_m});
  check(q_weights, "q_weights", kF32, {rows, top_m});
  if (rows_per_request < 1) {
    TVM_FFI_THROW(ValueError) << "rows_per_request is " << rows_per_request
                              << ", wanted at least 1: it is the batch's rows over b";
  }
  if (rows == 0) return;
  SlotWeights weights{};
  for (const double weight : slot_weights) weights.values[weights.count++] = weight;
  run(ProposeCall{ptr<float>(logp),
                  ptr<int64_t>(index),
                  table,
                  ptr<double>(uniforms),
                  map,
                  {ptr<float>(out_logp), ptr<int64_t>(out_tokens), ptr<int32_t>(out_draws), ptr<int64_t>(q_tokens),
                   ptr<float>(q_weights)},
                  rows,
                  first_row,
                  rows_per_request,
                  static_cast<int32_t>(top_m),
                  static_cast<int32_t>(k),
                  weights,
                  logp.device()});
}

// A walk over the trees, without what its rule reads beside the logits.
inline VerifyTreeCall check_walk(TensorView tokens, TensorView parents, TensorView logits, Array<Tensor> params,
                                 bool chained, TensorView workspace, TensorView index, TensorView lengths,
                                 TensorView out) {
  check(tokens, "tokens", kI64, {kAny, kAny});
  const int64_t b = tokens.size(0), width = tokens.size(1);
  check(parents, "parents", kI32, {b, width});
  VerifyTreeCall call{};
  call.step = check_rows(logits, "logits", kF32, {b * width, kAny});  // engines slice off padding
  const int64_t vocabulary = logits.size(1);
  call.params = check_params(params, b);
  check(index, "index", kI32, {b, kAny});
  const int64_t max_accept_length = index.size(1);
  check(lengths, "lengths", kI32, {b});
  check(out, "out", kI64, {b, max_accept_length});
  check(workspace, "workspace", kI64, {b * width, kAny});
  if (width < 1) TVM_FFI_THROW(ValueError) << "tokens has 0 nodes per request, wanted at least the root: add node 0";
  if (max_accept_length < 1) {
    TVM_FFI_THROW(ValueError) << "max_accept_length is 0, wanted at least 1: the bonus token needs a place";
  }
  if (vocabulary < 1 || vocabulary > INT32_MAX) {
    TVM_FFI_THROW(ValueError) << "logits has a vocabulary of " << vocabulary
                              << ", wanted 1 to 2^31 - 1: pass the target's logits";
  }
  call.tokens = ptr<int64_t>(tokens), call.parents = ptr<int32_t>(parents), call.logits = ptr<float>(logits);
  call.index = ptr<int32_t>(index), call.lengths = ptr<int32_t>(lengths), call.out = ptr<int64_t>(out);
  call.b = b, call.width = static_cast<int32_t>(width), call.vocabulary = static_cast<int32_t>(vocabulary);
  call.max_accept_length = static_cast<int32_t>(max_accept_length);
  call.chained = chained;
  call.work = workspace.size(1) == kWorkspaceWords ? ptr<RowWork>(workspace) : nullptr;
  call.device = tokens.device();
  return call;
}

inline void verify_tree(TensorView tokens, TensorView parents, TensorView draws, TensorView logits,
                        Array<Tensor> params, TensorView q_tokens, TensorView q_weights, TensorView uniforms,
                        bool chained, TensorView workspace, TensorView index, TensorView lengths, TensorView out) {
  VerifyTreeCall call = check_walk(tokens, parents, logits, params, chained, workspace, index, lengths, out);
  const int64_t b = call.b, width = call.width;
  check(draws, "draws", kI32, {b, width});
  check(q_tokens, "proposals.tokens", kI64, {b, kAny, kAny});
  const int64_t rows = q_tokens.size(1), top_m = q_tokens.size(2);
  check(q_weights, "proposals.weights", kF32, {b, rows, top_m});
  check(uniforms, "uniforms", kF64, {b, call.max_accept_length, kAny});
  const int64_t num_uniforms = uniforms.size(2);  // per node
  if (num_uniforms < 1 || num_uniforms > kMaxSampled + 1) {
    TVM_FFI_THROW(ValueError) << "uniforms has " << num_uniforms << " numbers per node, wanted 1 to " << kMaxSampled + 1
                              << ": one for each sampled child to test and one to draw with";
  }
  for (int64_t i = 0; kChecksValues && i < b * width; ++i) {
    const int32_t row = ptr<int32_t>(draws)[i];
    if (row < -1 || row >= rows) {
      TVM_FFI_THROW(ValueError) << "draws names proposal row " << row << ", wanted -1 to " << rows - 1
                                << ": pass the proposals that drew this tree";
    }
  }
  if (b == 0) return;
  call.draws = ptr<int32_t>(draws);
  call.q_tokens = ptr<int64_t>(q_tokens), call.q_weights = ptr<float>(q_weights);
  call.uniforms = ptr<double>(uniforms);
  call.rows = static_cast<int32_t>(rows), call.top_m = static_cast<int32_t>(top_m);
  call.num_uniforms = static_cast<int32_t>(num_uniforms);
  run(call);
}

inline void verify_coupled(TensorView tokens, TensorView parents, TensorView logits, Array<Tensor> params,
                           TensorView rng_keys, TensorView roots, bool chained, TensorView workspace, TensorView index,
                           TensorView lengths, TensorView out) {
  VerifyTreeCall call = check_walk(tokens, parents, logits, params, chained, workspace, index, lengths, out);
  check(rng_keys, "rng_keys", kI64, {call.b});
  check(roots, "roots", kI64, {call.b});
  if (call.b == 0) return;
  call.rng_keys = ptr<int64_t>(rng_keys), call.roots = ptr<int64_t>(roots);
  run(call);
}

}  // namespace bindings
}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(uniforms, eagle::bindings::uniforms);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(propose, eagle::bindings::propose);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(propose_coupled, eagle::bindings::propose_coupled);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(verify_tree, eagle::bindings::verify_tree);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(verify_coupled, eagle::bindings::verify_coupled);

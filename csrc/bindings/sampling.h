// Bindings of uniforms, propose and verify_tree: the argument checks and the exported functions, the same in the CPU
// and the CUDA library. Each library defines `run` for the calls below and includes this header in one source file.
// Values are checked on the CPU only: on a GPU the host would have to wait for the device.
#pragma once
#include <eagle/philox.h>
#include <eagle/propose.h>
#include <eagle/row_draw.h>
#include <eagle/verify.h>
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
    propose(team, scratch, logp + i * top_m, index + i * top_m, top_m, params.row(i), Noise{rng_keys[i], positions[i]},
            sharpness, k, draft_to_target, scores + i * k, tokens + i * k);
  }
};

struct VerifyCall {
  const int64_t* tokens;
  const int32_t* parents;
  const float* logits;
  int64_t step;  // elements from one row of logits to the next
  SamplingTable params;
  const int64_t *rng_keys, *roots;  // [b]
  int32_t *index, *lengths;
  int64_t* out;
  int64_t b;
  int32_t width, vocabulary, max_accept_length;
  bool chained;   // each filter looks at what the one before it left
  RowWork* work;  // [b * width]; null where the walk reads the logits
  DLDevice device;

  EAGLE_HD const float* logits_of(int64_t i) const { return logits + i * width * step; }

  // The walk of request i, over distributions from this source.
  template <class Team, class Nodes>
  EAGLE_HD void walk(Team& team, const Nodes& nodes, int64_t i) const {
    const int64_t to = i * max_accept_length;
    const DraftRow tree{tokens + i * width, parents + i * width, width};
    const int32_t length =
        verify_tree(team, tree, nodes, rng_keys[i], roots[i], max_accept_length, index + to, out + to);
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
  // Of a greedy row, whose top-k is 1, the most likely token is all that a walk needs.
  EAGLE_HD bool is_filtered(int64_t node) const {
    const SamplingRow of = params_of(node);
    return of.top_k != 1 && of.cuts(vocabulary);
  }

  template <class Team>
  EAGLE_HD void find_best(Team& team, int64_t node, const RowPart& part) const {
    if (!is_padding(node)) find_part_best(team, row(node), part, work[node]);
  }
  template <class Team>
  EAGLE_HD void weigh(Team& team, WeighScratch& scratch, int64_t node, const RowPart& part) const {
    if (is_padding(node) || !is_filtered(node)) return;
    weigh_part(team, scratch, row(node), params_of(node), chained, part, work[node]);
  }
  template <class Team>
  EAGLE_HD void collect(Team& team, CollectScratch& scratch, int64_t node, const RowPart& part) const {
    if (is_padding(node) || !is_filtered(node)) return;
    collect_part(team, scratch, row(node), params_of(node), chained, part, work[node]);
  }
  template <class Team>
  EAGLE_HD void finish(Team& team, FinishScratch& scratch, int64_t node, int32_t parts) const {
    if (!is_padding(node)) finish_row(team, scratch, row(node), params_of(node), chained, parts, work[node]);
  }
  template <class Team>
  EAGLE_HD void draw(Team& team, int64_t node, const RowPart& part) const {
    if (is_padding(node) || params_of(node).top_k == 1) return;
    const Noise noise{rng_keys[node / width], roots[node / width] + depth_of(node)};
    draw_part(team, row(node), params_of(node), part, noise, work[node]);
  }
  // Parents come before children; a corrupt tree ends the search.
  EAGLE_HD int32_t depth_of(int64_t node) const {
    const int32_t* const of = parents + node / width * width;
    int32_t depth = 0;
    for (int64_t at = node % width; of[at] >= 0 && of[at] < at; at = of[at]) ++depth;
    return depth;
  }
  template <class Team>
  EAGLE_HD void walk_described(Team& team, int64_t i, int32_t parts) const {
    walk(team, DescribedNodes{work + i * width, logits_of(i), step, vocabulary, parts, params.row(i)}, i);
  }
};

void run(const UniformsCall& call);
void run(const ProposeCall& call);
void run(const VerifyCall& call);

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

inline void propose(TensorView logp, TensorView index, Array<Tensor> params, TensorView rng_keys, TensorView positions,
                    Optional<TensorView> draft_to_target, double sharpness, TensorView scores, TensorView tokens) {
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
  run(ProposeCall{ptr<float>(logp), ptr<int64_t>(index), table, ptr<int64_t>(rng_keys), ptr<int64_t>(positions), map,
                  ptr<float>(scores), ptr<int64_t>(tokens), rows, sharpness, static_cast<int32_t>(logp.size(1)),
                  static_cast<int32_t>(k), logp.device()});
}

inline void verify_tree(TensorView tokens, TensorView parents, TensorView logits, Array<Tensor> params,
                        TensorView rng_keys, TensorView roots, bool chained, TensorView workspace, TensorView index,
                        TensorView lengths, TensorView out) {
  check(tokens, "tokens", kI64, {kAny, kAny});
  const int64_t b = tokens.size(0), width = tokens.size(1);
  check(parents, "parents", kI32, {b, width});
  VerifyCall call{};
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
  check(rng_keys, "rng_keys", kI64, {b});
  check(roots, "lengths", kI64, {b});
  if (b == 0) return;
  call.rng_keys = ptr<int64_t>(rng_keys), call.roots = ptr<int64_t>(roots);
  run(call);
}

}  // namespace bindings
}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(uniforms, eagle::bindings::uniforms);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(propose, eagle::bindings::propose);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(verify_tree, eagle::bindings::verify_tree);

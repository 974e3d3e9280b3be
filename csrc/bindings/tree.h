// Bindings of topk_log_softmax, grow_level, grow_levels, select_tree and sibling_links: the argument checks and the
// exported functions, the same in the CPU and the CUDA library. Each library defines `run` for the calls below and
// includes this header in one source file.
#pragma once
#include <eagle/links.h>
#include <eagle/topk.h>
#include <eagle/tree.h>
#include <tvm/ffi/optional.h>

#include "checks.h"

namespace eagle {
using tvm::ffi::Optional;

struct TopkCall {
  const void* logits;
  DLDataType dtype;    // float32, bfloat16 or float16
  int64_t row_stride;  // elements from one row to the next
  float* logp;
  int64_t* index;
  int64_t rows;
  int32_t vocabulary, k;
  DLDevice device;
};

struct TableCall {  // the candidate tables of a batch
  float* scores;
  int64_t* tokens;
  int32_t* parents;
  int32_t capacity;

  EAGLE_HD TableRow row(int64_t i) const {
    const int64_t at = i * capacity;
    return {scores + at, tokens + at, parents + at};
  }
};

struct FrontierCall {
  int32_t* candidates;
  float* scores;
  int64_t *tokens, *parent_rows;
  uint64_t* ancestors;
  int32_t rows;

  EAGLE_HD FrontierRow row(int64_t i) const {
    const int64_t at = i * rows;
    return {candidates + at, scores + at, tokens + at, parent_rows + at, ancestors + at};
  }
};

struct GrowCall {
  TableCall table;
  const float* logp;
  const int64_t* tokens;
  FrontierCall previous;  // all null at depth 1
  FrontierCall out;
  int32_t rows, k, offset, first_slot;
  int64_t b;
  DLDevice device;

  EAGLE_HD LevelRow level(int64_t i) const {
    const int64_t at = i * rows * k;
    return {logp + at, tokens + at, rows, k, previous.scores ? previous.row(i) : FrontierRow{}, offset, first_slot};
  }
};

struct LevelsCall {
  TableCall table;
  const float* logp;
  const int64_t* tokens;
  int32_t rows, k, depth, topk;
  int64_t b;
  DLDevice device;

  EAGLE_HD LevelsRow levels(int64_t i) const {
    const int64_t at = i * rows * k;
    return {logp + at, tokens + at, depth, topk, k};
  }
};

struct SelectCall {
  TableCall table;
  const int64_t* root_tokens;
  int64_t* tokens;
  int32_t *parents, *depths;
  uint64_t* ancestors;
  int32_t width;
  int64_t b;
  DLDevice device;

  EAGLE_HD TreeRow row(int64_t i) const {
    const int64_t at = i * width;
    return {tokens + at, parents + at, depths + at, ancestors + at};
  }
};

struct LinksCall {
  const int32_t* parents;
  int64_t *first_child, *next_sibling;
  int64_t b;
  int32_t width;
  DLDevice device;

  template <class Team>
  EAGLE_HD void link(const Team& team, int64_t i) const {
    const int64_t at = i * width;
    sibling_links(team, parents + at, width, first_child + at, next_sibling + at);
  }
};

void run(const TopkCall& call);
void run(const GrowCall& call);
void run(const LevelsCall& call);
void run(const SelectCall& call);
void run(const LinksCall& call);

namespace bindings {

inline void topk_log_softmax(TensorView logits, TensorView logp, TensorView index) {
  const DLDataType dtype = logits.dtype();
  const int64_t row_stride = check_rows(logits, "logits", dtype, {kAny, kAny});
  const int64_t rows = logits.size(0), vocabulary = logits.size(1);
  check(logp, "logp", kF32, {rows, kAny});
  const int64_t k = logp.size(1);
  check(index, "index", kI64, {rows, k});
  if (k < 1 || k > vocabulary || k > kMaxTopM) {
    TVM_FFI_THROW(ValueError) << "k is " << k << " for logits of shape " << shape_of(logits)
                              << ", wanted [R, V] and 1 <= k <= min(V, 128): change k";
  }
  if (vocabulary > INT32_MAX) {
    TVM_FFI_THROW(ValueError) << "logits has " << vocabulary
                              << " columns, wanted at most 2^31 - 1: pass the logits of one vocabulary";
  }
  if (!same(dtype, kF32) && !same(dtype, kBF16) && !same(dtype, kF16)) {
    TVM_FFI_THROW(TypeError) << "logits is " << name_of(dtype)
                             << ", wanted float32, bfloat16 or float16: convert it with .to()";
  }
  if (rows == 0) return;
  run(TopkCall{logits.data_ptr(), dtype, row_stride, ptr<float>(logp), ptr<int64_t>(index), rows,
               static_cast<int32_t>(vocabulary), static_cast<int32_t>(k), logits.device()});
}

inline TableCall check_table(const TensorView& scores, const TensorView& tokens, const TensorView& parents, int64_t b) {
  check(scores, "table.scores", kF32, {b, kAny});
  const int64_t capacity = scores.size(1);
  check(tokens, "table.tokens", kI64, {b, capacity});
  check(parents, "table.parents", kI32, {b, capacity});
  return {ptr<float>(scores), ptr<int64_t>(tokens), ptr<int32_t>(parents), static_cast<int32_t>(capacity)};
}

// previous_* are all given or all absent (depth 1).
inline void grow_level(TensorView table_scores, TensorView table_tokens, TensorView table_parents, int64_t offset,
                       int64_t depth, TensorView logp, TensorView tokens, Optional<TensorView> previous_candidates,
                       Optional<TensorView> previous_scores, Optional<TensorView> previous_ancestors, int64_t topk,
                       TensorView candidates, TensorView scores, TensorView out_tokens, TensorView parent_rows,
                       TensorView ancestors) {
  check(logp, "logp", kF32, {kAny, kAny, kAny});
  const int64_t b = logp.size(0), rows = logp.size(1), k = logp.size(2);
  check(tokens, "tokens", kI64, {b, rows, k});
  GrowCall call{};
  call.table = check_table(table_scores, table_tokens, table_parents, b);
  const int64_t capacity = call.table.capacity, keep = topk < rows * k ? topk : rows * k;
  if (previous_scores.has_value()) {
    check(previous_candidates.value(), "previous.candidates", kI32, {b, rows});
    check(previous_scores.value(), "previous.scores", kF32, {b, rows});
    check(previous_ancestors.value(), "previous.ancestors", kI64, {b, rows});
    call.previous.candidates = ptr<int32_t>(previous_candidates.value());
    call.previous.scores = ptr<float>(previous_scores.value());
    call.previous.ancestors = ptr<uint64_t>(previous_ancestors.value());
    call.previous.rows = static_cast<int32_t>(rows);
  } else if (rows != 1) {
    TVM_FFI_THROW(ValueError) << "logp has " << rows
                              << " rows per request, wanted 1 without a previous frontier: only the "
                              << "root has children at depth 1";
  }
  if (offset < 0 || offset + rows * k > capacity) {
    TVM_FFI_THROW(ValueError) << "table holds " << capacity << " candidates, wanted at least " << offset + rows * k
                              << " (offset " << offset << "): make it larger with new_table";
  }
  if (depth < 1 || keep < 0 || (depth - 1) * topk + keep > kMaxWidth) {
    TVM_FFI_THROW(ValueError) << "depth " << depth << " with topk " << topk << " needs draft slots up to "
                              << (depth - 1) * topk + keep << ", wanted at most 64: lower the depth or topk";
  }
  check(candidates, "candidates", kI32, {b, keep});
  check(scores, "scores", kF32, {b, keep});
  check(out_tokens, "out_tokens", kI64, {b, keep});
  check(parent_rows, "parent_rows", kI64, {b, keep});
  check(ancestors, "ancestors", kI64, {b, keep});
  call.logp = ptr<float>(logp);
  call.tokens = ptr<int64_t>(tokens);
  call.out = {ptr<int32_t>(candidates),  ptr<float>(scores),       ptr<int64_t>(out_tokens),
              ptr<int64_t>(parent_rows), ptr<uint64_t>(ancestors), static_cast<int32_t>(keep)};
  call.rows = static_cast<int32_t>(rows);
  call.k = static_cast<int32_t>(k);
  call.offset = static_cast<int32_t>(offset);
  call.first_slot = static_cast<int32_t>((depth - 1) * topk);
  call.b = b;
  call.device = logp.device();
  if (b > 0) run(call);
}

inline void grow_levels(TensorView table_scores, TensorView table_tokens, TensorView table_parents, int64_t depth,
                        int64_t topk, TensorView logp, TensorView tokens) {
  check(logp, "logp", kF32, {kAny, kAny, kAny});
  const int64_t b = logp.size(0), rows = logp.size(1), k = logp.size(2);
  check(tokens, "tokens", kI64, {b, rows, k});
  const TableCall table = check_table(table_scores, table_tokens, table_parents, b);
  if (depth < 1 || topk < 1 || (depth - 1) * topk > kMaxWidth) {
    TVM_FFI_THROW(ValueError) << "depth " << depth << " with topk " << topk << " needs " << (depth - 1) * topk
                              << " draft slots, wanted at most 64, and a depth and a topk of at least 1: lower the "
                              << "depth or topk";
  }
  if (rows != 1 + (depth - 1) * topk || k < topk) {
    TVM_FFI_THROW(ValueError) << "logp has " << rows << " rows of " << k << " children per request, wanted "
                              << 1 + (depth - 1) * topk << " of at least " << topk
                              << ": one for the root, then topk for each further depth";
  }
  if (rows * k > table.capacity) {
    TVM_FFI_THROW(ValueError) << "table holds " << table.capacity << " candidates, wanted at least " << rows * k
                              << ": make it larger with new_table";
  }
  if (b == 0) return;
  run(LevelsCall{table, ptr<float>(logp), ptr<int64_t>(tokens), static_cast<int32_t>(rows), static_cast<int32_t>(k),
                 static_cast<int32_t>(depth), static_cast<int32_t>(topk), b, logp.device()});
}

inline void select_tree(TensorView table_scores, TensorView table_tokens, TensorView table_parents,
                        TensorView root_tokens, TensorView tokens, TensorView parents, TensorView depths,
                        TensorView ancestors) {
  check(root_tokens, "root_tokens", kI64, {kAny});
  const int64_t b = root_tokens.size(0);
  const TableCall table = check_table(table_scores, table_tokens, table_parents, b);
  check(tokens, "tokens", kI64, {b, kAny});
  const int64_t width = tokens.size(1);
  if (width < 1 || width > kMaxWidth) {
    TVM_FFI_THROW(ValueError) << "width is " << width << ", wanted 1 to 64: ancestors are one 64-bit bitmask per node";
  }
  check(parents, "parents", kI32, {b, width});
  check(depths, "depths", kI32, {b, width});
  check(ancestors, "ancestors", kI64, {b, width});
  if (b == 0) return;
  run(SelectCall{table, ptr<int64_t>(root_tokens), ptr<int64_t>(tokens), ptr<int32_t>(parents), ptr<int32_t>(depths),
                 ptr<uint64_t>(ancestors), static_cast<int32_t>(width), b, tokens.device()});
}

inline void sibling_links(TensorView parents, TensorView first_child, TensorView next_sibling) {
  check(parents, "parents", kI32, {kAny, kAny});
  const int64_t b = parents.size(0), width = parents.size(1);
  check(first_child, "first_child", kI64, {b, width});
  check(next_sibling, "next_sibling", kI64, {b, width});
  if (b == 0) return;
  run(LinksCall{ptr<int32_t>(parents), ptr<int64_t>(first_child), ptr<int64_t>(next_sibling), b,
                static_cast<int32_t>(width), parents.device()});
}

}  // namespace bindings
}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_log_softmax, eagle::bindings::topk_log_softmax);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grow_level, eagle::bindings::grow_level);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grow_levels, eagle::bindings::grow_levels);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(select_tree, eagle::bindings::select_tree);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sibling_links, eagle::bindings::sibling_links);

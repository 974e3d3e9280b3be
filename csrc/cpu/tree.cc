#include <eagle/ffi_checks.h>
#include <eagle/tree.h>
#include <tvm/ffi/optional.h>

namespace eagle {
using tvm::ffi::Optional;

namespace {

TableRow table_row(const TensorView& scores, const TensorView& tokens, const TensorView& parents, int64_t i) {
  const int64_t at = i * scores.size(1);
  return {ptr<float>(scores) + at, ptr<int64_t>(tokens) + at, ptr<int32_t>(parents) + at};
}

void check_table(const TensorView& scores, const TensorView& tokens, const TensorView& parents, int64_t b) {
  check(scores, "table.scores", kF32, {b, kAny});
  check(tokens, "table.tokens", kI64, {b, scores.size(1)});
  check(parents, "table.parents", kI32, {b, scores.size(1)});
}

}  // namespace

// previous_* are all given or all absent (level 1).
void grow_level_cpu(TensorView table_scores, TensorView table_tokens, TensorView table_parents, int64_t offset,
                    int64_t level, TensorView logp, TensorView tokens, Optional<TensorView> previous_candidates,
                    Optional<TensorView> previous_scores, Optional<TensorView> previous_ancestors, int64_t beam,
                    TensorView candidates, TensorView scores, TensorView out_tokens, TensorView parent_rows,
                    TensorView ancestors) {
  check(logp, "logp", kF32, {kAny, kAny, kAny});
  const int64_t b = logp.size(0), rows = logp.size(1), k = logp.size(2);
  check(tokens, "tokens", kI64, {b, rows, k});
  check_table(table_scores, table_tokens, table_parents, b);
  const int64_t capacity = table_scores.size(1), keep = beam < rows * k ? beam : rows * k;
  const bool grows = previous_scores.has_value();
  if (grows) {
    check(previous_candidates.value(), "previous.candidates", kI32, {b, rows});
    check(previous_scores.value(), "previous.scores", kF32, {b, rows});
    check(previous_ancestors.value(), "previous.ancestors", kI64, {b, rows});
  } else if (rows != 1) {
    TVM_FFI_THROW(ValueError) << "logp has " << rows
                              << " rows per request, wanted 1 without a previous frontier: only the "
                              << "root has children at level 1";
  }
  if (offset < 0 || offset + rows * k > capacity) {
    TVM_FFI_THROW(ValueError) << "table holds " << capacity << " candidates, wanted at least " << offset + rows * k
                              << " (offset " << offset << "): make it larger with new_table";
  }
  if (level < 1 || keep < 0 || (level - 1) * beam + keep > kMaxWidth) {
    TVM_FFI_THROW(ValueError) << "level " << level << " with beam " << beam << " needs draft slots up to "
                              << (level - 1) * beam + keep << ", wanted at most 64: lower the depth or the beam";
  }
  check(candidates, "candidates", kI32, {b, keep});
  check(scores, "scores", kF32, {b, keep});
  check(out_tokens, "out_tokens", kI64, {b, keep});
  check(parent_rows, "parent_rows", kI64, {b, keep});
  check(ancestors, "ancestors", kI64, {b, keep});

  for (int64_t i = 0; i < b; ++i) {
    FrontierRow previous{};
    if (grows) {
      previous.candidates = ptr<int32_t>(previous_candidates.value()) + i * rows;
      previous.scores = ptr<float>(previous_scores.value()) + i * rows;
      previous.ancestors = ptr<uint64_t>(previous_ancestors.value()) + i * rows;
    }
    const FrontierRow out{ptr<int32_t>(candidates) + i * keep, ptr<float>(scores) + i * keep,
                          ptr<int64_t>(out_tokens) + i * keep, ptr<int64_t>(parent_rows) + i * keep,
                          ptr<uint64_t>(ancestors) + i * keep};
    grow_level(table_row(table_scores, table_tokens, table_parents, i), static_cast<int32_t>(offset),
               static_cast<int32_t>(rows), static_cast<int32_t>(k), ptr<float>(logp) + i * rows * k,
               ptr<int64_t>(tokens) + i * rows * k, grows ? &previous : nullptr,
               static_cast<int32_t>((level - 1) * beam), static_cast<int32_t>(keep), out);
  }
}

void select_tree_cpu(TensorView table_scores, TensorView table_tokens, TensorView table_parents, TensorView root_tokens,
                     TensorView tokens, TensorView parents, TensorView depths, TensorView ancestors) {
  check(root_tokens, "root_tokens", kI64, {kAny});
  const int64_t b = root_tokens.size(0);
  check_table(table_scores, table_tokens, table_parents, b);
  check(tokens, "tokens", kI64, {b, kAny});
  const int64_t width = tokens.size(1);
  if (width < 1 || width > kMaxWidth) {
    TVM_FFI_THROW(ValueError) << "width is " << width << ", wanted 1 to 64: ancestors are one 64-bit word per node";
  }
  check(parents, "parents", kI32, {b, width});
  check(depths, "depths", kI32, {b, width});
  check(ancestors, "ancestors", kI64, {b, width});
  for (int64_t i = 0; i < b; ++i) {
    const TreeRow out{ptr<int64_t>(tokens) + i * width, ptr<int32_t>(parents) + i * width,
                      ptr<int32_t>(depths) + i * width, ptr<uint64_t>(ancestors) + i * width};
    if (!select_tree(table_row(table_scores, table_tokens, table_parents, i),
                     static_cast<int32_t>(table_scores.size(1)), ptr<int64_t>(root_tokens)[i],
                     static_cast<int32_t>(width), out)) {
      TVM_FFI_THROW(ValueError)
          << "table of request " << i << " has a candidate whose parent scores lower or stands "
          << "behind it, wanted scores that never rise from parent to child: fill it with grow_level";
    }
  }
}

}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(grow_level, eagle::grow_level_cpu);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(select_tree, eagle::select_tree_cpu);

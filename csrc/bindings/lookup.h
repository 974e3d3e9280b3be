// Bindings of look_up and append_tokens: the argument checks and the exported functions, the same in the CPU and the
// CUDA library. Each library defines `run` for the calls below and includes this header in one source file.
#pragma once
#include <eagle/lookup.h>
#include <tvm/ffi/container/array.h>

#include "checks.h"

namespace eagle {
using tvm::ffi::Array;
using tvm::ffi::Tensor;

struct HistoryCall {
  int32_t* tokens;
  int64_t *begins, *ends;
  int32_t *path, *cells;
  float* doubts;
  int64_t* starts;
  float *expected, *missed;
  int64_t* counts;
  const float* prior;
  int64_t rows, window;
  int32_t steps;

  EAGLE_HD HistoryRow row(int64_t i) const {
    return {tokens + i * window, window,
            begins + i,          ends + i,
            path + i * steps,    cells + i * steps,
            doubts + i * steps,  steps,
            starts + i,          expected + i * kCells,
            missed + i * kCells, counts + i * 2};
  }
};

struct LookupCall {
  HistoryCall history;
  float* scores;
  int64_t* table_tokens;
  int32_t* parents;
  int32_t capacity, candidates;
  const int64_t *rows, *prefix_lens, *roots;
  int64_t b;
  DLDevice device;

  // A request with a wrong row gets no branch; on the CPU it was refused before.
  template <class Team>
  EAGLE_HD void look(const Team& team, LookupScratch& scratch, int64_t i) const {
    const int64_t row = rows[i], at = i * capacity;
    if (row < 0 || row >= history.rows || prefix_lens[i] < 0) {
      for (int32_t c = candidates + team.rank(); c < capacity; c += team.size()) {
        scores[at + c] = -INFINITY, table_tokens[at + c] = 0, parents[at + c] = -1;
      }
      return;
    }
    look_up(team, scratch, history.row(row), history.prior, {scores + at, table_tokens + at, parents + at}, candidates,
            capacity - candidates, prefix_lens[i], roots[i]);
  }
};

struct AppendCall {
  HistoryCall history;
  const int64_t *rows, *prefix_lens, *tokens;
  const int32_t* lengths;
  const int64_t* tree_tokens;
  const int32_t* tree_parents;
  int64_t b;
  int32_t longest, width;
  DLDevice device;

  template <class Team>
  EAGLE_HD void append(const Team& team, int64_t i) const {
    const int64_t row = rows[i];
    if (row < 0 || row >= history.rows || prefix_lens[i] < 0) return;
    const int32_t length = lengths[i] < 0 ? 0 : lengths[i] > longest ? longest : lengths[i];
    append_tokens(team, history.row(row), prefix_lens[i], tokens + i * longest, length,
                  {tree_tokens + i * width, tree_parents + i * width, width});
  }
};

void run(const LookupCall& call);
void run(const AppendCall& call);

namespace bindings {

inline HistoryCall check_history(const Array<Tensor>& given, const TensorView& rows, const TensorView& prefix_lens) {
  if (given.size() != 11) TVM_FFI_THROW(ValueError) << "history has " << given.size() << " tensors, wanted 11";
  const auto part = [&](int i) { return TensorView(given[i]); };
  check(part(0), "history.tokens", kI32, {kAny, kAny});
  const int64_t size = part(0).size(0), window = part(0).size(1);
  check(part(1), "history.begins", kI64, {size});
  check(part(2), "history.ends", kI64, {size});
  check(part(3), "history.path", kI32, {size, kAny});
  const int64_t steps = part(3).size(1);
  check(part(4), "history.cells", kI32, {size, steps});
  check(part(5), "history.doubts", kF32, {size, steps});
  check(part(6), "history.starts", kI64, {size});
  check(part(7), "history.expected", kF32, {size, kCells});
  check(part(8), "history.missed", kF32, {size, kCells});
  check(part(9), "history.counts", kI64, {size, 2});
  check(part(10), "history.prior", kF32, {kCells});
  check(rows, "rows", kI64, {kAny});
  check(prefix_lens, "prefix_lens", kI64, {rows.size(0)});
  for (int64_t i = 0; kChecksValues && i < rows.size(0); ++i) {
    if (const int64_t row = ptr<int64_t>(rows)[i]; row < 0 || row >= size) {
      TVM_FFI_THROW(ValueError) << "rows[" << i << "] is " << row << ", wanted 0 to " << size - 1
                                << ": the history has a row for each request";
    }
  }
  for (int64_t i = 0; kChecksValues && i < rows.size(0); ++i) {
    if (const int64_t length = ptr<int64_t>(prefix_lens)[i]; length < 0) {
      TVM_FFI_THROW(ValueError) << "prefix_lens[" << i << "] is " << length
                                << ", wanted 0 or more: it counts committed tokens";
    }
  }
  return {ptr<int32_t>(part(0)),
          ptr<int64_t>(part(1)),
          ptr<int64_t>(part(2)),
          ptr<int32_t>(part(3)),
          ptr<int32_t>(part(4)),
          ptr<float>(part(5)),
          ptr<int64_t>(part(6)),
          ptr<float>(part(7)),
          ptr<float>(part(8)),
          ptr<int64_t>(part(9)),
          ptr<float>(part(10)),
          size,
          window,
          static_cast<int32_t>(steps)};
}

inline void look_up(Array<Tensor> history, TensorView scores, TensorView tokens, TensorView parents, int64_t candidates,
                    TensorView rows, TensorView prefix_lens, TensorView roots) {
  const HistoryCall found = check_history(history, rows, prefix_lens);
  const int64_t b = rows.size(0);
  check(scores, "table.scores", kF32, {b, kAny});
  const int64_t capacity = scores.size(1);
  check(tokens, "table.tokens", kI64, {b, capacity});
  check(parents, "table.parents", kI32, {b, capacity});
  check(roots, "roots", kI64, {b});
  if (candidates < 0 || candidates >= capacity || capacity > candidates + found.steps || found.steps > kMaxWidth) {
    TVM_FFI_THROW(ValueError) << "table holds " << capacity << " candidates, " << candidates
                              << " of the head, wanted 1 to " << found.steps
                              << " more: the history keeps paths of that length";
  }
  if (b == 0) return;
  run(LookupCall{found, ptr<float>(scores), ptr<int64_t>(tokens), ptr<int32_t>(parents), static_cast<int32_t>(capacity),
                 static_cast<int32_t>(candidates), ptr<int64_t>(rows), ptr<int64_t>(prefix_lens), ptr<int64_t>(roots),
                 b, rows.device()});
}

inline void append_tokens(Array<Tensor> history, TensorView rows, TensorView prefix_lens, TensorView tokens,
                          TensorView lengths, TensorView tree_tokens, TensorView tree_parents) {
  const HistoryCall found = check_history(history, rows, prefix_lens);
  const int64_t b = rows.size(0);
  check(tokens, "accepted.tokens", kI64, {b, kAny});
  check(lengths, "accepted.lengths", kI32, {b});
  check(tree_tokens, "tree.tokens", kI64, {b, kAny});
  const int64_t width = tree_tokens.size(1);
  check(tree_parents, "tree.parents", kI32, {b, width});
  if (b == 0) return;
  run(AppendCall{found, ptr<int64_t>(rows), ptr<int64_t>(prefix_lens), ptr<int64_t>(tokens), ptr<int32_t>(lengths),
                 ptr<int64_t>(tree_tokens), ptr<int32_t>(tree_parents), b, static_cast<int32_t>(tokens.size(1)),
                 static_cast<int32_t>(width), rows.device()});
}

}  // namespace bindings
}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(look_up, eagle::bindings::look_up);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(append_tokens, eagle::bindings::append_tokens);

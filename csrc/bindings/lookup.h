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
  int32_t* taken;
  float *expected, *missed;
  int64_t* counts;
  const float* prior;
  int64_t rows, window;
  int32_t steps;

  EAGLE_HD HistoryRow row(int64_t i) const {
    const int64_t at = i * steps, cell = i * kCells;
    return {tokens + i * window, window,        begins + i,    ends + i,   path + at,
            cells + at,          doubts + at,   steps,         starts + i, taken + i,
            expected + cell,     missed + cell, counts + i * 2};
  }
};

struct LookupCall {
  HistoryCall history;
  float* scores;
  int64_t* table_tokens;
  int32_t* parents;
  int32_t capacity, candidates, width;
  const int64_t *rows, *prefix_lens, *roots;
  int64_t b;
  DLDevice device;

  // Row 0 is nobody's: its requests get no branches, as one with a wrong row, which the CPU has refused before.
  template <class Team>
  EAGLE_HD void look(const Team& team, LookupScratch& scratch, int64_t i) const {
    const int64_t row = rows[i], at = i * capacity;
    if (row <= 0 || row >= history.rows || prefix_lens[i] < 0) {
      for (int32_t c = candidates + team.rank(); c < capacity; c += team.size()) {
        scores[at + c] = -INFINITY, table_tokens[at + c] = 0, parents[at + c] = -1;
      }
      return;
    }
    look_up(team, scratch, history.row(row), history.prior, {scores + at, table_tokens + at, parents + at}, candidates,
            capacity - candidates, width, prefix_lens[i], roots[i]);
  }
};

struct AppendCall {
  HistoryCall history;
  const int64_t *rows, *prefix_lens, *tokens;
  const int32_t* lengths;
  int64_t b;
  int32_t longest;
  DLDevice device;

  template <class Team>
  EAGLE_HD void append(const Team& team, int64_t i) const {
    const int64_t row = rows[i];
    if (row <= 0 || row >= history.rows || prefix_lens[i] < 0) return;
    const int32_t length = lengths[i] < 0 ? 0 : lengths[i] > longest ? longest : lengths[i];
    append_tokens(team, history.row(row), prefix_lens[i], tokens + i * longest, length);
  }
};

void run(const LookupCall& call);
void run(const AppendCall& call);

namespace bindings {

inline HistoryCall check_history(const Array<Tensor>& given, const TensorView& rows, const TensorView& prefix_lens) {
  if (given.size() != 12) TVM_FFI_THROW(ValueError) << "history has " << given.size() << " tensors, wanted 12";
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
  check(part(7), "history.taken", kI32, {size});
  check(part(8), "history.expected", kF32, {size, kCells});
  check(part(9), "history.missed", kF32, {size, kCells});
  check(part(10), "history.counts", kI64, {size, 2});
  check(part(11), "history.prior", kF32, {kCells});
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
          ptr<int32_t>(part(7)),
          ptr<float>(part(8)),
          ptr<float>(part(9)),
          ptr<int64_t>(part(10)),
          ptr<float>(part(11)),
          size,
          window,
          static_cast<int32_t>(steps)};
}

inline void look_up(Array<Tensor> history, TensorView scores, TensorView tokens, TensorView parents, int64_t candidates,
                    int64_t width, TensorView rows, TensorView prefix_lens, TensorView roots) {
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
                 static_cast<int32_t>(candidates), static_cast<int32_t>(width), ptr<int64_t>(rows),
                 ptr<int64_t>(prefix_lens), ptr<int64_t>(roots), b, rows.device()});
}

inline void append_tokens(Array<Tensor> history, TensorView rows, TensorView prefix_lens, TensorView tokens,
                          TensorView lengths) {
  const HistoryCall found = check_history(history, rows, prefix_lens);
  const int64_t b = rows.size(0);
  check(tokens, "accepted.tokens", kI64, {b, kAny});
  check(lengths, "accepted.lengths", kI32, {b});
  if (b == 0) return;
  run(AppendCall{found, ptr<int64_t>(rows), ptr<int64_t>(prefix_lens), ptr<int64_t>(tokens), ptr<int32_t>(lengths), b,
                 static_cast<int32_t>(tokens.size(1)), rows.device()});
}

}  // namespace bindings
}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(look_up, eagle::bindings::look_up);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(append_tokens, eagle::bindings::append_tokens);

// Binding of read_path: the argument checks and the exported function, the same in the CPU and the CUDA library. Each
// library defines `run` for the call below and includes this header in one source file. Values are not checked: a wrong
// length names the path's ends.
#pragma once
#include <eagle/accepted_path.h>

#include "checks.h"

namespace eagle {

struct PathCall {
  const int32_t *index, *lengths;
  const int64_t *tokens, *prefix_lens;
  int64_t *rows, *positions, *last, *roots;
  int64_t b, longest, width;
  DLDevice device;

  template <class Team>
  EAGLE_HD void read(const Team& team, int64_t i) const {
    const int64_t at = i * longest;
    read_path(team, {index + at, tokens + at, lengths[i], longest}, prefix_lens[i], i * width, at,
              {rows + at, positions + at, last + i, roots + i});
  }
};

void run(const PathCall& call);

namespace bindings {

inline void read_path(TensorView index, TensorView lengths, TensorView tokens, TensorView prefix_lens, int64_t width,
                      TensorView rows, TensorView positions, TensorView last, TensorView roots) {
  check(index, "accepted.index", kI32, {kAny, kAny});
  const int64_t b = index.size(0), longest = index.size(1);
  check(lengths, "accepted.lengths", kI32, {b});
  check(tokens, "accepted.tokens", kI64, {b, longest});
  check(prefix_lens, "prefix_lens", kI64, {b});
  check(rows, "rows", kI64, {b, longest});
  check(positions, "positions", kI64, {b, longest});
  check(last, "last", kI64, {b});
  check(roots, "roots", kI64, {b});
  if (longest < 1) {
    TVM_FFI_THROW(ValueError) << "accepted.index has 0 places per request, wanted at least 1: the bonus token has one";
  }
  if (b == 0) return;
  run(PathCall{ptr<int32_t>(index), ptr<int32_t>(lengths), ptr<int64_t>(tokens), ptr<int64_t>(prefix_lens),
               ptr<int64_t>(rows), ptr<int64_t>(positions), ptr<int64_t>(last), ptr<int64_t>(roots), b, longest, width,
               index.device()});
}

}  // namespace bindings
}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(read_path, eagle::bindings::read_path);

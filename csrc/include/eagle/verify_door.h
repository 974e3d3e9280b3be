// The door of verify_greedy: both libraries check the same tensors and export the same function. Each defines `run`.
#pragma once
#include "ffi_checks.h"
#include "verify.h"

namespace eagle {

struct GreedyCall {
  const int64_t* tokens;
  const int32_t* parents;
  const int64_t* targets;
  int32_t *index, *lengths;
  int64_t* out;
  int64_t b;
  int32_t width, stride;
  DLDevice device;

  template <class Team>
  EAGLE_HD void walk(const Team& team, int64_t i) const {
    const int64_t at = i * width, to = i * stride;
    const int32_t length =
        verify_greedy(team, tokens + at, parents + at, targets + at, width, stride, index + to, out + to);
    if (team.rank() == 0) lengths[i] = length;
  }
};

void run(const GreedyCall& call);

inline void verify_greedy_door(TensorView tokens, TensorView parents, TensorView targets, TensorView index,
                               TensorView lengths, TensorView out) {
  check(tokens, "tokens", kI64, {kAny, kAny});
  check(index, "index", kI32, {kAny, kAny});
  const int64_t b = tokens.size(0), width = tokens.size(1), stride = index.size(1);
  check(parents, "parents", kI32, {b, width});
  check(targets, "targets", kI64, {b, width});
  check(index, "index", kI32, {b, stride});
  check(lengths, "lengths", kI32, {b});
  check(out, "out", kI64, {b, stride});
  if (width < 1) TVM_FFI_THROW(ValueError) << "tokens has 0 nodes per request, wanted at least the root: add node 0";
  if (stride < 1) TVM_FFI_THROW(ValueError) << "stride is 0, wanted at least 1: the bonus token needs a place";
  if (b == 0) return;
  run(GreedyCall{ptr<int64_t>(tokens), ptr<int32_t>(parents), ptr<int64_t>(targets), ptr<int32_t>(index),
                 ptr<int32_t>(lengths), ptr<int64_t>(out), b, static_cast<int32_t>(width), static_cast<int32_t>(stride),
                 tokens.device()});
}

}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(verify_greedy, eagle::verify_greedy_door);

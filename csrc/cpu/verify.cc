#include <eagle/ffi_checks.h>
#include <eagle/verify.h>

namespace eagle {

void verify_greedy_cpu(TensorView tokens, TensorView parents, TensorView targets, TensorView index, TensorView lengths,
                       TensorView out) {
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
  for (int64_t i = 0; i < b; ++i) {
    ptr<int32_t>(lengths)[i] =
        verify_greedy(ptr<int64_t>(tokens) + i * width, ptr<int32_t>(parents) + i * width,
                      ptr<int64_t>(targets) + i * width, static_cast<int32_t>(width), static_cast<int32_t>(stride),
                      ptr<int32_t>(index) + i * stride, ptr<int64_t>(out) + i * stride);
  }
}

}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(verify_greedy, eagle::verify_greedy_cpu);

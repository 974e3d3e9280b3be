// The door of topk_log_softmax: both libraries check the same tensors and export the same function. Each defines `run`.
#pragma once
#include "ffi_checks.h"
#include "topk.h"

namespace eagle {

struct TopkCall {
  const void* logits;
  DLDataType dtype;  // float32, bfloat16 or float16
  int64_t stride;    // elements from one row to the next
  float* logp;
  int64_t* index;
  int64_t rows;
  int32_t vocabulary, k;
  DLDevice device;
};

void run(const TopkCall& call);

inline void topk_log_softmax_door(TensorView logits, TensorView logp, TensorView index) {
  const DLDataType dtype = logits.dtype();
  const int64_t stride = check_rows(logits, "logits", dtype, {kAny, kAny});
  const int64_t rows = logits.size(0), vocabulary = logits.size(1);
  check(logp, "logp", kF32, {rows, kAny});
  const int64_t k = logp.size(1);
  check(index, "index", kI64, {rows, k});
  if (k < 1 || k > vocabulary || k > kMaxListed) {
    TVM_FFI_THROW(ValueError) << "k is " << k << " for logits of shape " << shape_of(logits)
                              << ", wanted [R, V] and 1 <= k <= min(V, 128)";
  }
  if (vocabulary > INT32_MAX) {
    TVM_FFI_THROW(ValueError) << "logits has " << vocabulary << " columns, wanted at most 2^31 - 1";
  }
  if (!same(dtype, kF32) && !same(dtype, kBF16) && !same(dtype, kF16)) {
    TVM_FFI_THROW(TypeError) << "logits is " << name_of(dtype)
                             << ", wanted float32, bfloat16 or float16: convert it with .to()";
  }
  if (rows == 0) return;
  run(TopkCall{logits.data_ptr(), dtype, stride, ptr<float>(logp), ptr<int64_t>(index), rows,
               static_cast<int32_t>(vocabulary), static_cast<int32_t>(k), logits.device()});
}

}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_log_softmax, eagle::topk_log_softmax_door);

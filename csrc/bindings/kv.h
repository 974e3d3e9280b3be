// Bindings of compact_kv and store_kv: the argument checks and the exported functions, the same in the CPU and the CUDA
// library. Each library defines `run` for the calls below and includes this header in one source file.
#pragma once
#include <eagle/portable.h>

#include "checks.h"

namespace eagle {

struct CompactCall {
  const int64_t *data_ptrs, *row_bytes;  // of each cache
  const int64_t* window;
  const int32_t *index, *lengths;
  int64_t caches, b, width, max_accept_length;
  int64_t slots;  // rows of the smallest cache, 0 when it is not known
  DLDevice device;

  EAGLE_HD int64_t longest() const { return width < max_accept_length ? width : max_accept_length; }
  EAGLE_HD bool has_slot(int64_t slot) const { return slot >= 0 && (slots <= 0 || slot < slots); }
};

struct StoreCall {
  char *k_cache, *v_cache;
  const int64_t* loc;
  const char *k, *v;
  int64_t n, slots, heads;
  int64_t k_size, v_size;  // bytes of a head
  int64_t k_slot, v_slot;  // bytes of the caches from one slot to the next
  int64_t k_head, v_head;  // and from one head to the next
  int64_t k_step, v_step;  // bytes from one new row to the next
  DLDevice device;
};

void run(const CompactCall& call);
void run(const StoreCall& call);

namespace bindings {

inline void compact_kv(TensorView data_ptrs, TensorView row_bytes, TensorView window, TensorView index,
                       TensorView lengths, int64_t slots) {
  check(data_ptrs, "data_ptrs", kI64, {kAny});
  const int64_t caches = data_ptrs.size(0);
  check(row_bytes, "row_bytes", kI64, {caches});
  check(window, "window", kI64, {kAny, kAny});
  const int64_t b = window.size(0), width = window.size(1);
  check(index, "index", kI32, {b, kAny});
  check(lengths, "lengths", kI32, {b});
  if (b == 0) return;
  run(CompactCall{ptr<int64_t>(data_ptrs), ptr<int64_t>(row_bytes), ptr<int64_t>(window), ptr<int32_t>(index),
                  ptr<int32_t>(lengths), caches, b, width, index.size(1), slots, window.device()});
}

inline void store_kv(TensorView k_cache, TensorView v_cache, TensorView loc, TensorView k, TensorView v) {
  const DLDataType dtype = k_cache.dtype();
  const CacheStrides keys = check_cache(k_cache, "k_cache", dtype, {kAny, kAny, kAny});
  const int64_t slots = k_cache.size(0), heads = k_cache.size(1);
  const CacheStrides values = check_cache(v_cache, "v_cache", dtype, {slots, heads, kAny});
  check(loc, "loc", kI64, {kAny});
  const int64_t n = loc.size(0), width = dtype.bits / 8;
  const int64_t k_step = check_rows(k, "k", dtype, {n, heads, k_cache.size(2)}) * width;
  const int64_t v_step = check_rows(v, "v", dtype, {n, heads, v_cache.size(2)}) * width;
  if (n == 0) return;
  run(StoreCall{ptr<char>(k_cache), ptr<char>(v_cache), ptr<int64_t>(loc), ptr<char>(k), ptr<char>(v), n, slots, heads,
                k_cache.size(2) * width, v_cache.size(2) * width, keys.slot * width, values.slot * width,
                keys.head * width, values.head * width, k_step, v_step, loc.device()});
}

}  // namespace bindings
}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(compact_kv, eagle::bindings::compact_kv);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_kv, eagle::bindings::store_kv);

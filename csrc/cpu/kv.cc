// Moves rows of the paged cache. Everything is checked before the first byte is written.
#include <eagle/ffi_checks.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "parallel.h"

namespace eagle {
namespace {

constexpr int64_t kWorthThreads = 1 << 20;  // bytes below which waking other threads costs more than it saves

int64_t check_slot(const TensorView& window, int64_t request, int64_t node, int64_t slots) {
  const int64_t slot = ptr<int64_t>(window)[request * window.size(1) + node];
  if (slot < 0 || (slots > 0 && slot >= slots)) {
    TVM_FFI_THROW(ValueError) << "window of request " << request << " names slot " << slot << ", wanted "
                              << (slots > 0 ? "0 to " + std::to_string(slots - 1) : std::string("0 or more"))
                              << ": allocate the slot first";
  }
  return slot;
}

}  // namespace

void compact_kv(TensorView data_ptrs, TensorView row_bytes, TensorView window, TensorView index, TensorView lengths,
                int64_t slots) {
  check(data_ptrs, "data_ptrs", kI64, {kAny});
  const int64_t caches = data_ptrs.size(0);
  check(row_bytes, "row_bytes", kI64, {caches});
  check(window, "window", kI64, {kAny, kAny});
  const int64_t b = window.size(0), width = window.size(1);
  check(index, "index", kI32, {b, kAny});
  check(lengths, "lengths", kI32, {b});
  const int64_t stride = index.size(1), most = std::min(width, stride);

  std::vector<std::pair<int64_t, int64_t>> moves;  // (from, to), rows that stay where they are left out
  bool ascending = true;
  for (int64_t i = 0; i < b; ++i) {
    const int32_t length = ptr<int32_t>(lengths)[i];
    if (length < 0 || length > most) {
      TVM_FFI_THROW(ValueError) << "lengths[" << i << "] is " << length << ", wanted 0 to " << most
                                << ": pass the lengths of verify_greedy";
    }
    int32_t before = -1;
    for (int64_t j = 0; j < length; ++j) {
      const int32_t node = ptr<int32_t>(index)[i * stride + j];
      if (node < 0 || node >= width) {
        TVM_FFI_THROW(ValueError) << "index[" << i << ", " << j << "] is " << node << ", wanted 0 to " << width - 1
                                  << ": pass the index of verify_greedy";
      }
      ascending = ascending && node > before;
      before = node;
      const int64_t from = check_slot(window, i, node, slots), to = check_slot(window, i, j, slots);
      if (from != to) moves.emplace_back(from, to);
    }
  }
  if (moves.empty()) return;
  int64_t total = 0;
  for (int64_t c = 0; c < caches; ++c) total += ptr<int64_t>(row_bytes)[c] * static_cast<int64_t>(moves.size());

  parallel_for(caches, total > kWorthThreads, [&](int64_t c) {
    char* base = reinterpret_cast<char*>(ptr<int64_t>(data_ptrs)[c]);
    const int64_t size = ptr<int64_t>(row_bytes)[c];
    if (ascending) {  // a node never stands before its place on the path: no row is overwritten before it is read
      for (const auto& [from, to] : moves) std::memmove(base + to * size, base + from * size, size);
      return;
    }
    std::vector<char> rows(size * moves.size());
    char* row = rows.data();
    for (const auto& move : moves) std::memcpy(std::exchange(row, row + size), base + move.first * size, size);
    row = rows.data();
    for (const auto& move : moves) std::memcpy(base + move.second * size, std::exchange(row, row + size), size);
  });
}

void store_kv(TensorView k_cache, TensorView v_cache, TensorView loc, TensorView k, TensorView v) {
  const DLDataType dtype = k_cache.dtype();
  check(k_cache, "k_cache", dtype, {kAny, kAny, kAny});
  const int64_t slots = k_cache.size(0), heads = k_cache.size(1);
  check(v_cache, "v_cache", dtype, {slots, heads, kAny});
  check(loc, "loc", kI64, {kAny});
  const int64_t n = loc.size(0), width = dtype.bits / 8;
  const int64_t k_row = heads * k_cache.size(2) * width, v_row = heads * v_cache.size(2) * width;
  const int64_t k_step = check_rows(k, "k", dtype, {n, heads, k_cache.size(2)}) * width;
  const int64_t v_step = check_rows(v, "v", dtype, {n, heads, v_cache.size(2)}) * width;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t slot = ptr<int64_t>(loc)[i];
    if (slot < 0 || slot >= slots) {
      TVM_FFI_THROW(ValueError) << "loc names slot " << slot << ", wanted 0 to " << slots - 1
                                << ": allocate the slot first";
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t slot = ptr<int64_t>(loc)[i];
    std::memcpy(ptr<char>(k_cache) + slot * k_row, ptr<char>(k) + i * k_step, k_row);
    std::memcpy(ptr<char>(v_cache) + slot * v_row, ptr<char>(v) + i * v_step, v_row);
  }
}

}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(compact_kv, eagle::compact_kv);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_kv, eagle::store_kv);

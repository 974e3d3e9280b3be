// Brings rows of a paged cache into the CPU's cache, all their heads at once.
#pragma once
#include "attention.h"

namespace eagle {

constexpr int64_t kLine = 64;               // bytes
constexpr int64_t kReadAhead = 512 * 1024;  // bytes at once, of keys and values together: they must stay in the cache

// How many positions are read ahead at once: whole blocks.
inline int64_t read_ahead_keys(const AttentionSpec& a) {
  const int64_t row = a.kv_heads * (a.dim + a.dim_v) * a.element_size;
  return std::max<int64_t>(1, kReadAhead / (row * kBlock)) * kBlock;
}

// Reads a byte of every line of the keys and values at positions [from, to), one row after another. Attention itself
// goes from row to row and skips the other heads: the CPU does not foresee that, but it does foresee these reads.
// Prefetch instructions for the same lines gained nothing. Slots outside the cache are left to the check of the caller.
inline void read_ahead(const AttentionSpec& a, const int32_t* slots, int64_t from, int64_t to) {
  const auto read = [&](const void* cache, int64_t dim, int64_t stride) {
    const int64_t row = a.kv_heads * dim * a.element_size, step = stride * a.element_size;
    const char* rows = static_cast<const char*>(cache);
    for (int64_t i = from; i < to; ++i) {
      if (slots[i] < 0 || slots[i] >= a.slots) continue;
      const char* at = rows + slots[i] * step;
      for (int64_t byte = 0; byte < row; byte += kLine)
        static_cast<void>(*static_cast<const volatile char*>(at + byte));
    }
  };
  read(a.k, a.dim, a.k_stride);
  if (a.v != a.k) read(a.v, a.dim_v, a.v_stride);  // else the values are a part of each key
}

}  // namespace eagle

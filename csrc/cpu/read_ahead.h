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
  const auto span = [&](const CacheStrides& strides, int64_t dim) {  // bytes of a row, from its first head to its last
    return ((a.kv_heads - 1) * strides.head + dim) * a.element_size;
  };
  const auto read = [&](const void* cache, const CacheStrides& strides, int64_t row) {
    const char* rows = static_cast<const char*>(cache);
    for (int64_t i = from; i < to; ++i) {
      if (slots[i] < 0 || slots[i] >= a.slots) continue;
      const char* at = rows + slots[i] * strides.slot * a.element_size;
      for (int64_t byte = 0; byte < row; byte += kLine)
        static_cast<void>(*static_cast<const volatile char*>(at + byte));
    }
  };
  const int64_t keys = span(a.keys, a.dim), values = span(a.values, a.dim_v);
  const int64_t apart = static_cast<const char*>(a.v) - static_cast<const char*>(a.k);
  const bool together = apart >= 0 && apart < keys;  // the values of a head lie beside its keys
  read(a.k, a.keys, together ? std::max(keys, apart + values) : keys);
  if (!together) read(a.v, a.values, values);
}

}  // namespace eagle

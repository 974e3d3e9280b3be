// Attention of a group of query rows over a stretch of a paged cache, 64 keys at a time with an online softmax in
// float32. A row is one (query, query head); all query heads of a key head are rows of one group, so that every key and
// value is read from the cache once. Host only (GCC vectors); the GPU has kernels of its own shape.
#pragma once
#include <bindings/checks.h>

#include "float8.h"
#include "simd.h"
#include "visibility.h"

namespace eagle {

constexpr float kHidden = -1e30f;  // a logit that is masked; anything below kHidden / 10 weighs nothing
constexpr int kRowTile = 4;        // rows computed together
constexpr int kMaxDim = 576;       // the latent rows of DeepSeek: 512 numbers, which are the values too, and 64
constexpr int kMaxStretches = 8;   // of one group of rows, see Plan::add in csrc/cpu/attention.cc
constexpr int kVectors = simd::kLanes == 16 ? 4 : 2;  // vectors per row of a tile: as many as the registers hold

struct AttentionSpec {  // what all requests of a call share
  const void *q, *k, *v;
  void* out;
  const float* sinks;  // [q_heads] or null
  int64_t q_stride;    // elements from one query to the next
  CacheStrides keys, values;
  int64_t q_heads, kv_heads, group, dim, dim_v, slots;
  int64_t element_size;  // bytes of a number in the cache
  Float8 stored;         // what it is where element_size is 1; else the type of the queries
  float scale, logit_cap;
  float v_scale;  // what the values of the cache are multiplied by; that of the keys is part of `scale`
};

struct Stretch {         // keys [begin, end) of one request for one key head
  const int32_t* slots;  // slot of each position of the request
  int64_t kv_head, begin, end;
};

// What a stretch of keys contributes: out = acc / total after merging the stretches of a row.
struct Partial {
  float *acc, *highest, *total;  // [rows, dim_v], [rows], [rows]
};

struct Scratch {  // of one thread, for `rows` rows (a multiple of the lanes)
  float *q, *logits, *keys, *values, *totals, *fade, *read;
  static int64_t floats(int64_t rows, int64_t dim, int64_t dim_v) {
    return rows * (dim + kBlock + simd::kLanes + 1) + 2 * kBlock * (dim + dim_v);
  }
  Scratch(float* base, int64_t rows, int64_t dim, int64_t dim_v) {
    q = base;                         // [rows, dim], of pairs in the first half of each row where kPaired
    logits = q + rows * dim;          // [rows, kBlock]
    totals = logits + rows * kBlock;  // [rows, lanes]: the denominator, summed lane by lane
    fade = totals + rows * simd::kLanes;
    keys = fade + rows;              // [dim, kBlock], transposed; [dim / 2, kBlock] of pairs where kPaired
    values = keys + kBlock * dim;    // [kBlock, dim_v]
    read = values + kBlock * dim_v;  // [kBlock, dim + dim_v]: what 8-bit numbers stand for, in the type of the queries
  }
};

inline int64_t padded_rows(int64_t rows) { return (rows + simd::kLanes - 1) / simd::kLanes * simd::kLanes; }

// bfloat16 keys stay pairs of neighbouring dimensions where the CPU multiplies such pairs; all others become float32.
template <class T>
constexpr bool kPaired = simd::kPairProducts && std::is_same_v<T, simd::BFloat16>;

// kLanes keys, the dimensions [d, d + Count) of each -> columns [column, column + kLanes) of the transposed block.
template <int Count, class T>
void stage_keys(const T* const* rows, int64_t d, float* keys, int column) {
  simd::Ints tile[simd::kLanes];  // a lane of a 16-bit type is a pair of neighbours in the key
  for (int i = 0; i < simd::kLanes; ++i) {
    tile[i] = simd::Ints{};
    std::memcpy(&tile[i], rows[i] + d, sizeof(T) * Count);
  }
  simd::transpose(tile);
  constexpr int lanes = Count * sizeof(T) / 4;
  for (int i = 0; i < lanes; ++i) {
    if constexpr (kPaired<T>) {
      simd::store(keys + (d / 2 + i) * kBlock + column, (simd::Floats)tile[i]);
    } else if constexpr (sizeof(T) == 2) {
      simd::store(keys + (d + 2 * i) * kBlock + column, simd::widen<T>(tile[i]));
      simd::store(keys + (d + 2 * i + 1) * kBlock + column, simd::widen<T>(tile[i] >> 16));
    } else {
      simd::store(keys + (d + i) * kBlock + column, (simd::Floats)tile[i]);
    }
  }
}

// One row of an 8-bit cache, as `values` say; `at` is its first number.
template <class T>
const T* read_float8(const T* values, const void* cache, int64_t at, int64_t dim, T* out) {
  const uint8_t* bits = static_cast<const uint8_t*>(cache) + at;
  for (int64_t d = 0; d < dim; ++d) out[d] = values[bits[d]];
  return out;
}

// Brings the keys of one block into the scratch, and the values as float32 where `widen` is set; values[kBlock] says
// where they are in the cache. Keys and values that no row sees
// are zero, whatever their slot holds; columns from `to`, the end of what is seen, to the end of the block are not
// written, but for those that share a vector. Returns false when a slot is outside the cache.
template <class T>
bool stage_block(const AttentionSpec& a, const Stretch& s, int64_t start, uint64_t seen, int to, bool widen,
                 const Scratch& w, const T** values) {
  static const T zeros[kMaxDim]{};
  const T* rows[kBlock];
  const T* float8 = a.element_size == 1 ? values_of<T>(a.stored) : nullptr;
  const int columns = (to + simd::kLanes - 1) / simd::kLanes * simd::kLanes;
  for (int j = 0; j < columns; ++j) {
    rows[j] = values[j] = zeros;
    if (seen >> j & 1) {
      const int64_t slot = s.slots[start + j];
      if (slot < 0 || slot >= a.slots) return false;
      const int64_t key = slot * a.keys.slot + s.kv_head * a.keys.head;
      const int64_t value = slot * a.values.slot + s.kv_head * a.values.head;
      if (float8) {
        T* out = reinterpret_cast<T*>(w.read) + j * (a.dim + a.dim_v);
        rows[j] = read_float8(float8, a.k, key, a.dim, out);
        values[j] = read_float8(float8, a.v, value, a.dim_v, out + a.dim);
      } else {
        rows[j] = static_cast<const T*>(a.k) + key;
        values[j] = static_cast<const T*>(a.v) + value;
      }
    }
    if (!widen) continue;
    float* value = w.values + j * a.dim_v;
    for (int64_t d = 0; d < a.dim_v; d += simd::kLanes) simd::store(value + d, simd::load(values[j] + d));
  }
  constexpr int step = simd::kLanes * 4 / sizeof(T);  // elements of a key in one vector
  for (int column = 0; column < columns; column += simd::kLanes) {
    int64_t d = 0;
    for (; d + step <= a.dim; d += step) stage_keys<step>(rows + column, d, w.keys, column);
    if constexpr (step > 16) {  // a dimension like 80
      if (d < a.dim) stage_keys<16>(rows + column, d, w.keys, column);
    }
  }
  return true;
}

// logits[Rows, kBlock] = q keys * scale, capped.
template <class T, int Rows>
void tile_logits(const AttentionSpec& a, const float* q, const float* keys, float* logits) {
  const int64_t steps = kPaired<T> ? a.dim / 2 : a.dim;
  for (int column = 0; column < kBlock; column += kVectors * simd::kLanes) {
    simd::Floats c[Rows][kVectors] = {};
    for (int64_t d = 0; d < steps; ++d) {
      simd::Floats key[kVectors];
      for (int i = 0; i < kVectors; ++i) key[i] = simd::load(keys + d * kBlock + column + i * simd::kLanes);
      for (int r = 0; r < Rows; ++r) {
        const float* at = q + r * a.dim + d;
        if constexpr (kPaired<T>) {
          int32_t pair;
          std::memcpy(&pair, at, sizeof pair);
          const simd::Ints x = simd::broadcast(pair);
          for (int i = 0; i < kVectors; ++i) c[r][i] = simd::add_pairs(c[r][i], x, (simd::Ints)key[i]);
        } else {
          const simd::Floats x = simd::broadcast(*at);
          for (int i = 0; i < kVectors; ++i) c[r][i] += x * key[i];
        }
      }
    }
    for (int r = 0; r < Rows; ++r) {
      for (int i = 0; i < kVectors; ++i) {
        simd::Floats x = c[r][i] * a.scale;
        if (a.logit_cap > 0) x = a.logit_cap * simd::tanh(x / a.logit_cap);
        simd::store(logits + r * kBlock + column + i * simd::kLanes, x);
      }
    }
  }
}

// Hides what the row does not see of the columns before `to` and returns the new highest logit.
inline float mask_row(float* logits, uint64_t seen, int to, float highest) {
  simd::Floats top = simd::broadcast(highest);
  simd::Ints lane_bit;
  for (int i = 0; i < simd::kLanes; ++i) lane_bit[i] = 1 << i;
  for (int i = 0; i < to; i += simd::kLanes) {
    simd::Floats x = simd::load(logits + i);
    if (~seen) {
      const simd::Ints bits = simd::broadcast(static_cast<int32_t>(seen >> i & ((1 << simd::kLanes) - 1)));
      x = (bits & lane_bit) != 0 ? x : simd::broadcast(kHidden);
      simd::store(logits + i, x);
    }
    top = simd::max(top, x);
  }
  return simd::highest(top);
}

// Turns one row of logits into weights and adds them, lane by lane, to the faded totals.
inline void weigh_row(float* logits, int to, float highest, float fade, float* totals) {
  const float base = highest > kHidden ? highest : 0.0f;  // nothing seen so far: all weights are zero
  simd::Floats total = simd::load(totals) * fade;
  for (int i = 0; i < to; i += simd::kLanes) {
    const simd::Floats p = simd::exp(simd::load(logits + i) - base);
    total += p;
    simd::store(logits + i, p);
  }
  simd::store(totals, total);
}

// acc[Rows, d..] = acc * fade + weights values, for `Vectors` vectors of the value that `value_of` gives for a key.
template <int Rows, int Vectors, class ValueOf>
inline void tile_values(const float* weights, const ValueOf& value_of, int64_t stride, int from, int to,
                        const float* fade, float* acc) {
  simd::Floats o[Rows][Vectors];
  for (int r = 0; r < Rows; ++r) {
    for (int i = 0; i < Vectors; ++i) o[r][i] = simd::load(acc + r * stride + i * simd::kLanes) * fade[r];
  }
  for (int j = from; j < to; ++j) {
    simd::Floats value[Vectors];
    for (int i = 0; i < Vectors; ++i) value[i] = simd::load(value_of(j) + i * simd::kLanes);
    for (int r = 0; r < Rows; ++r) {
      const simd::Floats p = simd::broadcast(weights[r * kBlock + j]);
      for (int i = 0; i < Vectors; ++i) o[r][i] += p * value[i];
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int i = 0; i < Vectors; ++i) simd::store(acc + r * stride + i * simd::kLanes, o[r][i]);
  }
}

// The same, for all columns.
template <int Rows, class ValueOf>
inline void add_values(const float* weights, const ValueOf& value_of, int64_t dim_v, int from, int to,
                       const float* fade, float* acc) {
  int64_t d = 0;
  for (; d + kVectors * simd::kLanes <= dim_v; d += kVectors * simd::kLanes) {
    tile_values<Rows, kVectors>(weights, [&](int j) { return value_of(j) + d; }, dim_v, from, to, fade, acc + d);
  }
  for (; d < dim_v; d += simd::kLanes) {
    tile_values<Rows, 1>(weights, [&](int j) { return value_of(j) + d; }, dim_v, from, to, fade, acc + d);
  }
}

// Calls tile(Rows) with the rows [r, r + Rows) for each tile, Rows a constant; only the last tile can have fewer than
// kRowTile. What a row gets does not depend on the size of its tile.
template <class Tile>
inline void for_tiles(int64_t rows, const Tile& tile) {
  static_assert(kRowTile == 4);
  int64_t r = 0;
  for (; r + kRowTile <= rows; r += kRowTile) tile(std::integral_constant<int, kRowTile>(), r);
  if (rows - r == 3) tile(std::integral_constant<int, 3>(), r);
  if (rows - r == 2) tile(std::integral_constant<int, 2>(), r);
  if (rows - r == 1) tile(std::integral_constant<int, 1>(), r);
}

// The rows of `queries` queries (a.group rows each, q points at the first) over one stretch. Returns false when a slot
// is outside the cache; what `out` holds is then unspecified.
template <class T>
bool attend_stretch(const AttentionSpec& a, const Query* queries, int64_t count, const T* q, const Stretch& s,
                    const Scratch& w, const Partial& out) {
  const int64_t rows = count * a.group, padded = padded_rows(rows);
  const bool widen = rows > kRowTile;  // else every value is read once
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = q + r / a.group * a.q_stride + r % a.group * a.dim;
    if constexpr (kPaired<T>) {
      std::memcpy(w.q + r * a.dim, from, sizeof(T) * a.dim);
    } else {
      for (int64_t d = 0; d < a.dim; d += simd::kLanes) simd::store(w.q + r * a.dim + d, simd::load(from + d));
    }
    out.highest[r] = kHidden;
  }
  std::memset(w.fade, 0, sizeof(float) * padded);
  std::memset(w.totals, 0, sizeof(float) * rows * simd::kLanes);
  std::memset(out.acc, 0, sizeof(float) * rows * a.dim_v);

  for (int64_t start = s.begin; start < s.end; start += kBlock) {
    uint64_t any = 0;
    for (int64_t i = 0; i < count; ++i) any |= queries[i].block(start);
    any &= bit_range(0, s.end - start);
    if (!any) continue;
    const int from = __builtin_ctzll(any), to = 64 - __builtin_clzll(any);
    const T* values[kBlock];
    if (!stage_block<T>(a, s, start, any, to, widen, w, values)) return false;

    for_tiles(rows,
              [&](auto size, int64_t r) { tile_logits<T, size()>(a, w.q + r * a.dim, w.keys, w.logits + r * kBlock); });
    uint64_t seen = 0;
    for (int64_t r = 0; r < rows; ++r) {
      if (r % a.group == 0) seen = queries[r / a.group].block(start) & any;
      const float before = out.highest[r];
      out.highest[r] = mask_row(w.logits + r * kBlock, seen, to, before);
      w.fade[r] = before - out.highest[r];
    }
    for (int64_t r = 0; r < padded; r += simd::kLanes) simd::store(w.fade + r, simd::exp(simd::load(w.fade + r)));
    for (int64_t r = 0; r < rows; ++r) {
      weigh_row(w.logits + r * kBlock, to, out.highest[r], w.fade[r], w.totals + r * simd::kLanes);
    }
    for_tiles(rows, [&](auto size, int64_t r) {
      const float *weights = w.logits + r * kBlock, *fade = w.fade + r;
      float* acc = out.acc + r * a.dim_v;
      if (widen) {
        add_values<size()>(weights, [&](int j) { return w.values + j * a.dim_v; }, a.dim_v, from, to, fade, acc);
      } else {
        add_values<size()>(weights, [&](int j) { return values[j]; }, a.dim_v, from, to, fade, acc);
      }
    });
  }
  for (int64_t r = 0; r < rows; ++r) out.total[r] = simd::sum(simd::load(w.totals + r * simd::kLanes));
  return true;
}

// Merges the stretches of each row and writes it. parts[i] covers the same rows; q_head is the first head of the group.
template <class T>
void finish_rows(const AttentionSpec& a, int64_t rows, const Partial* parts, int64_t count, int64_t first_query,
                 int64_t q_head) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t head = q_head + r % a.group;
    T* out = static_cast<T*>(a.out) + ((first_query + r / a.group) * a.q_heads + head) * a.dim_v;
    float highest = a.sinks ? a.sinks[head] : kHidden;
    for (int64_t i = 0; i < count; ++i) highest = std::max(highest, parts[i].highest[r]);
    float total = a.sinks ? simd::exp(simd::broadcast(a.sinks[head] - highest))[0] : 0.0f;
    float weight[kMaxStretches];
    for (int64_t i = 0; i < count; ++i) {
      weight[i] = simd::exp(simd::broadcast(parts[i].highest[r] - highest))[0];
      total += parts[i].total[r] * weight[i];
    }
    const float inverse = total == 0.0f ? 0.0f : a.v_scale / total;  // a row that sees no key is zero
    for (int64_t d = 0; d < a.dim_v; d += simd::kLanes) {
      simd::Floats x{};
      for (int64_t i = 0; i < count; ++i) {
        x += simd::load(parts[i].acc + r * a.dim_v + d) * weight[i];
      }
      simd::store(out + d, x * inverse);
    }
  }
}

}  // namespace eagle

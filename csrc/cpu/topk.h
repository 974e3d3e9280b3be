// topk_log_softmax for the host, with vectors: a row is cut into segments, and each segment keeps a list of its best.
#pragma once
#include <eagle/topk.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace eagle::cpu {

constexpr int64_t kSegment = 8192;             // a vocabulary is cut so that one row keeps several threads busy
constexpr int64_t kMinParallelLogits = 16384;  // below, waking other threads costs more than it saves
constexpr int kStep = 8 * simd::kLanes;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Segment {                // the best of one part of a row
  uint64_t keys[4 * kMaxTopM];  // the best and candidates that may still be dropped
  int length;
  double total;  // sum of exp(x - the best score)
};

inline simd::Floats load_row(const float* p) { return simd::load(p); }
inline simd::Floats load_row(const simd::BFloat16* p) { return simd::load(p); }
inline simd::Floats load_row(
    const simd::Float16* p) {  // by integer arithmetic: subnormals are scaled, inf and NaN kept
  simd::Halves h;
  std::memcpy(&h, p, sizeof h);
  const simd::Ints bits = __builtin_convertvector(h, simd::Ints);
  const simd::Ints magnitude = (bits & 0x7fff) << 13;
  const simd::Floats finite = (simd::Floats)magnitude * 0x1p112f;
  const simd::Ints special = magnitude | 0x7f800000;
  const simd::Ints value = magnitude >= 0x0f800000 ? special : (simd::Ints)finite;
  return (simd::Floats)(value | ((bits & 0x8000) << 16));
}

// A NaN logit counts as impossible.
inline simd::Floats without_nan(simd::Floats x) { return x == x ? x : simd::broadcast(-kInfinity); }

template <class T>
simd::Floats load_some(const T* p, int64_t count) {  // lanes from `count` on are -inf
  if (count >= simd::kLanes) return without_nan(load_row(p));
  T buffer[simd::kLanes] = {};
  std::memcpy(buffer, p, sizeof(T) * count);
  simd::Floats x = without_nan(load_row(buffer));
  for (int64_t i = count; i < simd::kLanes; ++i) x[i] = -kInfinity;
  return x;
}

// Keeps the k best keys of a list, in any order except that the k-th best is the last.
inline void keep_best(Segment& list, int k) {
  std::nth_element(list.keys, list.keys + k - 1, list.keys + list.length, std::greater<>());
  list.length = k;
}

template <class T>
void scan(const T* row, int64_t begin, int64_t end, int k, Segment& out) {
  // Candidates are collected, and cut back to the k best when the list is full. From then on only a better score can
  // enter: items come by ascending index, and of equal scores the first is the better.
  const int room = 4 * k;
  float floor = -kInfinity;
  bool full = false;
  out.length = 0;
  for (int64_t at = begin; at < end; at += kStep) {
    simd::Floats x[8], top = simd::broadcast(-kInfinity);
    const int64_t count = std::min<int64_t>(kStep, end - at);
    const int vectors = static_cast<int>((count + simd::kLanes - 1) / simd::kLanes);
    for (int i = 0; i < vectors; ++i) {
      x[i] = load_some(row + at + i * simd::kLanes, count - i * simd::kLanes);
      top = simd::max(top, x[i]);
    }
    if (full && !(simd::highest(top) > floor)) continue;
    for (int i = 0; i < vectors; ++i) {
      if (full && !(simd::highest(x[i]) > floor)) continue;
      const int64_t from = at + i * simd::kLanes, lanes = std::min<int64_t>(simd::kLanes, end - from);
      for (int64_t j = 0; j < lanes; ++j) {
        if (full && !(x[i][j] > floor)) continue;
        out.keys[out.length++] = best_key(x[i][j], static_cast<int32_t>(from + j));
        if (out.length < room) continue;
        keep_best(out, k);
        floor = score_of(out.keys[k - 1]);
        full = true;
      }
    }
  }
  if (out.length > k) keep_best(out, k);
  std::sort(out.keys, out.keys + out.length, std::greater<>());
  simd::Floats sums[4] = {};
  const float top = score_of(out.keys[0]);
  const simd::Floats base = simd::broadcast(top == -kInfinity ? 0.0f : top);
  int64_t at = begin;
  for (; at + 4 * simd::kLanes <= end; at += 4 * simd::kLanes) {
    for (int i = 0; i < 4; ++i) sums[i] += simd::exp(without_nan(load_row(row + at + i * simd::kLanes)) - base);
  }
  for (; at < end; at += simd::kLanes) sums[0] += simd::exp(load_some(row + at, end - at) - base);
  out.total = simd::sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

inline void merge(const Segment* segments, int64_t count, int k, float* logp, int64_t* index) {
  uint64_t best[kMaxTopM];
  thread_local std::vector<int> next;  // of each segment; grows to the longest row, and stays
  next.assign(std::max(next.size(), static_cast<size_t>(count)), 0);
  int length = 0;
  for (; length < k; ++length) {
    int64_t from = -1;
    for (int64_t s = 0; s < count; ++s) {
      if (next[s] == segments[s].length) continue;
      if (from < 0 || segments[s].keys[next[s]] > segments[from].keys[next[from]]) from = s;
    }
    if (from < 0) break;
    best[length] = segments[from].keys[next[from]++];
  }
  const float top = score_of(best[0]);
  double total = 0;
  for (int64_t s = 0; s < count; ++s) {
    const double below = double(score_of(segments[s].keys[0])) - top;
    if (segments[s].total > 0) total += segments[s].total * std::exp(below);
  }
  for (int j = 0; j < length; ++j) {
    logp[j] = log_probability(score_of(best[j]), top, total);
    index[j] = index_of(best[j]);
  }
}

// logits [rows, vocabulary], rows `row_stride` elements apart; logp and index [rows, k].
template <class T>
void topk_rows(const T* logits, int64_t row_stride, int64_t rows, int64_t vocabulary, int k, float* logp,
               int64_t* index) {
  const int64_t pieces = (vocabulary + kSegment - 1) / kSegment;
  thread_local std::vector<Segment> kept;  // grows to the largest call of a thread, and stays
  kept.resize(std::max(kept.size(), static_cast<size_t>(rows * pieces)));
  Segment* segments = kept.data();
  parallel_for(rows * pieces, rows * vocabulary > kMinParallelLogits, [&](int64_t task) {
    const int64_t row = task / pieces, begin = task % pieces * kSegment;
    scan(logits + row * row_stride, begin, std::min<int64_t>(vocabulary, begin + kSegment), k, segments[task]);
  });
  for (int64_t row = 0; row < rows; ++row) {
    merge(segments + row * pieces, pieces, k, logp + row * k, index + row * k);
  }
}

}  // namespace eagle::cpu

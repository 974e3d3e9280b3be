// The k most likely tokens of each row of logits, with their log-probabilities.
#include <eagle/ffi_checks.h>
#include <eagle/simd.h>
#include <eagle/tree.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "parallel.h"

namespace eagle {
namespace {

constexpr int64_t kSegment = 8192;        // a vocabulary is cut so that one row keeps several threads busy
constexpr int64_t kWorthThreads = 16384;  // logits below which waking other threads costs more than it saves
constexpr int kStep = 8 * simd::kLanes;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Segment {  // the best of one stretch of a row
  float scores[kMaxWidth];
  int32_t items[kMaxWidth];
  int length;
  double total;  // sum of exp(x - scores[0])
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

// NaN counts as impossible.
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

template <class T>
void scan(const T* row, int64_t begin, int64_t end, int k, Segment& out) {
  out.length = 0;
  for (int64_t at = begin; at < end; at += kStep) {
    simd::Floats x[8], top = simd::broadcast(-kInfinity);
    const int64_t count = std::min<int64_t>(kStep, end - at);
    const int vectors = static_cast<int>((count + simd::kLanes - 1) / simd::kLanes);
    for (int i = 0; i < vectors; ++i) {
      x[i] = load_some(row + at + i * simd::kLanes, count - i * simd::kLanes);
      top = simd::max(top, x[i]);
    }
    if (out.length == k && !(simd::highest(top) > out.scores[k - 1])) continue;
    for (int64_t j = 0; j < count; ++j) {
      out.length = insert_best(out.scores, out.items, out.length, k, x[j / simd::kLanes][j % simd::kLanes],
                               static_cast<int32_t>(at + j));
    }
  }
  simd::Floats sums[4] = {};
  const float top = out.scores[0];
  const simd::Floats base = simd::broadcast(top == -kInfinity ? 0.0f : top);
  int64_t at = begin;
  for (; at + 4 * simd::kLanes <= end; at += 4 * simd::kLanes) {
    for (int i = 0; i < 4; ++i) sums[i] += simd::exp(without_nan(load_row(row + at + i * simd::kLanes)) - base);
  }
  for (; at < end; at += simd::kLanes) sums[0] += simd::exp(load_some(row + at, end - at) - base);
  out.total = simd::sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

void merge(const Segment* segments, int64_t count, int k, float* logp, int64_t* index) {
  float scores[kMaxWidth];
  int32_t items[kMaxWidth];
  int length = 0;
  for (int64_t s = 0; s < count; ++s) {
    for (int j = 0; j < segments[s].length; ++j) {
      length = insert_best(scores, items, length, k, segments[s].scores[j], segments[s].items[j]);
    }
  }
  double total = 0;
  for (int64_t s = 0; s < count; ++s) {
    if (segments[s].total > 0) total += segments[s].total * std::exp(double(segments[s].scores[0]) - scores[0]);
  }
  for (int j = 0; j < length; ++j) {
    const double p = double(scores[j]) - scores[0] - std::log(total);
    logp[j] = std::isnan(p) ? -kInfinity : std::min(static_cast<float>(p), 0.0f);
    index[j] = items[j];
  }
}

template <class T>
void run(const TensorView& logits, int64_t stride, const TensorView& logp, const TensorView& index) {
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  const int k = static_cast<int>(logp.size(1));
  const int64_t pieces = (vocab + kSegment - 1) / kSegment;
  std::vector<Segment> segments(rows * pieces);
  parallel_for(rows * pieces, rows * vocab > kWorthThreads, [&](int64_t task) {
    const int64_t row = task / pieces, begin = task % pieces * kSegment;
    scan(ptr<T>(logits) + row * stride, begin, std::min(vocab, begin + kSegment), k, segments[task]);
  });
  for (int64_t row = 0; row < rows; ++row) {
    merge(segments.data() + row * pieces, pieces, k, ptr<float>(logp) + row * k, ptr<int64_t>(index) + row * k);
  }
}

}  // namespace

void topk_log_softmax(TensorView logits, TensorView logp, TensorView index) {
  const DLDataType dtype = logits.dtype();
  const int64_t stride = check_rows(logits, "logits", dtype, {kAny, kAny});
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  check(logp, "logp", kF32, {rows, kAny});
  const int64_t k = logp.size(1);
  check(index, "index", kI64, {rows, k});
  if (k < 1 || k > vocab || k > kMaxWidth) {
    TVM_FFI_THROW(ValueError) << "k is " << k << " for logits of shape " << shape_of(logits)
                              << ", wanted [R, V] and 1 <= k <= min(V, 64)";
  }
  if (vocab > std::numeric_limits<int32_t>::max())
    TVM_FFI_THROW(ValueError) << "logits has " << vocab << " columns, wanted at most 2^31 - 1";
  if (same(dtype, kF32)) {
    run<float>(logits, stride, logp, index);
  } else if (same(dtype, kBF16)) {
    run<simd::BFloat16>(logits, stride, logp, index);
  } else if (same(dtype, kF16)) {
    run<simd::Float16>(logits, stride, logp, index);
  } else {
    TVM_FFI_THROW(TypeError) << "logits is " << name_of(dtype)
                             << ", wanted float32, bfloat16 or float16: convert it with .to()";
  }
}

}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_log_softmax, eagle::topk_log_softmax);

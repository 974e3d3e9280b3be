// The linear layer of bf16_linear.cc for CPUs without products of bfloat16 pairs: every weight is widened to float32 in
// a register, once for a group of rows. An output is the same number whatever the other rows are: its products are
// always summed in the same order.
#include <cstring>

#include "bf16_rows.h"
#include "simd.h"

namespace eagle {
namespace {

using simd::BFloat16;
using simd::Floats;
using simd::Ints;
using simd::kLanes;

// A step has the inputs with even numbers, then those with odd ones, as the halves of a vector of weights.
using Layer = Bf16Layer<float>;

constexpr int64_t kRows = 4;           // of a group that is multiplied at once
constexpr int64_t kStep = 2 * kLanes;  // inputs of a vector of weights
constexpr int64_t kMaxRows = 256;      // rows whose inputs are float32 at a time

// The kStep weights or inputs from `p` on, `count` of them; zeros for the others.
inline Ints load_pairs(const uint16_t* p, int64_t count) {
  uint16_t part[kStep] = {};
  std::memcpy(part, p, count * sizeof(uint16_t));
  Ints pairs;
  std::memcpy(&pairs, part, sizeof pairs);
  return pairs;
}

inline Ints load_pairs(const uint16_t* p) {
  Ints pairs;
  std::memcpy(&pairs, p, sizeof pairs);
  return pairs;
}

inline Floats even(Ints pairs) { return (Floats)(pairs << 16); }
inline Floats odd(Ints pairs) { return (Floats)(pairs & int32_t(0xffff0000)); }

void copy_inputs(const uint16_t* from, int64_t count, float* to) {
  const Ints pairs = load_pairs(from, count);
  simd::store(to, even(pairs));
  simd::store(to + kLanes, odd(pairs));
}

template <int Rows>
inline void add_products(const float* x, const Ints* pairs, Floats* sums) {
  constexpr int kOutputs = kLanes / Rows;
  Floats evens[kOutputs], odds[kOutputs];
  for (int j = 0; j < kOutputs; ++j) evens[j] = even(pairs[j]), odds[j] = odd(pairs[j]);
  for (int r = 0; r < Rows; ++r) {
    const Floats x_even = simd::load(x + r * kStep), x_odd = simd::load(x + r * kStep + kLanes);
    for (int j = 0; j < kOutputs; ++j) {
      sums[r * kOutputs + j] += evens[j] * x_even;
      sums[r * kOutputs + j] += odds[j] * x_odd;
    }
  }
}

// kLanes results: kLanes / Rows outputs from `output` on, `left` of which exist, of the rows [row, row + Rows).
template <int Rows, bool Fetch>
void multiply_tile(const Layer& layer, int64_t row, int64_t output, int64_t left) {
  constexpr int kOutputs = kLanes / Rows;
  const float* x = layer.x + row * layer.steps * kStep;
  const uint16_t* weight = layer.weight + output * layer.inputs;
  const int64_t whole = layer.inputs / kStep;
  int64_t at[kOutputs];  // an output that does not exist is computed like the last one, and not stored
  for (int j = 0; j < kOutputs; ++j) at[j] = std::min<int64_t>(j, left - 1) * layer.inputs;
  Floats sums[kLanes] = {};
  Ints pairs[kOutputs];
  for (int64_t step = 0; step < whole; ++step, x += Rows * kStep) {
    for (int j = 0; j < kOutputs; ++j) {
      const uint16_t* here = weight + at[j] + step * kStep;
      pairs[j] = load_pairs(here);
      if (Fetch) __builtin_prefetch(here + kOutputs * layer.inputs);
    }
    add_products<Rows>(x, pairs, sums);
  }
  if (whole < layer.steps) {
    const int64_t first = whole * kStep;
    for (int j = 0; j < kOutputs; ++j) pairs[j] = load_pairs(weight + at[j] + first, layer.inputs - first);
    add_products<Rows>(x, pairs, sums);
  }
  Ints lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = (Ints)sums[i];
  simd::transpose(lanes);
  Floats total = (Floats)lanes[0];
  for (int i = 1; i < kLanes; ++i) total += (Floats)lanes[i];
  if (layer.bias) {
    BFloat16 bias[kLanes];
    for (int i = 0; i < kLanes; ++i) bias[i].bits = layer.bias[output + std::min<int64_t>(i % kOutputs, left - 1)];
    total += simd::load(bias);
  }
  BFloat16 rounded[kLanes];
  simd::store(rounded, total);
  const int64_t count = std::min<int64_t>(left, kOutputs) * sizeof(BFloat16);
  for (int64_t r = 0; r < std::min<int64_t>(Rows, layer.rows - row); ++r) {
    std::memcpy(layer.out + (row + r) * layer.outputs + output, rounded + r * kOutputs, count);
  }
}

template <int Rows, bool Fetch>
void multiply_block(const Layer& layer, int64_t row, int64_t output, int64_t end) {
  for (; output < end; output += kLanes / Rows) multiply_tile<Rows, Fetch>(layer, row, output, end - output);
}

// The first rows ask for the weights to come, the others find them in the cache.
template <bool Fetch>
void multiply_rows(const Layer& layer, int64_t row, int64_t rows, int64_t output, int64_t end) {
  if (rows == kRows) return multiply_block<kRows, Fetch>(layer, row, output, end);
  if (rows == 2) return multiply_block<2, Fetch>(layer, row, output, end);
  multiply_block<1, Fetch>(layer, row, output, end);
}

void multiply_all(const Layer& layer) {
  for_blocks<kRows>(layer, [&](int64_t row, int64_t rows, int64_t output, int64_t end) {
    row ? multiply_rows<false>(layer, row, rows, output, end) : multiply_rows<true>(layer, row, rows, output, end);
  });
}

}  // namespace

// Arguments as in bf16_rows.h.
void bf16_linear_fma(TensorView x, TensorView weight, TensorView bias, TensorView out) {
  Layer layer = check_bf16_linear<float>(x, weight, bias, out, kStep);
  const int64_t rows = layer.rows, most = std::min(rows, kMaxRows);
  thread_local std::vector<float> grouped;  // grows to the largest call of a thread, and stays
  grouped.resize(std::max<size_t>(grouped.size(), (most + kRows) * layer.steps * kStep));
  layer.x = grouped.data();
  for (int64_t first = 0; first < rows; first += kMaxRows, layer.out += kMaxRows * layer.outputs) {
    layer.rows = std::min(kMaxRows, rows - first);
    group_rows<kRows, kStep>(ptr<uint16_t>(x) + first * x.stride(0), x.stride(0), layer, grouped.data(), copy_inputs);
    multiply_all(layer);
  }
}

}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(bf16_linear_fma, eagle::bf16_linear_fma);

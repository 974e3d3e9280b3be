// What the linear layers with int8 weights share. Every group of 64 elements of a row of x is rounded to int8 with a
// scale of its own, so that a few large elements do not spoil the others.
//
// x [rows, K] bfloat16 and out [rows, N] bfloat16; scales [N] float32; weights [N / 16, K / 4, 16, 4] uint8, N and K
// rounded up to multiples of 16 and 64: byte [i, k, j, l] is 128 + the rounded weight of output 16 i + j and input 4 k
// + l.
#pragma once
#include <bindings/checks.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace eagle {

constexpr int64_t kInt8Group = 64;  // elements of a row of x with one scale
constexpr int64_t kInt8Lanes = 16;  // outputs of a block of weights
constexpr int64_t kInt8Step = 4;    // inputs that are together in a block

struct Int8Layer {
  const uint8_t* weights;  // [blocks, K / kInt8Step, kInt8Lanes, kInt8Step]
  const float* scales;     // [outputs]
  uint16_t* out;           // [rows, outputs]
  int64_t blocks, inner, outputs;
};

// Raises what is wrong with the arguments.
inline Int8Layer check_int8_linear(TensorView x, TensorView weights, TensorView scales, TensorView out) {
  constexpr DLDataType kU8{kDLUInt, 8, 1};
  check_rows(x, "x", kBF16, {kAny, kAny});
  check(out, "out", kBF16, {x.size(0), kAny});
  const int64_t outputs = out.size(1), blocks = (outputs + kInt8Lanes - 1) / kInt8Lanes;
  const int64_t inner = (x.size(1) + kInt8Group - 1) / kInt8Group * kInt8Group;
  check(scales, "scales", kF32, {outputs});
  check(weights, "weights", kU8, {blocks, inner / kInt8Step, kInt8Lanes, kInt8Step});
  return {ptr<uint8_t>(weights), ptr<float>(scales), ptr<uint16_t>(out), blocks, inner, outputs};
}

// The rows of x as the products read them; T is int8_t or int16_t. A byte of the weights is the weight + 128;
// `correction` takes 128 times the sum of a group away again.
template <class T>
struct RoundedRows {
  std::vector<T> values;            // [rows, inner]
  std::vector<float> scales;        // [rows, inner / kInt8Group]
  std::vector<int32_t> correction;  // [rows, inner / kInt8Group]

  void round(TensorView x, const Int8Layer& layer) {
    const int64_t rows = x.size(0), depth = x.size(1), inner = layer.inner, groups = inner / kInt8Group;
    values.resize(std::max<size_t>(values.size(), rows * inner));
    scales.resize(std::max<size_t>(scales.size(), rows * groups));
    correction.resize(std::max<size_t>(correction.size(), rows * groups));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t first = g * kInt8Group;
        round_group(ptr<uint16_t>(x) + r * x.stride(0) + first, std::min(kInt8Group, depth - first),
                    values.data() + r * inner + first, scales[r * groups + g], correction[r * groups + g]);
      }
    }
  }

 private:
  static void round_group(const uint16_t* x, int64_t count, T* values, float& scale, int32_t& correction) {
    float wide[kInt8Group], top = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = uint32_t(x[i]) << 16;
      std::memcpy(wide + i, &bits, sizeof bits);
      top = std::max(top, std::fabs(wide[i]));
    }
    scale = top / 127;
    const float inverse = top > 0 ? 127 / top : 0;
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t value = static_cast<int32_t>(std::nearbyint(wide[i] * inverse));
      values[i] = static_cast<T>(value);
      sum += value;
    }
    for (int64_t i = count; i < kInt8Group; ++i) values[i] = 0;
    correction = -128 * sum;
  }
};

}  // namespace eagle

// A linear layer with int8 weights, by the instruction vpdpbusd of AVX-512 VNNI: every group of 64 elements of a row of
// x is rounded to int8 with a scale of its own, so that a few large elements do not spoil the others.
#include <bindings/checks.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "avx512.h"
#include "parallel.h"

#if defined(EAGLE_AVX512)
#define EAGLE_VNNI __attribute__((target(EAGLE_AVX512 ",avx512vnni")))
#endif

namespace eagle {
namespace {

constexpr int64_t kGroup = 64;             // elements of a row of x with one scale
constexpr int64_t kLanes = 16;             // outputs of a block of weights: the lanes of a vector
constexpr int64_t kStep = 4;               // products that one lane sums per instruction
constexpr int64_t kChunk = 4;              // blocks of one task
constexpr int64_t kMinParallel = 1 << 20;  // products; below, waking other threads costs more than it saves

// The rows of x as the products read them. A byte of the weights is the weight + 128, because the instruction
// multiplies unsigned by signed bytes; `correction` takes 128 times the sum of a group away again.
struct Rounded {
  std::vector<int8_t> values;       // [rows, K]
  std::vector<float> scales;        // [rows, K / kGroup]
  std::vector<int32_t> correction;  // [rows, K / kGroup]
};

float to_float(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

void round_group(const uint16_t* x, int64_t count, int8_t* values, float& scale, int32_t& correction) {
  float wide[kGroup], top = 0;
  for (int64_t i = 0; i < count; ++i) {
    wide[i] = to_float(x[i]);
    top = std::max(top, std::fabs(wide[i]));
  }
  scale = top / 127;
  const float inverse = top > 0 ? 127 / top : 0;
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t value = static_cast<int32_t>(std::nearbyint(wide[i] * inverse));
    values[i] = static_cast<int8_t>(value);
    sum += value;
  }
  for (int64_t i = count; i < kGroup; ++i) values[i] = 0;
  correction = -128 * sum;
}

struct Layer {
  const uint8_t* weights;  // [blocks, K / kStep, kLanes, kStep]
  const float* scales;     // [outputs]
  uint16_t* out;           // [rows, outputs]
  int64_t blocks, inner, outputs;
};

#if defined(EAGLE_VNNI)

// The outputs of `Blocks` blocks from `block` on, for `Rows` rows from `row` on.
template <int Rows, int Blocks, bool Fetch>
EAGLE_VNNI void multiply(const Layer& layer, const Rounded& x, int64_t row, int64_t block) {
  const int64_t groups = layer.inner / kGroup, size = layer.inner * kLanes;
  __m512 sums[Rows][Blocks];
  for (int r = 0; r < Rows; ++r) {
    for (int j = 0; j < Blocks; ++j) sums[r][j] = _mm512_setzero_ps();
  }
  for (int64_t g = 0; g < groups; ++g) {
    __m512i part[Rows][Blocks];
    for (int r = 0; r < Rows; ++r) {
      const __m512i correction = _mm512_set1_epi32(x.correction[(row + r) * groups + g]);
      for (int j = 0; j < Blocks; ++j) part[r][j] = correction;
    }
    for (int64_t k = 0; k < kGroup; k += kStep) {
      const int64_t at = g * kGroup + k;
      __m512i weights[Blocks];
      for (int j = 0; j < Blocks; ++j) {
        const uint8_t* here = layer.weights + (block + j) * size + at * kLanes;
        weights[j] = _mm512_loadu_si512(here);
        if (Fetch) _mm_prefetch(reinterpret_cast<const char*>(here + Blocks * size), _MM_HINT_T1);
      }
      for (int r = 0; r < Rows; ++r) {
        int32_t four;
        std::memcpy(&four, x.values.data() + (row + r) * layer.inner + at, sizeof four);
        const __m512i values = _mm512_set1_epi32(four);
        for (int j = 0; j < Blocks; ++j) part[r][j] = _mm512_dpbusd_epi32(part[r][j], weights[j], values);
      }
    }
    for (int r = 0; r < Rows; ++r) {
      const __m512 scale = _mm512_set1_ps(x.scales[(row + r) * groups + g]);
      for (int j = 0; j < Blocks; ++j) {
        sums[r][j] = _mm512_fmadd_ps(_mm512_maskz_cvtepi32_ps(0xffff, part[r][j]), scale, sums[r][j]);
      }
    }
  }
  for (int j = 0; j < Blocks; ++j) {
    const int64_t first = (block + j) * kLanes, left = std::min(kLanes, layer.outputs - first);
    const auto lanes = static_cast<__mmask16>((1u << left) - 1);
    const __m512 scale = _mm512_maskz_loadu_ps(lanes, layer.scales + first);
    for (int r = 0; r < Rows; ++r) {
      _mm256_mask_storeu_epi16(layer.out + (row + r) * layer.outputs + first, lanes,
                               to_bfloat16(_mm512_mul_ps(sums[r][j], scale)));
    }
  }
}

template <int Rows, bool Fetch>
EAGLE_VNNI void multiply_rows(const Layer& layer, const Rounded& x, int64_t row, int64_t begin, int64_t end) {
  constexpr int kBlocks = Rows == 4 ? 2 : 4;
  int64_t block = begin;
  for (; block + kBlocks <= end; block += kBlocks) multiply<Rows, kBlocks, Fetch>(layer, x, row, block);
  for (; block < end; ++block) multiply<Rows, 1, Fetch>(layer, x, row, block);
}

// Up to four rows. The first rows ask for the weights to come, the others find them in the cache.
template <bool Fetch>
void multiply_some(const Layer& layer, const Rounded& x, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  if (rows >= 4) return multiply_rows<4, Fetch>(layer, x, row, begin, end);
  if (rows == 3) return multiply_rows<3, Fetch>(layer, x, row, begin, end);
  if (rows == 2) return multiply_rows<2, Fetch>(layer, x, row, begin, end);
  multiply_rows<1, Fetch>(layer, x, row, begin, end);
}

void multiply_all(const Layer& layer, const Rounded& x, int64_t rows) {
  const int64_t tasks = (layer.blocks + kChunk - 1) / kChunk;
  parallel_for(tasks, layer.outputs * layer.inner * rows >= kMinParallel, [&](int64_t task) {
    const int64_t begin = task * kChunk, end = std::min(layer.blocks, begin + kChunk);
    for (int64_t row = 0; row < rows; row += 4) {
      row ? multiply_some<false>(layer, x, row, rows - row, begin, end)
          : multiply_some<true>(layer, x, row, rows - row, begin, end);
    }
  });
}

#else

void multiply_all(const Layer&, const Rounded&, int64_t) {}

#endif

bool has_int8_linear() {
#if defined(EAGLE_VNNI)
  return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

}  // namespace

// x [rows, K] bfloat16 and out [rows, N] bfloat16; scales [N] float32; weights [N / 16, K / 4, 16, 4] uint8, N and K
// rounded up to multiples of 16 and 64: byte [i, k, j, l] is 128 + the rounded weight of output 16 i + j and input 4 k
// + l.
void int8_linear(TensorView x, TensorView weights, TensorView scales, TensorView out) {
  constexpr DLDataType kU8{kDLUInt, 8, 1};
  const int64_t stride = check_rows(x, "x", kBF16, {kAny, kAny}), rows = x.size(0), depth = x.size(1);
  check(out, "out", kBF16, {rows, kAny});
  const int64_t outputs = out.size(1), blocks = (outputs + kLanes - 1) / kLanes;
  const int64_t groups = (depth + kGroup - 1) / kGroup, inner = groups * kGroup;
  check(scales, "scales", kF32, {outputs});
  check(weights, "weights", kU8, {blocks, inner / kStep, kLanes, kStep});
  if (!has_int8_linear()) {
    TVM_FFI_THROW(RuntimeError) << "this CPU has no AVX-512 VNNI: ask has_int8_linear() first";
  }
  thread_local Rounded rounded;  // grows to the largest call of a thread, and stays
  rounded.values.resize(std::max<size_t>(rounded.values.size(), rows * inner));
  rounded.scales.resize(std::max<size_t>(rounded.scales.size(), rows * groups));
  rounded.correction.resize(std::max<size_t>(rounded.correction.size(), rows * groups));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t g = 0; g < groups; ++g) {
      round_group(ptr<uint16_t>(x) + r * stride + g * kGroup, std::min(kGroup, depth - g * kGroup),
                  rounded.values.data() + r * inner + g * kGroup, rounded.scales[r * groups + g],
                  rounded.correction[r * groups + g]);
    }
  }
  const Layer layer{ptr<uint8_t>(weights), ptr<float>(scales), ptr<uint16_t>(out), blocks, inner, outputs};
  multiply_all(layer, rounded, rows);
}

}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(int8_linear, eagle::int8_linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(has_int8_linear, eagle::has_int8_linear);

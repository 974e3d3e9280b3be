// A linear layer for a few rows with the weights as they are in memory, [outputs, inputs] bfloat16, by the instruction
// vdpbf16ps of AVX-512 BF16. Such a layer takes the time to read its weights, so they are read once, in order, and
// asked for ahead of their use. An output is the same number whatever the other rows are: its products are always
// summed in the same order.
#include <cstring>

#include "avx512.h"
#include "bf16_rows.h"

#if defined(EAGLE_AVX512)
#define EAGLE_BF16 __attribute__((target(EAGLE_AVX512 ",avx512bf16")))
#endif

namespace eagle {
namespace {

using Layer = Bf16Layer<uint16_t>;

constexpr int64_t kRows = 8;   // of a group that is multiplied at once
constexpr int64_t kStep = 32;  // inputs per instruction
constexpr int64_t kPart = 32;  // steps for which the rows of x stay in the first cache
constexpr int64_t kAhead = 2;  // tiles between reading weights and asking for those to come

void copy_inputs(const uint16_t* from, int64_t count, uint16_t* to) {
  std::copy_n(from, count, to);
  std::fill(to + count, to + kStep, 0);
}

#if defined(EAGLE_BF16)

EAGLE_BF16 inline __m512bh load(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }

EAGLE_BF16 inline __m512bh load(const uint16_t* p, __mmask32 elements) {
  return (__m512bh)_mm512_maskz_loadu_epi16(elements, p);
}

// The sum of each of 16 vectors, that of vector i in lane i. Each is summed in the same order.
EAGLE_BF16 inline __m512 sums_of(const __m512* v) {
  __m512 halves[8], quarters[4], pairs[2];
  for (int i = 0; i < 8; ++i) {
    halves[i] = _mm512_add_ps(_mm512_maskz_shuffle_f32x4(0xffff, v[i], v[i + 8], 0x44),
                              _mm512_maskz_shuffle_f32x4(0xffff, v[i], v[i + 8], 0xee));
  }
  for (int i = 0; i < 4; ++i) {
    quarters[i] = _mm512_add_ps(_mm512_maskz_shuffle_f32x4(0xffff, halves[i], halves[i + 4], 0x88),
                                _mm512_maskz_shuffle_f32x4(0xffff, halves[i], halves[i + 4], 0xdd));
  }
  for (int i = 0; i < 2; ++i) {
    pairs[i] = _mm512_add_ps(_mm512_maskz_shuffle_ps(0xffff, quarters[i], quarters[i + 2], 0x44),
                             _mm512_maskz_shuffle_ps(0xffff, quarters[i], quarters[i + 2], 0xee));
  }
  const __m512 mixed = _mm512_add_ps(_mm512_maskz_shuffle_ps(0xffff, pairs[0], pairs[1], 0x88),
                                     _mm512_maskz_shuffle_ps(0xffff, pairs[0], pairs[1], 0xdd));
  const __m512i lane_of = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return _mm512_maskz_permutexvar_ps(0xffff, lane_of, mixed);
}

template <int Rows, int Outputs>
EAGLE_BF16 inline void add_products(__m512* sums, const uint16_t* x, const __m512bh* weights) {
  for (int r = 0; r < Rows; ++r) {
    const __m512bh values = load(x + r * kStep);
    for (int j = 0; j < Outputs; ++j) {
      sums[r * Outputs + j] = _mm512_dpbf16_ps(sums[r * Outputs + j], values, weights[j]);
    }
  }
}

// Add the products of `steps` steps to the sums of Rows * Outputs results. `fetch` is where the weights that are to be
// asked for begin.
template <int Rows, int Outputs, bool Fetch>
EAGLE_BF16 inline void multiply(const Layer& layer, const uint16_t* x, const uint16_t* weight, int64_t steps,
                                const uint16_t* fetch, __m512* total) {
  __m512 sums[Rows * Outputs];
  for (int i = 0; i < Rows * Outputs; ++i) sums[i] = total[i];
  for (int64_t k = 0; k < steps * kStep; k += kStep, x += Rows * kStep) {
    __m512bh weights[Outputs];
    for (int j = 0; j < Outputs; ++j) {
      weights[j] = load(weight + j * layer.inputs + k);
      if (Fetch) _mm_prefetch(reinterpret_cast<const char*>(fetch + j * layer.inputs + k), _MM_HINT_T1);
    }
    add_products<Rows, Outputs>(sums, x, weights);
  }
  for (int i = 0; i < Rows * Outputs; ++i) total[i] = sums[i];
}

// The inputs after the last whole step.
template <int Rows, int Outputs>
EAGLE_BF16 inline void multiply_last(const Layer& layer, const uint16_t* x, const uint16_t* weight, __m512* total) {
  const __mmask32 left = (__mmask32{1} << (layer.inputs % kStep)) - 1;
  __m512bh weights[Outputs];
  for (int j = 0; j < Outputs; ++j) weights[j] = load(weight + j * layer.inputs, left);
  add_products<Rows, Outputs>(total, x, weights);
}

template <int Rows, int Outputs>
EAGLE_BF16 inline void store(const Layer& layer, int64_t row, int64_t output, const __m512* sums) {
  __m512 all[16];
  for (int i = 0; i < 16; ++i) all[i] = i < Rows * Outputs ? sums[i] : _mm512_setzero_ps();
  __m512 total = sums_of(all);
  if (layer.bias) {
    alignas(64) uint32_t bias[16] = {};
    for (int i = 0; i < Rows * Outputs; ++i) bias[i] = uint32_t(layer.bias[output + i % Outputs]) << 16;
    total = _mm512_add_ps(total, _mm512_castsi512_ps(_mm512_load_si512(bias)));
  }
  alignas(32) uint16_t rounded[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(rounded), to_bfloat16(total));
  for (int64_t r = 0; r < std::min<int64_t>(Rows, layer.rows - row); ++r) {
    std::memcpy(layer.out + (row + r) * layer.outputs + output, rounded + r * Outputs, Outputs * sizeof(uint16_t));
  }
}

// Tiles * Outputs outputs from `output` on, of the rows [row, row + Rows).
template <int Rows, int Outputs, int Tiles, bool Fetch>
EAGLE_BF16 void multiply_tiles(const Layer& layer, int64_t row, int64_t output) {
  const uint16_t* x = layer.x + row * layer.steps * kStep;
  const uint16_t* weight = layer.weight + output * layer.inputs;
  const int64_t whole = layer.inputs / kStep, parts = (whole + kPart - 1) / kPart, tile_size = Outputs * layer.inputs;
  __m512 sums[Tiles][Rows * Outputs];
  for (auto& tile : sums) std::fill(tile, tile + Rows * Outputs, _mm512_setzero_ps());
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = part * kPart, steps = std::min(kPart, whole - first);
    for (int tile = 0; tile < Tiles; ++tile) {
      // Ahead is a tile of this part, of the next part or, after the last part, of the next outputs.
      const int64_t next = tile + kAhead, part_ahead = part + next / Tiles;
      const int64_t ahead = part_ahead < parts ? (next % Tiles) * tile_size + part_ahead * kPart * kStep
                                               : (next % Tiles + (part_ahead - parts + 1) * Tiles) * tile_size;
      multiply<Rows, Outputs, Fetch>(layer, x + first * kStep * Rows, weight + tile * tile_size + first * kStep, steps,
                                     weight + ahead, sums[tile]);
    }
  }
  for (int tile = 0; tile < Tiles; ++tile) {
    if (whole < layer.steps) {
      multiply_last<Rows, Outputs>(layer, x + whole * kStep * Rows, weight + tile * tile_size + whole * kStep,
                                   sums[tile]);
    }
    store<Rows, Outputs>(layer, row, output + tile * Outputs, sums[tile]);
  }
}

template <int Rows, bool Fetch>
void multiply_block(const Layer& layer, int64_t row, int64_t output, int64_t end) {
  if (output + kBf16Block == end) return multiply_tiles<Rows, 16 / Rows, Rows, Fetch>(layer, row, output);
  for (; output < end; ++output) multiply_tiles<Rows, 1, 1, false>(layer, row, output);
}

// The first rows ask for the weights to come, the others find them in the cache.
template <bool Fetch>
void multiply_rows(const Layer& layer, int64_t row, int64_t rows, int64_t output, int64_t end) {
  switch (rows) {
    case 8:
      return multiply_block<8, Fetch>(layer, row, output, end);
    case 4:
      return multiply_block<4, Fetch>(layer, row, output, end);
    case 2:
      return multiply_block<2, Fetch>(layer, row, output, end);
    default:
      return multiply_block<1, Fetch>(layer, row, output, end);
  }
}

void multiply_all(const Layer& layer) {
  for_blocks<kRows>(layer, [&](int64_t row, int64_t rows, int64_t output, int64_t end) {
    row ? multiply_rows<false>(layer, row, rows, output, end) : multiply_rows<true>(layer, row, rows, output, end);
  });
}

#else

void multiply_all(const Layer&) {}

#endif

bool has_bf16_linear() {
#if defined(EAGLE_BF16)
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

}  // namespace

// Arguments as in bf16_rows.h.
void bf16_linear(TensorView x, TensorView weight, TensorView bias, TensorView out) {
  Layer layer = check_bf16_linear<uint16_t>(x, weight, bias, out, kStep);
  if (!has_bf16_linear()) {
    TVM_FFI_THROW(RuntimeError) << "this CPU has no AVX-512 BF16: ask has_bf16_linear() first";
  }
  thread_local std::vector<uint16_t> grouped;  // grows to the largest call of a thread, and stays
  grouped.resize(std::max<size_t>(grouped.size(), (layer.rows + kRows) * layer.steps * kStep));
  layer.x = grouped.data();
  group_rows<kRows, kStep>(ptr<uint16_t>(x), x.stride(0), layer, grouped.data(), copy_inputs);
  multiply_all(layer);
}

}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(bf16_linear, eagle::bf16_linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(has_bf16_linear, eagle::has_bf16_linear);

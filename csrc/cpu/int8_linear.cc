// A linear layer with int8 weights, by the instruction vpdpbusd of AVX-512 VNNI, for the inputs of int8_rows.h.
#include "avx512.h"
#include "int8_rows.h"
#include "parallel.h"

#if defined(EAGLE_AVX512)
#define EAGLE_VNNI __attribute__((target(EAGLE_AVX512 ",avx512vnni")))
#endif

namespace eagle {
namespace {

using Layer = Int8Layer;
using Rounded = RoundedRows<int8_t>;

constexpr int64_t kChunk = 4;              // blocks of one task
constexpr int64_t kMinParallel = 1 << 20;  // products; below, waking other threads costs more than it saves

#if defined(EAGLE_VNNI)

// The outputs of `Blocks` blocks from `block` on, for `Rows` rows from `row` on.
template <int Rows, int Blocks, bool Fetch>
EAGLE_VNNI void multiply(const Layer& layer, const Rounded& x, int64_t row, int64_t block) {
  const int64_t groups = layer.inner / kInt8Group, size = layer.inner * kInt8Lanes;
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
    for (int64_t k = 0; k < kInt8Group; k += kInt8Step) {
      const int64_t at = g * kInt8Group + k;
      __m512i weights[Blocks];
      for (int j = 0; j < Blocks; ++j) {
        const uint8_t* here = layer.weights + (block + j) * size + at * kInt8Lanes;
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
    const int64_t first = (block + j) * kInt8Lanes, left = std::min(kInt8Lanes, layer.outputs - first);
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

// Arguments as in int8_rows.h.
void int8_linear(TensorView x, TensorView weights, TensorView scales, TensorView out) {
  const Int8Layer layer = check_int8_linear(x, weights, scales, out);
  if (!has_int8_linear()) {
    TVM_FFI_THROW(RuntimeError) << "this CPU has no AVX-512 VNNI: ask has_int8_linear() first";
  }
  thread_local Rounded rounded;  // grows to the largest call of a thread, and stays
  rounded.round(x, layer);
  multiply_all(layer, rounded, x.size(0));
}

}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(int8_linear, eagle::int8_linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(has_int8_linear, eagle::has_int8_linear);

// The linear layer of int8_linear.cc for CPUs with AVX2 alone: weights and inputs are widened to int16, and a vector of
// products has four outputs. It sums in the order of the other kernel, whose results it should have to the bit.
#include "int8_rows.h"
#include "parallel.h"
#include "simd.h"

namespace eagle {
namespace {

using Rounded = RoundedRows<int16_t>;

constexpr int64_t kRows = 2;               // that are multiplied at once
constexpr int64_t kChunk = 4;              // blocks of one task
constexpr int64_t kMinParallel = 1 << 20;  // products; below, waking other threads costs more than it saves

#if defined(__AVX2__)

// The outputs of a block, for `Rows` rows from `row` on.
template <int Rows, bool Fetch>
void multiply(const Int8Layer& layer, const Rounded& x, int64_t row, int64_t block) {
  const int64_t groups = layer.inner / kInt8Group, size = layer.inner * kInt8Lanes;
  const uint8_t* weights = layer.weights + block * size;
  __m256 sums[Rows][2];
  for (auto& sum : sums) sum[0] = sum[1] = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    __m256i part[Rows][4];
    for (auto& four : part) std::fill(four, four + 4, _mm256_setzero_si256());
    for (int64_t k = g * kInt8Group; k < (g + 1) * kInt8Group; k += kInt8Step) {
      const uint8_t* here = weights + k * kInt8Lanes;
      if (Fetch) __builtin_prefetch(here + size);
      __m256i values[Rows];
      for (int r = 0; r < Rows; ++r) {
        int64_t four;
        std::memcpy(&four, x.values.data() + (row + r) * layer.inner + k, sizeof four);
        values[r] = _mm256_set1_epi64x(four);
      }
      for (int i = 0; i < 4; ++i) {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(here) + i));
        for (int r = 0; r < Rows; ++r) part[r][i] = _mm256_add_epi32(part[r][i], _mm256_madd_epi16(wide, values[r]));
      }
    }
    for (int r = 0; r < Rows; ++r) {
      const int64_t at = (row + r) * groups + g;
      const __m256i correction = _mm256_set1_epi32(x.correction[at]);
      const __m256 scale = _mm256_set1_ps(x.scales[at]);
      for (int half = 0; half < 2; ++half) {
        // An output has two neighbouring sums; those of 8 outputs come in the order 0, 1, 4, 5, 2, 3, 6, 7.
        const __m256i total = _mm256_hadd_epi32(part[r][2 * half], part[r][2 * half + 1]);
        sums[r][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(total, correction)), scale, sums[r][half]);
      }
    }
  }
  const int64_t first = block * kInt8Lanes, left = std::min(kInt8Lanes, layer.outputs - first);
  float scales[kInt8Lanes] = {};
  std::memcpy(scales, layer.scales + first, left * sizeof(float));
  for (int r = 0; r < Rows; ++r) {
    float totals[kInt8Lanes];
    for (int half = 0; half < 2; ++half) {
      const __m256 in_order = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sums[r][half]), 0xd8));
      _mm256_storeu_ps(totals + 8 * half, _mm256_mul_ps(in_order, _mm256_loadu_ps(scales + 8 * half)));
    }
    simd::BFloat16 rounded[kInt8Lanes];
    for (int i = 0; i < kInt8Lanes; i += simd::kLanes) simd::store(rounded + i, simd::load(totals + i));
    std::memcpy(layer.out + (row + r) * layer.outputs + first, rounded, left * sizeof rounded[0]);
  }
}

// The first rows ask for the weights to come, the others find them in the cache.
void multiply_all(const Int8Layer& layer, const Rounded& x, int64_t rows) {
  const int64_t tasks = (layer.blocks + kChunk - 1) / kChunk;
  parallel_for(tasks, layer.outputs * layer.inner * rows >= kMinParallel, [&](int64_t task) {
    const int64_t begin = task * kChunk, end = std::min(layer.blocks, begin + kChunk);
    for (int64_t row = 0; row < rows; row += kRows) {
      for (int64_t block = begin; block < end; ++block) {
        if (row + 1 == rows) {
          row ? multiply<1, false>(layer, x, row, block) : multiply<1, true>(layer, x, row, block);
        } else {
          row ? multiply<kRows, false>(layer, x, row, block) : multiply<kRows, true>(layer, x, row, block);
        }
      }
    }
  });
}

constexpr bool kHasAvx2 = true;

#else

void multiply_all(const Int8Layer&, const Rounded&, int64_t) {}
constexpr bool kHasAvx2 = false;

#endif

}  // namespace

// Arguments as in int8_rows.h.
void int8_linear_avx2(TensorView x, TensorView weights, TensorView scales, TensorView out) {
  const Int8Layer layer = check_int8_linear(x, weights, scales, out);
  if (!kHasAvx2) TVM_FFI_THROW(RuntimeError) << "this library was built without AVX2";
  thread_local Rounded rounded;  // grows to the largest call of a thread, and stays
  rounded.round(x, layer);
  multiply_all(layer, rounded, x.size(0));
}

}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(int8_linear_avx2, eagle::int8_linear_avx2);

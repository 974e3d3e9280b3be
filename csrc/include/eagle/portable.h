// A kernel body compiles for the host (g++) and for a GPU (nvcc).
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define EAGLE_HD __device__ __forceinline__
#define EAGLE_UNROLL _Pragma("unroll")
#else
#define EAGLE_HD inline
#define EAGLE_UNROLL
#endif

namespace eagle {
constexpr int kMaxWidth = 64;  // ancestors are one 64-bit bitmask per node
constexpr int kMaxTopM = 128;  // M: most likely tokens of a row that are kept as candidates

// The place of the lowest bit that is set; bits is not 0.
EAGLE_HD int32_t lowest_bit(uint64_t bits) {
#if defined(__CUDACC__)
  return __ffsll(static_cast<long long>(bits)) - 1;
#else
  return __builtin_ctzll(bits);
#endif
}
}  // namespace eagle

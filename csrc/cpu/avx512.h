// What the kernels for AVX-512 extensions share. Their functions are compiled for the extension by an attribute, so
// that they are in every build of the library, and are called only where the CPU has it.
#pragma once
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#define EAGLE_AVX512 "avx512f,avx512bw,avx512dq,avx512vl"

namespace eagle {

// 16 floats as bfloat16, rounded to nearest even.
__attribute__((target(EAGLE_AVX512))) inline __m256i to_bfloat16(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_maskz_cvtepi32_epi16(0xffff, _mm512_srli_epi32(rounded, 16));
}

}  // namespace eagle
#endif

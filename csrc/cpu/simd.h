// Vectors of floats through GCC's vector extensions: 16 lanes with AVX-512, 8 otherwise. Host only.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace eagle::simd {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline Floats broadcast(float x) { return x - Floats{}; }
inline Ints broadcast(int32_t x) { return x - Ints{}; }

inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Floats load(const BFloat16* p) {
  Halves h;
  std::memcpy(&h, p, sizeof h);
  return (Floats)(__builtin_convertvector(h, Ints) << 16);
}
// The masked forms of AVX-512 are used because the plain ones warn of an uninitialized variable in GCC 12's own header.
inline Floats from_halves(Halves h) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h);
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)h);
#else
  _Float16 parts[kLanes];
  std::memcpy(parts, &h, sizeof parts);
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = parts[i];
  return v;
#endif
}
inline Floats load(const Float16* p) {
  Halves h;
  std::memcpy(&h, p, sizeof h);
  return from_halves(h);
}
inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
inline void store(Float16* p, Floats v) {  // round to nearest even
#if defined(__AVX512F__)
  const __m256i h = _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  const __m128i h = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  _Float16 h[kLanes];
  for (int i = 0; i < kLanes; ++i) h[i] = static_cast<_Float16>(v[i]);
#endif
  std::memcpy(p, &h, sizeof h);
}
inline void store(BFloat16* p, Floats v) {  // round to nearest even; NaN stays NaN
  const Ints bits = (Ints)v;
  const Ints rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Ints kept = (v != v) ? (bits | 0x400000) : rounded;
  const Halves h = __builtin_convertvector((kept >> 16) & 0xffff, Halves);
  std::memcpy(p, &h, sizeof h);
}

// The 16-bit float in the low half of each lane.
template <class T>
inline Floats widen(Ints lanes) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return (Floats)(lanes << 16);
  } else {
    return from_halves(__builtin_convertvector(lanes & 0xffff, Halves));
  }
}

// c + a b for lanes that are pairs of bfloat16, summed in float32; subnormal numbers may count as zero.
Floats add_pairs(Floats c, Ints a, Ints b);
#if defined(__AVX512BF16__)
constexpr bool kPairProducts = true;
inline Floats add_pairs(Floats c, Ints a, Ints b) {
  return (Floats)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}
#else
constexpr bool kPairProducts = false;  // without the instruction it is only declared
#endif

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

// Lane i becomes lane i ^ Step.
template <int Step, int... I>
inline Floats exchange(Floats v, std::integer_sequence<int, I...>) {
  const Ints from = {(I ^ Step)...};
  return __builtin_shuffle(v, from);
}
template <int Step>
inline Floats exchange(Floats v) {
  return exchange<Step>(v, std::make_integer_sequence<int, kLanes>{});
}
inline float highest(Floats v) {
  if constexpr (kLanes == 16) v = max(v, exchange<8 % kLanes>(v));
  v = max(v, exchange<4>(v));
  v = max(v, exchange<2>(v));
  return max(v, exchange<1>(v))[0];
}
inline float sum(Floats v) {
  if constexpr (kLanes == 16) v += exchange<8 % kLanes>(v);
  v += exchange<4>(v);
  v += exchange<2>(v);
  return (v + exchange<1>(v))[0];
}

// e^x for x <= 88, relative error below 2e-7; 0 below -87 (also for -inf), NaN for NaN.
inline Floats exp(Floats x) {
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const Floats inside = x < -87.0f ? broadcast(-87.0f) : x;
  const Floats n = (inside * 1.44269504f + magic) - magic;
  const Floats r = inside - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Floats y = p * (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
  return x < -87.0f ? Floats{} : y;
}

inline Floats tanh(Floats x) {  // absolute error below 3e-7
  const Floats limit = broadcast(15.0f);
  const Floats inside = x > limit ? limit : (x < -limit ? -limit : x);
  return 1.0f - 2.0f / (exp(2.0f * inside) + 1.0f);
}

// One step of an in-register transposition: swaps the off-diagonal blocks of size Step of the rows a and b.
template <int Step, int... I>
inline void swap_blocks(Ints& a, Ints& b, std::integer_sequence<int, I...>) {
  const Ints low = {((I & Step) ? kLanes + I - Step : I)...};
  const Ints high = {((I & Step) ? kLanes + I : I + Step)...};
  const Ints x = __builtin_shuffle(a, b, low);
  b = __builtin_shuffle(a, b, high);
  a = x;
}
template <int Step = 1>
inline void transpose(Ints* rows) {  // kLanes rows of kLanes lanes
  for (int i = 0; i < kLanes; ++i) {
    if (!(i & Step)) swap_blocks<Step>(rows[i], rows[i + Step], std::make_integer_sequence<int, kLanes>{});
  }
  if constexpr (2 * Step < kLanes) transpose<2 * Step>(rows);
}

}  // namespace eagle::simd

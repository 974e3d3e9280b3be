// The 8-bit floats of a quantised cache.
#pragma once
#include <cmath>
#include <limits>

#include "simd.h"

namespace eagle {

// Bits of the exponent: 4, with 448 as the largest number and no infinity (e4m3fn), or 5, as float16 has (e5m2).
enum class Float8 : int { kE4M3 = 4, kE5M2 = 5 };

inline float value_of(Float8 type, int bits) {
  const int exponent_bits = static_cast<int>(type), mantissa_bits = 7 - exponent_bits;
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1), mantissa = bits & ((1 << mantissa_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1, last = (1 << exponent_bits) - 1;
  float value;
  if (type == Float8::kE4M3 && (bits & 0x7f) == 0x7f) {
    value = std::numeric_limits<float>::quiet_NaN();
  } else if (type == Float8::kE5M2 && exponent == last) {
    value = mantissa ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(static_cast<float>(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
  }
  return bits & 0x80 ? -value : value;
}

// What each of the 256 bit patterns stands for. All types of queries hold these numbers exactly.
template <class T>
struct Float8Values {
  T of[256];

  explicit Float8Values(Float8 type) {
    float values[256];
    for (int bits = 0; bits < 256; ++bits) values[bits] = value_of(type, bits);
    for (int bits = 0; bits < 256; bits += simd::kLanes) simd::store(of + bits, simd::load(values + bits));
  }
};

template <class T>
const T* values_of(Float8 type) {
  static const Float8Values<T> e4m3(Float8::kE4M3), e5m2(Float8::kE5M2);
  return type == Float8::kE4M3 ? e4m3.of : e5m2.of;
}

}  // namespace eagle

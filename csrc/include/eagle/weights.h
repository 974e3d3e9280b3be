// The weights of the tokens of one row of logits, and which of them are kept.
//
// Probabilities are integer weights, 2^40 for the most likely token. An integer sum does not depend on its order, so a
// row gives the same token whatever the size of the team that works on it. A token whose probability is below 2^-40 of
// the most likely token's has weight 0. Nothing of the size of the vocabulary is stored: each reading of the logits
// computes the weights again.
#pragma once
#include <cmath>
#include <cstring>

#include "portable.h"

namespace eagle {

constexpr float kWeightOfOne = 1099511627776.0f;  // 2^40

struct SamplingRow {  // the sampling parameters of one request
  float temperature;
  int32_t top_k;
  float top_p, min_p;

  EAGLE_HD bool cuts(int32_t vocabulary) const { return top_k < vocabulary || top_p < 1.0f; }
  // The least weight that min-p keeps.
  EAGLE_HD int64_t min_weight() const {
    if (!(min_p > 0)) return 0;
    const double least = static_cast<double>(min_p) * kWeightOfOne;
    return static_cast<int64_t>(least) + (static_cast<int64_t>(least) < least);
  }
};

EAGLE_HD float without_nan(float x) { return x == x ? x + 0.0f : -INFINITY; }  // and -0 becomes 0

// a * b + c. On a GPU always one rounding, so that two kernels compute the same weight of a token.
EAGLE_HD float multiply_add(float a, float b, float c) {
#if defined(__CUDACC__)
  return __fmaf_rn(a, b, c);
#else
  return a * b + c;
#endif
}

// e^x for x in [-28, 0], relative error below 2e-7, without branches, so that loops over it become vectors.
EAGLE_HD float exp_weight(float x) {
  // 1.5 * 2^23: adding it rounds to the nearest integer
  const float n = multiply_add(x, 1.44269504f, 12582912.0f) - 12582912.0f;
  const float r = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, x));
  float p = 1.9875691500e-4f;
  p = multiply_add(p, r, 1.3981999507e-3f);
  p = multiply_add(p, r, 8.3334519073e-3f);
  p = multiply_add(p, r, 4.1665795894e-2f);
  p = multiply_add(p, r, 1.6666665459e-1f);
  p = multiply_add(p, r, 5.0000001201e-1f);
  p = multiply_add(p * r, r, r) + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

struct TargetDistribution {
  const float* logits;
  int32_t vocabulary;
  float highest, inverse_temperature;
  float cut_value;     // a token is kept if its logit is above this,
  int32_t cut_index;   // or equal to it and its id at most this,
  int64_t min_weight;  // and its weight is at least this
  int64_t total;       // weight of the kept tokens

  // What the temperature leaves of a logit's distance from the highest; NaN for infinite logits.
  EAGLE_HD float exponent(float x) const { return (x - highest) * inverse_temperature; }
  // Weight before the filters, 0 to 2^40.
  EAGLE_HD int64_t raw_weight(float x) const {
    const float z = exponent(x);
    const float inside = z > -28.0f ? z : -28.0f;  // also when z is NaN: infinite logits, whose case follows
    const float e = z > -28.0f ? exp_weight(inside) : 0.0f;
    return static_cast<int64_t>((x == highest ? 1.0f : e) * kWeightOfOne);
  }
  // Weight after the filters, of token i with logit x.
  EAGLE_HD int64_t kept_weight(float x, int32_t i) const {
    const int64_t w = raw_weight(x);
    const bool kept = (x > cut_value || (x == cut_value && i <= cut_index)) && w >= min_weight;
    return kept ? w : 0;
  }
  // Whether the filters keep token i with logit x; one with logit -inf only where all have it.
  EAGLE_HD bool keeps(float x, int32_t i) const {
    if (!(x > cut_value || (x == cut_value && i <= cut_index))) return false;
    return min_weight == 0 || raw_weight(x) >= min_weight;
  }
  // The logarithm of its probability beside that of the most likely token.
  EAGLE_HD double score(float x) const {
    return x == highest ? 0.0 : (static_cast<double>(x) - highest) * static_cast<double>(inverse_temperature);
  }
  EAGLE_HD int64_t weight(int32_t i) const { return kept_weight(without_nan(logits[i]), i); }
  EAGLE_HD int64_t sum(int32_t begin, int32_t end, int32_t step) const {
    int64_t s = 0;
    for (int32_t i = begin; i < end; i += step) s += weight(i);
    return s;
  }
  // Keeps all tokens, whose weight is `all`.
  EAGLE_HD void keep_all(int64_t all) {
    cut_value = -INFINITY;
    cut_index = vocabulary;
    min_weight = 0;
    total = all;
  }
  // Whether nothing is cut; min-p may remove tokens all the same.
  EAGLE_HD bool keeps_all() const { return cut_value == -INFINITY && cut_index == vocabulary; }
};

// Ascending keys for descending logits.
EAGLE_HD uint32_t descending_key(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits >> 31 ? bits : ~(bits | 0x80000000u);
}
EAGLE_HD float value_of_key(uint32_t key) {
  const uint32_t bits = key >> 31 ? key : ~key & 0x7fffffffu;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace eagle

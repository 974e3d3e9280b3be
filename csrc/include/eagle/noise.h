// The noise that a draft shares with the draw of the target. The specification is gumbel_noise in
// eagle_plugin/core/gumbel.py.
#pragma once
#include <cmath>

#include "philox.h"

namespace eagle {

constexpr uint32_t kNoiseStream = 3;
constexpr double kMostNoise = 22.9;

struct Noise {  // of the tokens that may come after one position
  int64_t key, position;

  // The numbers of the tokens 4 * block .. 4 * block + 3.
  EAGLE_HD void words(int64_t block, uint32_t* out) const {
    philox(key, position, kNoiseStream, static_cast<uint32_t>(block), out);
  }
  EAGLE_HD static double of(uint32_t word) { return -log(-log((word + 0.5) * (1.0 / 4294967296.0))); }
  EAGLE_HD double of_token(int64_t token) const {
    uint32_t all[4];
    words(token / 4, all);
    return of(all[token % 4]);
  }
  // Whether the noise of this number is below d for sure: it is below -log(1 - u), and e^-d below a power of 2.
  EAGLE_HD static bool is_below(uint32_t word, double d) {
    if (!(d > 0)) return false;
    const int bits = static_cast<int>(d * 1.4426950408889634);
    return bits < 32 && (uint64_t{1} << 32) - word > uint64_t{1} << (32 - bits);
  }
};

}  // namespace eagle

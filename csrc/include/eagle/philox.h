// Random numbers by counter: Philox-4x32-10 (Salmon et al., SC 2011). The specification is eagle_plugin/core/rng.py.
#pragma once
#include "portable.h"

namespace eagle {

// The four words of a block of the sequence (key, counter, stream).
EAGLE_HD void philox(int64_t key, int64_t counter, uint32_t stream, uint32_t block, uint32_t* c) {
  c[0] = block;
  c[1] = stream;
  c[2] = static_cast<uint32_t>(counter);
  c[3] = static_cast<uint32_t>(static_cast<uint64_t>(counter) >> 32);
  uint32_t k[2] = {static_cast<uint32_t>(key), static_cast<uint32_t>(static_cast<uint64_t>(key) >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
    c[0] = static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0];
    c[1] = static_cast<uint32_t>(b);
    c[2] = static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1];
    c[3] = static_cast<uint32_t>(a);
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
}

// Number `place` of the sequence: uniform in [0, 1) with 53 random bits.
EAGLE_HD double uniform(int64_t key, int64_t counter, uint32_t stream, int64_t place) {
  uint32_t c[4];
  philox(key, counter, stream, static_cast<uint32_t>(place / 2), c);
  const uint32_t high = place & 1 ? c[2] : c[0], low = place & 1 ? c[3] : c[1];
  return static_cast<double>((uint64_t{high >> 5} << 26) + (low >> 6)) * (1.0 / 9007199254740992.0);
}

}  // namespace eagle

// The keys of a query. Every rule (causal limit, first visible position, ancestor bitmask, byte mask) is turned into
// one 64-bit mask per block of 64 keys, so that the attention body has one kind of mask.
#pragma once
#include <algorithm>
#include <cstdint>

namespace eagle {

constexpr int kBlock = 64;  // keys per block

// A mask of the bits [low, high), both clamped to 0..64.
inline uint64_t bit_range(int64_t low, int64_t high) {
  low = std::max<int64_t>(low, 0);
  high = std::min<int64_t>(high, 64);
  if (low >= high) return 0;
  const uint64_t below_high = high == 64 ? ~uint64_t{0} : (uint64_t{1} << high) - 1;
  return below_high & ~((uint64_t{1} << low) - 1);
}

// The lowest position that a row sees. window >= 0: so many keys before it; chunk > 0: the positions of its own chunk.
inline int64_t first_visible(int64_t position, int64_t window, int64_t chunk) {
  int64_t first = window < 0 ? 0 : std::max<int64_t>(0, position - window);
  if (chunk > 0) first = std::max(first, position / chunk * chunk);
  return first;
}

// Clears the `count` lowest set bits.
inline uint64_t without_lowest(uint64_t bits, int64_t count) {
  for (; count > 0 && bits; --count) bits &= bits - 1;
  return bits;
}

struct Query {
  int64_t low;           // keys [low, high) are visible ...
  int64_t high;          //
  int64_t tail;          // ... and of the keys from here on those that `ancestors` or `bytes` name
  int64_t end;           // no key at or after this position
  uint64_t ancestors;    // bit t: key tail + t
  const uint8_t* bytes;  // byte t: key tail + t; null without a byte mask

  uint64_t block(int64_t start) const {
    uint64_t seen = bit_range(low - start, high - start);
    const int64_t shift = tail - start;
    if (bytes) {
      const int64_t to = std::min<int64_t>(start + kBlock, end);
      for (int64_t key = std::max(start, tail); key < to; ++key) {
        seen |= static_cast<uint64_t>(bytes[key - tail] != 0) << (key - start);
      }
    } else if (ancestors && shift > -64 && shift < 64) {
      seen |= shift >= 0 ? ancestors << shift : ancestors >> -shift;
    }
    return seen & bit_range(0, end - start);
  }
};

}  // namespace eagle

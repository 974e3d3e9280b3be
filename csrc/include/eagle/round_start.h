// The start of a round for one request. The specification is eagle_plugin/core/round_start.py.
#pragma once
#include "team.h"

namespace eagle {

constexpr int64_t kStartTile = 4096;  // positions of the slot table that a team copies

struct StartBuffers {  // of one request of the padded batch
  int64_t *prefix_len, *request, *rng_key, *slots;
  int64_t reach;
  int32_t* table;
  int64_t width;  // of the table
};

struct StartSource {  // what the buffers are filled with
  int64_t length, row, rng_key;
  const int32_t* slots;  // by position; null for a padding request
  int64_t context;       // positions that it has

  EAGLE_HD int32_t slot(int64_t position) const { return slots && position < context ? slots[position] : 0; }
};

// The positions of [begin, begin + kStartTile) of the table that the round reads; with the first of them all else.
template <class Team>
EAGLE_HD void fill_request(const Team& team, const StartBuffers& out, const StartSource& source, int64_t begin) {
  const int64_t read = source.length + out.reach < out.width ? source.length + out.reach : out.width;
  const int64_t end = begin + kStartTile < read ? begin + kStartTile : read;
  for (int64_t position = begin + team.rank(); position < end; position += team.size()) {
    out.table[position] = source.slot(position);
  }
  if (begin > 0) return;
  for (int64_t u = team.rank(); u < out.reach; u += team.size()) out.slots[u] = source.slot(source.length + u);
  if (team.rank() > 0) return;
  *out.prefix_len = source.length;
  *out.request = source.row;
  *out.rng_key = source.rng_key;
}

}  // namespace eagle

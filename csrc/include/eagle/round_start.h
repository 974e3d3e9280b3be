// The start of a round for one request. The specification is eagle_plugin/core/round_start.py.
#pragma once
#include "team.h"

namespace eagle {

constexpr int64_t kStartTile = 4096;  // positions of the slot table that a team copies

struct StartLane {  // the buffers of one lane
  int64_t *prefix_len, *request, *key, *slots;
  int64_t reach;
  int32_t* table;
  int64_t width;  // of the table
};

struct StartSource {  // what the lane is filled with
  int64_t length, row, key;
  const int32_t* slots;  // by position; null in a padding lane
  int64_t context;       // positions that it has

  EAGLE_HD int32_t slot(int64_t position) const { return slots && position < context ? slots[position] : 0; }
};

// The positions of [begin, begin + kStartTile) of the table that the round reads; with the first of them all else.
template <class Team>
EAGLE_HD void fill_lane(const Team& team, const StartLane& lane, const StartSource& source, int64_t begin) {
  const int64_t read = source.length + lane.reach < lane.width ? source.length + lane.reach : lane.width;
  const int64_t end = begin + kStartTile < read ? begin + kStartTile : read;
  for (int64_t position = begin + team.rank(); position < end; position += team.size()) {
    lane.table[position] = source.slot(position);
  }
  if (begin > 0) return;
  for (int64_t u = team.rank(); u < lane.reach; u += team.size()) lane.slots[u] = source.slot(source.length + u);
  if (team.rank() > 0) return;
  *lane.prefix_len = source.length;
  *lane.request = source.row;
  *lane.key = source.key;
}

}  // namespace eagle

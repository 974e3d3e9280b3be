// The greedy walk over the draft tree of one request. The specification is eagle_plugin/core/verify.py.
#pragma once
#include "team.h"

namespace eagle {

// index[stride] and out[stride] are written whole; returns the accept length. The walk compares parents and never
// follows them, so that no value in the tree can lead it out of bounds, and it takes at most stride - 1 steps.
template <class Team>
EAGLE_HD int32_t verify_greedy(const Team& team, const int64_t* tokens, const int32_t* parents, const int64_t* targets,
                               int32_t width, int32_t stride, int32_t* index, int64_t* out) {
  int32_t current = 0, length = 0;
  for (;;) {
    const int64_t chosen = targets[current];
    if (team.rank() == 0) {
      index[length] = current;
      out[length] = chosen;
    }
    if (++length == stride) break;
    int32_t child = team.rank();
    while (child < width && !(parents[child] == current && tokens[child] == chosen)) child += team.size();
    child = team.min(child);
    if (child >= width) break;
    current = child;
  }
  for (int32_t j = length + team.rank(); j < stride; j += team.size()) {
    index[j] = -1;
    out[j] = 0;
  }
  return length;
}

}  // namespace eagle

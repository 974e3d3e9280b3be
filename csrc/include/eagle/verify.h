// The greedy walk over the draft tree of one request. The specification is eagle_plugin/core/verify.py.
#pragma once
#include "portable.h"

namespace eagle {

// index[stride] and out[stride] are written whole; returns the accept length. The walk compares parents and never
// follows them, so that no value in the tree can lead it out of bounds, and it takes at most stride - 1 steps.
EAGLE_HD int32_t verify_greedy(const int64_t* tokens, const int32_t* parents, const int64_t* targets, int32_t width,
                               int32_t stride, int32_t* index, int64_t* out) {
  int32_t current = 0, length = 1;
  index[0] = 0;
  for (; length < stride; ++length) {
    const int64_t chosen = targets[current];
    int32_t child = 0;
    while (child < width && !(parents[child] == current && tokens[child] == chosen)) ++child;
    if (child == width) break;
    out[length - 1] = chosen;
    index[length] = child;
    current = child;
  }
  out[length - 1] = targets[current];
  for (int32_t j = length; j < stride; ++j) {
    index[j] = -1;
    out[j] = 0;
  }
  return length;
}

}  // namespace eagle

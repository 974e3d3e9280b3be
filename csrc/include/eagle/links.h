// First-child / next-sibling links of one draft tree. The specification is eagle_plugin/core/links.py.
#pragma once
#include "team.h"

namespace eagle {

// The first node of [begin, width) with this parent, -1 when there is none.
EAGLE_HD int64_t find_child(const int32_t* parents, int32_t begin, int32_t width, int32_t parent) {
  for (int32_t node = begin; node < width; ++node) {
    if (parents[node] == parent) return node;
  }
  return -1;
}

template <class Team>
EAGLE_HD void sibling_links(const Team& team, const int32_t* parents, int32_t width, int64_t* first_child,
                            int64_t* next_sibling) {
  for (int32_t node = team.rank(); node < width; node += team.size()) {
    first_child[node] = find_child(parents, 0, width, node);
    next_sibling[node] = parents[node] < 0 ? -1 : find_child(parents, node + 1, width, parents[node]);
  }
}

}  // namespace eagle

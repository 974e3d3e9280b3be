// What the round after a walk reads of one request's accepted path. The specification is
// eagle_plugin/core/accepted_path.py.
#pragma once
#include "team.h"

namespace eagle {

struct PathRow {         // one request's row of the accepted paths
  const int32_t* index;  // nodes, -1 after the path
  const int64_t* tokens;
  int64_t length, longest;  // tokens of the path, E
};

struct PathOut {
  int64_t *rows, *positions;  // [E]
  int64_t *last, *root;
};

// first_row: the row of the request's first node; first_out: of its first place on the path.
template <class Team>
EAGLE_HD void read_path(const Team& team, const PathRow& path, int64_t prefix_len, int64_t first_row, int64_t first_out,
                        PathOut out) {
  for (int64_t j = team.rank(); j < path.longest; j += team.size()) {
    out.rows[j] = first_row + (path.index[j] > 0 ? path.index[j] : 0);
    out.positions[j] = prefix_len + j;
  }
  if (team.rank() > 0) return;
  // A length that cannot be, from a corrupt walk, names the path's ends.
  const int64_t place = path.length < 1 ? 0 : (path.length > path.longest ? path.longest : path.length) - 1;
  *out.last = first_out + place;
  *out.root = path.tokens[place];
}

}  // namespace eagle

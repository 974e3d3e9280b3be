// The draw at one node by parts of its row, after its statistics (row_filters.h).
#pragma once
#include "row_filters.h"
#include "verify.h"

namespace eagle {

// Draws from the part's tokens; `work` keeps what was drawn.
template <class Team>
EAGLE_HD void draw_part(Team& team, const LogitsRow<float>& row, const SamplingRow& params, const RowPart& part,
                        const Noise& noise, RowWork& work) {
  const RowStatistics& known = work.statistics;
  const TargetDistribution target{row.logits,       static_cast<int32_t>(row.vocabulary),
                                  known.highest,    1 / params.temperature,
                                  known.cut_value,  known.cut_index,
                                  known.min_weight, 0};
  const Drawn drawn = draw_within(team, target, noise, known.most_likely, static_cast<int32_t>(part.begin(row)),
                                  static_cast<int32_t>(part.end(row)));
  if (team.rank() == 0) work.keys[part.index] = drawn.key, work.tokens[part.index] = drawn.token;
}

// Of all parts of a row.
EAGLE_HD int32_t drawn_token(const RowWork& work, int32_t parts) {
  Drawn best{work.keys[0], work.tokens[0]};
  for (int32_t j = 1; j < parts; ++j) {
    if (work.keys[j] > best.key || (work.keys[j] == best.key && work.tokens[j] < best.token)) {
      best = {work.keys[j], work.tokens[j]};
    }
  }
  return best.token;
}

struct DrawnNodes {  // a source of draws that were made at all nodes of a request
  const RowWork* rows;
  int32_t parts;  // of each row
  bool greedy;

  template <class Team>
  EAGLE_HD int32_t draw(Team&, int32_t node, const Noise&) const {
    return greedy ? rows[node].statistics.most_likely : drawn_token(rows[node], parts);
  }
};

}  // namespace eagle

// The draw at one node after the statistics of its row (row_filters.h): by parts, as those were made, or during the
// walk where there are rows enough for all blocks.
#pragma once
#include "row_filters.h"
#include "verify.h"

namespace eagle {

EAGLE_HD TargetDistribution distribution_of(const RowStatistics& known, const float* logits, int64_t vocabulary,
                                            const SamplingRow& params) {
  return {logits,           static_cast<int32_t>(vocabulary),
          known.highest,    1 / params.temperature,
          known.cut_value,  known.cut_index,
          known.min_weight, 0};
}

// Draws from the part's tokens; `work` keeps what was drawn.
template <class Team>
EAGLE_HD void draw_part(Team& team, const LogitsRow<float>& row, const SamplingRow& params, const RowPart& part,
                        const Noise& noise, RowWork& work) {
  const TargetDistribution target = distribution_of(work.statistics, row.logits, row.vocabulary, params);
  const Drawn drawn = draw_within(team, target, noise, work.statistics.most_likely,
                                  static_cast<int32_t>(part.begin(row)), static_cast<int32_t>(part.end(row)));
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

struct DescribedNodes {  // a source of draws at the nodes of a request whose rows have statistics
  const RowWork* rows;
  const float* logits;  // [width, vocabulary], rows `step` elements apart
  int64_t step;
  int32_t vocabulary, parts;  // of each row; those of several were drawn from already
  SamplingRow params;

  template <class Team>
  EAGLE_HD int32_t draw(Team& team, int32_t node, const Noise& noise) const {
    const RowStatistics& known = rows[node].statistics;
    if (params.top_k == 1) return known.most_likely;
    if (parts > 1) return drawn_token(rows[node], parts);
    const TargetDistribution target = distribution_of(known, logits + node * step, vocabulary, params);
    return draw_within(team, target, noise, known.most_likely, 0, vocabulary).token;
  }
};

}  // namespace eagle

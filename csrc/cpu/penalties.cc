#include <bindings/penalties.h>

#include "parallel.h"

namespace eagle {
namespace {

constexpr int64_t kMinParallelCounts = 1 << 18;  // below, waking other threads costs more than it saves

}  // namespace

void run(const PenalizeCall& call) {
  const int64_t tiles = call.tiles;
  parallel_for(call.b * tiles, call.b * call.vocabulary > kMinParallelCounts, [&](int64_t task) {
    PenaltyScratch scratch;
    call.tile(SerialTeam{}, scratch, task / tiles, static_cast<int32_t>(task % tiles));
  });
}

void run(const CountCall& call) {
  for (int64_t i = 0; i < call.b; ++i) {
    for (int64_t j = 0; j < call.lengths[i]; ++j) ++*call.place(i, j);
  }
}

}  // namespace eagle

#include <eagle/sampling_door.h>

#include "parallel.h"

namespace eagle {
namespace {

constexpr int64_t kWorthThreads = 1 << 14;  // logits below which waking other threads costs more than it saves

}  // namespace

void run(const UniformsCall& call) {
  for (int64_t at = 0; at < call.b * call.n; ++at) call.fill(at);
}

void run(const ProposeCall& call) {
  for (int64_t i = 0; i < call.rows; ++i) call.row(i);
}

void run(const VerifyTreeCall& call) {
  parallel_for(call.b, call.b * call.stride * call.vocabulary > kWorthThreads, [&](int64_t i) {
    SerialTeam team;
    Histogram histogram;
    call.walk(team, histogram, i);
  });
}

}  // namespace eagle

#include <bindings/sampling.h>

#include "parallel.h"

namespace eagle {
namespace {

constexpr int64_t kMinParallelLogits = 1 << 14;  // below, waking other threads costs more than it saves

}  // namespace

void run(const UniformsCall& call) {
  for (int64_t at = 0; at < call.b * call.n; ++at) call.fill(at);
}

void run(const ProposeCall& call) {
  ProposeScratch scratch;
  for (int64_t i = 0; i < call.rows; ++i) call.row(SerialTeam{}, scratch, i);
}

void run(const VerifyCall& call) {
  parallel_for(call.b, call.b * call.max_accept_length * call.vocabulary > kMinParallelLogits, [&](int64_t i) {
    SerialTeam team;
    Histogram histogram;
    call.walk_logits(team, histogram, i);
  });
}

}  // namespace eagle

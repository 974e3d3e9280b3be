// One block per request and tile of its slot table; a block whose tile begins after what the round reads has nothing to
// do. Values are not checked on the host, which would have to wait for the device: a request with a wrong row becomes a
// padding request.
#include <bindings/round_start.h>

#include "block_team.cuh"
#include "launch.cuh"

namespace eagle {
namespace {

constexpr unsigned kThreads = 256;

__global__ void __launch_bounds__(kThreads) start_kernel(StartCall call) {
  __shared__ BlockTeam::Exchange exchange;
  call.fill(BlockTeam(exchange), blockIdx.x, blockIdx.y);
}

}  // namespace

void run(const StartCall& call) {
  const dim3 grid(static_cast<unsigned>(call.padded), static_cast<unsigned>(call.tiles));
  launch("start_round", start_kernel, grid, kThreads, call.device, call);
}

}  // namespace eagle

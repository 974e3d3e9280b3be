#include <eagle/verify_door.h>

#include "block_team.cuh"
#include "launch.cuh"

namespace eagle {
namespace {

constexpr unsigned kThreads = 64;  // nodes of a tree

__global__ void __launch_bounds__(kThreads) greedy_kernel(GreedyCall call) {
  __shared__ BlockTeam::Exchange exchange;
  call.walk(BlockTeam(exchange), blockIdx.x);
}

}  // namespace

void run(const GreedyCall& call) {
  launch("verify_greedy", greedy_kernel, dim3(static_cast<unsigned>(call.b)), kThreads, call.device, call);
}

}  // namespace eagle

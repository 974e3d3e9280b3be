// One small block per request: a path has a few places.
#include <bindings/accepted_path.h>

#include "block_team.cuh"
#include "launch.cuh"

namespace eagle {
namespace {

constexpr unsigned kThreads = 32;

__global__ void __launch_bounds__(kThreads) path_kernel(PathCall call) {
  __shared__ BlockTeam::Exchange exchange;
  call.read(BlockTeam(exchange), blockIdx.x);
}

}  // namespace

void run(const PathCall& call) {
  launch("read_path", path_kernel, dim3(static_cast<unsigned>(call.b)), kThreads, call.device, call);
}

}  // namespace eagle

#include <eagle/links_door.h>

#include "block_team.cuh"
#include "launch.cuh"

namespace eagle {
namespace {

constexpr unsigned kThreads = 64;  // nodes of a tree

__global__ void __launch_bounds__(kThreads) links_kernel(LinksCall call) {
  __shared__ BlockTeam::Exchange exchange;
  call.link(BlockTeam(exchange), blockIdx.x);
}

}  // namespace

void run(const LinksCall& call) {
  launch("sibling_links", links_kernel, dim3(static_cast<unsigned>(call.b)), kThreads, call.device, call);
}

}  // namespace eagle

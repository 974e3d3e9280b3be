// One block a request. Values are not checked on the host, which would have to wait for the device: of a corrupt
// table select_tree keeps the root alone.
#include <eagle/tree_door.h>

#include "block_team.cuh"
#include "launch.cuh"

namespace eagle {
namespace {

constexpr unsigned kThreads = 128;  // at least 64: each brings one item when the best are looked for

__global__ void __launch_bounds__(kThreads) grow_kernel(GrowCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ BestScratch scratch;
  const int64_t i = blockIdx.x;
  grow_level(BlockTeam(exchange), scratch, call.table.row(i), call.level(i), call.out.rows, call.out.row(i));
}

__global__ void __launch_bounds__(kThreads) select_kernel(SelectCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ SelectScratch scratch;
  const int64_t i = blockIdx.x;
  select_tree(BlockTeam(exchange), scratch, call.table.row(i), call.table.capacity, call.root_tokens[i], call.width,
              call.row(i));
}

}  // namespace

void run(const GrowCall& call) {
  launch("grow_level", grow_kernel, dim3(static_cast<unsigned>(call.b)), kThreads, call.device, call);
}

void run(const SelectCall& call) {
  launch("select_tree", select_kernel, dim3(static_cast<unsigned>(call.b)), kThreads, call.device, call);
}

}  // namespace eagle

// One block per request and tile of the vocabulary; most tiles hold no counted token. Values are not checked on the
// host, which would have to wait for the device: a wrong row, token or length changes nothing.
#include <bindings/penalties.h>

#include "block_team.cuh"
#include "launch.cuh"

namespace eagle {
namespace {

constexpr unsigned kTileThreads = 256;
constexpr unsigned kCountThreads = 128;

__global__ void __launch_bounds__(kTileThreads) penalize_kernel(PenalizeCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ PenaltyScratch scratch;
  call.tile(BlockTeam(exchange), scratch, blockIdx.x, static_cast<int32_t>(blockIdx.y));
}

__global__ void __launch_bounds__(kCountThreads) count_kernel(CountCall call) {
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= call.b * call.most) return;
  if (int32_t* place = call.place(at / call.most, at % call.most)) atomicAdd(place, 1);
}

}  // namespace

void run(const PenalizeCall& call) {
  const dim3 grid(static_cast<unsigned>(call.b), static_cast<unsigned>(call.tiles));
  launch("penalize_nodes", penalize_kernel, grid, kTileThreads, call.device, call);
}

void run(const CountCall& call) {
  const dim3 grid(static_cast<unsigned>((call.b * call.most + kCountThreads - 1) / kCountThreads));
  launch("count_tokens", count_kernel, grid, kCountThreads, call.device, call);
}

}  // namespace eagle

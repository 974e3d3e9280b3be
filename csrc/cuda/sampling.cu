#include <bindings/sampling.h>

#include "block_team.cuh"
#include "launch.cuh"

namespace eagle {
namespace {

constexpr unsigned kStatisticsThreads = 1024;  // a row of logits is long: many loads must be in flight
constexpr unsigned kWalkThreads = 256;         // a walk reads one segment of a row per drawn token
constexpr unsigned kNumberThreads = 32;        // one thread per number; small blocks spread over the GPU

__global__ void __launch_bounds__(kNumberThreads) uniforms_kernel(UniformsCall call) {
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at < call.b * call.n) call.fill(at);
}

__global__ void __launch_bounds__(kMaxTopM) propose_kernel(ProposeCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ ProposeScratch scratch;
  call.row(BlockTeam(exchange), scratch, blockIdx.x);
}

__global__ void __launch_bounds__(kStatisticsThreads) statistics_kernel(VerifyTreeCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ RowScratch scratch;
  const BlockTeam team(exchange);
  call.describe(team, scratch, blockIdx.x);
}

__global__ void __launch_bounds__(kWalkThreads) walk_kernel(VerifyTreeCall call) {
  __shared__ BlockTeam::Exchange exchange;
  const BlockTeam team(exchange);
  call.walk_described(team, blockIdx.x);
}

}  // namespace

void run(const UniformsCall& call) {
  const dim3 grid(static_cast<unsigned>((call.b * call.n + kNumberThreads - 1) / kNumberThreads));
  launch("uniforms", uniforms_kernel, grid, kNumberThreads, call.device, call);
}

void run(const ProposeCall& call) {
  launch("propose", propose_kernel, dim3(static_cast<unsigned>(call.rows)), kMaxTopM, call.device, call);
}

void run(const VerifyTreeCall& call) {
  const dim3 nodes(static_cast<unsigned>(call.b * call.width)), requests(static_cast<unsigned>(call.b));
  launch("verify_tree (statistics)", statistics_kernel, nodes, kStatisticsThreads, call.device, call);
  launch("verify_tree (walk)", walk_kernel, requests, kWalkThreads, call.device, call);
}

}  // namespace eagle

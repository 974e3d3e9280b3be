#include <bindings/sampling.h>

#include "block_team.cuh"
#include "launch.cuh"

namespace eagle {
namespace {

constexpr unsigned kWalkThreads = 1024;  // a walk reads a few rows of the vocabulary's size
constexpr unsigned kRowThreads = 32;     // one thread per row or number; small blocks spread over the GPU

__global__ void __launch_bounds__(kRowThreads) uniforms_kernel(UniformsCall call) {
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at < call.b * call.n) call.fill(at);
}

__global__ void __launch_bounds__(kRowThreads) propose_kernel(ProposeCall call) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < call.rows) call.row(i);
}

__global__ void __launch_bounds__(kWalkThreads) verify_kernel(VerifyTreeCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ Histogram histogram;
  const BlockTeam team(exchange);
  call.walk(team, histogram, blockIdx.x);
}

dim3 blocks_of(int64_t rows) { return dim3(static_cast<unsigned>((rows + kRowThreads - 1) / kRowThreads)); }

}  // namespace

void run(const UniformsCall& call) {
  launch("uniforms", uniforms_kernel, blocks_of(call.b * call.n), kRowThreads, call.device, call);
}

void run(const ProposeCall& call) {
  launch("propose", propose_kernel, blocks_of(call.rows), kRowThreads, call.device, call);
}

void run(const VerifyTreeCall& call) {
  launch("verify_tree", verify_kernel, dim3(static_cast<unsigned>(call.b)), kWalkThreads, call.device, call);
}

}  // namespace eagle

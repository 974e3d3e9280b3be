#include <bindings/sampling.h>

#include "block_team.cuh"
#include "launch.cuh"

namespace eagle {
namespace {

constexpr unsigned kPartThreads = 512;    // a row of logits is long: many loads must be in flight
constexpr unsigned kFinishThreads = 256;  // a few thousand tokens, and bins
constexpr int64_t kLeastPart = 1024;      // tokens of a row's part, or its blocks would have too little to do
constexpr unsigned kWalkThreads = 256;    // a walk reads one segment of a row per drawn token
constexpr unsigned kNumberThreads = 32;   // one thread per number; small blocks spread over the GPU

__global__ void __launch_bounds__(kNumberThreads) uniforms_kernel(UniformsCall call) {
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at < call.b * call.n) call.fill(at);
}

__global__ void __launch_bounds__(kMaxTopM) propose_kernel(ProposeCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ ProposeScratch scratch;
  call.row(BlockTeam(exchange), scratch, blockIdx.x);
}

__global__ void __launch_bounds__(kMaxTopM) propose_coupled_kernel(ProposeCoupledCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ ProposeScratch scratch;
  call.row(BlockTeam(exchange), scratch, blockIdx.x);
}

__device__ RowPart this_part() { return {static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(gridDim.y)}; }

__global__ void __launch_bounds__(kPartThreads, 2) best_kernel(VerifyTreeCall call) {
  __shared__ BlockTeam::Exchange exchange;
  const BlockTeam team(exchange);
  call.find_best(team, blockIdx.x, this_part());
}

__global__ void __launch_bounds__(kPartThreads, 2) weigh_kernel(VerifyTreeCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ WeighScratch scratch;
  const BlockTeam team(exchange);
  call.weigh(team, scratch, blockIdx.x, this_part());
}

__global__ void __launch_bounds__(kPartThreads, 2) collect_kernel(VerifyTreeCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ CollectScratch scratch;
  const BlockTeam team(exchange);
  call.collect(team, scratch, blockIdx.x, this_part());
}

// Four blocks per multiprocessor: 64 registers a thread, also on sm_80, where it would take 78.
__global__ void __launch_bounds__(kFinishThreads, 4) finish_kernel(VerifyTreeCall call, int32_t parts) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ FinishScratch scratch;
  const BlockTeam team(exchange);
  call.finish(team, scratch, blockIdx.x, parts);
}

__global__ void __launch_bounds__(kWalkThreads) walk_kernel(VerifyTreeCall call) {
  __shared__ BlockTeam::Exchange exchange;
  const BlockTeam team(exchange);
  call.walk_described(team, blockIdx.x);
}

// Into how many parts to divide each row, so that the blocks fill the device, two per multiprocessor.
unsigned parts_of(const VerifyTreeCall& call) {
  int processors = 1;
  const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, call.device.device_id);
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "verify_tree: no device: " << cudaGetErrorString(error);
  unsigned parts = 1;
  while (2 * parts <= kSegments && call.b * call.width * parts <= processors &&
         call.vocabulary >= 2 * kLeastPart * parts) {
    parts *= 2;
  }
  return parts;
}

}  // namespace

void run(const UniformsCall& call) {
  const dim3 grid(static_cast<unsigned>((call.b * call.n + kNumberThreads - 1) / kNumberThreads));
  launch("uniforms", uniforms_kernel, grid, kNumberThreads, call.device, call);
}

void run(const ProposeCall& call) {
  launch("propose", propose_kernel, dim3(static_cast<unsigned>(call.rows)), kMaxTopM, call.device, call);
}

void run(const ProposeCoupledCall& call) {
  launch("propose_coupled", propose_coupled_kernel, dim3(static_cast<unsigned>(call.rows)), kMaxTopM, call.device,
         call);
}

// Bytes that a row of V logits makes the device read, by launch: 4 V in best, weigh and collect each, 12 V in all;
// 4 V if the request is greedy, 8 V if top-k and top-p cut nothing. Bins and list are 0.1 MB beside them, and stay in
// the L2 cache. Before there were bins it was 8 V where top-p keeps few tokens and 28 V where it keeps most, with every
// token added to a sum of 64 bits in shared memory by a loop. Model of an H200 (4.1 TB/s) at V = 128256 and 16 nodes,
// twice the bytes over the bandwidth: 12 us at batch 1, 382 us at batch 32. At batch 1 the launches take longer than
// that. A model, not a measurement.
void run(const VerifyTreeCall& call) {
  if (!call.work) {
    TVM_FFI_THROW(ValueError) << "workspace does not have " << kWorkspaceWords
                              << " words per row, wanted the size of a row's work: allocate WORKSPACE_SIZE words";
  }
  const unsigned nodes = static_cast<unsigned>(call.b * call.width), parts = parts_of(call);
  const dim3 divided(nodes, parts);
  launch("verify_tree (best)", best_kernel, divided, kPartThreads, call.device, call);
  launch("verify_tree (weigh)", weigh_kernel, divided, kPartThreads, call.device, call);
  launch("verify_tree (collect)", collect_kernel, divided, kPartThreads, call.device, call);
  launch("verify_tree (finish)", finish_kernel, dim3(nodes), kFinishThreads, call.device, call,
         static_cast<int32_t>(parts));
  launch("verify_tree (walk)", walk_kernel, dim3(static_cast<unsigned>(call.b)), kWalkThreads, call.device, call);
}

}  // namespace eagle

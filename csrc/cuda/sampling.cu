#include <bindings/sampling.h>

#include "block_team.cuh"
#include "launch.cuh"

namespace eagle {
namespace {

constexpr unsigned kPartThreads = 512;    // a row of logits is long: many loads must be in flight
constexpr unsigned kFinishThreads = 256;  // a few thousand tokens, and bins
constexpr int64_t kLeastPart = 1024;      // tokens of a row's part, or its blocks would have too little to do
constexpr unsigned kWalkThreads = 256;    // a walk over tokens that were drawn before it
constexpr unsigned kReadThreads = 1024;   // one that reads a row per token: there are few blocks, one per request
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

__device__ RowPart this_part() { return {static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(gridDim.y)}; }

__global__ void __launch_bounds__(kPartThreads, 2) best_kernel(VerifyCall call) {
  __shared__ BlockTeam::Exchange exchange;
  const BlockTeam team(exchange);
  call.find_best(team, blockIdx.x, this_part());
}

__global__ void __launch_bounds__(kPartThreads, 2) weigh_kernel(VerifyCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ WeighScratch scratch;
  const BlockTeam team(exchange);
  call.weigh(team, scratch, blockIdx.x, this_part());
}

__global__ void __launch_bounds__(kPartThreads, 2) collect_kernel(VerifyCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ CollectScratch scratch;
  const BlockTeam team(exchange);
  call.collect(team, scratch, blockIdx.x, this_part());
}

// Four blocks per multiprocessor: 64 registers a thread, also on sm_80, where it would take 78.
__global__ void __launch_bounds__(kFinishThreads, 4) finish_kernel(VerifyCall call, int32_t parts) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ FinishScratch scratch;
  const BlockTeam team(exchange);
  call.finish(team, scratch, blockIdx.x, parts);
}

__global__ void __launch_bounds__(kPartThreads, 2) draw_kernel(VerifyCall call) {
  __shared__ BlockTeam::Exchange exchange;
  const BlockTeam team(exchange);
  call.draw(team, blockIdx.x, this_part());
}

// 64 registers a thread, as in draw_kernel, which has the same loop over a row.
__global__ void __launch_bounds__(kReadThreads) walk_kernel(VerifyCall call, int32_t parts) {
  __shared__ BlockTeam::Exchange exchange;
  const BlockTeam team(exchange);
  call.walk_described(team, blockIdx.x, parts);
}

// Into how many parts to divide each row, so that the blocks fill the device, two per multiprocessor.
unsigned parts_of(const VerifyCall& call) {
  int processors = 1;
  const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, call.device.device_id);
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "verify_tree: no device: " << cudaGetErrorString(error);
  unsigned parts = 1;
  while (2 * parts <= kMaxParts && call.b * call.width * parts <= processors &&
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

// Bytes that a row of V logits makes the device read, by launch: 4 V in best, weigh and collect each, and 4 V for the
// draw, of all nodes or, where these fill the device, of the nodes of the path; 4 V in all if the request is greedy, 8
// V if top-k and top-p cut nothing. Bins and list are 0.1 MB beside them, and stay in the L2 cache.
void run(const VerifyCall& call) {
  if (!call.work) {
    TVM_FFI_THROW(ValueError) << "workspace does not have " << kWorkspaceWords
                              << " words per row, wanted the size of a row's work: allocate WORKSPACE_SIZE words";
  }
  const unsigned nodes = static_cast<unsigned>(call.b * call.width), parts = parts_of(call);
  const dim3 divided(nodes, parts);
  launch("verify_tree (best)", best_kernel, divided, kPartThreads, call.device, call);
  launch("verify_tree (weigh)", weigh_kernel, divided, kPartThreads, call.device, call);
  launch("verify_tree (collect)", collect_kernel, divided, kPartThreads, call.device, call);
  const int32_t count = static_cast<int32_t>(parts);
  launch("verify_tree (finish)", finish_kernel, dim3(nodes), kFinishThreads, call.device, call, count);
  if (parts > 1) launch("verify_tree (draw)", draw_kernel, divided, kPartThreads, call.device, call);
  const dim3 requests(static_cast<unsigned>(call.b));
  const unsigned threads = parts > 1 ? kWalkThreads : kReadThreads;
  launch("verify_tree (walk)", walk_kernel, requests, threads, call.device, call, count);
}

}  // namespace eagle

// One block per request. Values are not checked on the host, which would have to wait for the device: a request with a
// wrong row has no history.
#include <bindings/lookup.h>

#include "block_team.cuh"
#include "launch.cuh"

namespace eagle {
namespace {

constexpr unsigned kThreads = 512;  // a history is long and requests are few: many loads must be in flight
constexpr unsigned kAppendThreads = 32;

__global__ void __launch_bounds__(kThreads) look_up_kernel(LookupCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ LookupScratch scratch;
  call.look(BlockTeam(exchange), scratch, blockIdx.x);
}

__global__ void __launch_bounds__(kAppendThreads) append_kernel(AppendCall call) {
  __shared__ BlockTeam::Exchange exchange;
  call.append(BlockTeam(exchange), blockIdx.x);
}

}  // namespace

void run(const LookupCall& call) {
  launch("look_up", look_up_kernel, dim3(static_cast<unsigned>(call.b)), kThreads, call.device, call);
}

void run(const AppendCall& call) {
  launch("append_tokens", append_kernel, dim3(static_cast<unsigned>(call.b)), kAppendThreads, call.device, call);
}

}  // namespace eagle

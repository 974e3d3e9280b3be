// One block a row of logits.
#include <eagle/topk_door.h>

#include "block_team.cuh"
#include "launch.cuh"

namespace eagle {
namespace {

constexpr unsigned kThreads = 1024;  // a row is long and rows are few: loads in flight decide

template <class T>
__global__ void __launch_bounds__(kThreads) topk_kernel(TopkCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ BestScratch scratch;
  const int64_t i = blockIdx.x;
  const LogitsRow<T> row(static_cast<const T*>(call.logits) + i * call.stride, call.vocabulary);
  topk_log_softmax(BlockTeam(exchange), scratch, row, call.k, call.logp + i * call.k, call.index + i * call.k);
}

}  // namespace

void run(const TopkCall& call) {
  const auto kernel = same(call.dtype, kF32)    ? topk_kernel<float>
                      : same(call.dtype, kBF16) ? topk_kernel<BFloat16>
                                                : topk_kernel<Float16>;
  launch("topk_log_softmax", kernel, dim3(static_cast<unsigned>(call.rows)), kThreads, call.device, call);
}

}  // namespace eagle

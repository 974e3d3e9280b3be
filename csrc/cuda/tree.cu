// One block per request, or per row of logits. Values are not checked on the host, which would have to wait for the
// device: from a corrupt table select_tree makes a tree of the root alone.
#include <bindings/tree.h>

#include "block_team.cuh"
#include "launch.cuh"

namespace eagle {
namespace {

constexpr unsigned kThreads = 128;      // at least 64: each brings one item to the search for the best
constexpr unsigned kRowThreads = 1024;  // a row of logits is long and rows are few: many loads must be in flight
constexpr unsigned kLinkThreads = 64;   // nodes of a tree

template <class T>
__global__ void __launch_bounds__(kRowThreads) topk_kernel(TopkCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ BestScratch scratch;
  const int64_t i = blockIdx.x;
  const LogitsRow<T> row(static_cast<const T*>(call.logits) + i * call.row_stride, call.vocabulary);
  topk_log_softmax(BlockTeam(exchange), scratch, row, call.k, call.logp + i * call.k, call.index + i * call.k);
}

__global__ void __launch_bounds__(kThreads) grow_kernel(GrowCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ BestScratch scratch;
  const int64_t i = blockIdx.x;
  grow_level(BlockTeam(exchange), scratch, call.table.row(i), call.level(i), call.out.rows, call.out.row(i));
}

__global__ void __launch_bounds__(kThreads) levels_kernel(LevelsCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ LevelsScratch scratch;
  const int64_t i = blockIdx.x;
  grow_levels(BlockTeam(exchange), scratch, call.table.row(i), call.levels(i));
}

__global__ void __launch_bounds__(kThreads) select_kernel(SelectCall call) {
  __shared__ BlockTeam::Exchange exchange;
  __shared__ SelectScratch scratch;
  const int64_t i = blockIdx.x;
  select_tree(BlockTeam(exchange), scratch, call.table.row(i), call.table.capacity, call.root_tokens[i], call.width,
              call.row(i));
}

__global__ void __launch_bounds__(kLinkThreads) links_kernel(LinksCall call) {
  __shared__ BlockTeam::Exchange exchange;
  call.link(BlockTeam(exchange), blockIdx.x);
}

}  // namespace

void run(const TopkCall& call) {
  const auto kernel = same(call.dtype, kF32)    ? topk_kernel<float>
                      : same(call.dtype, kBF16) ? topk_kernel<BFloat16>
                                                : topk_kernel<Float16>;
  launch("topk_log_softmax", kernel, dim3(static_cast<unsigned>(call.rows)), kRowThreads, call.device, call);
}

void run(const GrowCall& call) {
  launch("grow_level", grow_kernel, dim3(static_cast<unsigned>(call.b)), kThreads, call.device, call);
}

void run(const LevelsCall& call) {
  launch("grow_levels", levels_kernel, dim3(static_cast<unsigned>(call.b)), kThreads, call.device, call);
}

void run(const SelectCall& call) {
  launch("select_tree", select_kernel, dim3(static_cast<unsigned>(call.b)), kThreads, call.device, call);
}

void run(const LinksCall& call) {
  launch("sibling_links", links_kernel, dim3(static_cast<unsigned>(call.b)), kLinkThreads, call.device, call);
}

}  // namespace eagle

// The threads of an emulated block as fibers: each runs from barrier to barrier, in an order of choice.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <vector>

inline dim3 threadIdx;

namespace emulation {

constexpr unsigned kMaxThreads = 1024;
constexpr size_t kStack = 128 << 10;

struct Barrier {
  unsigned members = 0, arrived = 0, generation = 0;

  void release_if_complete() {
    if (members == 0 || arrived < members) return;
    arrived = 0;
    ++generation;
  }
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  const Barrier* waits_for = nullptr;
  unsigned generation = 0;  // of that barrier, when the fiber began to wait

  bool ready() const { return !done && (!waits_for || waits_for->generation != generation); }
};

struct Block {
  Barrier barrier, warp_barriers[kMaxThreads / 32];
  uint64_t exchange[2][kMaxThreads];
  unsigned shuffles[kMaxThreads];  // of each thread
  std::vector<Fiber> fibers;
  ucontext_t scheduler;
  std::function<void()> body;
};

inline Block block;

inline void wait(Barrier& barrier) {
  Fiber& fiber = block.fibers[threadIdx.x];
  fiber.waits_for = &barrier;
  fiber.generation = barrier.generation;
  ++barrier.arrived;
  barrier.release_if_complete();
  if (!fiber.ready()) swapcontext(&fiber.context, &block.scheduler);
}

inline void enter_fiber() {
  block.body();
  block.fibers[threadIdx.x].done = true;
  for (Barrier* barrier : {&block.barrier, &block.warp_barriers[threadIdx.x / 32]}) {
    --barrier->members;
    barrier->release_if_complete();
  }
}

inline void start_fiber(Fiber& fiber) {
  if (!fiber.stack) fiber.stack.reset(new char[kStack]);
  fiber.done = false;
  fiber.waits_for = nullptr;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = &block.scheduler;
  makecontext(&fiber.context, enter_fiber, 0);
}

// Lets each of these fibers run to its next barrier; false when all wait or are done.
inline bool take_turns(const std::vector<unsigned>& turns) {
  bool progress = false;
  for (unsigned i : turns) {
    if (!block.fibers[i].ready()) continue;
    progress = true;
    threadIdx.x = i;
    swapcontext(&block.scheduler, &block.fibers[i].context);
  }
  return progress;
}

// forward and reverse: one warp after another, each as far as it gets, so that it may be a phase ahead of the others.
// random: any threads in any order.
inline void run_block(std::function<void()> body) {
  const unsigned threads = blockDim.x;
  if (threads == 0 || threads % 32 || threads > kMaxThreads) throw std::runtime_error("a block is 1 to 32 whole warps");
  const char* variable = std::getenv("EAGLE_EMULATION_ORDER");
  const std::string order = variable && *variable ? variable : "forward";
  if (order != "forward" && order != "reverse" && order != "random") {
    throw std::runtime_error("EAGLE_EMULATION_ORDER is '" + order + "', wanted forward, reverse or random");
  }
  block.body = std::move(body);
  block.barrier = {threads};
  for (Barrier& barrier : block.warp_barriers) barrier = {32};
  block.fibers.resize(std::max<size_t>(block.fibers.size(), threads));
  std::vector<unsigned> all(threads);
  for (unsigned i = 0; i < threads; ++i) {
    start_fiber(block.fibers[i]);
    block.shuffles[i] = 0;
    all[i] = order == "reverse" ? threads - 1 - i : i;
  }
  static std::mt19937 random(1);
  bool progress = true;
  while (progress) {
    progress = false;
    if (order == "random") std::shuffle(all.begin(), all.end(), random);  // a pass must reach every thread
    for (unsigned at = 0; at < threads; at += 32) {
      const std::vector<unsigned> turns(all.begin() + at, all.begin() + at + 32);
      while (take_turns(turns)) progress = true;
    }
  }
  for (unsigned i : all) {
    if (!block.fibers[i].done) throw std::runtime_error("a barrier that not every thread of the block reaches");
  }
}

}  // namespace emulation

// The threads of an emulated block as real threads, for ThreadSanitizer: barriers are the only order between them.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

inline thread_local dim3 threadIdx;

namespace emulation {

constexpr unsigned kMaxThreads = 1024;

class Barrier {
 public:
  void reset(unsigned members) {
    members_ = members;
    arrived_ = 0;
  }
  void arrive_and_wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const unsigned generation = generation_;
    ++arrived_;
    release_if_complete();
    changed_.wait(lock, [&] { return generation_ != generation; });
  }
  void leave() {
    const std::lock_guard<std::mutex> lock(mutex_);
    --members_;
    release_if_complete();
  }

 private:
  void release_if_complete() {
    if (members_ == 0 || arrived_ < members_) return;
    arrived_ = 0;
    ++generation_;
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  unsigned members_ = 0, arrived_ = 0, generation_ = 0;
};

struct Block {
  Barrier barrier, warp_barriers[kMaxThreads / 32];
  uint64_t exchange[2][kMaxThreads];
  unsigned shuffles[kMaxThreads];  // of each thread
};

inline Block block;
inline void wait(Barrier& barrier) { barrier.arrive_and_wait(); }

template <class Body>
void run_block(const Body& body) {
  block.barrier.reset(blockDim.x);
  for (Barrier& barrier : block.warp_barriers) barrier.reset(32);
  std::fill(block.shuffles, block.shuffles + kMaxThreads, 0);
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < blockDim.x; ++i) {
    threads.emplace_back([&body, i] {
      threadIdx.x = i;
      body();
      block.warp_barriers[i / 32].leave();
      block.barrier.leave();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace emulation

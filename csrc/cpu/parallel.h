// Work on torch's own OpenMP threads. Nothing is linked: the functions of the OpenMP runtime that torch has loaded are
// looked up at run time, so that a second runtime, with a second set of spinning threads, can never enter the process.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

namespace eagle {

// Threads that parallel_for would use: torch.get_num_threads() of the calling thread; 1 without an OpenMP runtime or
// inside a parallel region.
int max_threads();

// The file that the OpenMP runtime in use was loaded from; empty when there is none.
std::string openmp_library();

void run_on_threads(int threads, void (*body)(void*), void* data);

// Calls f(task) for every task in [0, tasks). Threads take the next task from a counter, so that a core which another
// process slows down takes fewer. f must not throw. `worth` false: the caller's thread does it all.
template <class F>
void parallel_for(int64_t tasks, bool worth, F&& f) {
  int threads = worth && tasks > 1 ? max_threads() : 1;
  if (threads > tasks) threads = static_cast<int>(tasks);
  if (threads <= 1) {
    for (int64_t task = 0; task < tasks; ++task) f(task);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t tasks;
    F* f;
  } shared;
  shared.tasks = tasks;
  shared.f = &f;
  run_on_threads(
      threads,
      [](void* data) {
        auto* s = static_cast<Shared*>(data);
        for (int64_t task; (task = s->next.fetch_add(1, std::memory_order_relaxed)) < s->tasks;) (*s->f)(task);
      },
      &shared);
}

}  // namespace eagle

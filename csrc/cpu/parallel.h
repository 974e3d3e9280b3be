// Work on torch's own OpenMP threads. Nothing is linked: the functions of the OpenMP runtime that torch has loaded are
// looked up at run time, so that a second runtime, with a second set of spinning threads, can never enter the process.
#pragma once
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace eagle {

struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*max_threads)() = nullptr;
  int (*in_parallel)() = nullptr;
};

// torch opens its OpenMP library with RTLD_GLOBAL (through libtorch_global_deps), so the default scope has it.
inline OpenMp find_openmp() {
  OpenMp found;
  found.parallel = reinterpret_cast<decltype(found.parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  found.max_threads = reinterpret_cast<decltype(found.max_threads)>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
  found.in_parallel = reinterpret_cast<decltype(found.in_parallel)>(dlsym(RTLD_DEFAULT, "omp_in_parallel"));
  return found.parallel && found.max_threads && found.in_parallel ? found : OpenMp{};
}

inline const OpenMp& openmp() {
  static const OpenMp found = find_openmp();
  return found;
}

// Threads that parallel_for would use: torch.get_num_threads() of the calling thread; 1 without an OpenMP runtime or
// inside a parallel region.
inline int max_threads() {
  const OpenMp& found = openmp();
  return found.parallel && !found.in_parallel() ? found.max_threads() : 1;
}

// The file that the OpenMP runtime in use was loaded from; empty when there is none.
inline std::string openmp_library() {
  Dl_info info;
  void* address = reinterpret_cast<void*>(openmp().parallel);
  return address && dladdr(address, &info) && info.dli_fname ? info.dli_fname : "";
}

// Calls f(task) for every task in [0, tasks). Threads take the next task from a counter, so that a core which another
// process slows down takes fewer. f must not throw. Unless `parallel`, the calling thread does all tasks.
template <class F>
void parallel_for(int64_t tasks, bool parallel, F&& f) {
  int threads = parallel && tasks > 1 ? max_threads() : 1;
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
  openmp().parallel(
      [](void* data) {
        auto* s = static_cast<Shared*>(data);
        for (int64_t task; (task = s->next.fetch_add(1, std::memory_order_relaxed)) < s->tasks;) (*s->f)(task);
      },
      &shared, threads, 0);
}

}  // namespace eagle

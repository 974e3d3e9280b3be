#include "parallel.h"

#include <dlfcn.h>

namespace eagle {
namespace {

struct Runtime {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*max_threads)() = nullptr;
  int (*in_parallel)() = nullptr;
};

// torch opens its OpenMP library with RTLD_GLOBAL (through libtorch_global_deps), so the default scope has it.
Runtime find_runtime() {
  Runtime r;
  r.parallel = reinterpret_cast<decltype(r.parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  r.max_threads = reinterpret_cast<decltype(r.max_threads)>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
  r.in_parallel = reinterpret_cast<decltype(r.in_parallel)>(dlsym(RTLD_DEFAULT, "omp_in_parallel"));
  return r.parallel && r.max_threads && r.in_parallel ? r : Runtime{};
}

const Runtime& runtime() {
  static const Runtime found = find_runtime();
  return found;
}

}  // namespace

int max_threads() {
  const Runtime& r = runtime();
  return r.parallel && !r.in_parallel() ? r.max_threads() : 1;
}

std::string openmp_library() {
  Dl_info info;
  void* address = reinterpret_cast<void*>(runtime().parallel);
  return address && dladdr(address, &info) && info.dli_fname ? info.dli_fname : "";
}

void run_on_threads(int threads, void (*body)(void*), void* data) { runtime().parallel(body, data, threads, 0); }

}  // namespace eagle

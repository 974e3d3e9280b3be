// Stands in for CUDA's header of this name, so that g++ compiles the kernels of csrc/cuda, launchers included, into a
// library that runs on CPU tensors. Blocks run one after another. A block's threads are fibers (fibers.h), or with
// EAGLE_EMULATION_THREADS real threads (threads.h), of which ThreadSanitizer reports every access that no barrier
// orders. Three variables are read at every launch:
//
//     EAGLE_EMULATION_ORDER  forward (default), reverse or random: the order in which fibers take their turns
//     EAGLE_EMULATION_BLOCK  threads of a block instead of what the launcher says; a multiple of 32
//     EAGLE_EMULATION_PROCESSORS  multiprocessors of the device, 132 without it
//
// Not emulated: dynamic shared memory, tensor cores, asynchronous copies. Shared memory keeps what the block before
// left there, as a device may.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 blockIdx, blockDim, gridDim;

#if defined(EAGLE_EMULATION_THREADS)
#include "threads.h"
#else
#include "fibers.h"
#endif

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline const char* cudaGetErrorName(cudaError_t) { return "cudaSuccess"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  const char* processors = std::getenv("EAGLE_EMULATION_PROCESSORS");
  return *value = processors && *processors ? std::atoi(processors) : 132, cudaSuccess;
}

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
};

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  const char* size = std::getenv("EAGLE_EMULATION_BLOCK");
  blockDim = size && *size ? dim3(static_cast<unsigned>(std::atoi(size))) : config->blockDim;
  gridDim = config->gridDim;
  for (unsigned y = 0; y < config->gridDim.y; ++y) {
    for (unsigned x = 0; x < config->gridDim.x; ++x) {
      blockIdx = dim3(x, y);
      emulation::run_block([&] { kernel(arguments...); });
    }
  }
  return cudaSuccess;
}

inline void __syncthreads() { emulation::wait(emulation::block.barrier); }

// Publishes a value, waits for the warp, reads another lane's. The next value goes to another place: it may be
// published before all lanes have read this one, but not the value after it.
template <class T>
T emulated_shuffle(T x, unsigned lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  const unsigned me = threadIdx.x, warp = me / 32;
  uint64_t* exchange = emulation::block.exchange[emulation::block.shuffles[me]++ % 2];
  std::memcpy(&exchange[me], &x, sizeof x);
  emulation::wait(emulation::block.warp_barriers[warp]);
  std::memcpy(&x, &exchange[warp * 32 + lane], sizeof x);
  return x;
}
template <class T>
T __shfl_xor_sync(unsigned, T x, unsigned mask) {
  return emulated_shuffle(x, (threadIdx.x % 32) ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T x, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return emulated_shuffle(x, lane >= distance ? lane - distance : lane);
}

template <class T>
T atomicAdd(T* p, T x) {
  return __atomic_fetch_add(p, x, __ATOMIC_RELAXED);
}

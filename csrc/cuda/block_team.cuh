// The team of one CUDA block; csrc/include/eagle/team.h documents its functions. Blocks are one-dimensional, of whole
// warps.
#pragma once
#include <eagle/team.h>

#include <cstring>

namespace eagle {

class BlockTeam {
 public:
  static constexpr int kTake = 1;
  struct Exchange {  // shared memory: one word for each warp
    uint64_t words[32];
  };

  __device__ explicit BlockTeam(Exchange& exchange) : exchange_(exchange) {}

  __device__ int rank() const { return static_cast<int>(threadIdx.x); }
  __device__ int size() const { return static_cast<int>(blockDim.x); }
  __device__ void sync() const { __syncthreads(); }

  template <class T>
  __device__ T sum(T x) const {
    T before;
    return scan(x, &before);
  }
  template <class T>
  __device__ T exclusive_sum(T x) const {
    T before;
    scan(x, &before);
    return before;
  }
  template <class T>
  __device__ T max(T x) const {
    return reduce(x, [](T a, T b) { return b > a ? b : a; });
  }
  template <class T>
  __device__ T min(T x) const {
    return reduce(x, [](T a, T b) { return b < a ? b : a; });
  }
  __device__ uint32_t add(uint32_t* p, uint32_t x) const { return atomicAdd(p, x); }
  __device__ uint64_t add(uint64_t* p, uint64_t x) const {
    return atomicAdd(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(x));
  }
  // In shared memory an atomic sum of 64 bits is a loop that compares and swaps; one of 32 bits is an instruction.
  __device__ void accumulate(uint64_t* p, uint64_t x) const {
    uint32_t* const halves = reinterpret_cast<uint32_t*>(p);  // the lower half comes first
    const uint32_t low = static_cast<uint32_t>(x), before = atomicAdd(halves, low);
    const uint32_t high = static_cast<uint32_t>(x >> 32) + (before + low < low);
    if (high) atomicAdd(halves + 1, high);
  }

 private:
  static constexpr unsigned kWarp = 32, kAll = 0xffffffff;

  // The second barrier in both functions: after it every member has read the exchange, and the next call may write it.
  template <class T, class Op>
  __device__ T reduce(T x, Op op) const {
    for (unsigned d = kWarp / 2; d > 0; d /= 2) x = op(x, __shfl_xor_sync(kAll, x, d));
    if (lane() == 0) write(x);
    __syncthreads();
    for (unsigned w = 0; w < warps(); ++w) x = op(x, read<T>(w));
    __syncthreads();
    return x;
  }
  template <class T>
  __device__ T scan(T x, T* before) const {
    T upto = x;
    for (unsigned d = 1; d < kWarp; d *= 2) {
      const T lower = __shfl_up_sync(kAll, upto, d);
      if (lane() >= d) upto += lower;
    }
    if (lane() == kWarp - 1) write(upto);
    __syncthreads();
    T total = 0;
    *before = upto - x;
    for (unsigned w = 0; w < warps(); ++w) {
      const T part = read<T>(w);
      total += part;
      if (w < warp()) *before += part;
    }
    __syncthreads();
    return total;
  }

  template <class T>
  __device__ void write(T x) const {
    memcpy(&exchange_.words[warp()], &x, sizeof x);
  }
  template <class T>
  __device__ T read(unsigned w) const {
    T x;
    memcpy(&x, &exchange_.words[w], sizeof x);
    return x;
  }

  __device__ static unsigned lane() { return threadIdx.x % kWarp; }
  __device__ static unsigned warp() { return threadIdx.x / kWarp; }
  __device__ static unsigned warps() { return blockDim.x / kWarp; }

  Exchange& exchange_;
};

}  // namespace eagle

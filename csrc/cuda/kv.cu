// Moves rows of the paged cache. Values are not checked on the host, which would have to wait for the device: the rows
// of a path are moved up to its first wrong entry, and a new row whose slot is outside the cache is not stored.
#include <bindings/kv.h>

#include "launch.cuh"

namespace eagle {
namespace {

constexpr unsigned kThreads = 128;

struct alignas(16) Words {
  uint32_t words[4];
};

// Whether all bits below the size of a word are zero in addresses and sizes that are OR-ed together.
template <class Word>
__device__ bool fits(uint64_t bits) {
  return bits % sizeof(Word) == 0;
}

// Accepted nodes ascend, because parents come before children. So no row is overwritten before it is read when the rows
// are moved in the order of the path. Each thread moves columns that no other thread touches.
template <class Word>
__device__ void move_path(char* base, int64_t size, const int64_t* window, const int32_t* index, int32_t length) {
  const int64_t step = int64_t{sizeof(Word)} * blockDim.x;
  for (int64_t at = int64_t{sizeof(Word)} * threadIdx.x; at < size; at += step) {
    for (int32_t j = 0; j < length; ++j) {
      const int64_t from = window[index[j]], to = window[j];
      if (from != to) {
        *reinterpret_cast<Word*>(base + to * size + at) = *reinterpret_cast<const Word*>(base + from * size + at);
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) compact_kernel(CompactCall call) {
  const int64_t i = blockIdx.x, cache = blockIdx.y;
  const int64_t* window = call.window + i * call.width;
  const int32_t* index = call.index + i * call.max_accept_length;
  const int32_t claimed = call.lengths[i];
  int32_t length = 0;
  for (int32_t before = -1; length < claimed && length < call.longest(); before = index[length], ++length) {
    const int32_t node = index[length];
    if (node <= before || node >= call.width || !call.has_slot(window[node]) || !call.has_slot(window[length])) break;
  }
  char* base = reinterpret_cast<char*>(call.data_ptrs[cache]);
  const int64_t size = call.row_bytes[cache];
  const uint64_t bits = static_cast<uint64_t>(call.data_ptrs[cache] | size);
  if (fits<Words>(bits)) {
    move_path<Words>(base, size, window, index, length);
  } else if (fits<uint32_t>(bits)) {
    move_path<uint32_t>(base, size, window, index, length);
  } else {
    move_path<char>(base, size, window, index, length);
  }
}

template <class Word>
__device__ void copy_words(char* to, int64_t step, const char* from, int64_t heads, int64_t size) {
  const int64_t words = size / sizeof(Word);  // of a head
  for (int64_t i = threadIdx.x; i < heads * words; i += blockDim.x) {
    char* at = to + i / words * step + i % words * sizeof(Word);
    *reinterpret_cast<Word*>(at) = *reinterpret_cast<const Word*>(from + i * sizeof(Word));
  }
}

// The heads of a new row, which is dense, to places `step` bytes apart.
__device__ void copy_row(char* to, int64_t step, const char* from, int64_t heads, int64_t size) {
  const uint64_t bits = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) |
                        static_cast<uint64_t>(step) | static_cast<uint64_t>(size);
  if (fits<Words>(bits)) {
    copy_words<Words>(to, step, from, heads, size);
  } else if (fits<uint32_t>(bits)) {
    copy_words<uint32_t>(to, step, from, heads, size);
  } else {
    copy_words<char>(to, step, from, heads, size);
  }
}

__global__ void __launch_bounds__(kThreads) store_kernel(StoreCall call) {
  const int64_t i = blockIdx.x, slot = call.loc[i];
  if (slot < 0 || slot >= call.slots) return;
  copy_row(call.k_cache + slot * call.k_slot, call.k_head, call.k + i * call.k_step, call.heads, call.k_size);
  copy_row(call.v_cache + slot * call.v_slot, call.v_head, call.v + i * call.v_step, call.heads, call.v_size);
}

}  // namespace

void run(const CompactCall& call) {
  const dim3 grid(static_cast<unsigned>(call.b), static_cast<unsigned>(call.caches));
  if (call.caches > 0) launch("compact_kv", compact_kernel, grid, kThreads, call.device, call);
}

void run(const StoreCall& call) {
  launch("store_kv", store_kernel, dim3(static_cast<unsigned>(call.n)), kThreads, call.device, call);
}

}  // namespace eagle

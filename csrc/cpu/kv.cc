// Moves rows of the paged cache. All slots are checked before the first byte is written.
#include <bindings/kv.h>

#include <cstring>
#include <utility>
#include <vector>

#include "parallel.h"

namespace eagle {
namespace {

constexpr int64_t kMinParallelBytes = 1 << 20;  // below, waking other threads costs more than it saves

int64_t slot_of(const CompactCall& call, int64_t request, int64_t node) {
  const int64_t slot = call.window[request * call.width + node];
  if (!call.has_slot(slot)) {
    TVM_FFI_THROW(ValueError) << "window of request " << request << " names slot " << slot << ", wanted "
                              << (call.slots > 0 ? "0 to " + std::to_string(call.slots - 1) : std::string("0 or more"))
                              << ": allocate the slot first";
  }
  return slot;
}

// The heads of a new row, which is dense, to places `step` bytes apart.
void copy_row(char* to, int64_t step, const char* from, int64_t heads, int64_t size) {
  if (step == size) {
    std::memcpy(to, from, heads * size);
    return;
  }
  for (int64_t head = 0; head < heads; ++head) std::memcpy(to + head * step, from + head * size, size);
}

}  // namespace

void run(const CompactCall& call) {
  std::vector<std::pair<int64_t, int64_t>> moves;  // (from, to), without the rows that stay where they are
  bool ascending = true;
  for (int64_t i = 0; i < call.b; ++i) {
    const int32_t length = call.lengths[i];
    if (length < 0 || length > call.longest()) {
      TVM_FFI_THROW(ValueError) << "lengths[" << i << "] is " << length << ", wanted 0 to " << call.longest()
                                << ": pass the lengths of verify_tree";
    }
    int32_t before = -1;
    for (int64_t j = 0; j < length; ++j) {
      const int32_t node = call.index[i * call.max_accept_length + j];
      if (node < 0 || node >= call.width) {
        TVM_FFI_THROW(ValueError) << "index[" << i << ", " << j << "] is " << node << ", wanted 0 to " << call.width - 1
                                  << ": pass the index of verify_tree";
      }
      ascending = ascending && node > before;
      before = node;
      const int64_t from = slot_of(call, i, node), to = slot_of(call, i, j);
      if (from != to) moves.emplace_back(from, to);
    }
  }
  if (moves.empty()) return;
  int64_t total = 0;
  for (int64_t c = 0; c < call.caches; ++c) total += call.row_bytes[c] * static_cast<int64_t>(moves.size());

  parallel_for(call.caches, total > kMinParallelBytes, [&](int64_t c) {
    char* base = reinterpret_cast<char*>(call.data_ptrs[c]);
    const int64_t size = call.row_bytes[c];
    if (ascending) {  // a node never comes before its place on the path: no row is overwritten before it is read
      for (const auto& [from, to] : moves) std::memmove(base + to * size, base + from * size, size);
      return;
    }
    std::vector<char> rows(size * moves.size());
    char* row = rows.data();
    for (const auto& move : moves) std::memcpy(std::exchange(row, row + size), base + move.first * size, size);
    row = rows.data();
    for (const auto& move : moves) std::memcpy(base + move.second * size, std::exchange(row, row + size), size);
  });
}

void run(const StoreCall& call) {
  for (int64_t i = 0; i < call.n; ++i) {
    if (call.loc[i] < 0 || call.loc[i] >= call.slots) {
      TVM_FFI_THROW(ValueError) << "loc names slot " << call.loc[i] << ", wanted 0 to " << call.slots - 1
                                << ": allocate the slot first";
    }
  }
  for (int64_t i = 0; i < call.n; ++i) {
    const int64_t slot = call.loc[i];
    copy_row(call.k_cache + slot * call.k_slot, call.k_head, call.k + i * call.k_step, call.heads, call.k_size);
    copy_row(call.v_cache + slot * call.v_slot, call.v_head, call.v + i * call.v_step, call.heads, call.v_size);
  }
}

}  // namespace eagle

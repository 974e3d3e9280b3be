// Reads and writes of the slot table of a paged cache, and row copies between its slots; see ../cache_index.py.
#include <bindings/checks.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace eagle {
namespace {

struct Table {
  int32_t* data;
  int64_t rows, width;
};

Table table_of(const TensorView& slot_table) {
  check(slot_table, "slot_table", kI32, {kAny, kAny});
  return {ptr<int32_t>(slot_table), slot_table.size(0), slot_table.size(1)};
}

// The first entry of [start, end) in table row `row`, both checked.
int32_t* range_of(Table table, int64_t row, int64_t start, int64_t end) {
  if (row < 0 || row >= table.rows) {
    TVM_FFI_THROW(ValueError) << "row is " << row << ", wanted 0 to " << table.rows - 1 << ": check the request's row";
  }
  if (start < 0 || end < start || end > table.width) {
    TVM_FFI_THROW(ValueError) << "range is " << start << " to " << end << ", wanted inside a row of " << table.width
                              << " slots: check start and end";
  }
  return table.data + row * table.width + start;
}

// Calls move(range, slots, count) for each request's range and its place in `slots`.
template <class Move>
void for_ranges(const TensorView& slot_table, const TensorView& rows, const TensorView& start, const TensorView& end,
                const TensorView& slots, Move&& move) {
  const Table table = table_of(slot_table);
  check(rows, "rows", kI64, {kAny});
  const int64_t b = rows.size(0);
  check(start, "start", kI64, {b});
  check(end, "end", kI64, {b});
  check(slots, "slots", kI64, {kAny});
  int64_t used = 0;
  for (int64_t i = 0; i < b; ++i) {
    const int64_t lo = ptr<int64_t>(start)[i], hi = ptr<int64_t>(end)[i];
    int32_t* range = range_of(table, ptr<int64_t>(rows)[i], lo, hi);
    if (used + (hi - lo) > slots.size(0)) {
      TVM_FFI_THROW(ValueError) << "slots holds " << slots.size(0) << ", wanted at least " << used + (hi - lo)
                                << ", the sum of the ranges: make it larger";
    }
    move(range, ptr<int64_t>(slots) + used, hi - lo);
    used += hi - lo;
  }
}

}  // namespace

void write_slots_cpu(TensorView slot_table, TensorView rows, TensorView start, TensorView end, TensorView slots) {
  for_ranges(slot_table, rows, start, end, slots, [](int32_t* range, const int64_t* slot, int64_t count) {
    for (int64_t j = 0; j < count; ++j) range[j] = static_cast<int32_t>(slot[j]);
  });
}

void read_slots_cpu(TensorView slot_table, TensorView rows, TensorView start, TensorView end, TensorView slots) {
  for_ranges(slot_table, rows, start, end, slots,
             [](const int32_t* range, int64_t* slot, int64_t count) { std::copy(range, range + count, slot); });
}

void branch_slot_table_cpu(TensorView slot_table, TensorView rows, TensorView seq_lens, TensorView out, int64_t topk,
                           int64_t steps) {
  const Table table = table_of(slot_table);
  check(rows, "rows", kI64, {kAny});
  const int64_t b = rows.size(0);
  check(seq_lens, "seq_lens", kI64, {b});
  if (topk < 1 || steps < 0) {
    TVM_FFI_THROW(ValueError) << "topk is " << topk << " and steps " << steps
                              << ", wanted at least 1 and 0: raise them";
  }
  check(out, "out", kI32, {b * topk, kAny});
  const int64_t width = out.size(1);
  for (int64_t i = 0; i < b; ++i) {
    const int64_t len = ptr<int64_t>(seq_lens)[i];
    const int32_t* row = range_of(table, ptr<int64_t>(rows)[i], 0, len + topk * steps);
    if (len + steps > width) {
      TVM_FFI_THROW(ValueError) << "out has rows of " << width << ", wanted at least " << len + steps
                                << ": make it wider";
    }
    for (int64_t k = 0; k < topk; ++k) {
      int32_t* to = ptr<int32_t>(out) + (i * topk + k) * width;
      std::copy(row, row + len, to);
      std::copy(row + len + k * steps, row + len + (k + 1) * steps, to + len);
    }
  }
}

void gather_accepted_slots_cpu(TensorView index, TensorView slots, TensorView out) {
  check(index, "index", kI32, {kAny});
  check(slots, "slots", kI64, {kAny});
  check(out, "out", kI64, {kAny});
  int64_t found = 0;
  for (int64_t j = 0; j < index.size(0); ++j) {
    const int32_t at = ptr<int32_t>(index)[j];
    if (at < 0) continue;
    if (at >= slots.size(0) || found >= out.size(0)) {
      TVM_FFI_THROW(ValueError) << "accepted index is " << at << " and the place for it " << found << ", wanted below "
                                << slots.size(0) << " and " << out.size(0) << ": check the verify step's shapes";
    }
    ptr<int64_t>(out)[found++] = ptr<int64_t>(slots)[at];
  }
}

void rotate_ids_cpu(TensorView ids, TensorView start, TensorView lens, TensorView last, TensorView at) {
  check(ids, "ids", kI64, {kAny});
  check(start, "start", kI64, {kAny});
  const int64_t b = start.size(0), total = ids.size(0);
  check(lens, "lens", kI64, {b});
  check(last, "last", kI64, {b});
  check(at, "at", kI64, {b});
  int64_t* id = ptr<int64_t>(ids);
  for (int64_t i = 0; i < b; ++i) {
    const int64_t lo = ptr<int64_t>(start)[i], len = ptr<int64_t>(lens)[i], to = ptr<int64_t>(at)[i];
    if (len <= 0) continue;
    if (lo < 0 || lo + len > total || to < 0 || to >= total) {
      TVM_FFI_THROW(ValueError) << "request " << i << " covers ids " << lo << " to " << lo + len << " and sets " << to
                                << ", wanted inside " << total << " ids: check start, lens and select";
    }
    std::copy(id + lo + 1, id + lo + len, id + lo);
    id[to] = ptr<int64_t>(last)[i];
  }
}

void copy_rows_cpu(TensorView data_ptrs, TensorView row_bytes, TensorView to, TensorView source) {
  check(data_ptrs, "data_ptrs", kI64, {kAny});
  const int64_t n = data_ptrs.size(0);
  check(row_bytes, "row_bytes", kI64, {n});
  check(to, "to", kI64, {kAny});
  const int64_t m = to.size(0);
  check(source, "source", kI64, {m});
  std::vector<char> rows;
  for (int64_t layer = 0; layer < n; ++layer) {
    char* base = reinterpret_cast<char*>(ptr<uint64_t>(data_ptrs)[layer]);
    const int64_t size = ptr<int64_t>(row_bytes)[layer];
    rows.resize(static_cast<size_t>(m * size));
    for (int64_t j = 0; j < m; ++j) std::memcpy(rows.data() + j * size, base + ptr<int64_t>(source)[j] * size, size);
    for (int64_t j = 0; j < m; ++j) std::memcpy(base + ptr<int64_t>(to)[j] * size, rows.data() + j * size, size);
  }
}

}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_slots, eagle::write_slots_cpu);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(read_slots, eagle::read_slots_cpu);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(branch_slot_table, eagle::branch_slot_table_cpu);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_accepted_slots, eagle::gather_accepted_slots_cpu);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rotate_ids, eagle::rotate_ids_cpu);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_rows, eagle::copy_rows_cpu);

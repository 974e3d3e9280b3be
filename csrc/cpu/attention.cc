// Splits attention into tasks (request, key head, block of queries, stretch of keys), which run on torch's threads.
#include "attention.h"

#include <bindings/checks.h>
#include <tvm/ffi/optional.h>

#include <memory>
#include <vector>

#include "parallel.h"
#include "read_ahead.h"

namespace eagle {
using tvm::ffi::Optional;

namespace {

constexpr int64_t kRowsPerTask = 64;  // rows (query x head) of a block of queries
constexpr int64_t kKeysPerStretch =
    128;  // long prefixes are shared between threads in stretches of at least this length
constexpr double kMinParallelProducts = 1e6;  // multiplications; below, waking other threads costs more than it saves

struct Group {  // rows that share keys: one block of queries of one request, for one key head
  const Query* queries;
  int64_t first_query, count, kv_head;
  const int32_t* slots;
  int64_t begin, end, stretch;  // keys, and how many of them a task takes
  int64_t first_task, tasks;
  int32_t done;  // tasks that have finished, counted by all threads
};

// Memory that grows and is kept for the next call of this thread.
float* workspace(int slot, int64_t floats) {
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<float, Free> memory[2];
  thread_local int64_t held[2] = {0, 0};
  if (held[slot] < floats) {
    const int64_t bytes = (floats * sizeof(float) + 63) / 64 * 64;
    memory[slot].reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    held[slot] = memory[slot] ? floats : 0;
    if (!memory[slot])
      TVM_FFI_THROW(RuntimeError) << "attention needs " << bytes << " bytes of scratch memory: free some";
  }
  return memory[slot].get();
}

// A stretch of keys for a block of queries: one task for each key head.
struct Unit {
  int32_t first_group, stretch;
  bool first;  // block of its request: what the others read of its keys is in the cache then
};

struct Plan {
  std::vector<Query> queries;  // of every request; groups point into it
  std::vector<Group> groups;
  std::vector<Unit> units;
  int64_t tasks;
  int64_t rows;  // of the largest group
  double work;

  // An empty plan for `count` queries, in the memory of the calling thread's last plan: a call that is not larger than
  // earlier ones of the thread allocates nothing.
  static Plan& begin(int64_t count) {
    thread_local Plan plan;
    plan.queries.resize(count);
    plan.groups.clear();
    plan.units.clear();
    plan.tasks = 0;
    plan.rows = 0;
    plan.work = 0;
    return plan;
  }

  // Adds the queries[first, first + count) of one request, whose keys are in `slots`. The split depends on
  // this request alone, never on the batch or on the number of threads, so that its result does not either.
  void add(const AttentionSpec& a, int64_t first, int64_t count, int64_t first_query, const int32_t* slots) {
    const int64_t block = std::max<int64_t>(1, kRowsPerTask / a.group);
    for (int64_t at = 0; at < count; at += block) {
      Group g{};
      g.queries = queries.data() + first + at;
      g.first_query = first_query + at;
      g.count = std::min(block, count - at);
      g.slots = slots;
      g.begin = INT64_MAX;
      for (int64_t i = 0; i < g.count; ++i) {
        g.begin = std::min(g.begin, std::min(g.queries[i].low, g.queries[i].tail));
        g.end = std::max(g.end, g.queries[i].end);
      }
      g.begin = std::max<int64_t>(0, g.begin) / kBlock * kBlock;
      const int64_t keys = std::max<int64_t>(0, g.end - g.begin);
      g.tasks = 1;
      if (count <= block) g.tasks = std::min<int64_t>(kMaxStretches, std::max<int64_t>(1, keys / kKeysPerStretch));
      g.stretch = ((keys + g.tasks - 1) / g.tasks + kBlock - 1) / kBlock * kBlock;
      if (g.stretch) g.tasks = std::max<int64_t>(1, (keys + g.stretch - 1) / g.stretch);
      for (int32_t i = 0; i < g.tasks; ++i) units.push_back({static_cast<int32_t>(groups.size()), i, at == 0});
      for (g.kv_head = 0; g.kv_head < a.kv_heads; ++g.kv_head) {
        g.first_task = tasks;
        tasks += g.tasks;
        groups.push_back(g);
      }
      rows = std::max(rows, g.count * a.group);
      work += static_cast<double>(keys) * g.count * a.q_heads * (a.dim + a.dim_v);
    }
  }
};

template <class T>
void run(const AttentionSpec& a, Plan& plan) {
  const int64_t rows = padded_rows(plan.rows), part = rows * (a.dim_v + 2);
  // a task whose group has no other keeps its partial result in the thread's own scratch
  const bool split = plan.tasks != static_cast<int64_t>(plan.groups.size());
  float* parts = split ? workspace(0, plan.tasks * part) : nullptr;
  std::atomic<bool> bad_slot{false};
  const int64_t scratch = Scratch::floats(rows, a.dim, a.dim_v);
  auto partial = [&](float* at) { return Partial{at, at + rows * a.dim_v, at + rows * (a.dim_v + 1)}; };

  auto attend = [&](Group& g, int64_t begin, int64_t end, int64_t task) {
    float* own = workspace(1, scratch + part);
    const Stretch s{g.slots, g.kv_head, begin, end};
    const int64_t head = g.kv_head * a.group;
    const T* q = static_cast<const T*>(a.q) + g.first_query * a.q_stride + head * a.dim;
    const Partial mine = partial(g.tasks > 1 ? parts + task * part : own + scratch);
    if (!attend_stretch<T>(a, g.queries, g.count, q, s, Scratch(own, rows, a.dim, a.dim_v), mine)) {
      bad_slot.store(true, std::memory_order_relaxed);
    }
    // the last task of a group merges them all, in the order of their keys
    if (__atomic_add_fetch(&g.done, 1, __ATOMIC_ACQ_REL) < g.tasks) return;
    Partial all[kMaxStretches] = {mine};
    for (int64_t i = 0; g.tasks > 1 && i < g.tasks; ++i) all[i] = partial(parts + (g.first_task + i) * part);
    finish_rows<T>(a, g.count * a.group, all, g.tasks, g.first_query, head);
  };

  const bool parallel = plan.work > kMinParallelProducts;
  const int64_t units = static_cast<int64_t>(plan.units.size());
  // a thread takes all heads of a unit, so that it reads whole rows of the cache, or one where threads would lack work
  const bool whole = !parallel || units >= 2 * max_threads();
  const int64_t heads = whole ? a.kv_heads : 1, read = read_ahead_keys(a);
  parallel_for(units * a.kv_heads / heads, parallel, [&](int64_t i) {
    const Unit& unit = plan.units[i * heads / a.kv_heads];
    Group* group = &plan.groups[unit.first_group + i * heads % a.kv_heads];
    const int64_t begin = group->begin + unit.stretch * group->stretch;
    const int64_t end = std::min(group->end, begin + group->stretch);
    if (whole && unit.first) read_ahead(a, group->slots, begin, std::min(end, begin + read));
    for (int64_t head = 0; head < heads; ++head, ++group) attend(*group, begin, end, group->first_task + unit.stretch);
  });
  if (bad_slot.load()) {
    TVM_FFI_THROW(ValueError) << "slot_table names a slot outside the cache, wanted 0 to " << a.slots - 1
                              << " for every visible key: fill the slot table up to the sequence length";
  }
}

bool is_float8(DLDataType dtype) { return same(dtype, kE4M3) || same(dtype, kE5M2); }

float scale_of(const Optional<TensorView>& scale, const char* name) {
  if (!scale.has_value()) return 1.0f;
  check(scale.value(), name, kF32, {1});
  return *ptr<float>(scale.value());
}

AttentionSpec check_call(const TensorView& q, const TensorView& k, const TensorView& v, double scale, double logit_cap,
                         const Optional<TensorView>& sinks, const Optional<TensorView>& k_scale,
                         const Optional<TensorView>& v_scale, const TensorView& out) {
  AttentionSpec a{};
  const DLDataType dtype = q.dtype();
  if (!same(dtype, kF32) && !same(dtype, kBF16) && !same(dtype, kF16)) {
    TVM_FFI_THROW(TypeError) << "q is " << name_of(dtype)
                             << ", wanted float32, bfloat16 or float16: convert it with .to()";
  }
  a.q_stride = check_rows(q, "q", dtype, {kAny, kAny, kAny});
  a.q_heads = q.size(1);
  a.dim = q.size(2);
  const DLDataType stored = is_float8(k.dtype()) ? k.dtype() : dtype;
  a.element_size = stored.bits / 8;
  a.stored = same(stored, kE5M2) ? Float8::kE5M2 : Float8::kE4M3;
  a.keys = check_cache(k, "k_cache", stored, {kAny, kAny, a.dim});
  a.slots = k.size(0);
  a.kv_heads = k.size(1);
  a.values = check_cache(v, "v_cache", stored, {a.slots, a.kv_heads, kAny});
  a.dim_v = v.size(2);
  if (a.kv_heads < 1 || a.q_heads % a.kv_heads) {
    TVM_FFI_THROW(ValueError) << "q has " << a.q_heads << " heads over " << a.kv_heads
                              << " key heads, wanted a multiple: check the head counts";
  }
  for (int64_t dim : {a.dim, a.dim_v}) {
    if (dim < 16 || dim > kMaxDim || dim % 16) {
      TVM_FFI_THROW(ValueError) << "head_dim is " << dim << ", wanted a multiple of 16 up to " << kMaxDim
                                << ": use the torch path";
    }
  }
  a.group = a.q_heads / a.kv_heads;
  check(out, "out", dtype, {q.size(0), a.q_heads, a.dim_v});
  if (sinks.has_value()) {
    check(sinks.value(), "sinks", kF32, {a.q_heads});
    a.sinks = ptr<float>(sinks.value());
  }
  a.q = q.data_ptr();
  a.k = k.data_ptr();
  a.v = v.data_ptr();
  a.out = out.data_ptr();
  a.scale = static_cast<float>(scale) * scale_of(k_scale, "k_scale");
  a.v_scale = scale_of(v_scale, "v_scale");
  a.logit_cap = static_cast<float>(logit_cap);
  return a;
}

const int32_t* check_slots(const TensorView& slot_table, const TensorView& rows, int64_t request, int64_t keys) {
  const int64_t row = ptr<int64_t>(rows)[request];
  if (row < 0 || row >= slot_table.size(0)) {
    TVM_FFI_THROW(ValueError) << "rows[" << request << "] is " << row << ", wanted 0 to " << slot_table.size(0) - 1
                              << ": pass rows of the slot table";
  }
  if (keys < 0 || keys > slot_table.size(1)) {
    TVM_FFI_THROW(ValueError) << "request " << request << " needs " << keys << " positions, wanted 0 to "
                              << slot_table.size(1) << ": the slot table is too short";
  }
  return ptr<int32_t>(slot_table) + row * slot_table.size(1);
}

void run_any(const AttentionSpec& a, Plan& plan, DLDataType dtype) {
  if (same(dtype, kF32)) {
    run<float>(a, plan);
  } else if (same(dtype, kF16)) {
    run<simd::Float16>(a, plan);
  } else {
    run<simd::BFloat16>(a, plan);
  }
}

}  // namespace

void tree_attention(TensorView q, TensorView k, TensorView v, TensorView slot_table, TensorView rows,
                    TensorView prefix_lens, TensorView ancestors, int64_t tail, double scale, double logit_cap,
                    int64_t window, int64_t chunk, Optional<TensorView> sinks, Optional<TensorView> k_scale,
                    Optional<TensorView> v_scale, TensorView out) {
  const AttentionSpec a = check_call(q, k, v, scale, logit_cap, sinks, k_scale, v_scale, out);
  check(ancestors, "ancestors", kI64, {kAny, kAny});
  const int64_t b = ancestors.size(0), nodes = ancestors.size(1);
  check_shape(q, "q", {b * nodes, a.q_heads, a.dim});
  check(slot_table, "slot_table", kI32, {kAny, kAny});
  check(rows, "rows", kI64, {b});
  check(prefix_lens, "prefix_lens", kI64, {b});
  if (tail < 0 || tail > 64) {
    TVM_FFI_THROW(ValueError) << "tail is " << tail << ", wanted 0 to 64: ancestors are one 64-bit bitmask per node";
  }
  Plan& plan = Plan::begin(b * nodes);
  for (int64_t i = 0; i < b; ++i) {
    const int64_t prefix = ptr<int64_t>(prefix_lens)[i];
    const int32_t* slots = check_slots(slot_table, rows, i, prefix < 0 ? prefix : prefix + tail);
    for (int64_t r = 0; r < nodes; ++r) {
      const uint64_t bits = ptr<uint64_t>(ancestors)[i * nodes + r];
      const int64_t position = prefix + __builtin_popcountll(bits) - 1;
      const int64_t first = first_visible(position, window, chunk);
      // the k-th set bit is a node at position prefix + k
      const uint64_t seen = without_lowest(bits, first - prefix);
      plan.queries[i * nodes + r] = {std::min(prefix, first), prefix, prefix, prefix + tail, seen, nullptr};
    }
    plan.add(a, i * nodes, nodes, i * nodes, slots);
  }
  run_any(a, plan, q.dtype());
}

void extend_attention(TensorView q, TensorView k, TensorView v, TensorView slot_table, TensorView rows,
                      TensorView seq_lens, TensorView extend_lens, TensorView starts, double scale, bool causal,
                      Optional<TensorView> mask, double logit_cap, int64_t window, int64_t chunk,
                      Optional<TensorView> sinks, Optional<TensorView> k_scale, Optional<TensorView> v_scale,
                      TensorView out) {
  const AttentionSpec a = check_call(q, k, v, scale, logit_cap, sinks, k_scale, v_scale, out);
  check(seq_lens, "seq_lens", kI64, {kAny});
  const int64_t b = seq_lens.size(0);
  check(extend_lens, "extend_lens", kI64, {b});
  check(starts, "starts", kI64, {b});
  check(slot_table, "slot_table", kI32, {kAny, kAny});
  check(rows, "rows", kI64, {b});
  int64_t total = 0, squares = 0;
  for (int64_t i = 0; i < b; ++i) {
    const int64_t keys = ptr<int64_t>(seq_lens)[i], fresh = ptr<int64_t>(extend_lens)[i],
                  start = ptr<int64_t>(starts)[i];
    check_slots(slot_table, rows, i, keys);
    if (fresh < 0 || fresh > keys || start < 0 || start > q.size(0) - fresh) {
      TVM_FFI_THROW(ValueError) << "request " << i << " has " << fresh << " new tokens of " << keys << " from row "
                                << start << " of q's " << q.size(0)
                                << " rows, wanted new tokens within the sequence and within q: "
                                << "check extend_lens and starts";
    }
    total += fresh;
    squares += fresh * fresh;
  }
  if (mask.has_value()) check(mask.value(), "mask", kBool, {squares});
  Plan& plan = Plan::begin(total);
  const uint8_t* bytes = mask.has_value() ? ptr<uint8_t>(mask.value()) : nullptr;
  int64_t at = 0;
  for (int64_t i = 0; i < b; ++i) {
    const int64_t keys = ptr<int64_t>(seq_lens)[i], fresh = ptr<int64_t>(extend_lens)[i], prefix = keys - fresh;
    for (int64_t j = 0; j < fresh; ++j) {
      Query& query = plan.queries[at + j];
      if (bytes) {
        int64_t seen = 0;
        for (int64_t t = 0; t < fresh; ++t) seen += bytes[t] != 0;
        const int64_t first = first_visible(prefix + seen - 1, window, chunk);
        int64_t hidden = 0;  // new tokens before the first one at that position or a later one
        for (int64_t drop = first - prefix; drop > 0 && hidden < fresh; ++hidden) drop -= bytes[hidden] != 0;
        query = {std::min(prefix, first), prefix, prefix + hidden, keys, 0, bytes + hidden};
        bytes += fresh;
      } else {
        const int64_t position = prefix + j, end = causal ? position + 1 : keys;
        query = {first_visible(position, window, chunk), end, end, end, 0, nullptr};
      }
    }
    plan.add(a, at, fresh, ptr<int64_t>(starts)[i], check_slots(slot_table, rows, i, keys));
    at += fresh;
  }
  run_any(a, plan, q.dtype());
}

}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(tree_attention, eagle::tree_attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(extend_attention, eagle::extend_attention);

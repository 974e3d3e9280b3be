// Binding of start_round: the argument checks and the exported function, the same in the CPU and the CUDA library. Each
// library defines `run` for the call below and includes this header in one source file.
#pragma once
#include <eagle/round_start.h>

#include "checks.h"

namespace eagle {

struct StartParams {  // sampling parameters of rows
  float* temperatures;
  int32_t* top_ks;
  float *top_ps, *min_ps;
};

struct StartCall {
  const int64_t *lengths, *rows;
  const int32_t* req_to_token;
  const int64_t* keys;
  StartParams sampling;
  int64_t b, table_rows, context;
  int64_t row_step;  // elements from one row of req_to_token to the next
  int64_t *prefix_lens, *requests, *out_keys, *slots;
  int32_t* table;
  StartParams out;
  int64_t lanes, reach, width, tiles;  // tiles of the table
  DLDevice device;

  template <class Team>
  EAGLE_HD void fill(const Team& team, int64_t i, int64_t tile) const {
    StartSource source{1, 0, 0, nullptr, context};
    const int64_t row = i < b ? rows[i] : -1;
    const bool serves = row >= 0 && row < table_rows && lengths[i] >= 0;
    if (serves) source = {lengths[i], row, keys[row], req_to_token + row * row_step, context};
    fill_lane(team, {prefix_lens + i, requests + i, out_keys + i, slots + i * reach, reach, table + i * width, width},
              source, tile * kStartTile);
    if (tile > 0 || team.rank() > 0) return;
    out.temperatures[i] = serves ? sampling.temperatures[i] : 1.0f;
    out.top_ks[i] = serves ? sampling.top_ks[i] : 1;
    out.top_ps[i] = serves ? sampling.top_ps[i] : 1.0f;
    out.min_ps[i] = serves ? sampling.min_ps[i] : 0.0f;
  }
};

void run(const StartCall& call);

namespace bindings {

inline StartParams check_start_params(const TensorView& temperatures, const TensorView& top_ks,
                                      const TensorView& top_ps, const TensorView& min_ps, const std::string& name,
                                      int64_t rows) {
  check(temperatures, (name + ".temperatures").c_str(), kF32, {rows});
  check(top_ks, (name + ".top_ks").c_str(), kI32, {rows});
  check(top_ps, (name + ".top_ps").c_str(), kF32, {rows});
  check(min_ps, (name + ".min_ps").c_str(), kF32, {rows});
  return {ptr<float>(temperatures), ptr<int32_t>(top_ks), ptr<float>(top_ps), ptr<float>(min_ps)};
}

inline void start_round(TensorView lengths, TensorView rows, TensorView req_to_token, TensorView keys,
                        TensorView temperatures, TensorView top_ks, TensorView top_ps, TensorView min_ps,
                        TensorView prefix_lens, TensorView requests, TensorView out_keys, TensorView slots,
                        TensorView table, TensorView out_temperatures, TensorView out_top_ks, TensorView out_top_ps,
                        TensorView out_min_ps) {
  check(lengths, "lengths", kI64, {kAny});
  const int64_t b = lengths.size(0);
  check(rows, "rows", kI64, {b});
  const int64_t row_step = check_rows(req_to_token, "req_to_token", kI32, {kAny, kAny});
  const int64_t size = req_to_token.size(0), context = req_to_token.size(1);
  check(keys, "keys", kI64, {size});
  const StartParams sampling = check_start_params(temperatures, top_ks, top_ps, min_ps, "sampling", b);
  check(slots, "out.slots", kI64, {kAny, kAny});
  const int64_t lanes = slots.size(0);
  check(prefix_lens, "out.prefix_lens", kI64, {lanes});
  check(requests, "out.requests", kI64, {lanes});
  check(out_keys, "out.keys", kI64, {lanes});
  check(table, "out.table", kI32, {lanes, kAny});
  const StartParams out =
      check_start_params(out_temperatures, out_top_ks, out_top_ps, out_min_ps, "out.sampling", lanes);
  if (b > lanes) {
    TVM_FFI_THROW(ValueError) << "lengths has " << b << " requests, wanted at most " << lanes
                              << ": out has a lane for each";
  }
  if (size < 1 || context < 1) {
    TVM_FFI_THROW(ValueError) << "req_to_token has shape [" << size << ", " << context
                              << "], wanted rows and positions: pass the engine's";
  }
  if (lanes == 0) return;
  const int64_t width = table.size(1);
  run(StartCall{ptr<int64_t>(lengths),
                ptr<int64_t>(rows),
                ptr<int32_t>(req_to_token),
                ptr<int64_t>(keys),
                sampling,
                b,
                size,
                context,
                row_step,
                ptr<int64_t>(prefix_lens),
                ptr<int64_t>(requests),
                ptr<int64_t>(out_keys),
                ptr<int64_t>(slots),
                ptr<int32_t>(table),
                out,
                lanes,
                slots.size(1),
                width,
                width > 0 ? (width - 1) / kStartTile + 1 : 1,
                lengths.device()});
}

}  // namespace bindings
}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(start_round, eagle::bindings::start_round);

// Binding of start_round: the argument checks and the exported function, the same in the CPU and the CUDA library. Each
// library defines `run` for the call below and includes this header in one source file.
#pragma once
#include <eagle/round_start.h>

#include "checks.h"
#include "sampling_params.h"

namespace eagle {

struct StartCall {
  const int64_t *lengths, *rows;
  const int32_t* req_to_token;
  const int64_t* rng_keys;
  SamplingTable sampling;
  int64_t b, table_rows, context;
  int64_t row_step;  // elements from one row of req_to_token to the next
  int64_t *prefix_lens, *requests, *out_rng_keys, *slots;
  int32_t* table;
  SamplingTable out;
  int64_t padded, reach, width, tiles;  // tiles of the table
  DLDevice device;

  template <class Team>
  EAGLE_HD void fill(const Team& team, int64_t i, int64_t tile) const {
    StartSource source{1, 0, 0, nullptr, context};
    const int64_t row = i < b ? rows[i] : -1;
    const bool serves = row >= 0 && row < table_rows && lengths[i] >= 0;
    if (serves) source = {lengths[i], row, rng_keys[row], req_to_token + row * row_step, context};
    fill_request(team,
                 {prefix_lens + i, requests + i, out_rng_keys + i, slots + i * reach, reach, table + i * width, width},
                 source, tile * kStartTile);
    if (tile > 0 || team.rank() > 0) return;
    out.set_row(i, serves ? sampling.row(i) : greedy_row());
  }
};

void run(const StartCall& call);

namespace bindings {

inline void start_round(TensorView lengths, TensorView rows, TensorView req_to_token, TensorView rng_keys,
                        Array<Tensor> sampling, TensorView prefix_lens, TensorView requests, TensorView out_rng_keys,
                        TensorView slots, TensorView table, Array<Tensor> out_sampling) {
  check(lengths, "lengths", kI64, {kAny});
  const int64_t b = lengths.size(0);
  check(rows, "rows", kI64, {b});
  const int64_t row_step = check_rows(req_to_token, "req_to_token", kI32, {kAny, kAny});
  const int64_t size = req_to_token.size(0), context = req_to_token.size(1);
  check(rng_keys, "rng_keys", kI64, {size});
  const SamplingTable given = check_sampling(sampling, "sampling", b);
  check(slots, "out.slots", kI64, {kAny, kAny});
  const int64_t padded = slots.size(0);
  check(prefix_lens, "out.prefix_lens", kI64, {padded});
  check(requests, "out.requests", kI64, {padded});
  check(out_rng_keys, "out.rng_keys", kI64, {padded});
  check(table, "out.table", kI32, {padded, kAny});
  const SamplingTable out = check_sampling(out_sampling, "out.sampling", padded);
  if (b > padded) {
    TVM_FFI_THROW(ValueError) << "lengths has " << b << " requests, wanted at most " << padded
                              << ": out has a place for each";
  }
  if (size < 1 || context < 1) {
    TVM_FFI_THROW(ValueError) << "req_to_token has shape [" << size << ", " << context
                              << "], wanted rows and positions: pass the engine's";
  }
  if (padded == 0) return;
  const int64_t width = table.size(1);
  run(StartCall{ptr<int64_t>(lengths),
                ptr<int64_t>(rows),
                ptr<int32_t>(req_to_token),
                ptr<int64_t>(rng_keys),
                given,
                b,
                size,
                context,
                row_step,
                ptr<int64_t>(prefix_lens),
                ptr<int64_t>(requests),
                ptr<int64_t>(out_rng_keys),
                ptr<int64_t>(slots),
                ptr<int32_t>(table),
                out,
                padded,
                slots.size(1),
                width,
                width > 0 ? (width - 1) / kStartTile + 1 : 1,
                lengths.device()});
}

}  // namespace bindings
}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(start_round, eagle::bindings::start_round);

// Bindings of penalize_nodes and count_tokens: the argument checks and the exported functions, the same in the CPU and
// the CUDA library. Each library defines `run` for the calls below and includes this header in one source file.
#pragma once
#include <eagle/penalties.h>

#include "checks.h"

namespace eagle {

struct PenalizeCall {
  float* logits;
  int64_t step;  // elements from one row of logits to the next
  const int64_t *tokens, *rows, *lengths;
  const uint64_t* ancestors;
  const int32_t *depths, *counts;
  const float *frequency, *presence, *repetition;
  const int64_t *stops, *min_lens;
  int64_t b, table_rows;
  int32_t width, vocabulary, num_stops, tiles;  // tiles of the vocabulary
  DLDevice device;

  template <class Team>
  EAGLE_HD void tile(const Team& team, PenaltyScratch& scratch, int64_t i, int32_t tile) const {
    const int64_t row = rows[i], node = i * width;
    if (row < 0 || row >= table_rows) return;
    const int32_t begin = tile * kPenaltyTile;
    penalize_tile(
        team, scratch,
        PenaltyRow{counts + row * vocabulary, frequency[row], presence[row], repetition[row], stops + row * num_stops,
                   num_stops, min_lens[row]},
        NodeRow{tokens + node, ancestors + node, depths + node, width, lengths[i], logits + node * step, step}, begin,
        vocabulary - begin < kPenaltyTile ? vocabulary : begin + kPenaltyTile);
  }
};

struct CountCall {
  int32_t* counts;
  const int64_t *rows, *tokens;
  const int32_t* lengths;
  int64_t b, most, table_rows, vocabulary;
  DLDevice device;

  // Where token j of request i is counted, null if it is not.
  EAGLE_HD int32_t* place(int64_t i, int64_t j) const {
    const int64_t row = rows[i], token = tokens[i * most + j];
    const bool counted = j < lengths[i] && row >= 0 && row < table_rows && token >= 0 && token < vocabulary;
    return counted ? counts + row * vocabulary + token : nullptr;
  }
};

void run(const PenalizeCall& call);
void run(const CountCall& call);

namespace bindings {

inline void penalize_nodes(TensorView logits, TensorView tokens, TensorView ancestors, TensorView depths,
                           TensorView rows, TensorView lengths, TensorView counts, TensorView frequency,
                           TensorView presence, TensorView repetition, TensorView stops, TensorView min_lens) {
  check(tokens, "tokens", kI64, {kAny, kAny});
  const int64_t b = tokens.size(0), width = tokens.size(1);
  if (width < 1 || width > kMaxWidth) {
    TVM_FFI_THROW(ValueError) << "tokens has " << width << " nodes per request, wanted 1 to " << kMaxWidth
                              << ": ancestors have 64 bits";
  }
  check(ancestors, "ancestors", kI64, {b, width});
  check(depths, "depths", kI32, {b, width});
  const int64_t step = check_rows(logits, "logits", kF32, {b * width, kAny});  // engines slice off padding
  const int64_t vocabulary = logits.size(1);
  check(rows, "rows", kI64, {b});
  check(lengths, "lengths", kI64, {b});
  check(counts, "penalties.counts", kI32, {kAny, vocabulary});
  const int64_t size = counts.size(0);
  check(frequency, "penalties.frequency", kF32, {size});
  check(presence, "penalties.presence", kF32, {size});
  check(repetition, "penalties.repetition", kF32, {size});
  check(stops, "penalties.stops", kI64, {size, kAny});
  check(min_lens, "penalties.min_lens", kI64, {size});
  if (b == 0 || vocabulary == 0) return;
  run(PenalizeCall{ptr<float>(logits),
                   step,
                   ptr<int64_t>(tokens),
                   ptr<int64_t>(rows),
                   ptr<int64_t>(lengths),
                   ptr<uint64_t>(ancestors),
                   ptr<int32_t>(depths),
                   ptr<int32_t>(counts),
                   ptr<float>(frequency),
                   ptr<float>(presence),
                   ptr<float>(repetition),
                   ptr<int64_t>(stops),
                   ptr<int64_t>(min_lens),
                   b,
                   size,
                   static_cast<int32_t>(width),
                   static_cast<int32_t>(vocabulary),
                   static_cast<int32_t>(stops.size(1)),
                   static_cast<int32_t>((vocabulary - 1) / kPenaltyTile + 1),
                   logits.device()});
}

inline void count_tokens(TensorView counts, TensorView rows, TensorView tokens, TensorView lengths) {
  check(counts, "counts", kI32, {kAny, kAny});
  check(tokens, "tokens", kI64, {kAny, kAny});
  const int64_t b = tokens.size(0), most = tokens.size(1), vocabulary = counts.size(1);
  check(rows, "rows", kI64, {b});
  check(lengths, "lengths", kI32, {b});
  if (b == 0 || most == 0) return;
  run(CountCall{ptr<int32_t>(counts), ptr<int64_t>(rows), ptr<int64_t>(tokens), ptr<int32_t>(lengths), b, most,
                counts.size(0), vocabulary, counts.device()});
}

}  // namespace bindings
}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(penalize_nodes, eagle::bindings::penalize_nodes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(count_tokens, eagle::bindings::count_tokens);

#include <bindings/tree.h>

#include "topk.h"

namespace eagle {

void run(const TopkCall& call) {
  const auto rows = [&](auto* logits) {
    cpu::topk_rows(logits, call.row_stride, call.rows, call.vocabulary, call.k, call.logp, call.index);
  };
  if (same(call.dtype, kF32)) rows(static_cast<const float*>(call.logits));
  if (same(call.dtype, kBF16)) rows(static_cast<const simd::BFloat16*>(call.logits));
  if (same(call.dtype, kF16)) rows(static_cast<const simd::Float16*>(call.logits));
}

void run(const GrowCall& call) {
  BestScratch scratch;
  for (int64_t i = 0; i < call.b; ++i) {
    grow_level(SerialTeam{}, scratch, call.table.row(i), call.level(i), call.out.rows, call.out.row(i));
  }
}

void run(const LevelsCall& call) {
  LevelsScratch scratch;
  for (int64_t i = 0; i < call.b; ++i) grow_levels(SerialTeam{}, scratch, call.table.row(i), call.levels(i));
}

void run(const SelectCall& call) {
  SelectScratch scratch;
  for (int64_t i = 0; i < call.b; ++i) {
    if (!select_tree(SerialTeam{}, scratch, call.table.row(i), call.table.capacity, call.root_tokens[i], call.width,
                     call.row(i))) {
      TVM_FFI_THROW(ValueError) << "table of request " << i << " has a candidate whose parent scores lower or comes "
                                << "after it, wanted scores that never rise from parent to child: fill it with "
                                << "grow_level";
    }
  }
}

void run(const LinksCall& call) {
  for (int64_t i = 0; i < call.b; ++i) call.link(SerialTeam{}, i);
}

}  // namespace eagle

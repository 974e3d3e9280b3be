// The door of sibling_links: both libraries check the same tensors and export the same function. Each defines `run`.
#pragma once
#include "ffi_checks.h"
#include "links.h"

namespace eagle {

struct LinksCall {
  const int32_t* parents;
  int64_t *first_child, *next_sibling;
  int64_t b;
  int32_t width;
  DLDevice device;

  template <class Team>
  EAGLE_HD void link(const Team& team, int64_t i) const {
    const int64_t at = i * width;
    sibling_links(team, parents + at, width, first_child + at, next_sibling + at);
  }
};

void run(const LinksCall& call);

inline void sibling_links_door(TensorView parents, TensorView first_child, TensorView next_sibling) {
  check(parents, "parents", kI32, {kAny, kAny});
  const int64_t b = parents.size(0), width = parents.size(1);
  check(first_child, "first_child", kI64, {b, width});
  check(next_sibling, "next_sibling", kI64, {b, width});
  if (b == 0) return;
  run(LinksCall{ptr<int32_t>(parents), ptr<int64_t>(first_child), ptr<int64_t>(next_sibling), b,
                static_cast<int32_t>(width), parents.device()});
}

}  // namespace eagle

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sibling_links, eagle::sibling_links_door);

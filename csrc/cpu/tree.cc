#include <eagle/tree_door.h>

namespace eagle {

void run(const GrowCall& call) {
  BestScratch scratch;
  for (int64_t i = 0; i < call.b; ++i) {
    grow_level(SerialTeam{}, scratch, call.table.row(i), call.level(i), call.out.rows, call.out.row(i));
  }
}

void run(const SelectCall& call) {
  SelectScratch scratch;
  for (int64_t i = 0; i < call.b; ++i) {
    if (!select_tree(SerialTeam{}, scratch, call.table.row(i), call.table.capacity, call.root_tokens[i], call.width,
                     call.row(i))) {
      TVM_FFI_THROW(ValueError)
          << "table of request " << i << " has a candidate whose parent scores lower or stands "
          << "behind it, wanted scores that never rise from parent to child: fill it with grow_level";
    }
  }
}

}  // namespace eagle

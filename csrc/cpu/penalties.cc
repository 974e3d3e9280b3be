// Values are checked before the first one is changed.
#include <bindings/penalties.h>

#include "parallel.h"

namespace eagle {
namespace {

constexpr int64_t kMinParallelCounts = 1 << 18;  // below, waking other threads costs more than it saves

void check_table_rows(const int64_t* rows, int64_t b, int64_t size) {
  for (int64_t i = 0; i < b; ++i) {
    if (rows[i] < 0 || rows[i] >= size) {
      TVM_FFI_THROW(ValueError) << "rows[" << i << "] is " << rows[i] << ", wanted 0 to " << size - 1
                                << ": the tables have a row for each request";
    }
  }
}

}  // namespace

void run(const PenalizeCall& call) {
  check_table_rows(call.rows, call.b, call.table_rows);
  const int64_t tiles = call.tiles;
  parallel_for(call.b * tiles, call.b * call.vocabulary > kMinParallelCounts, [&](int64_t task) {
    PenaltyScratch scratch;
    call.tile(SerialTeam{}, scratch, task / tiles, static_cast<int32_t>(task % tiles));
  });
}

void run(const CountCall& call) {
  check_table_rows(call.rows, call.b, call.table_rows);
  for (int64_t i = 0; i < call.b; ++i) {
    const int32_t length = call.lengths[i];
    if (length < 0 || length > call.most) {
      TVM_FFI_THROW(ValueError) << "lengths[" << i << "] is " << length << ", wanted 0 to " << call.most
                                << ": pass the lengths of verify_tree";
    }
    for (int64_t j = 0; j < length; ++j) {
      const int64_t token = call.tokens[i * call.most + j];
      if (token < 0 || token >= call.vocabulary) {
        TVM_FFI_THROW(ValueError) << "tokens[" << i << ", " << j << "] is " << token << ", wanted 0 to "
                                  << call.vocabulary - 1 << ": counts has a column per token";
      }
    }
  }
  for (int64_t i = 0; i < call.b; ++i) {
    for (int64_t j = 0; j < call.lengths[i]; ++j) ++*call.place(i, j);
  }
}

}  // namespace eagle

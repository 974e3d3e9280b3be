#include <bindings/round_start.h>

namespace eagle {

void run(const StartCall& call) {
  for (int64_t i = 0; i < call.b; ++i) {
    if (call.lengths[i] < 0) {
      TVM_FFI_THROW(ValueError) << "lengths[" << i << "] is " << call.lengths[i]
                                << ", wanted 0 or more: it counts committed tokens";
    }
    if (call.rows[i] < 0 || call.rows[i] >= call.table_rows) {
      TVM_FFI_THROW(ValueError) << "rows[" << i << "] is " << call.rows[i] << ", wanted 0 to " << call.table_rows - 1
                                << ": req_to_token has a row for each request";
    }
  }
  for (int64_t i = 0; i < call.padded; ++i) {
    for (int64_t tile = 0; tile < call.tiles; ++tile) call.fill(SerialTeam{}, i, tile);
  }
}

}  // namespace eagle

#include <bindings/round_start.h>

namespace eagle {

void run(const StartCall& call) {
  for (int64_t i = 0; i < call.lanes; ++i) {
    for (int64_t tile = 0; tile < call.tiles; ++tile) call.fill(SerialTeam{}, i, tile);
  }
}

}  // namespace eagle

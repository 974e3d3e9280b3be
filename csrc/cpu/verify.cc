#include <eagle/verify_door.h>

namespace eagle {

void run(const GreedyCall& call) {
  for (int64_t i = 0; i < call.b; ++i) call.walk(SerialTeam{}, i);
}

}  // namespace eagle

#include <bindings/accepted_path.h>

namespace eagle {

void run(const PathCall& call) {
  for (int64_t i = 0; i < call.b; ++i) call.read(SerialTeam{}, i);
}

}  // namespace eagle

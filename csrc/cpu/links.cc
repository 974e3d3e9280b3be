#include <eagle/links_door.h>

namespace eagle {

void run(const LinksCall& call) {
  for (int64_t i = 0; i < call.b; ++i) call.link(SerialTeam{}, i);
}

}  // namespace eagle

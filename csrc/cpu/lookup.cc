#include <bindings/lookup.h>

namespace eagle {

void run(const LookupCall& call) {
  LookupScratch scratch;
  for (int64_t i = 0; i < call.b; ++i) call.look(SerialTeam{}, scratch, i);
}

void run(const AppendCall& call) {
  for (int64_t i = 0; i < call.b; ++i) call.append(SerialTeam{}, i);
}

}  // namespace eagle

// Registration of everything that ships, once per process. No static initialisers.
#include <mutex>

#include "ops/kernels.h"
#include "ops/ops.h"
#include "ops/pointwise.h"

namespace dtensor {

#define DT_OP_FAMILY(name) void Register##name##Ops();
#include "ops/list.inc"
#undef DT_OP_FAMILY

void RegisterOps() {
  static std::once_flag once;
  std::call_once(once, [] {
    RegisterKernels();
    RegisterPointwiseOps();
#define DT_OP_FAMILY(name) Register##name##Ops();
#include "ops/list.inc"
#undef DT_OP_FAMILY
  });
}

}  // namespace dtensor

// The kernels of ops/pointwise/real.inc.
// clang-format off: it says how the others are compiled
#include "dtensor/tensor/cuda/math.h"
// clang-format on
#include "dtensor/ops/cpu/make_trig_table.h"

namespace dtensor {
static __device__ constexpr TrigTable kTrigTable = MakeTrigTable();
}  // namespace dtensor

#include "dtensor/ops/cpu/gamma.h"

#define DT_TABLE "dtensor/ops/pointwise/real.inc"
#define DT_ADD AddRealKernels
#include "dtensor/tensor/cuda/kernels/table.inc"

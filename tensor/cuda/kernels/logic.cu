// The kernels of ops/pointwise/logic.inc.
#define DT_TABLE "dtensor/ops/pointwise/logic.inc"
#define DT_ADD AddLogicKernels
#include "dtensor/tensor/cuda/kernels/table.inc"

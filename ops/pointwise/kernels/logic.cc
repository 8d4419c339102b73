// The loops of ops/pointwise/logic.inc.
#define DT_TABLE "dtensor/ops/pointwise/logic.inc"
#define DT_REGISTER RegisterLogic
#include "dtensor/ops/pointwise/kernels/table.inc"

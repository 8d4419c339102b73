// The loops of ops/pointwise/elementwise.inc, one per computing type, and their registration.
#include "dtensor/ops/cpu/powers.h"

#define DT_TABLE "dtensor/ops/pointwise/elementwise.inc"
#define DT_REGISTER RegisterPointwise
#define DT_MORE_TABLES RegisterLogic(add), RegisterReal(add), RegisterActivations(add);
#include "dtensor/ops/pointwise/kernels/table.inc"

// The loops of ops/pointwise/real.inc.
#include "dtensor/ops/cpu/real.h"

#include "dtensor/ops/cpu/gamma.h"
#include "dtensor/ops/cpu/trig.h"

#define DT_TABLE "dtensor/ops/pointwise/real.inc"
#define DT_REGISTER RegisterReal
#include "dtensor/ops/pointwise/kernels/table.inc"

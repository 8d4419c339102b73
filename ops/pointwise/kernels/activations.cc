// The loops of ops/pointwise/activations.inc.
#include "dtensor/ops/cpu/activations.h"

#define DT_TABLE "dtensor/ops/pointwise/activations.inc"
#define DT_REGISTER RegisterActivations
#include "dtensor/ops/pointwise/kernels/table.inc"

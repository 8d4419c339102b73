// The kernels of ops/pointwise/activations.inc.
#define DT_TABLE "dtensor/ops/pointwise/activations.inc"
#define DT_ADD AddActivationKernels
#include "dtensor/tensor/cuda/kernels/table.inc"

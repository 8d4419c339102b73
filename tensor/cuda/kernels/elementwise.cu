// The kernels of ops/pointwise/elementwise.inc.
#define DT_TABLE "dtensor/ops/pointwise/elementwise.inc"
#define DT_ADD AddElementwiseKernels
#include "dtensor/tensor/cuda/kernels/table.inc"

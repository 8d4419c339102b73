// Convolutions of float32 by oneDNN: what it does faster than columns and Gemm.
#pragma once

#include <cstdint>

namespace dtensor {

class Workspace;

// x [n, groups c, in...], w [groups o, c, kernel...], y [n, groups o, out...], b [groups o] or
// null; all row-major. `make` says which of x, w and y is computed from the other two; b is added
// where y is. Spatial dims are the last `dims` of three. y at t reads x at t * stride - before + k
// * dilation, and 0 where that is outside.
struct ConvCall {
  enum class Make { kY, kX, kW } make;
  int dims;
  int64_t n, groups, c, o;
  int64_t in[3], out[3], kernel[3], stride[3], dilation[3], before[3];
  float *x, *w, *y;
  const float* b;
  Workspace* workspace;
};
// False where oneDNN does not take it: then nothing was done. Single-threaded; what oneDNN prepares
// for a shape is kept, up to 512 shapes per thread.
//   Bits:   the same for the same call on the same CPU level.
//   Errors: throws Error (ResourceExhausted) without memory.
bool ConvF32(const ConvCall& call);

}  // namespace dtensor

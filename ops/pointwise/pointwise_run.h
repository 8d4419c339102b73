// How a pointwise kernel walks its arrays: dims are merged, and the op's contiguous loop is run on
// spans of f64, f32 or int64. What is strided or of another dtype goes through small buffers, so an
// op has one loop per computing type and nothing else.
#pragma once

#include <cstdint>

#include "dtensor/tensor/kernel.h"

namespace dtensor {

// out and in are contiguous spans of n elements of the computing type (uint8_t for bool operands
// and results). `out` may be in[0]. attrs has at least one entry.
using PointwiseSpanFn = void (*)(void* out, const void* const* in, int64_t n, const Attr* attrs);

struct PointwiseLoop {
  PointwiseSpanFn f64, f32, i64;  // null where the type does not occur
  int mask = -1;                  // the bool operand
  bool bool_out = false;
};

// Inputs and output have equal sizes and any strides; at most 3 inputs.
void RunPointwise(const KernelCall& call, const PointwiseLoop& loop);
// Of a division by in[1]: the call fails where that is a whole number and has a zero.
void RunQuotient(const KernelCall& call, const PointwiseLoop& loop);

}  // namespace dtensor

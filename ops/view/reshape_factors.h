// The factor string of a reshape.
#pragma once

#include "dtensor/op.h"
#include "dtensor/tensor/shape.h"

namespace dtensor {

// Common refinement of the dims of `in` and `out` (same number of elements): pieces that both sides
// share are factors, a dim is the composite of its pieces, and what does not nest is read whole.
//   [6, 4] -> [24]      "(f0 f1) ... -> ...": "f0 f1 -> (f0 f1)"
//   [24] -> [6, 4]      "(f0 f1) -> f0 f1"
//   [6, 4] -> [4, 6]    "(f0 [w0]) [w1] -> (f0 [w2]) [w3]", f0 of size 2
//   [6, 1] -> [6]       "f0 1 -> f0"
// With a size of 0 anywhere every dim is read whole.
FactorText ReshapeFactors(IntSpan in, IntSpan out);

}  // namespace dtensor

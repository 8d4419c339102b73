// Shared by losses and norms.
#pragma once

#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {

// x in the dtype in which losses and statistics are computed: float32 for the 16-bit floats.
inline DTensor Wide(const DTensor& x) { return to(x, ComputeType(x.dtype())); }

// Of losses that have no mean over the batch: only kl_div has.
inline void RequireReduction(Reduction reduction) {
  if (reduction != Reduction::kBatchMean) return;
  ThrowInvalid("loss",
               "the reduction is none, mean or sum; kl_div alone has a mean over the batch");
}

}  // namespace dtensor

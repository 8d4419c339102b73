// cross_entropy with z-loss: what token_loss (parallel/plan/loss_parallel.h) is made of.
#pragma once

#include "dtensor/ops/ops.h"

namespace dtensor::internal {

// cross_entropy; for class indices, also z_loss times the square of log(sum(exp(logits))) per row,
// whose mean is over the rows that count, whatever the weights.
DTensor CrossEntropy(const DTensor& logits, const DTensor& target, const DTensor& weight,
                     int64_t ignore_index, Reduction reduction, double label_smoothing,
                     double z_loss);

}  // namespace dtensor::internal

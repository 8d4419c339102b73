// Whether ranks that should hold the same do.
#pragma once

#include "absl/status/status.h"
#include "dtensor/parallel/module/module.h"
#include "dtensor/parallel/optim/optim.h"

namespace dtensor {

// Compares the bits of every parameter, buffer and state of the optimizer between the ranks that
// hold the same part of it. All ranks of the world must call it.
//   Comm:   8 host bytes per tensor and rank.
//   Errors: DataLoss, the same on every rank, naming each tensor that differs and the ranks that
//           differ from the first holder.
//   Source: nanotron's checks after a step and after a save.
absl::Status CheckReplicas(const Module& model, const Optimizer& optimizer);

}  // namespace dtensor

// Whether ranks that should hold the same do.
#pragma once

#include "absl/status/status.h"
#include "dtensor/parallel/module/module.h"
#include "dtensor/parallel/optim/optim.h"

namespace dtensor {

// Compares, bit for bit, what several ranks hold the same part of: parameters and buffers
// (Module::GetStateDict), states of an optimizer (Optimizer::GetStateDict). All ranks of the world
// must call it with the same names.
//   Comm:   one exchange of 8 host bytes per tensor and rank.
//   Errors: DataLoss, the same on every rank, naming each tensor that differs and the ranks that
//           differ from the first holder; FailedPrecondition naming one that not all ranks have.
//   Source: nanotron after_tbi_sanity_checks, check_optim_state_in_sync
absl::Status CheckCopies(const StateDict& state);
// Of everything that training keeps, buffers that are in no state dict too. Errors besides: those
// of Optimizer::GetStateDictOfAll.
absl::Status CheckCopies(const Module& model, const Optimizer& optimizer);

}  // namespace dtensor

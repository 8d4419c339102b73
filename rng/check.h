// CheckedRandomOp: what every rank checks alike before a random op. Private to rng/.
#pragma once

#include "absl/status/statusor.h"
#include "dtensor/rng/fill.h"
#include "dtensor/rng/values.h"

namespace dtensor {

// The op as its kernel takes it: full ranges made explicit, 64-bit words chosen.
//   Errors: InvalidArgument for a dtype or parameters that the op does not take.
absl::StatusOr<RandomOp> CheckedRandomOp(const RandomOp& op, DType dtype, const Profile& profile);
// What the sampler of a checked op takes.
DrawParams SamplerParams(const RandomOp& checked, const Profile& profile);

}  // namespace dtensor

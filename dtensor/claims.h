// What a declaration claims for a sample: the strategies that take inputs as they are placed.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "dtensor/simulate.h"

namespace dtensor::internal {

struct Claim {
  DeviceMesh mesh;
  PlacedCall call;
  std::string text;  // mesh, placements and ranges
};
struct ClaimSet {
  std::vector<Claim> all;
};

// The strategy that takes inputs placed so as they are; none if something would have to move.
std::optional<Claim> ClaimFor(const OpDef& op, const VerifySample& sample, const DeviceMesh& mesh,
                              const std::vector<Placements>& inputs);

// Claims on meshes of 2, 3, 4, 2 x 2 and 2 x 3. On one mesh dim: every derived row, also with cuts
// in units and as segments, and all other placements of the inputs; on two the pairs of those; at
// most `most` placements of each kind, evenly thinned. Errors: those of the op where all inputs are
// replicated.
absl::StatusOr<ClaimSet> ClaimsOf(const OpDef& op, const VerifySample& sample, int64_t most);

}  // namespace dtensor::internal

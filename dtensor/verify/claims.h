// What a declaration claims for a sample: the strategies that take inputs as they are placed.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "dtensor/verify/simulate.h"

namespace dtensor::internal {

struct Claim {
  DeviceMesh mesh;
  PlacedCall call;
  Shape out_shape;   // of output 0
  std::string text;  // mesh, placements and ranges
};
struct ClaimSet {
  std::vector<Claim> all;
  // Pairs of what is claimed on one mesh dim that are not claimed on two, as they would be.
  std::vector<Claim> refused;
  // Calls on one mesh dim that the op's own rows or rule make impossible: the error says which.
  struct Impossible {
    DeviceMesh mesh;
    std::vector<Placements> inputs;
    std::string why;
  };
  std::vector<Impossible> impossible;
};

// Two segments, the second in multiples of `unit`.
Placement HalvesOf(int64_t size, int dim, int64_t unit = 1);
// Uneven pieces; of three ranks and more some are empty.
Placement FlatPieces(int64_t numel, int64_t n);

// The strategy that takes inputs placed so as they are; none if something would have to move.
// `like`: a placement of output 0 that a caller would prefer, or null. `impossible` gets the error
// of a false rule.
std::optional<Claim> ClaimFor(const OpDef& op, const VerifySample& sample, const DeviceMesh& mesh,
                              const std::vector<Placements>& inputs,
                              const Placements* like = nullptr, std::string* impossible = nullptr);

// The placements of all inputs on a mesh of one dim that ClaimsOf asks for, whether anything would
// have to move or not; some are no legal ones. At most `most` of those that are products of one
// input's placements with another's.
std::vector<std::vector<Placements>> AskedOnOneDim(const OpDef& op, const VerifySample& sample,
                                                   const DeviceMesh& mesh, int64_t most);

// Claims on meshes of 2, 3, 4, 2 x 2, 2 x 3 and 2 x 2 x 2. On one mesh dim: every derived row, also
// with cuts in units, as segments and flat, and all other placements of the inputs, and where
// output 0 is replicated those that cut it on request; on two the pairs of those; at most `most`
// placements of each kind, evenly thinned, and an eighth of that of triples. Errors: those of the
// op where all inputs are replicated.
absl::StatusOr<ClaimSet> ClaimsOf(const OpDef& op, const VerifySample& sample, int64_t most);

}  // namespace dtensor::internal

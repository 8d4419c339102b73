// VerifyOp: the judge of sharding declarations. A declaration cannot reveal that its form is a lie;
// running the op on simulated ranks does.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dtensor/op.h"
#include "tensor/shape.h"

namespace dtensor {

// One call of an op: what its inputs are. Values are drawn unless given.
struct VerifyInput {
  Shape shape;
  DType dtype = DType::kF64;
  std::vector<double> values = {};  // row-major; empty: noise in (-1, 1), or 0 and 1 for bool
};
struct VerifySample {
  std::vector<VerifyInput> inputs;
  Attrs attrs = {};
  std::vector<int64_t> ints = {};  // storage of the one attribute of kind kInts, if any
  int ints_attr = -1;              // which attribute that is
};

struct VerifyReport {
  int64_t combinations = 0;  // strategies run on all simulated ranks and compared
  // Each with a reproducer: op, mesh, placements, and what came out.
  std::vector<std::string> wrong;  // claimed, but the numbers are others
  std::string ToString(const std::string& op) const;
};

// Runs the op under every placement of its inputs (Replicate, every Shard, Partial(sum) with
// asymmetric terms) on meshes of 2, 3, 4, 2 x 2 and 2 x 3 simulated ranks (no threads, no peers),
// and compares every strategy that needs no redistribution with the op on the whole tensors. At
// most `most` choices of placements per sample and mesh, evenly thinned.
//   Errors: those of the op on a sample; FailedPrecondition inside a rank.
absl::StatusOr<VerifyReport> VerifyOp(const OpDef& op, const std::vector<VerifySample>& samples,
                                      int64_t most = 400);

}  // namespace dtensor

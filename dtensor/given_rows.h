// What ops say by hand about how they shard (.Strategies, .Rule), checked.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dtensor/factors.h"
#include "dtensor/op.h"
#include "dtensor/sharding.h"

namespace dtensor::internal {

// Whether an error says that an op's own rows or rule are false: those of all functions here, but
// for what the rule itself returned.
bool IsFalseRule(const absl::Status& status);

// One list of `count` placements per input and output; negative dims are counted from the end, in
// place. Errors: InvalidArgument naming the tensor.
absl::Status NormalizeGiven(const OpCall& call, const std::vector<Shape>& out_shapes, size_t count,
                            std::vector<Placements>* inputs, std::vector<Placements>* outputs);

// The op's .Strategies as the search takes them. Errors: theirs; InvalidArgument for a row that
// does not fit the call or whose cost is no number from 0 up.
absl::StatusOr<RowList> GivenRows(const OpCall& call, const std::vector<Shape>& out_shapes);

// Whether a kernel can run on what these placements give it: operands that hold a factor (a dim of
// its own each) hold the same indices of it, in one of the op's factor maps; without maps nothing
// is known. Of global sizes, so that all ranks find the same.
//   Errors: InvalidArgument naming two operands, their placements and the local sizes that differ.
absl::Status CheckCuts(const OpCall& call, const std::vector<FactorMap>& maps,
                       const Strategy& strategy);

}  // namespace dtensor::internal

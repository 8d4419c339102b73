// What is known of every registered op, as text: docs/reference/ops.md and the golden file of all
// derived strategies.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace dtensor {

// Markdown: of each op signature, factors, forms, other ways, gradient, kernels, and what bringing
// an input of one call to the op's liking moves, placement by placement. Then all functions, with
// the ops that they run, and what was decided against.
//   Errors: those of an op on its samples.
absl::StatusOr<std::string> OpCatalog();

// One line per strategy for one mesh dim of two ranks, of up to two calls of each op: what a change
// of a declaration changes shows in this text as a diff.
//   Errors: those of an op on its samples.
absl::StatusOr<std::string> DerivedStrategies();

}  // namespace dtensor

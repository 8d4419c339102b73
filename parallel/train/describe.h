// What a program prints before it trains: which style each module has, and where parameters are.
#pragma once

#include <string>

#include "dtensor/parallel/module/module.h"
#include "dtensor/parallel/plan/plan.h"

namespace dtensor {

// The tree of modules, a line each with its type and the style that the plan gives it; neighbours
// that differ in their number alone ("0", "1", ...) are told once, as "0 .. 5". Errors: those of
// MatchModules, for a pattern whose style is not Optional.
absl::StatusOr<std::string> DescribePlan(Module& model, const Plan& plan);

// A line per parameter: name, shape, placements, local shape on this rank, dtype; then the totals.
std::string DescribeParameters(const Module& model);

}  // namespace dtensor

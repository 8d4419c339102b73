// Which modules run again in backward instead of keeping their values: a list of patterns.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "dtensor/parallel/module/module.h"

namespace dtensor {

// Module::SetRecompute for all modules that the patterns name ("blocks.*"; patterns as in
// parallel/plan/plan.h). Errors: those of MatchModules; nothing is changed then.
absl::Status RecomputeModules(Module& root, const std::vector<std::string>& patterns);

}  // namespace dtensor

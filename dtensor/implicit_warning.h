// Warnings for redistributions that ops insert by themselves inside of modules under a plan.
#pragma once

#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/spec.h"
#include "dtensor/op.h"

namespace dtensor::internal {

// Of a rank: modules whose plan asks for warnings, by their paths in TraceState; what has been
// told, by path and op.
struct PlannedModules {
  absl::flat_hash_set<const std::string*> paths;
  absl::flat_hash_set<std::pair<const std::string*, std::string>> told;
};

// Tells on stderr, once per module and op, what `op` is about to move; the first rank of the mesh
// speaks, for all. Nothing outside of planned modules, where nothing is sent, or in a rehearsal.
void WarnInModule(const OpDef& op, int input, const Spec& from, const Spec& to);
inline void WarnOfImplicitMove(RankContext& context, const OpDef& op, int input, const Spec& from,
                               const Spec& to) {
  if (context.trace().module != nullptr) WarnInModule(op, input, from, to);
}

}  // namespace dtensor::internal

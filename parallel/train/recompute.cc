#include "dtensor/parallel/train/recompute.h"

#include "dtensor/parallel/plan/plan.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

absl::Status RecomputeModules(Module& root, const std::vector<std::string>& patterns) {
  std::vector<NamedModule> all;
  for (const std::string& pattern : patterns) {
    DT_ASSIGN_OR_RETURN(const std::vector<NamedModule> found, MatchModules(root, pattern));
    all.insert(all.end(), found.begin(), found.end());
  }
  for (const NamedModule& m : all) m.module->SetRecompute(true);
  return absl::OkStatus();
}

}  // namespace dtensor

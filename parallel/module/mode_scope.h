// EvaluationScope: a model that is evaluated for a while, whatever happens meanwhile.
#pragma once

#include <utility>
#include <vector>

#include "dtensor/parallel/module/module.h"

namespace dtensor {

// All modules of the model are in evaluation mode while this exists; then each has the mode that it
// had, also where they differed. The model must outlive it.
class EvaluationScope {
 public:
  explicit EvaluationScope(Module& model) {
    for (const NamedModule& m : model.NamedModules()) {
      modes_.emplace_back(m.module, m.module->training());
    }
    model.Train(false);
  }
  // From the root down: a module's mode is set for all below it first, and then theirs.
  ~EvaluationScope() {
    for (const auto& [module, training] : modes_) {
      if (module->training() != training) module->Train(training);
    }
  }
  EvaluationScope(const EvaluationScope&) = delete;

 private:
  std::vector<std::pair<Module*, bool>> modes_;
};

}  // namespace dtensor

// Explain for modules: a whole forward and backward, told without computing it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "mesh/comm_trace.h"
#include "mesh/cost.h"
#include "parallel/module.h"

namespace dtensor {

// What the calls of one name in one module do, in one direction.
struct ModuleCall {
  std::string module, op;  // as in CommEvent
  CommPhase phase;
  int64_t count = 0;                         // of op calls
  std::vector<std::string> strategies = {};  // distinct ones: "linear: x [R], w [S(0)] -> [S(1)]"
  std::vector<CommRow> comm = {};            // what they communicate, by kind and mesh dims
};

struct ModuleExplanation {
  std::vector<ModuleCall> calls;  // in the order of the program
  std::vector<CommEvent> events;  // what CommTrace would record in a run
  std::vector<CommRow> totals;    // per kind, mesh dims and phase
  // Of this rank: all parameters, all gradients of parameters, and the most that parameters, values
  // and gradients take at one time (kernels' scratch memory is not in it).
  int64_t parameter_bytes = 0, gradient_bytes = 0, peak_bytes = 0;
  // A table per module and op; only what communicates unless `all`.
  std::string ToString(bool all = false) const;
};

struct ExplainOptions {
  // What backward starts from; default: all floating outputs, each with a gradient of its own.
  std::function<DTensor(const Values& outputs)> loss = {};
  bool backward = true;
  CostModel cost = {};
};

// Rehearses model(inputs), the loss and its backward on this rank alone: strategies are chosen as
// in a run, tensors are on meta, no kernel runs, no peer is met, random generators stay where they
// are. Parameters may be recipes. The events equal those of a run of the same program.
//   Errors: those of the run; FailedPrecondition where the program reads values (Item, ToVector).
absl::StatusOr<ModuleExplanation> Explain(Module& model, const Values& inputs,
                                          const ExplainOptions& options = {});

}  // namespace dtensor

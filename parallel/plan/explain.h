// Explain for modules: a whole forward and backward, told without computing it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "dtensor/mesh/comm_trace.h"
#include "dtensor/mesh/cost.h"
#include "dtensor/parallel/module/module.h"

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
  double modelled_us = 0;  // of all collectives, by ExplainOptions::cost
  // Empty: all of it was rehearsed. Else why it ended early: the program asked for values, which no
  // rehearsal has (Item, ToVector, sampling), and the rest is what came before.
  std::string ended;
  // A table per module and op; only what communicates unless `all`.
  std::string ToString(bool all = false) const;
};

struct ExplainOptions {
  // What backward starts from; default: all floating outputs that no backward of the program has
  // started from, each with a gradient of its own.
  std::function<DTensor(const Values& outputs)> loss = {};
  bool backward = true;
  std::optional<CostModel> cost = {};  // default: the world's
};

// Rehearses model(inputs), the loss and its backward on this rank alone (dtensor/rehearsal.h):
// strategies are chosen as in a run, tensors are on meta, no kernel runs, no peer is met, and
// nothing outside changes: not values, gradients, redistributions that tensors keep, nor random
// generators. Parameters may be recipes. The events equal those of a run at this place; backward
// ends at tensors that were made before.
//   Errors: those of the run.
absl::StatusOr<ModuleExplanation> Explain(Module& model, const Values& inputs,
                                          const ExplainOptions& options = {});
// The same for any function of tensors. There are no parameters then: what it captures is like its
// inputs.
absl::StatusOr<ModuleExplanation> Explain(absl::FunctionRef<Values(const Values&)> program,
                                          const Values& inputs, const ExplainOptions& options = {});

}  // namespace dtensor

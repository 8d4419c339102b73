// Recompute: a function that runs again in backward, with the random numbers of the first time.
#include <algorithm>
#include <vector>

#include "ops/ops.h"
#include "rng/tracker.h"

namespace dtensor {
namespace {

// One backward from all outputs at once: they share their history.
void BackwardThrough(const Values& outputs, const Values& grads) {
  std::vector<size_t> wanted;
  for (size_t o = 0; o < outputs.size(); ++o) {
    if (grads[o].defined() && outputs[o].requires_grad()) wanted.push_back(o);
  }
  if (wanted.size() == 1) return outputs[wanted[0]].Backward(grads[wanted[0]]);
  const EnableGrad recording;
  DTensor total;
  for (size_t o : wanted) {
    const DTensor part = sum(mul(outputs[o], grads[o]));
    total = total.defined() ? add(total, part) : part;
  }
  if (total.defined()) total.Backward();
}

}  // namespace

Values Recompute(const std::function<Values(const Values&)>& fn, const Values& inputs) {
  const bool differentiable = std::any_of(inputs.begin(), inputs.end(), [](const DTensor& t) {
    return t.defined() && t.requires_grad();
  });
  if (!differentiable) return fn(inputs);  // the tape would not come back here
  const RngSnapshot before = RngSnapshot::Take();
  const auto forward = [&] { return fn(inputs); };
  const auto backward = [fn, inputs, before](const Values& grads) -> Values {
    // The generators go back to where they are now, also when fn throws.
    struct Restore {
      RngSnapshot now = RngSnapshot::Take();
      ~Restore() { now.Restore(); }
    } restore;
    before.Restore();
    Values leaves;
    for (const DTensor& t : inputs) {
      leaves.push_back(t.defined() ? t.Detach() : DTensor());
      if (t.defined() && t.requires_grad()) leaves.back().RequiresGrad();
    }
    Values outputs;
    {
      const EnableGrad recording;
      outputs = fn(leaves);
    }
    BackwardThrough(outputs, grads);
    Values results;
    for (const DTensor& t : leaves) {
      results.push_back(t.defined() && t.requires_grad() ? t.grad() : DTensor());
    }
    return results;
  };
  std::vector<DTensor> saved;
  for (const DTensor& t : inputs) {
    if (t.defined()) saved.push_back(t);
  }
  return CustomFunction("recompute", absl::MakeConstSpan(inputs), forward, backward, saved);
}

}  // namespace dtensor

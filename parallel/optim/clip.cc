// Clipping of gradients, by their norm and by value.
#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

void CheckArguments(double max_norm, double norm_type) {
  const auto refuse = [](const char* what, double got) {
    Throw(absl::InvalidArgumentError(absl::StrCat("[clip_grad_norm] ", what, ", got ", got)));
  };
  if (!(max_norm >= 0)) refuse("max_norm must not be negative", max_norm);
  if (!(norm_type > 0)) refuse("norm_type must be positive or infinity", norm_type);
}

// Those there are, reduced, on one mesh.
std::vector<DTensor> Gradients(absl::string_view who,
                               const std::vector<NamedParameter>& parameters) {
  const std::vector<NamedParameter> distinct = Distinct(parameters);
  std::vector<DTensor> leaves, grads;
  for (const NamedParameter& p : distinct) leaves.push_back(p.parameter->tensor());
  SyncGradients(leaves);
  for (size_t i = 0; i < distinct.size(); ++i) {
    const DTensor grad = leaves[i].grad();
    if (!grad.defined()) continue;
    if (!grads.empty() && !(grads[0].mesh() == grad.mesh())) {
      Throw(absl::InvalidArgumentError(absl::StrCat("[", who, "] ", distinct[i].fqn, " is on mesh ",
                                                    grad.mesh().ToString(), ", others are on ",
                                                    grads[0].mesh().ToString())));
    }
    grads.push_back(grad);
  }
  return grads;
}

}  // namespace

DTensor ClipGradients(const std::vector<NamedParameter>& parameters, double max_norm,
                      double norm_type) {
  CheckArguments(max_norm, norm_type);
  ScopedPhase phase(CommPhase::kOptimizer);
  NoGrad no_grad;
  const std::vector<DTensor> grads = Gradients("clip_grad_norm", parameters);
  if (grads.empty()) return zeros({}, {.dtype = DType::kF64});
  const DTensor norm = get_total_norm(grads, norm_type);
  clip_grads_with_norm_(grads, max_norm, norm);
  return norm;
}

void ClipGradValues(const std::vector<NamedParameter>& parameters, double clip_value) {
  ScopedPhase phase(CommPhase::kOptimizer);
  clip_grad_value_(Gradients("clip_grad_value", parameters), clip_value);
}

double ClipGradNorm(const std::vector<NamedParameter>& parameters, double max_norm,
                    double norm_type) {
  const DTensor norm = ClipGradients(parameters, max_norm, norm_type);
  const DeviceMesh& mesh = norm.mesh();
  return mesh.is_self() || mesh.Contains(RankContext::Current().rank()) ? norm.Item() : 0;
}

}  // namespace dtensor

// Clipping of gradients by their norm.
#include <cmath>

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
std::vector<DTensor> Gradients(const std::vector<NamedParameter>& parameters) {
  const std::vector<NamedParameter> distinct = Distinct(parameters);
  std::vector<DTensor> leaves, grads;
  for (const NamedParameter& p : distinct) leaves.push_back(p.parameter->tensor());
  SyncGradients(leaves);
  for (size_t i = 0; i < distinct.size(); ++i) {
    const DTensor grad = leaves[i].grad();
    if (!grad.defined()) continue;
    if (!grads.empty() && !(grads[0].mesh() == grad.mesh())) {
      Throw(absl::InvalidArgumentError(
          absl::StrCat("[clip_grad_norm] ", distinct[i].fqn, " is on mesh ", grad.mesh().ToString(),
                       ", others are on ", grads[0].mesh().ToString())));
    }
    grads.push_back(grad);
  }
  return grads;
}

// The sum (or largest) over all gradients, of all ranks with one all-reduce: where a rank has a
// copy, coordinate 0 counts.
DTensor Total(const std::vector<DTensor>& grads, double norm_type) {
  const DeviceMesh& mesh = grads[0].mesh();
  DTensor total = zeros({}, {.dtype = DType::kF64, .mesh = mesh});
  const Placements terms(mesh.ndim(), Partial());
  const bool largest = std::isinf(norm_type);
  if (!largest) total = total.Redistribute(terms);
  for (const DTensor& grad : grads) {
    const DTensor part = power_sum(grad, norm_type);
    total = largest ? maximum(total, part) : add(total, part.Redistribute(terms));
  }
  return total.Redistribute(Placements(mesh.ndim()));
}

}  // namespace

DTensor ClipGradients(const std::vector<NamedParameter>& parameters, double max_norm,
                      double norm_type) {
  CheckArguments(max_norm, norm_type);
  ScopedPhase phase(CommPhase::kOptimizer);
  NoGrad no_grad;
  const std::vector<DTensor> grads = Gradients(parameters);
  if (grads.empty()) return zeros({}, {.dtype = DType::kF64});
  DTensor norm = Total(grads, norm_type);
  if (!std::isinf(norm_type)) norm = norm_type == 2 ? sqrt(norm) : pow(norm, 1 / norm_type);
  // At 1 the product is exact, so nothing has to be decided here.
  scale_(grads, minimum(div(max_norm, add(norm, 1e-6)), ones_like(norm)));
  return norm;
}

double ClipGradNorm(const std::vector<NamedParameter>& parameters, double max_norm,
                    double norm_type) {
  const DTensor norm = ClipGradients(parameters, max_norm, norm_type);
  const DeviceMesh& mesh = norm.mesh();
  return mesh.is_self() || mesh.Contains(RankContext::Current().rank()) ? norm.Item() : 0;
}

}  // namespace dtensor

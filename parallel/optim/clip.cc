// Clipping of gradients, by their norm and by value.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
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

// Gradients that are there, of one mesh; a rank outside of it may have none.
struct Group {
  DeviceMesh mesh;
  std::vector<DTensor> grads;
};

// Those there are, reduced, by mesh in the order of the parameters. Which meshes there are does not
// depend on what this rank has: all ranks must come to the same conclusion.
std::vector<Group> Gradients(absl::string_view who, const std::vector<NamedParameter>& parameters) {
  const std::vector<NamedParameter> distinct = Distinct(parameters);
  std::vector<DTensor> leaves;
  for (const NamedParameter& p : distinct) leaves.push_back(p.parameter->tensor());
  SyncGradients(leaves);
  std::vector<Group> groups;
  for (size_t i = 0; i < distinct.size(); ++i) {
    const DTensor grad = leaves[i].grad();
    const DeviceMesh& mesh = leaves[i].mesh();
    // A gradient may have come to one that was frozen after its forward; no step takes it.
    if (!leaves[i].requires_grad() || (!grad.defined() && mesh.is_self())) continue;
    const auto same = [&](const Group& g) { return g.mesh == mesh; };
    auto group = std::find_if(groups.begin(), groups.end(), same);
    if (group == groups.end()) group = groups.insert(group, {mesh, {}});
    if (groups.size() > 1 && (mesh.is_self() || groups[0].mesh.is_self())) {
      Throw(absl::InvalidArgumentError(
          absl::StrCat("[", who, "] ", distinct[i].fqn, " is on mesh ", mesh.ToString(),
                       ", others are on ", groups[0].mesh.ToString(),
                       ": of a tensor on Self it is not known whether other ranks have the same")));
    }
    if (grad.defined()) group->grads.push_back(grad);
  }
  return groups;
}

// NaN stays.
double Larger(double a, double b) { return a > b || std::isnan(a) ? a : b; }

// One norm of all groups' norms, on Self: the first rank of each mesh gives what its mesh has, and
// all add up in the order of ranks.
double Together(const std::vector<Group>& groups, const std::vector<DTensor>& norms, double p) {
  RankContext& rank = RankContext::Current();
  const DeviceMesh world({rank.world_size()}, {"world"});
  const bool largest = std::isinf(p);
  double mine = 0;
  if (rank.rehearses()) {
    ThrowIfError(rank.RehearseExchange(world, {0}, sizeof(mine)));
    return mine;
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups[i].grads.empty() || !groups[i].mesh.Contains(rank.rank())) continue;
    const double norm = norms[i].Item();
    if (groups[i].mesh.Ranks()[0] != rank.rank()) continue;
    mine = largest ? Larger(mine, norm) : mine + std::pow(norm, p);
  }
  std::string bytes(sizeof(mine), 0);
  std::memcpy(bytes.data(), &mine, sizeof(mine));
  double all = 0;
  for (const std::string& peer : ValueOrThrow(rank.Exchange(world, {0}, "clip_grad_norm", bytes))) {
    double theirs = 0;
    std::memcpy(&theirs, peer.data(), sizeof(theirs));
    all = largest ? Larger(all, theirs) : all + theirs;
  }
  return largest ? all : std::pow(all, 1 / p);
}

}  // namespace

DTensor ClipGradients(const std::vector<NamedParameter>& parameters, double max_norm,
                      double norm_type) {
  CheckArguments(max_norm, norm_type);
  ScopedPhase phase(CommPhase::kOptimizer);
  NoGrad no_grad;
  const std::vector<Group> groups = Gradients("clip_grad_norm", parameters);
  const TensorOptions number = {.dtype = DType::kF64};
  if (groups.empty() || (groups.size() == 1 && groups[0].grads.empty())) return zeros({}, number);
  std::vector<DTensor> norms;
  for (const Group& g : groups) {
    norms.push_back(g.grads.empty() ? DTensor() : get_total_norm(g.grads, norm_type));
  }
  if (groups.size() == 1) {
    clip_grads_with_norm_(groups[0].grads, max_norm, norms[0]);
    return norms[0];
  }
  const double norm = Together(groups, norms, norm_type);
  for (const Group& g : groups) {
    if (g.grads.empty()) continue;
    clip_grads_with_norm_(g.grads, max_norm,
                          full({}, norm, {.dtype = DType::kF64, .mesh = g.mesh}));
  }
  return full({}, norm, number);
}

void ClipGradValues(const std::vector<NamedParameter>& parameters, double clip_value) {
  clip_grad_value_({}, clip_value);  // refuses it also where there are no gradients
  ScopedPhase phase(CommPhase::kOptimizer);
  for (const Group& g : Gradients("clip_grad_value", parameters)) {
    clip_grad_value_(g.grads, clip_value);
  }
}

double ClipGradNorm(const std::vector<NamedParameter>& parameters, double max_norm,
                    double norm_type) {
  const DTensor norm = ClipGradients(parameters, max_norm, norm_type);
  const DeviceMesh& mesh = norm.mesh();
  return mesh.is_self() || mesh.Contains(RankContext::Current().rank()) ? norm.Item() : 0;
}

}  // namespace dtensor

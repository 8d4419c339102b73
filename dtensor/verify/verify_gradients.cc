// Gradients before the judge: Backward on ranks of this process against one rank's.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
#include "dtensor/distribute.h"
#include "dtensor/impl.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"
#include "dtensor/verify/claims.h"
#include "dtensor/verify/simulate.h"
#include "dtensor/verify/verify.h"
#include "dtensor/verify/verify_text.h"

namespace dtensor {
namespace {

using internal::Claim;
using internal::Draw;
using internal::WholeValues;

// The gradient of one input, whole; none for inputs that have none.
using Gradients = std::vector<WholeValues>;

class GradientJudge {
 public:
  GradientJudge(const OpDef& op, const VerifySample& sample, Draw draw)
      : op_(op), sample_(sample), draw_(draw), attrs_(internal::AttrsOf(sample)) {}

  absl::Status Truth() {
    return RunSpmd(1, [&](RankContext&) {
      const Placements all_here(1);
      return Run(DeviceMesh({1}), std::vector<Placements>(sample_.inputs.size(), all_here), kAll,
                 &truth_);
    });
  }

  // Under each of the claims, all on one mesh; fills `why` per claim.
  absl::Status Compare(const std::vector<const Claim*>& claims, std::vector<std::string>* why) {
    why->assign(claims.size(), "");
    if (claims.empty()) return absl::OkStatus();
    const Dims shape(claims[0]->mesh.shape().begin(), claims[0]->mesh.shape().end());
    return RunSpmd(Numel(shape), [&](RankContext& context) -> absl::Status {
      DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, DeviceMesh::Create(shape));
      for (size_t c = 0; c < claims.size(); ++c) {
        Gradients got;
        DT_RETURN_IF_ERROR(Run(mesh, claims[c]->call.inputs, kAll, &got));
        if (context.rank() == 0) (*why)[c] = Differs(got, kAll);
        // And with a gradient that comes as a pending sum, for one input after the other.
        const int only = static_cast<int>(c % sample_.inputs.size());
        got.clear();
        DT_RETURN_IF_ERROR(Run(mesh, claims[c]->call.inputs, only, &got));
        if (context.rank() == 0 && (*why)[c].empty()) (*why)[c] = Differs(got, only);
      }
      return absl::OkStatus();
    });
  }

 private:
  static constexpr int kAll = -1;

  // `only`: the input that wants a gradient. Then that of the output is a pending sum on the mesh
  // dims on which the output is Replicate. Leaves are the parts that ranks hold, so that in-place
  // ops and pending inputs have gradients.
  absl::Status Run(const DeviceMesh& mesh, const std::vector<Placements>& placements, int only,
                   Gradients* gradients) const {
    Dims at;
    mesh.Coordinate(RankContext::Current().rank(), &at);
    std::vector<DTensor> leaves, inputs;
    for (size_t i = 0; i < placements.size(); ++i) {
      DT_ASSIGN_OR_RETURN(const Tensor part,
                          internal::PartOf(sample_.inputs[i], i, draw_, mesh, placements[i], at));
      leaves.push_back(OnSelf(part));
      const bool wants = only == kAll || only == static_cast<int>(i);
      if (wants && IsFloating(part.dtype())) leaves.back().RequiresGrad();
      FromLocalOptions options;
      options.shape = sample_.inputs[i].shape;
      options.grad_placements = WithoutPending(placements[i]);  // of the value, not of a term
      inputs.push_back(FromLocal(leaves.back(), mesh, placements[i], options));
    }
    for (int o = 0; op_.in_place() && o < op_.num_outputs(); ++o) {
      DT_ASSIGN_OR_RETURN(inputs[o], Copied(inputs[o]));
    }
    std::vector<const DTensor*> pointers;
    for (const DTensor& x : inputs) pointers.push_back(&x);
    const DTensor y = Call(op_, pointers, attrs_)[0];
    if (!y.requires_grad()) return absl::OkStatus();
    const VerifyInput cotangent = {y.shape(), y.dtype()};
    Placements terms(mesh.ndim());
    for (int m = 0; m < mesh.ndim(); ++m) {
      if (only != kAll && y.placements()[m].is_replicate()) terms[m] = Partial();
    }
    DT_ASSIGN_OR_RETURN(const Tensor dy, internal::PartOf(cotangent, placements.size(),
                                                          Draw::kSigned, mesh, terms, at));
    y.Backward(FromLocal(OnSelf(dy), mesh, terms));
    for (size_t i = 0; i < leaves.size(); ++i) {
      gradients->push_back(Whole(leaves[i], inputs[i], placements[i]));
    }
    return absl::OkStatus();
  }

  // A value of its own with x's history: neither a leaf nor a view may be changed in place.
  static absl::StatusOr<DTensor> Copied(const DTensor& x) {
    DT_ASSIGN_OR_RETURN(const Tensor copy, x.local().Clone());
    const auto forward = [&]() -> Values {
      return {internal::MakeDTensor(RankContext::Current(), x.spec_ref(), copy)};
    };
    return CustomFunction("copied", {x}, forward, [](const Values& grads) { return grads; })[0];
  }

  // A shard's gradient is a shard, anything else's is replicated.
  static WholeValues Whole(const DTensor& leaf, const DTensor& input, Placements placements) {
    if (!leaf.requires_grad() || !leaf.grad().defined()) return {};
    placements = WithoutPending(placements);
    FromLocalOptions options;
    options.shape = input.shape();
    return FromLocal(leaf.grad(), input.mesh(), placements, options).ToVector<double>();
  }

  std::string Differs(const Gradients& got, int only) const {
    if (got.size() != truth_.size()) {
      return only == kAll ? "requires no gradient, on one rank it does" : "";
    }
    for (size_t i = 0; i < truth_.size(); ++i) {
      if (only != kAll && only != static_cast<int>(i)) continue;
      const std::string name = op_.InputName(static_cast<int>(i));
      if (got[i].size() != truth_[i].size())
        return absl::StrCat("gradient of ", name, " is missing");
      double scale = 1;
      for (double t : truth_[i]) scale = std::max(scale, std::isfinite(t) ? std::fabs(t) : 0);
      const double tolerance = (sample_.inputs[i].dtype == DType::kF64 ? 1e-9 : 1e-4) * scale;
      for (size_t k = 0; k < truth_[i].size(); ++k) {
        const double g = got[i][k], want = truth_[i][k];
        if (g == want || (!std::isfinite(g) && !std::isfinite(want))) continue;
        if (std::fabs(g - want) <= tolerance) continue;
        return absl::StrCat("gradient of ", name, " element ", k, " is ", g, ", must be ", want);
      }
    }
    return "";
  }

  const OpDef& op_;
  const VerifySample& sample_;
  const Draw draw_;
  const Attrs attrs_;
  Gradients truth_;
};

absl::StatusOr<internal::ClaimSet> ClaimsInside(const OpDef& op, const VerifySample& sample,
                                                int64_t most) {
  absl::StatusOr<internal::ClaimSet> claims;
  DT_RETURN_IF_ERROR(RunFake({.world = 6}, [&](RankContext&) {
    claims = internal::ClaimsOf(op, sample, most);
    return claims.status();
  }));
  return claims;
}

}  // namespace

absl::StatusOr<VerifyReport> VerifyGradients(const OpDef& op,
                                             const std::vector<VerifySample>& samples,
                                             int64_t most) {
  if (op.vjp() == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("op ", op.name(), " has no gradient"));
  }
  VerifyReport report;
  for (const VerifySample& sample : samples) {
    DT_RETURN_IF_ERROR(internal::CheckSample(op, sample));
    DT_ASSIGN_OR_RETURN(const internal::ClaimSet claims, ClaimsInside(op, sample, most));
    for (const Dims& mesh : {Dims{2}, Dims{2, 2}}) {
      std::vector<const Claim*> here;
      for (const Claim& c : claims.all) {
        if (c.mesh.shape() == IntSpan(mesh)) here.push_back(&c);
      }
      for (Draw draw : {Draw::kSigned, Draw::kTies}) {
        GradientJudge judge(op, sample, draw);
        DT_RETURN_IF_ERROR(judge.Truth());
        std::vector<std::string> why;
        DT_RETURN_IF_ERROR(judge.Compare(here, &why));
        for (size_t c = 0; c < here.size(); ++c) {
          ++report.combinations;
          if (why[c].empty()) continue;
          VerifyFinding finding = internal::Finding(op, sample, mesh, here[c]->call.inputs,
                                                    here[c]->call.outputs, why[c]);
          finding.reproducer.clear();  // what a strategy gives is right: run VerifyGradients
          report.wrong.push_back(std::move(finding));
        }
      }
    }
  }
  return report;
}

}  // namespace dtensor

#include "dtensor/rng/fill.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/rng/check.h"
#include "dtensor/rng/fill_task.h"
#include "dtensor/rng/planner.h"
#include "dtensor/rng/runs.h"
#include "dtensor/rng/tracker.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

absl::Status CheckLocal(const Tensor& local, const Spec& spec, const std::string& name) {
  if (local.dtype() == spec.dtype() && local.shape() == spec.local_shape()) return absl::OkStatus();
  return InFunction(name, absl::InvalidArgumentError(absl::StrCat(
                              "local tensor ", std::string(Name(local.dtype())), " ",
                              ToString(local.shape()), " does not fit ", spec.ToString(),
                              ", which holds ", ToString(spec.local_shape()), " here")));
}

}  // namespace

absl::Status RefuseMaxAndMin(const Spec& spec, absl::string_view what) {
  for (const Placement& p : spec.placements()) {
    if (!p.is_partial() || p.reduce_op() == ReduceOp::kSum || p.reduce_op() == ReduceOp::kAvg) {
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat(what, " of a pending ", p.ToString(),
                                                   " has no meaning (", spec.ToString(),
                                                   "): redistribute it to Replicate first"));
  }
  return absl::OkStatus();
}

absl::Status FillRandom(const Tensor& local, const Spec& spec, const RandomOp& wanted,
                        Generator* generator, IntSpan global_strides) {
  if (!generator) generator = &DefaultGenerator();
  DT_ASSIGN_OR_RETURN(const RandomOp op,
                      CheckedRandomOp(wanted, spec.dtype(), generator->profile()));
  if (spec.in_mesh()) DT_RETURN_IF_ERROR(CheckLocal(local, spec, op.name));
  if (CurrentRngMode() != RngMode::kThreadBased && !spec.mesh().is_self()) {
    DT_RETURN_IF_ERROR(DrawOwnPart(spec, local, local.dtype(), generator, [&](const Spec& mine) {
      return FillRandom(local, mine, wanted, generator);
    }));
    if (!DrawsHere(spec, local)) return absl::OkStatus();
    if (const auto neutral = spec.NeutralHere()) FillInt(local, *neutral);
    return absl::OkStatus();
  }
  DT_ASSIGN_OR_RETURN(const RandomPlan plan,
                      PlanRandom(op.kind, spec.shape(), spec.dtype(), generator->profile(),
                                 generator->offset(), global_strides));
  const uint64_t seed = generator->Reserve(plan.advance).seed;
  if (!DrawsHere(spec, local)) return absl::OkStatus();
  if (const auto neutral = spec.NeutralHere()) {
    FillInt(local, *neutral);
    return absl::OkStatus();
  }
  const Strides row_major = ContiguousStrides(spec.shape());
  DT_ASSIGN_OR_RETURN(
      const Strides order,
      IterationStrides(spec.shape(), global_strides.empty() ? IntSpan(row_major) : global_strides));
  FillTask task;
  task.op = op.kind;
  task.dtype = spec.dtype();
  task.params = SamplerParams(op, generator->profile());
  task.seed = seed;
  task.plan = plan;
  task.boxes = LocalRunBoxes(spec, spec.coordinate(), order, local.strides());
  return task.Run(local);
}

}  // namespace dtensor

#include "rng/fill.h"

#include <cmath>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "rng/planner.h"
#include "rng/region.h"
#include "rng/sweep.h"
#include "tensor/status.h"

namespace dtensor {
namespace {

const char* OpName(RandomKind kind) {
  return kind == RandomKind::kUniform ? "uniform_" : "normal_";
}

double LargestFinite(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return 65504.0;
    case DType::kBF16:
      return 0x1.FEp127;
    case DType::kF32:
      return std::numeric_limits<float>::max();
    default:
      return std::numeric_limits<double>::max();
  }
}

// What every rank checks alike.
absl::Status CheckOp(const RandomOp& op, DType dtype) {
  const std::string type(Name(dtype));
  if (!IsFloating(dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat(OpName(op.kind), " needs a floating dtype, not ", type));
  }
  if (op.kind == RandomKind::kUniform) {
    if (!(op.a <= op.b)) {
      return absl::InvalidArgumentError(
          absl::StrCat("uniform_: from (", op.a, ") must not be above to (", op.b, ")"));
    }
    const double largest = LargestFinite(dtype);
    if (op.a < -largest || op.b > largest || op.b - op.a > largest) {
      return absl::InvalidArgumentError(
          absl::StrCat("uniform_: the range from ", op.a, " to ", op.b, " does not fit in ", type));
    }
  } else if (!(op.b >= 0)) {
    return absl::InvalidArgumentError(absl::StrCat("normal_: std (", op.b, ") must be >= 0"));
  }
  return absl::OkStatus();
}

absl::Status CheckLocal(const Tensor& local, const Spec& spec, RandomKind kind) {
  if (local.dtype() == spec.dtype() && local.shape() == spec.local_shape()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(OpName(kind), ": local tensor ", std::string(Name(local.dtype())), " ",
                   ToString(local.shape()), " does not fit ", spec.ToString(), ", which holds ",
                   ToString(spec.local_shape()), " here"));
}

// True if a pending reduction makes this coordinate hold neutral elements; then sets which.
bool HoldsNeutral(const Spec& spec, double* neutral) {
  for (int m = 0; m < spec.mesh().ndim(); ++m) {
    const Placement& p = spec.placement(m);
    if (!p.is_partial() || spec.coordinate()[m] == 0) continue;
    if (p.reduce_op() == ReduceOp::kSum || p.reduce_op() == ReduceOp::kProd) {
      *neutral = p.reduce_op() == ReduceOp::kSum ? 0 : 1;
      return true;
    }
  }
  return false;
}

void FillPart(const Tensor& local, const Spec& spec, const RandomOp& op, const RandomPlan& plan,
              uint64_t seed, const Profile& profile, IntSpan global_strides) {
  DrawCall call;
  call.keys = MakePhiloxKeys(seed);
  call.a = op.a;
  call.b = op.b;
  call.flip_raw_uniform = profile.flip_raw_uniform;
  const DrawFn draw = FindDraw(op.kind, spec.dtype(), ActiveCpuLevel());
  DT_CHECK(draw != nullptr);
  Sweeper sweeper(draw, call, local.data(), spec.dtype());
  const Strides row_major = ContiguousStrides(spec.shape());
  if (global_strides.empty()) global_strides = row_major;
  for (const Region& region :
       LocalRegions(spec, spec.coordinate(), global_strides, local.strides())) {
    sweeper.Fill(region, plan);
  }
}

}  // namespace

absl::Status FillRandom(const Tensor& local, const Spec& spec, const RandomOp& op,
                        Generator* generator, IntSpan global_strides) {
  DT_RETURN_IF_ERROR(CheckOp(op, spec.dtype()));
  if (spec.in_mesh()) DT_RETURN_IF_ERROR(CheckLocal(local, spec, op.kind));
  if (!generator) generator = &DefaultGenerator();
  DT_ASSIGN_OR_RETURN(const RandomPlan plan,
                      PlanRandom(op.kind, spec.shape(), spec.dtype(), generator->profile(),
                                 generator->offset(), global_strides));
  const uint64_t seed = generator->Reserve(plan.advance).seed;
  if (!spec.in_mesh() || local.device() == DeviceType::kMeta || local.numel() == 0) {
    return absl::OkStatus();
  }
  double neutral = 0;
  if (HoldsNeutral(spec, &neutral)) {
    Fill(local, neutral);
  } else {
    FillPart(local, spec, op, plan, seed, generator->profile(), global_strides);
  }
  return absl::OkStatus();
}

}  // namespace dtensor

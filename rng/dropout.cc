#include "dtensor/rng/dropout.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/rng/draw.h"
#include "dtensor/rng/fill.h"
#include "dtensor/rng/fill_task.h"
#include "dtensor/rng/planner.h"
#include "dtensor/rng/runs.h"
#include "dtensor/rng/tracker.h"
#include "dtensor/tensor/shape.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// The smallest float that is not below p: u < p and u < it are the same for float u.
float UpperFloat(double p) {
  auto f = static_cast<float>(p);
  if (static_cast<double>(f) < p) f = std::nextafter(f, std::numeric_limits<float>::infinity());
  return f;
}

// Whether the elements fill memory without gaps; no strides: they do.
bool IsDense(IntSpan shape, IntSpan strides) {
  if (strides.empty()) return true;
  const absl::StatusOr<Strides> order = IterationStrides(shape, strides);
  if (!order.ok()) return false;  // they overlap
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] != 1 && strides[d] != (*order)[d]) return false;
  }
  return true;
}

absl::Status CheckChance(double p) {
  if (p >= 0 && p < 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("dropout: p must be in [0, 1), got ", p));
}

// What draws the mask of a tensor of `n` elements; without boxes.
FillTask MaskTask(const DropoutPlan& plan, int64_t n, DType dtype, double p, uint64_t seed) {
  FillTask task;
  task.kind = FillTask::Kind::kMask;
  task.vec = plan.vec;
  task.params.a = UpperFloat(KeepChance(dtype, p));
  task.seed = seed;
  task.plan = {plan.vec > 1 ? 1 : kMaxUnroll,
               plan.blocks,
               plan.advance,
               {{0, n / plan.vec, plan.offset, plan.threads}}};
  return task;
}

}  // namespace

absl::StatusOr<DropoutPlan> PlanDropout(IntSpan shape, DType dtype, const Profile& profile,
                                        uint64_t offset, bool dense) {
  if (profile.layout_version != 1) {
    return absl::InvalidArgumentError(absl::StrCat("random profile \"", profile.name,
                                                   "\": unknown layout_version ",
                                                   profile.layout_version, "; known: 1"));
  }
  DT_ASSIGN_OR_RETURN(const int64_t n, CheckedNumel(shape));
  DropoutPlan plan;
  plan.offset = offset;
  if (n == 0) return plan;
  plan.vec =
      profile.old_dropout_vec ? 4 : static_cast<int>(std::min<int64_t>(16 / SizeOf(dtype), 8));
  while (plan.vec > 1 && (!dense || n % plan.vec != 0)) plan.vec /= 2;
  plan.blocks = plan.vec == 8 ? 2 : 1;
  plan.threads = 256 * std::min(CeilDiv(n, 256), profile.block_cap());
  const int64_t per_pass = profile.strict_streams && plan.vec != 1 ? plan.vec : 4;
  plan.advance = 4 * static_cast<uint64_t>(CeilDiv(n, plan.threads * per_pass));
  if (profile.strict_streams) plan.advance *= static_cast<uint64_t>(plan.blocks);
  return plan;
}

// Draws the mask by `run`, which gets the task.
using RunMask = absl::FunctionRef<absl::Status(const FillTask&)>;
static absl::Status DrawMask(const Tensor& mask, const Spec& spec, double p, Generator* generator,
                             IntSpan global_strides, RunMask run) {
  DT_RETURN_IF_ERROR(CheckChance(p));
  DT_RETURN_IF_ERROR(RefuseMaxAndMin(spec, "dropout"));
  if (!generator) generator = &DefaultGenerator();
  const Strides row_major = ContiguousStrides(spec.shape());
  const bool dense = IsDense(spec.shape(), global_strides);
  const IntSpan order = dense && !global_strides.empty() ? global_strides : IntSpan(row_major);
  DT_ASSIGN_OR_RETURN(
      const DropoutPlan plan,
      PlanDropout(spec.shape(), spec.dtype(), generator->profile(), generator->offset(), dense));
  if (CurrentRngMode() != RngMode::kThreadBased && !spec.mesh().is_self()) {
    return DrawOwnPart(spec, mask, spec.dtype(), generator, [&](const Spec& mine) {
      return DrawMask(mask, mine, p, generator, {}, run);
    });
  }
  const uint64_t seed = generator->Reserve(plan.advance).seed;
  if (!DrawsHere(spec, mask)) return absl::OkStatus();
  FillTask task = MaskTask(plan, Numel(spec.shape()), spec.dtype(), p, seed);
  task.boxes = LocalRunBoxes(spec, spec.coordinate(), order, mask.strides());
  return run(task);
}

absl::Status FillDropoutMask(const Tensor& mask, const Spec& spec, double p, Generator* generator,
                             IntSpan global_strides) {
  return DrawMask(mask, spec, p, generator, global_strides,
                  [&](const FillTask& task) { return task.Run(mask); });
}

bool DropsInOnePass(const Tensor& x) {
  return x.has_data() && x.is_contiguous() && FindKernel(kDropoutKernel, x.device()) != nullptr;
}

absl::Status FillDropout(const Tensor& mask, const Tensor& x, const Tensor& y, const Spec& spec,
                         double p, Generator* generator, IntSpan global_strides) {
  const double scale = 1 / KeepChance(spec.dtype(), p);
  return DrawMask(mask, spec, p, generator, global_strides,
                  [&](const FillTask& task) { return task.RunDropout(mask, x, y, scale); });
}

absl::StatusOr<std::vector<int64_t>> ReserveDropout(IntSpan shape, DType dtype, double p,
                                                    Generator* generator) {
  DT_RETURN_IF_ERROR(CheckChance(p));
  if (!generator) generator = &DefaultGenerator();
  DT_ASSIGN_OR_RETURN(const DropoutPlan plan,
                      PlanDropout(shape, dtype, generator->profile(), generator->offset()));
  const uint64_t seed = generator->Reserve(plan.advance).seed;
  return MaskTask(plan, Numel(shape), dtype, p, seed).ToWords();
}

// Where an element stands among all: by dims in the order of the shape, two of which change places
// where that is the order of memory of one tensor and not against that of the other.
static Strides CommonOrder(IntSpan shape, IntSpan a, IntSpan b) {
  std::vector<size_t> dims(shape.size());
  std::iota(dims.begin(), dims.end(), size_t{0});
  for (size_t i = 0; i < dims.size(); ++i) {
    for (size_t j = i + 1; j < dims.size(); ++j) {
      const size_t d = dims[i], e = dims[j];
      if (shape[d] == 1 || shape[e] == 1) continue;
      const bool inner = a[d] < a[e] || b[d] < b[e];
      const bool outer = a[e] < a[d] || b[e] < b[d];
      if (inner && !outer) std::swap(dims[i], dims[j]);
    }
  }
  Strides order(shape.size());
  int64_t step = 1;
  for (size_t i = dims.size(); i-- > 0;) {
    order[dims[i]] = step;
    step *= shape[dims[i]];
  }
  return order;
}

absl::Status FillBernoulli(const Tensor& out, const Tensor& probabilities, const Spec& spec,
                           Generator* generator, IntSpan out_strides, IntSpan probability_strides) {
  DT_RETURN_IF_ERROR(RefuseMaxAndMin(spec, "bernoulli"));
  if (!generator) generator = &DefaultGenerator();
  const int64_t n = Numel(spec.shape());
  if (n == 0) return absl::OkStatus();
  const Generator::Reservation reserved = generator->Reserve(10);
  if (!DrawsHere(spec, out)) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(const Tensor p, probabilities.To(DType::kF64));
  DT_ASSIGN_OR_RETURN(const Tensor chances, p.Contiguous());
  DT_ASSIGN_OR_RETURN(Tensor values, Tensor::Empty(out.shape(), DType::kBool, out.device()));
  FillTask task;
  task.kind = FillTask::Kind::kChance;
  task.vec = 4;
  task.name = "bernoulli";
  task.seed = reserved.seed;
  // One thread per four elements, whatever the device.
  task.plan = {1, 1, 0, {{0, CeilDiv(n, 4), reserved.offset, CeilDiv(n, 4)}}};
  const Strides row_major = ContiguousStrides(spec.shape());
  const auto strides = [&](IntSpan s) { return s.empty() ? IntSpan(row_major) : s; };
  const Strides order =
      CommonOrder(spec.shape(), strides(out_strides), strides(probability_strides));
  task.boxes = LocalRunBoxes(spec, spec.coordinate(), order, values.strides());
  DT_RETURN_IF_ERROR(task.Run(values, chances));
  Copy(values, out);
  return absl::OkStatus();
}

}  // namespace dtensor

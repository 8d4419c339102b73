#include "rng/dropout.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "mesh/launch.h"
#include "rng/draw.h"
#include "rng/fill.h"
#include "rng/planner.h"
#include "rng/runs.h"
#include "rng/sweep.h"
#include "rng/tracker.h"
#include "tensor/status.h"

namespace dtensor {
namespace {

constexpr int64_t kLanes = 512;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The box in groups of `vec` neighbours, if it cuts none of them.
std::optional<RunBox> InGroups(const RunBox& box, int vec) {
  RunBox groups = box;
  const auto whole = [&](int64_t* v) {
    if (*v % vec != 0) return false;
    *v /= vec;
    return true;
  };
  if (box.run().local_stride != 1 && vec > 1) return std::nullopt;
  if (!whole(&groups.first_g) || !whole(&groups.local_offset)) return std::nullopt;
  if (!whole(&groups.dims.back().size)) return std::nullopt;
  for (size_t d = 0; d + 1 < groups.dims.size(); ++d) {
    if (!whole(&groups.dims[d].g_stride) || !whole(&groups.dims[d].local_stride)) {
      return std::nullopt;
    }
  }
  return groups;
}

// Draws the groups that cover [begin, end), `item` results each, and hands stretches of them to
// take(g, results, n).
template <class T, class Take>
void DrawGroups(const DropoutPlan& plan, DrawFn draw, DrawCall call, int64_t begin, int64_t end,
                const Take& take) {
  alignas(64) T results[kLanes * 8];
  const int64_t last = (end - 1) / plan.vec;
  for (int64_t j = begin / plan.vec; j <= last;) {
    const int64_t thread = j % plan.threads;
    const int64_t n = std::min({kLanes, plan.threads - thread, last + 1 - j});
    call.block = plan.offset / 4 + static_cast<uint64_t>(j / plan.threads * plan.blocks);
    call.first_thread = static_cast<uint32_t>(thread);
    call.n = n;
    call.out[0] = results;
    draw(call);
    const int64_t first = std::max(begin, j * plan.vec), stop = std::min(end, (j + n) * plan.vec);
    take(first, results + (first - j * plan.vec), stop - first);
    j += n;
  }
}

// A box that cuts groups, or is not contiguous.
void FillCutGroups(const RunBox& box, const DropoutPlan& plan, DrawFn draw, const DrawCall& call,
                   bool* data) {
  const int64_t stride = box.run().local_stride;
  for (RunCursor run(box); !run.done(); run.Next()) {
    DrawGroups<bool>(plan, draw, call, run.begin(), run.end(),
                     [&](int64_t g, const bool* keep, int64_t n) {
                       bool* const to = data + run.Local(g);
                       for (int64_t i = 0; i < n; ++i) to[i * stride] = keep[i];
                     });
  }
}

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

absl::Status FillDropoutMask(const Tensor& mask, const Spec& spec, double p, Generator* generator,
                             IntSpan global_strides) {
  if (!(p >= 0 && p < 1)) {
    return absl::InvalidArgumentError(absl::StrCat("dropout: p must be in [0, 1), got ", p));
  }
  DT_RETURN_IF_ERROR(RefuseMaxAndMin(spec, "dropout"));
  if (!generator) generator = &DefaultGenerator();
  const Strides row_major = ContiguousStrides(spec.shape());
  const bool dense = IsDense(spec.shape(), global_strides);
  const IntSpan order = dense && !global_strides.empty() ? global_strides : IntSpan(row_major);
  DT_ASSIGN_OR_RETURN(
      const DropoutPlan plan,
      PlanDropout(spec.shape(), spec.dtype(), generator->profile(), generator->offset(), dense));
  if (CurrentRngMode() != RngMode::kThreadBased && !spec.mesh().is_self()) {
    return DrawOwnPart(spec, mask, spec.dtype(), generator,
                       [&](const Spec& mine) { return FillDropoutMask(mask, mine, p, generator); });
  }
  const uint64_t seed = generator->Reserve(plan.advance).seed;
  if (!spec.in_mesh() || mask.device() == DeviceType::kMeta || mask.numel() == 0) {
    return absl::OkStatus();
  }
  DrawCall call;
  call.keys = MakePhiloxKeys(seed);
  const double keep = 1.0 - p;
  call.a = spec.dtype() == DType::kF64 ? UpperFloat(keep) : static_cast<float>(keep);
  const std::vector<RunBox> boxes = LocalRunBoxes(spec, spec.coordinate(), order, mask.strides());
  const bool grouped = plan.vec > 1;
  const GroupKind kind = plan.vec == 2   ? GroupKind::kMask2
                         : plan.vec == 4 ? GroupKind::kMask4
                                         : GroupKind::kMask8;
  const DrawFn draw = grouped ? FindGroupDraw(kind, ActiveCpuLevel())
                              : FindDraw(RandomKind::kBernoulli, DType::kBool, ActiveCpuLevel());
  const RandomPlan whole = {grouped ? 1 : kMaxUnroll,
                            plan.blocks,
                            plan.advance,
                            {{0, Numel(spec.shape()) / plan.vec, plan.offset, plan.threads}}};
  Sweeper sweeper(draw, call, mask.data(), plan.vec);
  for (const RunBox& box : boxes) {
    std::optional<RunBox> groups = InGroups(box, plan.vec);
    if (groups) {
      sweeper.Fill(*groups, whole);
    } else {
      FillCutGroups(box, plan, draw, call, mask.data_as<bool>());
    }
  }
  return absl::OkStatus();
}

absl::Status FillBernoulli(const Tensor& out, const Tensor& probabilities, const Spec& spec,
                           Generator* generator) {
  DT_RETURN_IF_ERROR(RefuseMaxAndMin(spec, "bernoulli"));
  if (!generator) generator = &DefaultGenerator();
  const int64_t n = Numel(spec.shape());
  if (n == 0) return absl::OkStatus();
  const Generator::Reservation reserved = generator->Reserve(10);
  if (!spec.in_mesh() || out.device() == DeviceType::kMeta || out.numel() == 0) {
    return absl::OkStatus();
  }
  DT_ASSIGN_OR_RETURN(const Tensor p, probabilities.To(DType::kF64));
  DT_ASSIGN_OR_RETURN(Tensor values, Tensor::Empty(out.shape(), DType::kBool));
  const auto* chance = p.data_as<double>();
  auto* data = values.data_as<bool>();  // contiguous, so runs are too
  DropoutPlan plan;
  plan.threads = CeilDiv(n, 4);  // one thread per four elements, whatever the device
  plan.offset = reserved.offset;
  DrawCall call;
  call.keys = MakePhiloxKeys(reserved.seed);
  const DrawFn draw = FindGroupDraw(GroupKind::kUniform4, ActiveCpuLevel());
  bool bad = false;
  for (const RunBox& box :
       LocalRunBoxes(spec, spec.coordinate(), ContiguousStrides(spec.shape()), values.strides())) {
    for (RunCursor run(box); !run.done(); run.Next()) {
      DrawGroups<float>(plan, draw, call, run.begin(), run.end(),
                        [&](int64_t g, const float* u, int64_t count) {
                          const int64_t at = run.Local(g);
                          for (int64_t i = 0; i < count; ++i) {
                            const double p_i = chance[at + i];
                            bad |= !(p_i >= 0 && p_i <= 1);
                            data[at + i] = static_cast<double>(u[i]) <= p_i;
                          }
                        });
    }
  }
  if (bad) {
    return RankLocal(absl::InvalidArgumentError("bernoulli: a probability is outside of [0, 1]"));
  }
  Copy(values, out);
  return absl::OkStatus();
}

}  // namespace dtensor

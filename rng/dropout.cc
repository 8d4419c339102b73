#include "rng/dropout.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "mesh/launch.h"
#include "rng/draw.h"
#include "rng/fill.h"
#include "rng/planner.h"
#include "rng/region.h"
#include "rng/sweep.h"
#include "rng/tracker.h"
#include "tensor/status.h"

namespace dtensor {
namespace {

constexpr int64_t kLanes = 512;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Runs of elements g that this rank holds, through `visit(g_begin, g_end, local, stride)`.
template <class Visit>
void ForRuns(const Spec& spec, IntSpan local_strides, const Visit& visit) {
  const Strides row_major = ContiguousStrides(spec.shape());
  for (const Region& region : LocalRegions(spec, spec.coordinate(), row_major, local_strides)) {
    for (RunCursor run(region); !run.done(); run.Next()) {
      visit(run.begin(), run.end(), run.Local(run.begin()), region.run().local_stride);
    }
  }
}

// Draws the groups that cover [begin, end) and hands every element's draw to take(g, value).
template <class T, class Take>
void DrawGroups(const DropoutPlan& plan, DrawFn draw, DrawCall call, int64_t begin, int64_t end,
                const Take& take) {
  const int per_block = std::min(plan.vec, 4);
  alignas(64) T results[4][kLanes];
  const int64_t last = (end - 1) / plan.vec;
  for (int64_t j = begin / plan.vec; j <= last;) {
    const int64_t thread = j % plan.threads;
    const int64_t n = std::min({kLanes, plan.threads - thread, last + 1 - j});
    for (int block = 0; block < plan.blocks; ++block) {
      call.block = plan.offset / 4 + static_cast<uint64_t>(j / plan.threads * plan.blocks + block);
      call.first_thread = static_cast<uint32_t>(thread);
      call.n = n;
      for (int c = 0; c < 4; ++c) call.out[c] = c < per_block ? results[c] : nullptr;
      draw(call);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t g0 = (j + i) * plan.vec + block * 4;
        for (int c = 0; c < per_block; ++c) {
          if (g0 + c >= begin && g0 + c < end) take(g0 + c, results[c][i]);
        }
      }
    }
    j += n;
  }
}

// The smallest float that is not below p: u < p and u < it are the same for float u.
float UpperFloat(double p) {
  auto f = static_cast<float>(p);
  if (static_cast<double>(f) < p) f = std::nextafter(f, std::numeric_limits<float>::infinity());
  return f;
}

absl::Status RefuseMaxAndMin(const Spec& spec, absl::string_view what) {
  for (const Placement& p : spec.placements()) {
    if (!p.is_partial() || p.reduce_op() == ReduceOp::kSum || p.reduce_op() == ReduceOp::kAvg) {
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat(what, " of a pending ", p.ToString(),
                                                   " has no meaning (", spec.ToString(),
                                                   "): redistribute to Replicate first"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DropoutPlan> PlanDropout(IntSpan shape, DType dtype, const Profile& profile,
                                        uint64_t offset) {
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
  while (n % plan.vec != 0) plan.vec /= 2;
  plan.blocks = plan.vec == 8 ? 2 : 1;
  plan.threads = 256 * std::min(CeilDiv(n, 256), profile.block_cap());
  const int64_t per_pass = profile.strict_streams && plan.vec != 1 ? plan.vec : 4;
  plan.advance = 4 * static_cast<uint64_t>(CeilDiv(n, plan.threads * per_pass));
  if (profile.strict_streams) plan.advance *= static_cast<uint64_t>(plan.blocks);
  return plan;
}

absl::Status FillDropoutMask(const Tensor& mask, const Spec& spec, double p, Generator* generator) {
  if (!(p >= 0 && p < 1)) {
    return absl::InvalidArgumentError(absl::StrCat("dropout: p must be in [0, 1), got ", p));
  }
  DT_RETURN_IF_ERROR(RefuseMaxAndMin(spec, "dropout"));
  if (!generator) generator = &DefaultGenerator();
  DT_ASSIGN_OR_RETURN(
      const DropoutPlan plan,
      PlanDropout(spec.shape(), spec.dtype(), generator->profile(), generator->offset()));
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
  const DrawFn draw = FindDraw(RandomKind::kBernoulli, DType::kBool, ActiveCpuLevel());
  if (plan.vec == 1) {
    const RandomPlan whole = {
        kMaxUnroll, plan.advance, {{0, Numel(spec.shape()), plan.offset, plan.threads}}};
    Sweeper sweeper(draw, call, mask.data(), DType::kBool);
    for (const Region& region :
         LocalRegions(spec, spec.coordinate(), ContiguousStrides(spec.shape()), mask.strides())) {
      sweeper.Fill(region, whole);
    }
    return absl::OkStatus();
  }
  auto* data = mask.data_as<bool>();
  ForRuns(spec, mask.strides(), [&](int64_t begin, int64_t end, int64_t local, int64_t stride) {
    DrawGroups<bool>(plan, draw, call, begin, end, [&](int64_t g, bool keep_it) {
      data[local + (g - begin) * stride] = keep_it;
    });
  });
  return absl::OkStatus();
}

absl::Status FillBernoulli(const Tensor& out, const Tensor& probabilities, const Spec& spec,
                           Generator* generator) {
  DT_RETURN_IF_ERROR(RefuseMaxAndMin(spec, "bernoulli"));
  if (!generator) generator = &DefaultGenerator();
  const int64_t n = Numel(spec.shape());
  if (n == 0) return absl::OkStatus();
  const Generator::Reservation at = generator->Reserve(10);
  if (!spec.in_mesh() || out.device() == DeviceType::kMeta || out.numel() == 0) {
    return absl::OkStatus();
  }
  DT_ASSIGN_OR_RETURN(const Tensor p, probabilities.To(DType::kF64));
  DT_ASSIGN_OR_RETURN(Tensor values, Tensor::Empty(out.shape(), DType::kBool));
  const auto* chance = p.data_as<double>();
  auto* data = values.data_as<bool>();
  DropoutPlan plan;
  plan.threads = CeilDiv(n, 4);  // one thread per four elements, whatever the device
  plan.offset = at.offset;
  DrawCall call;
  call.keys = MakePhiloxKeys(at.seed);
  const DrawFn draw = FindDraw(RandomKind::kRaw, DType::kF32, ActiveCpuLevel());
  bool bad = false;
  ForRuns(spec, values.strides(), [&](int64_t begin, int64_t end, int64_t local, int64_t stride) {
    DrawGroups<float>(plan, draw, call, begin, end, [&](int64_t g, float u) {
      const int64_t i = local + (g - begin) * stride;
      bad |= !(chance[i] >= 0 && chance[i] <= 1);
      data[i] = static_cast<double>(u) <= chance[i];
    });
  });
  if (bad) {
    return absl::InvalidArgumentError("bernoulli: a probability is outside of [0, 1]");
  }
  Copy(values, out);
  return absl::OkStatus();
}

}  // namespace dtensor

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

namespace {

// As FillRandom does in the other modes.
absl::Status MaskOfOwnPart(const Tensor& mask, const Spec& spec, double p, Generator* generator) {
  const uint64_t before = generator->offset();
  const bool by_offset = CurrentRngMode() == RngMode::kOffsetBased;
  const OffsetShift shift = by_offset ? OffsetBasedShift(spec) : OffsetShift();
  if (spec.in_mesh() && mask.numel() > 0) {
    DT_ASSIGN_OR_RETURN(
        const SpecRef mine,
        RankContext::Current().specs().Intern(DeviceMesh::Self(), {}, mask.shape(), spec.dtype()));
    if (by_offset) DT_RETURN_IF_ERROR(generator->SetOffset(before + shift.before));
    DT_RETURN_IF_ERROR(FillDropoutMask(mask, *mine, p, generator));
  }
  return by_offset ? generator->SetOffset(before + shift.after) : absl::OkStatus();
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
    return MaskOfOwnPart(mask, spec, p, generator);
  }
  const uint64_t seed = generator->Reserve(plan.advance).seed;
  if (!spec.in_mesh() || mask.device() == DeviceType::kMeta || mask.numel() == 0) {
    return absl::OkStatus();
  }
  DrawCall call;
  call.keys = MakePhiloxKeys(seed);
  const double keep = 1.0 - p;
  call.a = spec.dtype() == DType::kF64 ? UpperFloat(keep) : static_cast<float>(keep);
  const DrawFn draw = FindDraw(RandomKind::kBernoulliTo, DType::kBool, ActiveCpuLevel());
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

namespace {

// Low `bits` bits as the sort compares them.
uint64_t SortKey(int64_t key, int bits, int width) {
  auto u = static_cast<uint64_t>(key);
  if (width == 32) u &= 0xFFFFFFFFu;
  if (bits >= width) return u ^ (uint64_t{1} << (width - 1));  // signed order
  return u & ((uint64_t{1} << bits) - 1);
}

// One-word draws of thread `t`: x, y, z, w of one block after the other.
class WordStream {
 public:
  WordStream(uint64_t seed, uint64_t thread, uint64_t offset)
      : keys_(MakePhiloxKeys(seed)), thread_(thread), block_(offset / 4) {}
  uint32_t Next() {
    if (at_ == 4) at_ = 0;
    if (at_ == 0) words_ = CurandBlock(keys_, block_++, thread_);
    const uint32_t w[4] = {words_.x, words_.y, words_.z, words_.w};
    return w[at_++];
  }

 private:
  PhiloxKeys keys_;
  uint64_t thread_, block_;
  PhiloxWords words_{};
  int at_ = 0;
};

absl::StatusOr<Tensor> Whole(IntSpan shape, DType dtype, const RandomOp& op, Generator* generator) {
  DT_ASSIGN_OR_RETURN(Tensor t, Tensor::Empty(shape, dtype));
  DT_ASSIGN_OR_RETURN(const SpecRef spec,
                      RankContext::Current().specs().Intern(DeviceMesh::Self(), {}, shape, dtype));
  DT_RETURN_IF_ERROR(FillRandom(t, *spec, op, generator));
  return t;
}

}  // namespace

absl::StatusOr<Tensor> RandomPermutation(int64_t n, Generator* generator) {
  if (n < 0) return absl::InvalidArgumentError(absl::StrCat("randperm: n is negative: ", n));
  if (!generator) generator = &DefaultGenerator();
  if (n == 0) return Tensor::Empty({0}, DType::kI64);
  const auto d = static_cast<double>(n);
  const int bits = std::min(
      64, static_cast<int>(std::ceil(std::log2(d - (6 * d * d + 1) / (12 * std::log(0.9))))));
  const bool narrow = bits <= 32;
  DT_ASSIGN_OR_RETURN(const Tensor keys,
                      narrow ? Whole({n}, DType::kI32,
                                     RandomRangeOp(std::numeric_limits<int32_t>::min(),
                                                   std::numeric_limits<int32_t>::max()),
                                     generator)
                             : Whole({n}, DType::kI64,
                                     RandomRangeOp(std::numeric_limits<int64_t>::min(),
                                                   std::numeric_limits<int64_t>::max()),
                                     generator));
  const Generator::Reservation second = generator->Reserve(static_cast<uint64_t>(n));
  std::vector<std::pair<uint64_t, int64_t>> order;
  const std::vector<int64_t> values = keys.ToVector<int64_t>();
  for (int64_t i = 0; i < n; ++i) {
    order.emplace_back(SortKey(values[i], bits, narrow ? 32 : 64), i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (int64_t t = 0; t < n;) {  // equal keys are shuffled among themselves
    int64_t end = t + 1;
    while (end < n && order[end].first == order[t].first) ++end;
    if (end - t > 1) {
      WordStream words(second.seed, static_cast<uint64_t>(t), second.offset);
      for (int64_t i = end - t - 1; i > 0; --i) {
        const auto r = static_cast<int64_t>(words.Next() % static_cast<uint64_t>(i + 1));
        std::swap(order[t + i].second, order[t + r].second);
      }
    }
    t = end;
  }
  std::vector<int64_t> permutation;
  for (const auto& [key, index] : order) permutation.push_back(index);
  return Tensor::FromVector(permutation, {n}, DType::kI64);
}

absl::StatusOr<Tensor> MultinomialUniforms(int64_t rows, int64_t samples, Generator* generator) {
  if (!generator) generator = &DefaultGenerator();
  DT_ASSIGN_OR_RETURN(Tensor u, Tensor::Empty({rows, samples}, DType::kF32));
  if (rows == 0 || samples == 0) return u;
  const int64_t grid = std::min<int64_t>(rows, 65535);
  const Generator::Reservation at =
      generator->Reserve(4 * static_cast<uint64_t>((rows - 1) / grid + 1));
  const int64_t width = CeilDiv(samples, 128) * 128;
  const PhiloxKeys keys = MakePhiloxKeys(at.seed);
  auto* data = u.data_as<float>();
  for (int64_t d = 0; d < rows; ++d) {
    for (int64_t s = 0; s < samples; ++s) {
      const auto thread = static_cast<uint64_t>((d % grid) * width + s);
      const auto block = at.offset / 4 + static_cast<uint64_t>(d / grid);
      data[d * samples + s] = UniformFloat(CurandBlock(keys, block, thread).x);
    }
  }
  return u;
}

}  // namespace dtensor

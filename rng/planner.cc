#include "rng/planner.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "tensor/status.h"

namespace dtensor {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What one launch of a dense tensor needs to know.
struct Launch {
  const Profile& profile;
  int unroll;
  int64_t item_bytes;

  int64_t Threads(int64_t n) const { return 256 * std::min(CeilDiv(n, 256), profile.block_cap()); }
  uint64_t Advance(int64_t n) const {
    const int64_t per_block = profile.old_wide_advance ? kMaxUnroll : unroll;
    return 4 * static_cast<uint64_t>(CeilDiv(n, Threads(n) * per_block));
  }
  bool FitsInt32(int64_t n) const {
    return n <= kMaxInt32 && n - 1 <= (kMaxInt32 - 1) / item_bytes;
  }
};

// Halves, depth first, until a part can be indexed in 32 bits; each part is a launch of its own.
void Split(const Launch& launch, int64_t first, int64_t count, uint64_t offset, RandomPlan* plan) {
  if (launch.FitsInt32(count)) {
    plan->segments.push_back({first, count, offset + plan->advance, launch.Threads(count)});
    plan->advance += launch.Advance(count);
    return;
  }
  const int64_t half = count / 2;
  Split(launch, first, half, offset, plan);
  Split(launch, first + half, count - half, offset, plan);
}

absl::Status CheckDense(IntSpan shape, IntSpan strides) {
  if (shape.size() != strides.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("random op on shape ", ToString(shape), " with strides ", ToString(strides)));
  }
  absl::InlinedVector<std::pair<int64_t, int64_t>, 6> dims;  // stride, size
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] != 1) dims.push_back({strides[d], shape[d]});
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) {
      return absl::InvalidArgumentError(
          absl::StrCat("random op on shape ", ToString(shape), " with strides ", ToString(strides),
                       ": the global tensor must fill its memory without gaps or overlap"));
    }
    expected *= size;
  }
  return absl::OkStatus();
}

}  // namespace

int RandomUnroll(RandomKind kind, DType dtype) {
  switch (kind) {
    case RandomKind::kWords32:
      return 4;
    case RandomKind::kWords64:
      return 2;
    default:
      return dtype == DType::kF64 ? 2 : 4;
  }
}

absl::StatusOr<RandomPlan> PlanRandom(RandomKind kind, IntSpan shape, DType dtype,
                                      const Profile& profile, uint64_t offset, IntSpan strides) {
  if (profile.layout_version != 1) {
    return absl::InvalidArgumentError(absl::StrCat("random profile \"", profile.name,
                                                   "\": unknown layout_version ",
                                                   profile.layout_version, "; known: 1"));
  }
  DT_ASSIGN_OR_RETURN(const int64_t numel, CheckedNumel(shape));
  RandomPlan plan;
  plan.unroll = RandomUnroll(kind, dtype);
  if (numel == 0) return plan;
  if (!strides.empty()) DT_RETURN_IF_ERROR(CheckDense(shape, strides));
  const Launch launch{profile, plan.unroll, SizeOf(dtype)};
  // PyTorch reserves for the whole tensor before it finds out that it must split, and does not use
  // that reservation then.
  if (!launch.FitsInt32(numel)) plan.advance = launch.Advance(numel);
  Split(launch, 0, numel, offset, &plan);
  return plan;
}

}  // namespace dtensor

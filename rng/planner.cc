#include "dtensor/rng/planner.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "dtensor/tensor/shape.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// What a launch needs to know of its op.
struct LaunchShape {
  const Profile& profile;
  int unroll;

  int64_t Threads(int64_t n) const { return 256 * std::min(CeilDiv(n, 256), profile.block_cap()); }
  uint64_t Advance(int64_t n) const {
    const int64_t per_block = profile.old_wide_advance ? kMaxUnroll : unroll;
    return 4 * static_cast<uint64_t>(CeilDiv(n, Threads(n) * per_block));
  }
};

struct IterationDim {
  int64_t stride, size;
  int dim;
};
// Largest stride first; without dims of size 1.
using IterationDims = absl::InlinedVector<IterationDim, 6>;

absl::StatusOr<IterationDims> InMemoryOrder(IntSpan shape, IntSpan strides) {
  const auto bad = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("random op on shape ", ToString(shape),
                                                   " with strides ", ToString(strides), why));
  };
  if (shape.size() != strides.size()) return bad(": their numbers differ");
  IterationDims dims;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] != 1) dims.push_back({strides[d], shape[d], static_cast<int>(d)});
  }
  std::stable_sort(dims.begin(), dims.end(), [](const IterationDim& a, const IterationDim& b) {
    return a.stride > b.stride;
  });
  int64_t extent = 1;  // elements from the first to behind the last of the dims within
  for (auto d = dims.rbegin(); d != dims.rend(); ++d) {
    if (d->stride < extent) return bad(": elements of the one-device tensor would overlap");
    extent += (d->size - 1) * d->stride;
  }
  return dims;
}

// One dim where one follows the other without a gap.
IterationDims Merged(const IterationDims& dims, int64_t item_bytes) {
  IterationDims merged;  // strides in bytes
  for (const IterationDim& d : dims) {
    const int64_t stride = d.stride * item_bytes;
    if (!merged.empty() && merged.back().stride == stride * d.size) {
      merged.back() = {stride, merged.back().size * d.size, 0};
    } else {
      merged.push_back({stride, d.size, 0});
    }
  }
  return merged;
}

// Halves the dim of the largest extent, depth first, until a part can be indexed in 32 bits; each
// part is a launch of its own. Only the outermost dims are longer than 1 where that is not so, so
// the parts follow each other in g.
void Split(const LaunchShape& launch, IterationDims dims, int64_t first, uint64_t offset,
           RandomPlan* plan) {
  int64_t count = 1, last_byte = 0;
  auto longest = dims.begin();
  for (auto d = dims.begin(); d != dims.end(); ++d) {
    count *= d->size;
    last_byte += (d->size - 1) * d->stride;
    if ((d->size - 1) * d->stride > (longest->size - 1) * longest->stride) longest = d;
  }
  if (count <= kMaxInt32 && last_byte < kMaxInt32) {
    plan->segments.push_back({first, count, offset + plan->advance, launch.Threads(count)});
    plan->advance += launch.Advance(count);
    return;
  }
  const int64_t size = longest->size, half = size / 2;
  longest->size = half;
  Split(launch, dims, first, offset, plan);
  longest->size = size - half;
  Split(launch, dims, first + count / size * half, offset, plan);
}

}  // namespace

absl::StatusOr<Strides> IterationStrides(IntSpan shape, IntSpan strides) {
  DT_ASSIGN_OR_RETURN(const IterationDims dims, InMemoryOrder(shape, strides));
  Strides iteration(shape.size(), 1);
  int64_t next = 1;
  for (auto d = dims.rbegin(); d != dims.rend(); ++d) {
    iteration[d->dim] = next;
    next *= d->size;
  }
  return iteration;
}

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
  const Strides row_major = ContiguousStrides(shape);
  DT_ASSIGN_OR_RETURN(const IterationDims dims,
                      InMemoryOrder(shape, strides.empty() ? IntSpan(row_major) : strides));
  const LaunchShape launch{profile, plan.unroll};
  // PyTorch reserves for the whole tensor before it finds out that it must split, and does not use
  // that reservation then.
  RandomPlan parts = plan;
  Split(launch, Merged(dims, SizeOf(dtype)), 0, offset, &parts);
  if (parts.segments.size() == 1) return parts;
  plan.advance = launch.Advance(numel);
  Split(launch, Merged(dims, SizeOf(dtype)), 0, offset, &plan);
  return plan;
}

}  // namespace dtensor

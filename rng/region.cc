#include "rng/region.h"

#include <algorithm>
#include <utility>

namespace dtensor {
namespace {

// Consecutive positions of one dim: [local, local + size) hold indices from `global` on.
struct Piece {
  int64_t global, local, size;
};
using Pieces = std::vector<Piece>;

// A box of positions in the local tensor before flat cuts.
struct LocalBox {
  Dims low, high;
};

Pieces PiecesOf(const std::vector<Interval>& intervals) {
  Pieces pieces;
  int64_t local = 0;
  for (const Interval& i : intervals) {
    if (i.length() > 0) pieces.push_back({i.start, local, i.length()});
    local += i.length();
  }
  return pieces;
}

Pieces Clip(const Pieces& pieces, int64_t low, int64_t high) {
  Pieces clipped;
  for (const Piece& p : pieces) {
    const int64_t begin = std::max(p.local, low), end = std::min(p.local + p.size, high);
    if (begin < end) clipped.push_back({p.global + begin - p.local, begin, end - begin});
  }
  return clipped;
}

// The flat cuts of the coordinate, applied left to right to [0, numel). False if there are none.
bool FlatIntervals(const Spec& spec, IntSpan coordinate, int64_t numel,
                   std::vector<Interval>* flat) {
  bool any = false;
  *flat = {{0, numel}};
  for (int m = 0; m < spec.mesh().ndim(); ++m) {
    if (!spec.placement(m).is_flat()) continue;
    any = true;
    int64_t length = 0;
    for (const Interval& i : *flat) length += i.length();
    std::vector<Interval> inner;
    LocalIntervals(spec.placement(m), length, spec.mesh().size(m), coordinate[m], &inner);
    *flat = ComposeIntervals(*flat, inner);
  }
  return any;
}

// Cuts the row-major interval [begin, end) of `shape` into boxes: at each step the largest whole
// sub-tensor that starts there.
std::vector<LocalBox> BoxesOf(IntSpan shape, int64_t begin, int64_t end) {
  const int ndim = static_cast<int>(shape.size());
  std::vector<LocalBox> boxes;
  const Strides strides = ContiguousStrides(shape);
  while (begin < end) {
    int dim = 0;  // the dim along which the next box extends
    while (dim < ndim && (begin % strides[dim] != 0 || end - begin < strides[dim])) ++dim;
    LocalBox box{Dims(ndim, 0), Dims(shape.begin(), shape.end())};
    int64_t taken = 1;
    for (int d = 0; d <= dim && d < ndim; ++d) {
      const int64_t index = begin / strides[d] % shape[d];
      const int64_t most = d == dim ? (end - begin) / strides[d] : 1;
      box.low[d] = index;
      box.high[d] = std::min(shape[d], index + most);
      if (d == dim) taken = (box.high[d] - index) * strides[d];
    }
    begin += taken;
    boxes.push_back(std::move(box));
  }
  return boxes;
}

void Normalize(Region* region) {
  auto& dims = region->dims;
  dims.erase(
      std::remove_if(dims.begin(), dims.end(), [](const RegionDim& d) { return d.size == 1; }),
      dims.end());
  std::sort(dims.begin(), dims.end(),
            [](const RegionDim& a, const RegionDim& b) { return a.g_stride > b.g_stride; });
  absl::InlinedVector<RegionDim, 4> merged;
  for (const RegionDim& d : dims) {
    if (!merged.empty() && merged.back().g_stride == d.g_stride * d.size &&
        merged.back().local_stride == d.local_stride * d.size) {
      merged.back() = {merged.back().size * d.size, d.g_stride, d.local_stride};
    } else {
      merged.push_back(d);
    }
  }
  if (merged.empty() || merged.back().g_stride != 1) merged.push_back({1, 1, 1});
  dims = std::move(merged);
}

// Every combination of one piece per dim becomes a region, in row-major order.
void AddRegions(const std::vector<Pieces>& axes, IntSpan global_strides, IntSpan local_strides,
                int64_t local_offset, std::vector<Region>* out) {
  const size_t ndim = axes.size();
  for (const Pieces& p : axes) {
    if (p.empty()) return;
  }
  std::vector<size_t> choice(ndim, 0);
  while (true) {
    Region region;
    region.local_offset = local_offset;
    for (size_t d = 0; d < ndim; ++d) {
      const Piece& p = axes[d][choice[d]];
      region.first_g += p.global * global_strides[d];
      region.local_offset += p.local * local_strides[d];
      region.dims.push_back({p.size, global_strides[d], local_strides[d]});
    }
    Normalize(&region);
    out->push_back(std::move(region));
    size_t d = ndim;
    while (d > 0 && ++choice[d - 1] == axes[d - 1].size()) choice[--d] = 0;
    if (d == 0) return;
  }
}

}  // namespace

int64_t Region::last_g() const {
  int64_t g = first_g;
  for (const RegionDim& d : dims) g += (d.size - 1) * d.g_stride;
  return g;
}

std::vector<Region> LocalRegions(const Spec& spec, IntSpan coordinate, IntSpan global_strides,
                                 IntSpan local_strides) {
  std::vector<Pieces> axes;
  Shape shape;
  for (const std::vector<Interval>& intervals : LocalIndex(spec, coordinate)) {
    axes.push_back(PiecesOf(intervals));
    shape.push_back(axes.back().empty() ? 0 : axes.back().back().local + axes.back().back().size);
  }
  std::vector<Region> regions;
  std::vector<Interval> flat;
  if (!FlatIntervals(spec, coordinate, Numel(shape), &flat)) {
    AddRegions(axes, global_strides, local_strides, 0, &regions);
    return regions;
  }
  // The flat local tensor is a window on the row-major tensor that the other placements left.
  Strides strides = ContiguousStrides(shape);
  for (int64_t& s : strides) s *= local_strides[0];
  int64_t position = 0;
  for (const Interval& interval : flat) {
    for (const LocalBox& box : BoxesOf(shape, interval.start, interval.end)) {
      std::vector<Pieces> clipped;
      for (size_t d = 0; d < axes.size(); ++d) {
        clipped.push_back(Clip(axes[d], box.low[d], box.high[d]));
      }
      AddRegions(clipped, global_strides, strides, (position - interval.start) * local_strides[0],
                 &regions);
    }
    position += interval.length();
  }
  return regions;
}

RunCursor::RunCursor(const Region& region)
    : region_(&region), outer_(region.dims.size() - 1), index_(outer_, 0) {
  Reset(0);
}

void RunCursor::Reset(size_t from) {
  std::fill(index_.begin() + from, index_.end(), 0);
  g_ = region_->first_g;
  local_ = region_->local_offset;
  for (size_t d = 0; d < outer_; ++d) {
    g_ += index_[d] * region_->dims[d].g_stride;
    local_ += index_[d] * region_->dims[d].local_stride;
  }
}

void RunCursor::Increment(size_t limit, int64_t count) {
  for (size_t d = limit; d > 0; --d, count = 1) {
    const RegionDim& dim = region_->dims[d - 1];
    g_ += count * dim.g_stride;
    local_ += count * dim.local_stride;
    if ((index_[d - 1] += count) < dim.size) return;
    index_[d - 1] = 0;
    g_ -= dim.size * dim.g_stride;
    local_ -= dim.size * dim.local_stride;
  }
  done_ = true;
}

void RunCursor::Skip(int64_t count) { Increment(outer_, count); }

void RunCursor::Seek(int64_t g) {
  done_ = false;
  int64_t rest = std::max<int64_t>(g - region_->first_g, 0);
  for (size_t d = 0; d < outer_; ++d) {
    const RegionDim& dim = region_->dims[d];
    index_[d] = rest / dim.g_stride;
    if (index_[d] >= dim.size) {  // behind everything with these outer indices
      index_[d] = 0;
      Reset(d);
      Increment(d);
      return;
    }
    rest -= index_[d] * dim.g_stride;
  }
  Reset(outer_);
  if (rest >= region_->run().size) Next();
}

}  // namespace dtensor

#include "dtensor/rng/runs.h"

#include <algorithm>
#include <utility>

#include "dtensor/mesh/region.h"
#include "dtensor/tensor/next_index.h"

namespace dtensor {
namespace {

// Consecutive positions of one dim: [local, local + size) hold indices from `global` on.
struct IndexRun {
  int64_t global, local, size;
};
using IndexRuns = std::vector<IndexRun>;

IndexRuns IndexRunsOf(const std::vector<Interval>& intervals) {
  IndexRuns pieces;
  int64_t local = 0;
  for (const Interval& i : intervals) {
    if (i.length() > 0) pieces.push_back({i.start, local, i.length()});
    local += i.length();
  }
  return pieces;
}

void Normalize(RunBox* box) {
  auto& dims = box->dims;
  dims.erase(std::remove_if(dims.begin(), dims.end(), [](const RunDim& d) { return d.size == 1; }),
             dims.end());
  std::sort(dims.begin(), dims.end(),
            [](const RunDim& a, const RunDim& b) { return a.g_stride > b.g_stride; });
  absl::InlinedVector<RunDim, 4> merged;
  for (const RunDim& d : dims) {
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

// Every combination of one piece per dim becomes a box, in row-major order.
void AddBoxes(const std::vector<IndexRuns>& axes, IntSpan global_strides, IntSpan local_strides,
              int64_t local_offset, std::vector<RunBox>* out) {
  const size_t ndim = axes.size();
  for (const IndexRuns& p : axes) {
    if (p.empty()) return;
  }
  std::vector<size_t> choice(ndim, 0);
  do {
    RunBox box;
    box.local_offset = local_offset;
    for (size_t d = 0; d < ndim; ++d) {
      const IndexRun& p = axes[d][choice[d]];
      box.first_g += p.global * global_strides[d];
      box.local_offset += p.local * local_strides[d];
      box.dims.push_back({p.size, global_strides[d], local_strides[d]});
    }
    Normalize(&box);
    out->push_back(std::move(box));
  } while (NextIndex(choice, [&](size_t d) { return axes[d].size(); }, [](size_t, int64_t) {}));
}

}  // namespace

int64_t RunBox::last_g() const {
  int64_t g = first_g;
  for (const RunDim& d : dims) g += (d.size - 1) * d.g_stride;
  return g;
}

std::vector<RunBox> LocalRunBoxes(const Spec& spec, IntSpan coordinate, IntSpan global_strides,
                                  IntSpan local_strides) {
  const bool flat = std::any_of(spec.placements().begin(), spec.placements().end(),
                                [](const Placement& p) { return p.is_flat(); });
  std::vector<RunBox> boxes;
  for (const Block& block : RegionOf(spec, coordinate)) {
    std::vector<IndexRuns> axes;
    for (const std::vector<Interval>& index : block.index) axes.push_back(IndexRunsOf(index));
    if (!flat) {
      AddBoxes(axes, global_strides, local_strides, 0, &boxes);
      continue;
    }
    Strides strides = block.strides;  // of a contiguous local tensor
    for (int64_t& s : strides) s *= local_strides[0];
    AddBoxes(axes, global_strides, strides, block.offset * local_strides[0], &boxes);
  }
  return boxes;
}

RunCursor::RunCursor(const RunBox& box)
    : box_(&box), outer_(box.dims.size() - 1), index_(outer_, 0) {
  Reset(0);
}

void RunCursor::Reset(size_t from) {
  std::fill(index_.begin() + from, index_.end(), 0);
  g_ = box_->first_g;
  local_ = box_->local_offset;
  for (size_t d = 0; d < outer_; ++d) {
    g_ += index_[d] * box_->dims[d].g_stride;
    local_ += index_[d] * box_->dims[d].local_stride;
  }
}

void RunCursor::Increment(size_t limit, int64_t count) {
  for (size_t d = limit; d > 0; --d, count = 1) {
    const RunDim& dim = box_->dims[d - 1];
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
  int64_t rest = std::max<int64_t>(g - box_->first_g, 0);
  for (size_t d = 0; d < outer_; ++d) {
    const RunDim& dim = box_->dims[d];
    index_[d] = rest / dim.g_stride;
    if (index_[d] >= dim.size) {  // behind everything with these outer indices
      Reset(d);
      Increment(d);
      return;
    }
    rest -= index_[d] * dim.g_stride;
  }
  Reset(outer_);
  if (rest >= box_->run().size) Next();
}

}  // namespace dtensor

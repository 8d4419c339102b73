// Views of a Tensor: new sizes and strides over the same buffer.
#include <numeric>

#include "absl/strings/str_cat.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {

Tensor Tensor::SeenAs(Shape&& shape, Strides&& strides, int64_t offset, bool row_major) const {
  Tensor view = *this;
  view.row_major_ = row_major;
  view.shape_ = std::move(shape);
  view.strides_ = std::move(strides);
  view.MoveTo(offset);
  return view;
}

Tensor Tensor::Slice(int dim, int64_t start, int64_t length, int64_t step) const {
  DT_CHECK(dim >= 0 && dim < ndim() && start >= 0 && length >= 0 && step >= 1);
  DT_CHECK(length == 0 || start + (length - 1) * step < shape_[dim]);
  Tensor view = *this;
  view.row_major_ = false;
  view.shape_[dim] = length;
  view.strides_[dim] *= step;
  if (length > 0) view.MoveTo(offset_ + start * strides_[dim]);
  return view;
}

Tensor Tensor::Select(int dim, int64_t index) const {
  Tensor view = Slice(dim, index, 1);
  view.shape_.erase(view.shape_.begin() + dim);
  view.strides_.erase(view.strides_.begin() + dim);
  return view;
}

Tensor Tensor::Transpose(int a, int b) const {
  DT_CHECK(a >= 0 && a < ndim() && b >= 0 && b < ndim());
  Tensor view = *this;
  view.row_major_ = false;
  std::swap(view.shape_[a], view.shape_[b]);
  std::swap(view.strides_[a], view.strides_[b]);
  return view;
}

Tensor Tensor::Permute(absl::Span<const int> order) const {
  DT_CHECK(static_cast<int>(order.size()) == ndim());
  Tensor view = *this;
  view.row_major_ = false;
  for (int d = 0; d < ndim(); ++d) {
    view.shape_[d] = shape_[order[d]];
    view.strides_[d] = strides_[order[d]];
  }
  return view;
}

Tensor Tensor::Unsqueeze(int dim) const {
  DT_CHECK(dim >= 0 && dim <= ndim());
  Tensor view = *this;
  view.row_major_ = false;
  const int64_t stride = dim < ndim() ? shape_[dim] * strides_[dim] : 1;
  view.shape_.insert(view.shape_.begin() + dim, 1);
  view.strides_.insert(view.strides_.begin() + dim, stride);
  return view;
}

Tensor Tensor::Squeeze(int dim) const {
  DT_CHECK(dim >= 0 && dim < ndim() && shape_[dim] == 1);
  Tensor view = *this;
  view.row_major_ = false;
  view.shape_.erase(view.shape_.begin() + dim);
  view.strides_.erase(view.strides_.begin() + dim);
  return view;
}

Tensor Tensor::Expand(IntSpan shape) const {
  const int extra = static_cast<int>(shape.size()) - ndim();
  DT_CHECK(extra >= 0);
  Tensor view = *this;
  view.row_major_ = false;
  view.shape_.assign(shape.begin(), shape.end());
  view.strides_.assign(shape.size(), 0);
  for (int d = 0; d < ndim(); ++d) {
    DT_CHECK(shape_[d] == shape[d + extra] || shape_[d] == 1);
    if (shape_[d] == shape[d + extra]) view.strides_[d + extra] = strides_[d];
  }
  return view;
}

absl::StatusOr<Tensor> Tensor::View(IntSpan shape) const {
  int64_t elements = 1, signs = 0;
  for (const int64_t size : shape) {
    elements *= size;
    signs |= size;
  }
  if (elements != numel() || signs < 0) {
    return absl::InvalidArgumentError(absl::StrCat("cannot view shape ", dtensor::ToString(shape_),
                                                   " as ", dtensor::ToString(shape)));
  }
  Shape target(shape.begin(), shape.end());
  if (is_contiguous() || numel() == 0) {
    return SeenAs(std::move(target), ContiguousStrides(shape), offset_, /*row_major=*/true);
  }
  // Walk runs of dims that are laid out as one, and cut each run into the new sizes.
  Strides strides(shape.size());
  int at = static_cast<int>(shape.size()) - 1;
  int64_t base = strides_.back(), have = 1, want = 1;
  for (int d = ndim() - 1; d >= 0; --d) {
    have *= shape_[d];
    const bool ends = d == 0 || (shape_[d - 1] != 1 && strides_[d - 1] != have * base);
    if (!ends) continue;
    while (at >= 0 && (want < have || shape[at] == 1)) {
      strides[at] = want * base;
      want *= shape[at--];
    }
    if (want != have) {
      return absl::FailedPreconditionError(absl::StrCat(
          "strides ", dtensor::ToString(strides_), " of shape ", dtensor::ToString(shape_),
          " do not allow a view as ", dtensor::ToString(shape)));
    }
    if (d > 0) base = strides_[d - 1];
    have = want = 1;
  }
  return AsStrided(target, strides, offset_);
}

absl::StatusOr<Tensor> Tensor::Reshape(IntSpan shape) const {
  absl::StatusOr<Tensor> view = View(shape);
  if (view.ok() || view.status().code() != absl::StatusCode::kFailedPrecondition) return view;
  DT_ASSIGN_OR_RETURN(Tensor copy, Contiguous());
  return copy.View(shape);
}

}  // namespace dtensor

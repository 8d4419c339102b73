// Kernels that move elements and compute nothing: the device's own copy, of the right parts.
#include "dtensor/tensor/cuda/arrays.h"
#include "dtensor/tensor/cuda/launch.h"

namespace dtensor::cuda {
namespace {

void Copy(const KernelCall& c, const TensorRef& from, const TensorRef& to) {
  NoteError(static_cast<cudaError_t>(CopyArray(c.stream, &from, &to)));
}
void CopyFirst(const KernelCall& c) { Copy(c, c.in[0], c.out[0]); }
void CopySecond(const KernelCall& c) { Copy(c, c.in[1], c.out[0]); }

// The part of an array at [start, start + step * length) of `dim`.
class Part {
 public:
  Part(const TensorRef& t, int dim, int64_t start, int64_t length, int64_t step) : ref_(t) {
    for (int d = 0; d < t.ndim; ++d) {
      sizes_[d] = d == dim ? length : t.sizes[d];
      strides_[d] = d == dim ? t.strides[d] * step : t.strides[d];
    }
    ref_.data = static_cast<char*>(t.data) + start * t.strides[dim] * SizeOf(t.dtype);
    ref_.sizes = sizes_;
    ref_.strides = strides_;
  }
  Part(const Part&) = delete;
  const TensorRef& ref() const { return ref_; }

 private:
  TensorRef ref_;
  int64_t sizes_[kMaxDims], strides_[kMaxDims];
};

// attrs: dim, start, step, size; factors: what lies before the slice
void SliceBackward(const KernelCall& c) {
  const TensorRef &dy = c.in[0], &out = c.out[0];
  const uint8_t zero = 0;
  NoteError(static_cast<cudaError_t>(FillArray(c.stream, &out, &zero, DType::kU8)));
  const int dim = static_cast<int>(c.attrs[0].i);
  const int64_t length = dy.sizes[dim], size = out.sizes[dim];
  if (length == 0) return;
  const bool counted = !c.factors.empty() && c.factors[0].global >= 0;
  const int64_t start = counted ? c.factors[0].local : c.attrs[1].i, step = c.attrs[2].i;
  const bool fits =
      start >= 0 && start < size && step >= 1 && (length - 1) <= (size - 1 - start) / step;
  if (!fits) return c.workspace->Fail("the slice is not in its dim");
  Copy(c, dy, Part(out, dim, start, length, step).ref());
}

// attrs: dim
void Cat(const KernelCall& c) {
  const int dim = static_cast<int>(c.attrs[0].i);
  int64_t start = 0;
  for (const TensorRef& x : c.in) {
    const int64_t length = x.sizes[dim];
    if (length > 0) Copy(c, x, Part(c.out[0], dim, start, length, 1).ref());
    start += length;
  }
}

// attrs: dims
void Flip(const KernelCall& c) {
  TensorRef x = c.in[0];
  int64_t strides[kMaxDims];
  for (int d = 0; d < x.ndim; ++d) strides[d] = x.strides[d];
  auto* first = static_cast<char*>(x.data);
  for (int64_t i = 0; i < c.attrs[0].n; ++i) {
    const int64_t d = c.attrs[0].ints[i];
    if (x.sizes[d] == 0) return;
    first += (x.sizes[d] - 1) * strides[d] * SizeOf(x.dtype);
    strides[d] = -strides[d];
  }
  x.data = first;
  x.strides = strides;
  Copy(c, x, c.out[0]);
}

}  // namespace

void AddCopiesKernels(AddKernelFn add) {
  for (const char* name : {"clone", "contiguous", "to"}) {
    add(name, &CopyFirst, kStoredDTypes, KernelLayout::kStrided);
  }
  add("copy_", &CopySecond, kStoredDTypes, KernelLayout::kStrided);
  add("slice_backward", &SliceBackward, kStoredDTypes, KernelLayout::kStrided);
  add("cat", &Cat, kStoredDTypes, KernelLayout::kStrided);
  add("flip", &Flip, kStoredDTypes, KernelLayout::kStrided);
}

}  // namespace dtensor::cuda

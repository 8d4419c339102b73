// Kernels that move elements and compute nothing.
#include <cstring>
#include <string>

#include "dtensor/ops/kernels.h"
#include "dtensor/tensor/shape.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {
namespace {

void CopyKernel(const KernelCall& c) { CopyRef(c.in[0], c.out[0]); }
void CopyInPlaceKernel(const KernelCall& c) { CopyRef(c.in[1], c.out[0]); }

// The part of `t` at [start, start + step * length) of `dim`, as an array over the same memory.
TensorRef Part(const TensorRef& t, int dim, int64_t start, int64_t length, int64_t step,
               Shape* sizes, Strides* strides) {
  sizes->assign(t.sizes, t.sizes + t.ndim);
  strides->assign(t.strides, t.strides + t.ndim);
  (*sizes)[dim] = length;
  (*strides)[dim] *= step;
  auto* data = static_cast<char*>(t.data) + start * t.strides[dim] * SizeOf(t.dtype);
  return {data, sizes->data(), strides->data(), t.ndim, t.dtype};
}

// attrs: dim, start, step, size; factors: what lies before the slice
void SliceBackwardKernel(const KernelCall& c) {
  const TensorRef &dy = c.in[0], &out = c.out[0];
  int64_t n = SizeOf(out.dtype);
  for (int d = 0; d < out.ndim; ++d) n *= out.sizes[d];
  std::memset(out.data, 0, static_cast<size_t>(n));
  const int dim = static_cast<int>(c.attrs[0].i);
  if (dy.sizes[dim] == 0) return;
  const bool counted = !c.factors.empty() && c.factors[0].global >= 0;
  const int64_t start = counted ? c.factors[0].local : c.attrs[1].i, step = c.attrs[2].i;
  if (!SliceFits(start, dy.sizes[dim], step, out.sizes[dim])) {
    c.workspace->Fail("the slice is not in [0, " + std::to_string(out.sizes[dim]) + ")");
    return;
  }
  Shape sizes;
  Strides strides;
  CopyRef(dy, Part(out, dim, start, dy.sizes[dim], step, &sizes, &strides));
}

// attrs: dim
void CatKernel(const KernelCall& c) {
  const int dim = static_cast<int>(c.attrs[0].i);
  int64_t start = 0;
  for (const TensorRef& x : c.in) {
    Shape sizes;
    Strides strides;
    if (x.sizes[dim] > 0) {
      CopyRef(x, Part(c.out[0], dim, start, x.sizes[dim], 1, &sizes, &strides));
    }
    start += x.sizes[dim];
  }
}

}  // namespace

void RegisterCopyKernels(AddKernelFn add) {
  for (const char* name : {"clone", "contiguous", "to"}) {
    add(name, CopyKernel, kStoredDTypes, KernelLayout::kStrided);
  }
  add("copy_", CopyInPlaceKernel, kStoredDTypes, KernelLayout::kStrided);
  add("slice_backward", SliceBackwardKernel, kStoredDTypes, KernelLayout::kStrided);
  add("cat", CatKernel, kStoredDTypes, KernelLayout::kStrided);
}

}  // namespace dtensor

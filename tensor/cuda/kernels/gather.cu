// Reading and writing where indices say. Operands are seen as [outer, rows, inner], rows along the
// indexed dim; indices either name whole rows ([picks]) or an element each ([outer, picks, inner]).
// What goes to one place is combined in the order of the CPU: the same bits.
#include <type_traits>

#include "dtensor/tensor/cuda/arrays.h"
#include "dtensor/tensor/cuda/kernels/fold.h"
#include "dtensor/tensor/cuda/kernels/segments.h"

namespace dtensor::cuda {
namespace {

// Items are picks of whole rows, which have `width` elements, or single elements.
struct Picks {
  Indices index;
  FactorRange rows;
  int64_t outer = 1, picks, inner = 1, width;
  bool by_row;
  ErrorSlot slot;

  // `x`: the operand that has the rows; `dim`: of x.
  Picks(const KernelCall& c, const TensorRef& x, const TensorRef& of)
      : index(of), by_row(of.ndim == 1), slot(ErrorSlotOf(c)) {
    const int dim = static_cast<int>(c.attrs[0].i);
    outer = ProductOf(x, 0, dim);
    inner = ProductOf(x, dim + 1, x.ndim);
    rows = PartOf(c, 0, x.sizes[dim]);
    picks = by_row ? of.sizes[0] : of.sizes[dim];
    width = by_row ? inner : 1;
  }
  int64_t items() const { return outer * picks * (by_row ? 1 : inner); }
  int64_t targets() const { return outer * rows.local * (by_row ? 1 : inner); }
  // Which row, or element, of x it is, counted in units of `width`; -1: another rank has it.
  // Complains of what is no index.
  __device__ int64_t operator()(int64_t item) const {
    const int64_t line = by_row ? item : item / inner, i = by_row ? 0 : item - line * inner;
    const int64_t o = line / picks, at = by_row ? line - o * picks : item, id = index[at];
    if (id < 0 || id >= rows.global) {
      Complaint(slot) << "index " << id << " is out of range for a dim of " << rows.global
                      << " (position " << at << ")";
      return -1;
    }
    const int64_t row = id - rows.start;
    if (row < 0 || row >= rows.local) return -1;
    return (o * rows.local + row) * (by_row ? 1 : inner) + i;
  }
};

template <class U>
__global__ void __launch_bounds__(kThreads) Gather(const U* x, Picks picks, U* out, int64_t n) {
  for (int64_t i = GridStart(); i < n; i += GridStep()) {
    const int64_t item = picks.width == 1 ? i : i / picks.width, from = picks(item);
    out[i] = from < 0 ? U{} : x[from * picks.width + (i - item * picks.width)];
  }
}
// x, index -> out; rows of other ranks give zeros. attrs: dim
void GatherKernel(const KernelCall& c) {
  const Picks picks(c, c.in[0], c.in[1]);
  const int64_t n = picks.items() * picks.width;
  if (n == 0) return;
  VisitSize(c.out[0].dtype, [&](auto element) {
    using U = decltype(element);
    Gather<<<BlocksFor(n), kThreads, 0, StreamOf(c)>>>(In<U>(c, 0), picks, Out<U>(c, 0), n);
    CheckLaunch();
  });
}

// --- writing: what is in out[row] combined with the items that go there

// Integers wrap around; truth values are combined as such; NaN wins.
template <class X>
struct Sum {
  using T = Computed<X>;
  __device__ static T Of(T a, T b) {
    if constexpr (std::is_same_v<X, Bool>) return a | b;
    if constexpr (std::is_floating_point_v<T>) return a + b;
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
};
template <class X>
struct Product {
  using T = Computed<X>;
  __device__ static T Of(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return a * b;
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
};
template <class X>
struct Larger {
  using T = Computed<X>;
  __device__ static T Of(T a, T b) { return b > a || b != b ? b : a; }
};
template <class X>
struct Smaller {
  using T = Computed<X>;
  __device__ static T Of(T a, T b) { return b < a || b != b ? b : a; }
};

template <class X, template <class> class Op>
struct CombineItems {
  const X* src;
  X* out;
  Walk places;  // of out, any strides
  int64_t width;
  using Acc = Computed<X>;
  __device__ Acc Start(int64_t to, int64_t column) const {
    return Widen(out[places.At(to * width + column)]);
  }
  __device__ Acc Add(Acc now, int64_t item, int64_t column) const {
    return Op<X>::Of(now, Widen(src[item * width + column]));
  }
  __device__ void Finish(int64_t to, int64_t column, Acc now) const {
    Store(now, out + places.At(to * width + column));
  }
};
// The last one stays.
template <class U>
struct LastItem {
  const U* src;
  U* out;
  Walk places;
  int64_t width;
  __device__ U Start(int64_t, int64_t) const { return U{}; }
  __device__ U Add(U, int64_t item, int64_t column) const { return src[item * width + column]; }
  __device__ void Finish(int64_t to, int64_t column, U now) const {
    out[places.At(to * width + column)] = now;
  }
};

Walk PlacesOf(const TensorRef& t) {
  Walk places;
  for (int d = 0; d < t.ndim; ++d) places.Append(t.sizes[d], t.strides[d]);
  return places;
}
// x, index, src -> out, which may be x
void CopyBase(const KernelCall& c) {
  if (c.in[0].data == c.out[0].data || NumelOf(c.out[0]) == 0) return;
  NoteError(static_cast<cudaError_t>(CopyArray(c.stream, &c.in[0], &c.out[0])));
}

template <template <class> class Op>
void Combine(const KernelCall& c, const TensorRef& src) {
  const Picks picks(c, c.out[0], c.in[1]);
  VisitDType(c.out[0].dtype, [&](auto element) {
    using X = typename decltype(element)::type;
    const CombineItems<X, Op> apply = {static_cast<const X*>(src.data), Out<X>(c, 0),
                                       PlacesOf(c.out[0]), picks.width};
    RunSegments(c, picks, apply, picks.items(), picks.targets(), picks.width);
  });
}
void ScatterKernel(const KernelCall& c) {
  CopyBase(c);
  const Picks picks(c, c.out[0], c.in[1]);
  VisitSize(c.out[0].dtype, [&](auto element) {
    using U = decltype(element);
    const LastItem<U> apply = {In<U>(c, 2), Out<U>(c, 0), PlacesOf(c.out[0]), picks.width};
    RunSegments(c, picks, apply, picks.items(), picks.targets(), picks.width);
  });
}
template <template <class> class Op>
void CombineKernel(const KernelCall& c) {
  CopyBase(c);
  Combine<Op>(c, c.in[2]);
}
// dy, index -> out, whose rows are sums. attrs: dim, size
void GatherBackwardKernel(const KernelCall& c) {
  const int64_t bytes = NumelOf(c.out[0]) * SizeOf(c.out[0].dtype);
  if (bytes == 0) return;
  NoteError(cudaMemsetAsync(c.out[0].data, 0, static_cast<size_t>(bytes), StreamOf(c)));
  Combine<Sum>(c, c.in[0]);
}

// Indices of a dim of `size`, from 0 up.
__global__ void __launch_bounds__(kThreads)
    CheckIndex(Indices index, int64_t* out, int64_t n, int64_t size, int64_t least,
               ErrorSlot slot) {
  for (int64_t i = GridStart(); i < n; i += GridStep()) {
    const int64_t id = index[i];
    if (id < least || id >= size) {
      Complaint(slot) << "index " << id << " is not in [" << least << ", " << size << ")";
    }
    out[i] = id < 0 ? id + size : id;
  }
}
// attrs: size, wraps
void CheckIndexKernel(const KernelCall& c) {
  const int64_t n = NumelOf(c.in[0]), size = c.attrs[0].i;
  if (n == 0) return;
  CheckIndex<<<BlocksFor(n), kThreads, 0, StreamOf(c)>>>(
      Indices(c.in[0]), Out<int64_t>(c, 0), n, size, c.attrs[1].i != 0 ? -size : 0, ErrorSlotOf(c));
  CheckLaunch();
}

// Zeros on one side of a diagonal: element (r, k) is kept where k < first + r, or (upper) not.
template <class U>
__global__ void __launch_bounds__(kThreads) Triangle(const U* x, U* out, int64_t n, int64_t rows,
                                                     int64_t columns, int64_t first, bool upper) {
  for (int64_t i = GridStart(); i < n; i += GridStep()) {
    const int64_t line = i / columns, k = i - line * columns, r = line % rows;
    out[i] = (k < first + r) != upper ? x[i] : U{};
  }
}
// x [..., rows, columns]; attrs: diagonal, upper; factors: rows, columns
void TrilKernel(const KernelCall& c) {
  const TensorRef& x = c.in[0];
  const int64_t n = NumelOf(x);
  if (n == 0) return;
  const int64_t rows = x.sizes[x.ndim - 2], columns = x.sizes[x.ndim - 1];
  const bool upper = c.attrs[1].i != 0;
  __int128 first = static_cast<__int128>(c.attrs[0].i) + PartOf(c, 0, rows).start -
                   PartOf(c, 1, columns).start + (upper ? 0 : 1);
  first = first > columns ? columns : first < -rows ? -rows : first;
  VisitSize(x.dtype, [&](auto element) {
    using U = decltype(element);
    Triangle<<<BlocksFor(n), kThreads, 0, StreamOf(c)>>>(
        In<U>(c, 0), Out<U>(c, 0), n, rows, columns, static_cast<int64_t>(first), upper);
    CheckLaunch();
  });
}

}  // namespace

void AddGatherKernels(AddKernelFn add) {
  constexpr uint32_t kIndices = DTypeBit(DType::kI64) | DTypeBit(DType::kI32);
  constexpr KernelLayout kRows = KernelLayout::kContiguous;
  add("gather", GatherKernel, kAllDTypes, kRows);
  add("take_along", GatherKernel, kAllDTypes, kRows);
  add("gather_backward", GatherBackwardKernel, kAllDTypes, kRows);
  add("put_along", GatherBackwardKernel, kFloatDTypes | DTypeBit(DType::kI64), kRows);
  add("scatter", ScatterKernel, kAllDTypes, kRows);
  add("scatter_", ScatterKernel, kAllDTypes, kRows);
  add("scatter_add", CombineKernel<Sum>, kAllDTypes, kRows);
  add("scatter_add_", CombineKernel<Sum>, kAllDTypes, kRows);
  add("scatter_prod", CombineKernel<Product>, kAllDTypes, kRows);
  add("scatter_amax", CombineKernel<Larger>, kAllDTypes, kRows);
  add("scatter_amin", CombineKernel<Smaller>, kAllDTypes, kRows);
  add("check_index", CheckIndexKernel, kIndices, kRows);
  add("tril", TrilKernel, kStoredDTypes, kRows);
}

}  // namespace dtensor::cuda

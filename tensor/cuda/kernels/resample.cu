// Mean pools and interpolation: a weighted sum along one of the last dims after the other, and its
// transpose, whose terms are sorted by where they go. In the CPU's order: its bits.
#include <type_traits>

#include "dtensor/tensor/cuda/arrays.h"
#include "dtensor/tensor/cuda/kernels/segments.h"
// What comes after it is device code.
#include "dtensor/tensor/cuda/math.h"
//
#include "dtensor/ops/conv/taps.h"

namespace dtensor::cuda {
namespace {

namespace dev = ::dtensor::device_code;

// One dim of a call.
struct Axis {
  WindowDim d;
  Resample mode;
  double scale;
};

// x [outer, in, inner] -> y [outer, out, inner], of n elements
template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    SumTaps(const __grid_constant__ Axis axis, const From* x, To* y, int64_t n, int64_t inner) {
  using T = Computed<From>;
  for (int64_t i = GridStart(); i < n; i += GridStep()) {
    const int64_t line = i / inner, outer = line / axis.d.out;
    const dev::Taps<T> taps =
        dev::TapsOf<T>(axis.d, axis.mode, axis.scale, line - outer * axis.d.out);
    const From* const from = x + outer * axis.d.in * inner + (i - line * inner);
    T sum = 0;
    for (int64_t k = 0; k < taps.count; ++k)
      sum += taps.Weight(k) * Widen(from[taps.At(k) * inner]);
    Store(sum, y + i);
  }
}

// --- transposed

// The taps of all elements of a result, `most` items each: where they are, or -1, and by what
// weight.
template <class T>
struct AllTaps {
  int64_t count, most;
  int64_t* places;
  T* weights;
  AllTaps(const KernelCall& c, const Axis& axis) : most(dev::MostTaps(axis.d, axis.mode)) {
    count = axis.d.out * most;
    places = Scratch<int64_t>(c, count);
    weights = Scratch<T>(c, count);
  }
  bool ok() const { return places != nullptr && weights != nullptr; }
  __device__ int64_t operator()(int64_t item) const { return places[item]; }
};
template <class T>
__global__ void __launch_bounds__(kThreads)
    FindTaps(const __grid_constant__ Axis axis, AllTaps<T> all) {
  for (int64_t i = GridStart(); i < all.count; i += GridStep()) {
    const int64_t o = i / all.most, k = i - o * all.most;
    const dev::Taps<T> taps = dev::TapsOf<T>(axis.d, axis.mode, axis.scale, o);
    all.places[i] = k < taps.count ? taps.At(k) : -1;
    all.weights[i] = k < taps.count ? taps.Weight(k) : T(0);
  }
}

// Columns are those of [outer, inner].
template <class From, class To>
struct SumItems {
  const From* dy;
  To* dx;
  const Computed<From>* weights;
  int64_t in, out, inner, most;
  using Acc = Computed<From>;
  __device__ int64_t At(int64_t column, int64_t rows, int64_t row) const {
    const int64_t outer = column / inner;
    return (outer * rows + row) * inner + (column - outer * inner);
  }
  __device__ Acc Start(int64_t, int64_t) const { return 0; }
  __device__ Acc Add(Acc sum, int64_t item, int64_t column) const {
    return sum + weights[item] * Widen(dy[At(column, out, item / most)]);
  }
  __device__ void Finish(int64_t place, int64_t column, Acc sum) const {
    Store(sum, dx + At(column, in, place));
  }
};

// dy [outer, out, inner] -> dx [outer, in, inner]
template <class From, class To>
void RunTransposed(const KernelCall& c, const Axis& axis, const From* dy, To* dx, int64_t outer,
                   int64_t inner) {
  using T = Computed<From>;
  const AllTaps<T> all(c, axis);
  if (!all.ok()) return;
  const auto bytes = outer * axis.d.in * inner * static_cast<int64_t>(sizeof(To));
  NoteError(cudaMemsetAsync(dx, 0, static_cast<size_t>(bytes), StreamOf(c)));
  FindTaps<<<BlocksFor(all.count), kThreads, 0, StreamOf(c)>>>(axis, all);
  CheckLaunch();
  const SumItems<From, To> apply = {dy, dx, all.weights, axis.d.in, axis.d.out, inner, all.most};
  RunSegments(c, all, apply, all.count, axis.d.in, outer * inner);
}

// x; window, mode, scale0, scale1, scale2. Results between two dims are in scratch memory, in the
// type that is computed in.
template <bool kTransposed>
void ResampleKernel(const KernelCall& c) {
  const TensorRef& x = c.in[0];
  const Windows w = WindowsOf(c.attrs[0]);
  const int skipped = kMaxWindowDims - w.dims;
  const int64_t total = NumelOf(c.out[0]);
  if (total == 0) return;
  int64_t outer = ProductOf(x, 0, x.ndim - w.dims);
  int64_t inner = kTransposed ? w.OutPlane() : w.InPlane();
  if (inner == 0) {  // of nothing
    NoteError(cudaMemsetAsync(c.out[0].data, 0, static_cast<size_t>(total * SizeOf(c.out[0].dtype)),
                              StreamOf(c)));
    return;
  }
  VisitFloat(x.dtype, [&](auto e) {
    using X = decltype(e);
    using T = Computed<X>;
    Axis axes[kMaxWindowDims];
    bool changes[kMaxWindowDims] = {};
    int last = -1;
    for (int d = skipped; d < kMaxWindowDims; ++d) {
      axes[d] = {w.d[d], static_cast<Resample>(c.attrs[1].i), c.attrs[2 + d - skipped].d};
      changes[d] = !dev::IsIdentity<T>(w.d[d], axes[d].mode, axes[d].scale);
      if (changes[d]) last = d;
    }
    if (last < 0) {
      NoteError(static_cast<cudaError_t>(CopyArray(c.stream, &x, &c.out[0])));
      return;
    }
    const T* between = nullptr;  // what the dims so far gave, if any
    for (int d = skipped; d < kMaxWindowDims; ++d) {
      const int64_t cols = kTransposed ? w.d[d].out : w.d[d].in;
      const int64_t rows = kTransposed ? w.d[d].in : w.d[d].out;
      inner /= cols;
      const auto run = [&](const auto* from, auto* to) {
        if constexpr (kTransposed) {
          RunTransposed(c, axes[d], from, to, outer, inner);
        } else {
          const int64_t n = outer * rows * inner;
          SumTaps<<<BlocksFor(n), kThreads, 0, StreamOf(c)>>>(axes[d], from, to, n, inner);
          CheckLaunch();
        }
      };
      if (changes[d]) {
        T* const next = d == last ? nullptr : Scratch<T>(c, outer * rows * inner);
        if (d != last && next == nullptr) return;
        if (between == nullptr) {
          next == nullptr ? run(In<X>(c, 0), Out<X>(c, 0)) : run(In<X>(c, 0), next);
        } else {
          next == nullptr ? run(between, Out<X>(c, 0)) : run(between, next);
        }
        between = next;
      }
      outer *= rows;
    }
  });
}

}  // namespace

void AddResampleKernels(AddKernelFn add) {
  add("resample", ResampleKernel<false>, kFloatDTypes, KernelLayout::kContiguous);
  add("resample_backward", ResampleKernel<true>, kFloatDTypes, KernelLayout::kContiguous);
}

}  // namespace dtensor::cuda

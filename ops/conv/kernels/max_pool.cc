// Max pools: the largest element of every window and where it is, and the gradient by that place.
#include "dtensor/ops/conv/window.h"
#include "dtensor/ops/cpu/rows.h"
#include "dtensor/ops/cpu/widen.h"
#include "dtensor/ops/kernels.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

template <class T>
T Least() {
  if constexpr (static_cast<T>(0.5) != 0) return static_cast<T>(-__builtin_inff());
  if constexpr (static_cast<T>(-1) > 0) return 0;
  return static_cast<T>(static_cast<uint64_t>(1) << (8 * sizeof(T) - 1));
}

// One window of a plane; of equal elements the first, of NaN the last, as torch.
template <class T>
void LargestOf(const T* x, const Windows& w, const WindowRange (&r)[3], T* y, int64_t* at) {
  T best = Least<T>();
  int64_t place = (r[0].start * w.d[1].in + r[1].start) * w.d[2].in + r[2].start;
  for (int64_t a = r[0].start; a < r[0].end; a += r[0].step) {
    for (int64_t b = r[1].start; b < r[1].end; b += r[1].step) {
      const int64_t row = (a * w.d[1].in + b) * w.d[2].in;
      for (int64_t i = r[2].start; i < r[2].end; i += r[2].step) {
        const T v = x[row + i];
        if (v > best || v != v) {
          best = v;
          place = row + i;
        }
      }
    }
  }
  *y = best;
  *at = place;
}

// Outputs [from, to) of a row, whose windows r[0] and r[1] leave rows of the input and reach over
// no end of those: tap by tap over runs of outputs, where LargestOf goes from window to window.
// kStride: that of the row where it is known; Place holds every place of a plane.
template <class T, class Place, int64_t kStride>
void LargestOfRow(const T* x, const Windows& w, const WindowRange (&r)[3], int64_t from, int64_t to,
                  T* y, int64_t* at) {
  constexpr int64_t kRun = 128;
  T best[kRun];
  Place place[kRun];
  const WindowDim& d = w.d[2];
  const int64_t stride = kStride > 0 ? kStride : d.stride;
  const int64_t above = (r[0].start * w.d[1].in + r[1].start) * d.in;
  for (int64_t begin = from; begin < to; begin += kRun) {
    const int64_t n = to - begin < kRun ? to - begin : kRun;
    const int64_t left = begin * stride - d.before;
    for (int64_t o = 0; o < n; ++o) {
      best[o] = Least<T>();
      place[o] = static_cast<Place>(above + left + o * stride);
    }
    for (int64_t a = r[0].start; a < r[0].end; a += r[0].step) {
      for (int64_t b = r[1].start; b < r[1].end; b += r[1].step) {
        for (int64_t k = 0; k < d.kernel; ++k) {
          const int64_t first = (a * w.d[1].in + b) * d.in + left + k * d.dilation;
          const T* in = x + first;
          for (int64_t o = 0; o < n; ++o) {
            const T v = in[o * stride];
            const bool better = (v > best[o]) | (v != v);
            best[o] = better ? v : best[o];
            place[o] = better ? static_cast<Place>(first + o * stride) : place[o];
          }
        }
      }
    }
    for (int64_t o = 0; o < n; ++o) {
      y[begin + o] = best[o];
      at[begin + o] = place[o];
    }
  }
}

template <class T, class Place>
void LargestOfRowBy(const T* x, const Windows& w, const WindowRange (&r)[3], int64_t from,
                    int64_t to, T* y, int64_t* at) {
  switch (w.d[2].stride) {
    case 1:
      return LargestOfRow<T, Place, 1>(x, w, r, from, to, y, at);
    case 2:
      return LargestOfRow<T, Place, 2>(x, w, r, from, to, y, at);
    default:
      return LargestOfRow<T, Place, 0>(x, w, r, from, to, y, at);
  }
}

// x [.., in]; window -> y and indices [.., out]
template <class T>
void MaxPoolOf(const KernelCall& c) {
  const TensorRef& x = c.in[0];
  const Windows w = WindowsOf(c.attrs[0]);
  const int64_t planes = ProductOf(x, 0, x.ndim - w.dims);
  const auto* in = static_cast<const T*>(x.data);
  auto* y = static_cast<T*>(c.out[0].data);
  auto* at = static_cast<int64_t*>(c.out[1].data);
  if (w.OutPlane() == 0) return;
  auto* last = static_cast<WindowRange*>(
      c.workspace->Allocate(w.d[2].out * static_cast<int64_t>(sizeof(WindowRange))));
  for (int64_t o = 0; o < w.d[2].out; ++o) last[o] = RangeOf(w.d[2], o);
  // Outputs whose windows are whole along a row: there is none of an adaptive pool's.
  const WindowDim& d = w.d[2];
  int64_t inner = (d.before + d.stride - 1) / d.stride, outer = 0;
  const int64_t room = d.in - 1 - (d.kernel - 1) * d.dilation + d.before;
  if (d.kernel > 0 && room >= 0) outer = room / d.stride + 1;
  if (outer > d.out) outer = d.out;
  constexpr int64_t kFewest = 8;  // fewer of them are not worth runs
  if (outer - inner < kFewest) inner = outer = 0;
  const auto row_of =
      w.InPlane() <= INT32_MAX ? LargestOfRowBy<T, int32_t> : LargestOfRowBy<T, int64_t>;
  for (int64_t p = 0; p < planes; ++p, in += w.InPlane()) {
    WindowRange r[3];
    for (int64_t a = 0; a < w.d[0].out; ++a) {
      r[0] = RangeOf(w.d[0], a);
      for (int64_t b = 0; b < w.d[1].out; ++b) {
        r[1] = RangeOf(w.d[1], b);
        const auto one_by_one = [&](int64_t from, int64_t to) {
          for (int64_t o = from; o < to; ++o) {
            r[2] = last[o];
            LargestOf(in, w, r, y + o, at + o);
          }
        };
        one_by_one(0, inner);
        if (inner < outer) row_of(in, w, r, inner, outer, y, at);
        one_by_one(outer, d.out);
        y += d.out;
        at += d.out;
      }
    }
  }
}

// dy and indices [.., out]; window -> dx [.., in]
template <class T>
void MaxPoolBackwardOf(const KernelCall& c) {
  const TensorRef& dy = c.in[0];
  const Windows w = WindowsOf(c.attrs[0]);
  const int64_t planes = ProductOf(dy, 0, dy.ndim - w.dims), in = w.InPlane(), out = w.OutPlane();
  const auto* from = static_cast<const T*>(dy.data);
  const auto* at = static_cast<const int64_t*>(c.in[1].data);
  auto* dx = static_cast<T*>(c.out[0].data);
  for (int64_t i = 0; i < planes * in; ++i) dx[i] = 0;
  for (int64_t p = 0; p < planes; ++p, dx += in) {
    for (int64_t o = 0; o < out; ++o, ++from, ++at) {
      if (*at >= 0 && *at < in) dx[*at] += *from;
    }
  }
}

void MaxPoolKernel(const KernelCall& c) {
  switch (c.in[0].dtype) {
    case DType::kI64:
      return MaxPoolOf<int64_t>(c);
    case DType::kI32:
      return MaxPoolOf<int32_t>(c);
    case DType::kU8:
      return MaxPoolOf<uint8_t>(c);
    default:
      return RunFloating(c, MaxPoolOf<double>, MaxPoolOf<float>);
  }
}

void MaxPoolBackwardKernel(const KernelCall& c) {
  RunFloating(c, MaxPoolBackwardOf<double>, MaxPoolBackwardOf<float>);
}

}  // namespace

void RegisterMaxPool(AddKernelFn add) {
  add("max_pool", MaxPoolKernel, kAllDTypes & ~DTypeBit(DType::kBool), KernelLayout::kContiguous);
  add("max_pool_backward", MaxPoolBackwardKernel, kFloatDTypes, KernelLayout::kContiguous);
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor

// Resampling along the last dims, one after the other: results are weighted sums of elements of x,
// by a sparse matrix per dim. Mean pools and interpolation differ in the matrix only, and a
// gradient is the transposed one.
#include "dtensor/ops/conv/resample.h"

#include "dtensor/ops/conv/window.h"
#include "dtensor/ops/cpu/rows.h"
#include "dtensor/ops/cpu/widen.h"
#include "dtensor/ops/kernels.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

int64_t Clamped(int64_t v, int64_t low, int64_t high) {
  return v < low ? low : v > high ? high : v;
}

// The place in x of the elements of a result.
template <class T>
struct Places {
  T step;
  bool corners;
  T At(int64_t o) const {
    return corners ? step * static_cast<T>(o) : step * (static_cast<T>(o) + T(0.5)) - T(0.5);
  }
};

// `scale`: the factor given, or 0.
template <class T>
Places<T> PlacesOf(const WindowDim& d, bool corners, double scale) {
  if (corners)
    return {d.out > 1 ? static_cast<T>(d.in - 1) / static_cast<T>(d.out - 1) : T(0), true};
  if (scale > 0) return {static_cast<T>(1.0 / scale), false};
  return {static_cast<T>(d.in) / static_cast<T>(d.out), false};
}

// What may be made an integer: no larger than `in`, and a number.
template <class T>
T Within(T place, int64_t in) {
  return place < static_cast<T>(in) ? place : static_cast<T>(in);
}

template <class T, class Emit>
void LinearTaps(const WindowDim& d, T place, const Emit& emit) {
  if (place < 0) place = 0;
  place = Within(place, d.in);
  const int64_t first = Clamped(static_cast<int64_t>(place), 0, d.in - 1);
  const int64_t second = first + (first < d.in - 1 ? 1 : 0);
  T part = place - static_cast<T>(first);
  if (part > 1) part = 1;
  emit(first, T(1) - part);
  emit(second, part);
}

// The convolution of Keys with a = -0.75.
template <class T, class Emit>
void CubicTaps(const WindowDim& d, T place, const Emit& emit) {
  const T a = T(-0.75);
  const auto near = [a](T x) { return ((a + 2) * x - (a + 3)) * x * x + 1; };
  const auto far = [a](T x) { return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a; };
  place = Within(place, d.in);
  const auto floor = static_cast<int64_t>(__builtin_floor(static_cast<double>(place)));
  const int64_t at = floor < d.in - 1 ? floor : d.in - 1;
  const T part = place - static_cast<T>(at), t = part < 1 ? part : T(1);
  const T weights[] = {far(t + 1), near(t), near(1 - t), far(2 - t)};
  for (int k = 0; k < 4; ++k) emit(Clamped(at - 1 + k, 0, d.in - 1), weights[k]);
}

template <class T, class Emit>
void WindowTaps(const WindowDim& d, Resample mode, double scale, int64_t o, const Emit& emit) {
  const WindowRange r = RangeOf(d, o);
  const int64_t n = r.end <= r.start ? 0 : (r.end - r.start + r.step - 1) / r.step;
  T weight = T(1) / static_cast<T>(n);
  if (mode == Resample::kSum) weight = static_cast<T>(scale);
  if (mode == Resample::kMeanWithin && d.kernel > 0) {
    const int64_t start = o * d.stride - d.before, end = start + d.kernel;
    weight = T(1) / static_cast<T>((end < d.in + d.before ? end : d.in + d.before) - start);
  }
  for (int64_t i = r.start; i < r.end; i += r.step) emit(i, weight);
}

// emit(i, weight) for every element of x that element o of the result is made of.
template <class T, class Emit>
void ForTaps(const WindowDim& d, Resample mode, double scale, int64_t o, const Emit& emit) {
  const bool corners = mode == Resample::kLinearCorners || mode == Resample::kCubicCorners;
  switch (mode) {
    case Resample::kMean:
    case Resample::kMeanWithin:
    case Resample::kSum:
      return WindowTaps<T>(d, mode, scale, o, emit);
    case Resample::kNearest:
    case Resample::kNearestExact: {
      // In float32 where the last bits decide, whatever the dtype: as torch.
      const T step = PlacesOf<T>(d, false, scale).step;
      const T place = step * (static_cast<T>(o) + (mode == Resample::kNearest ? T(0) : T(0.5)));
      return emit(
          Clamped(static_cast<int64_t>(static_cast<float>(Within(place, d.in))), 0, d.in - 1),
          T(1));
    }
    default:
      if (d.in == d.out && !(scale > 0 && scale != 1)) return emit(o, T(1));
      const T place = PlacesOf<T>(d, corners, scale).At(o);
      return mode == Resample::kLinear || mode == Resample::kLinearCorners
                 ? LinearTaps(d, place, emit)
                 : CubicTaps(d, place, emit);
  }
}

// A sparse matrix by rows: row r has weights[k] at columns[k] for k in [starts[r], starts[r + 1]).
template <class T>
struct Matrix {
  int64_t rows, cols;
  int64_t *starts, *columns;
  T* weights;
  bool identity;
  bool pairs;  // every row has two
};

template <class T>
T* Allocate(const KernelCall& c, int64_t n) {
  return static_cast<T*>(c.workspace->Allocate(n * static_cast<int64_t>(sizeof(T))));
}

template <class T>
Matrix<T> MatrixOf(const KernelCall& c, const WindowDim& d, Resample mode, double scale,
                   bool transposed) {
  Matrix<T> m = {transposed ? d.in : d.out,
                 transposed ? d.out : d.in,
                 nullptr,
                 nullptr,
                 nullptr,
                 d.in == d.out,
                 true};
  m.starts = Allocate<int64_t>(c, m.rows + 2);
  for (int64_t r = 0; r < m.rows + 2; ++r) m.starts[r] = 0;
  // Counted two rows on, so that the second pass, which moves starts, leaves them right.
  for (int64_t o = 0; o < d.out; ++o) {
    ForTaps<T>(d, mode, scale, o, [&](int64_t i, T weight) {
      ++m.starts[(transposed ? i : o) + 2];
      m.identity = m.identity && i == o && weight == 1;
    });
  }
  for (int64_t r = 0; r < m.rows; ++r) m.starts[r + 2] += m.starts[r + 1];
  m.identity = m.identity && m.starts[m.rows + 1] == d.in;
  for (int64_t r = 0; r < m.rows; ++r) m.pairs &= m.starts[r + 2] - m.starts[r + 1] == 2;
  m.columns = Allocate<int64_t>(c, m.starts[m.rows + 1]);
  m.weights = Allocate<T>(c, m.starts[m.rows + 1]);
  for (int64_t o = 0; o < d.out; ++o) {
    ForTaps<T>(d, mode, scale, o, [&](int64_t i, T weight) {
      const int64_t k = m.starts[(transposed ? i : o) + 1]++;
      m.columns[k] = transposed ? o : i;
      m.weights[k] = weight;
    });
  }
  return m;
}

// Of pairs, to the same bits.
template <class T>
void ApplyPairs(const Matrix<T>& m, const T* x, T* y, int64_t outer, int64_t inner) {
  const T* w = m.weights;
  for (int64_t u = 0; u < outer; ++u, x += m.cols * inner) {
    if (inner == 1) {
      for (int64_t r = 0; r < m.rows; ++r) {
        const int64_t k = 2 * r;
        y[r] = (T(0) + w[k] * x[m.columns[k]]) + w[k + 1] * x[m.columns[k + 1]];
      }
      y += m.rows;
      continue;
    }
    for (int64_t r = 0; r < m.rows; ++r, y += inner) {
      const T *a = x + m.columns[2 * r] * inner, *b = x + m.columns[2 * r + 1] * inner;
      const T first = w[2 * r], second = w[2 * r + 1];
      for (int64_t i = 0; i < inner; ++i) y[i] = (T(0) + first * a[i]) + second * b[i];
    }
  }
}

// x [outer, cols, inner] -> y [outer, rows, inner]
template <class T>
void Apply(const Matrix<T>& m, const T* x, T* y, int64_t outer, int64_t inner) {
  if (m.pairs) return ApplyPairs(m, x, y, outer, inner);
  for (int64_t u = 0; u < outer; ++u, x += m.cols * inner) {
    for (int64_t r = 0; r < m.rows; ++r, y += inner) {
      if (inner == 1) {
        T sum = 0;
        for (int64_t k = m.starts[r]; k < m.starts[r + 1]; ++k)
          sum += m.weights[k] * x[m.columns[k]];
        *y = sum;
        continue;
      }
      for (int64_t i = 0; i < inner; ++i) y[i] = 0;
      for (int64_t k = m.starts[r]; k < m.starts[r + 1]; ++k) {
        const T* row = x + m.columns[k] * inner;
        const T weight = m.weights[k];
        for (int64_t i = 0; i < inner; ++i) y[i] += weight * row[i];
      }
    }
  }
}

// x; window, mode, scale0, scale1, scale2. Results between two dims are in workspace memory.
template <class T, bool transposed>
void Run(const KernelCall& c) {
  const TensorRef& x = c.in[0];
  const Windows w = WindowsOf(c.attrs[0]);
  const auto mode = static_cast<Resample>(c.attrs[1].i);
  const int skipped = kMaxWindowDims - w.dims;
  int64_t outer = ProductOf(x, 0, x.ndim - w.dims), inner = w.InPlane();
  if (transposed) inner = w.OutPlane();
  const int64_t total = ProductOf(c.out[0], 0, c.out[0].ndim);
  if (total == 0) return;
  Matrix<T> matrices[kMaxWindowDims];
  int last = -1;  // dim that changes something
  for (int d = skipped; d < kMaxWindowDims; ++d) {
    matrices[d] = MatrixOf<T>(c, w.d[d], mode, c.attrs[2 + d - skipped].d, transposed);
    if (!matrices[d].identity) last = d;
  }
  const auto* from = static_cast<const T*>(x.data);
  auto* out = static_cast<T*>(c.out[0].data);
  if (inner == 0) {  // of nothing: the gradient of a result without elements
    for (int64_t i = 0; i < total; ++i) out[i] = 0;
    return;
  }
  for (int d = skipped; d < kMaxWindowDims; ++d) {
    const Matrix<T>& m = matrices[d];
    inner = m.cols == 0 ? 0 : inner / m.cols;
    if (!m.identity) {
      T* to = d == last ? out : Allocate<T>(c, outer * m.rows * inner);
      Apply(m, from, to, outer, inner);
      from = to;
    }
    outer *= m.rows;
  }
  for (int64_t i = 0; last < 0 && i < total; ++i) out[i] = from[i];
}

void ResampleKernel(const KernelCall& c) { RunFloating(c, Run<double, false>, Run<float, false>); }
void ResampleBackwardKernel(const KernelCall& c) {
  RunFloating(c, Run<double, true>, Run<float, true>);
}

}  // namespace

void RegisterResample(AddKernelFn add) {
  add("resample", ResampleKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("resample_backward", ResampleBackwardKernel, kFloatDTypes, KernelLayout::kContiguous);
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor

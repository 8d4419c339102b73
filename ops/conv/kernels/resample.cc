// Resampling along the last dims, one after the other: results are weighted sums of elements of x,
// by a sparse matrix per dim. Mean pools and interpolation differ in the matrix only, and a
// gradient is the transposed one.
#include "dtensor/ops/conv/taps.h"
#include "dtensor/ops/cpu/rows.h"
#include "dtensor/ops/cpu/widen.h"
#include "dtensor/ops/kernels.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

// A sparse matrix by rows: row r has weights[k] at columns[k] for k in [starts[r], starts[r + 1]).
template <class T>
struct Matrix {
  int64_t rows, cols;
  int64_t *starts, *columns;
  T* weights;
  bool pairs;  // every row has two
};

template <class T>
T* Allocate(const KernelCall& c, int64_t n) {
  return static_cast<T*>(c.workspace->Allocate(n * static_cast<int64_t>(sizeof(T))));
}

template <class T>
Matrix<T> MatrixOf(const KernelCall& c, const WindowDim& d, Resample mode, double scale,
                   bool transposed) {
  Matrix<T> m = {
      transposed ? d.in : d.out, transposed ? d.out : d.in, nullptr, nullptr, nullptr, true};
  m.starts = Allocate<int64_t>(c, m.rows + 2);
  for (int64_t r = 0; r < m.rows + 2; ++r) m.starts[r] = 0;
  // Counted two rows on, so that the second pass, which moves starts, leaves them right.
  for (int64_t o = 0; o < d.out; ++o) {
    const Taps<T> taps = TapsOf<T>(d, mode, scale, o);
    for (int64_t k = 0; k < taps.count; ++k) ++m.starts[(transposed ? taps.At(k) : o) + 2];
  }
  for (int64_t r = 0; r < m.rows; ++r) m.starts[r + 2] += m.starts[r + 1];
  for (int64_t r = 0; r < m.rows; ++r) m.pairs &= m.starts[r + 2] - m.starts[r + 1] == 2;
  m.columns = Allocate<int64_t>(c, m.starts[m.rows + 1]);
  m.weights = Allocate<T>(c, m.starts[m.rows + 1]);
  for (int64_t o = 0; o < d.out; ++o) {
    const Taps<T> taps = TapsOf<T>(d, mode, scale, o);
    for (int64_t k = 0; k < taps.count; ++k) {
      const int64_t i = taps.At(k), to = m.starts[(transposed ? i : o) + 1]++;
      m.columns[to] = transposed ? o : i;
      m.weights[to] = taps.Weight(k);
    }
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
  bool changes[kMaxWindowDims] = {};
  int last = -1;  // dim that changes something
  for (int d = skipped; d < kMaxWindowDims; ++d) {
    changes[d] = !IsIdentity<T>(w.d[d], mode, c.attrs[2 + d - skipped].d);
    if (changes[d]) last = d;
  }
  const auto* from = static_cast<const T*>(x.data);
  auto* out = static_cast<T*>(c.out[0].data);
  if (inner == 0) {  // of nothing: the gradient of a result without elements
    for (int64_t i = 0; i < total; ++i) out[i] = 0;
    return;
  }
  for (int d = skipped; d < kMaxWindowDims; ++d) {
    const int64_t rows = transposed ? w.d[d].in : w.d[d].out;
    inner /= transposed ? w.d[d].out : w.d[d].in;
    if (changes[d]) {
      T* to = d == last ? out : Allocate<T>(c, outer * rows * inner);
      Apply(MatrixOf<T>(c, w.d[d], mode, c.attrs[2 + d - skipped].d, transposed), from, to, outer,
            inner);
      from = to;
    }
    outer *= rows;
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

// layer_norm and rms_norm over the last dim, forward and backward. Variance in two passes.
#include "dtensor/ops/cpu/rows.h"
#include "dtensor/ops/cpu/wide_rows.h"
#include "dtensor/ops/kernels.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

template <class T>
struct NormRows {
  explicit NormRows(const TensorRef& x)
      : width(x.sizes[x.ndim - 1]), count(ProductOf(x, 0, x.ndim - 1)) {}
  int64_t width, count;
};
template <class T>
const T* In(const KernelCall& c, int i) {
  return static_cast<const T*>(c.in[i].data);
}
template <class T>
T* Out(const KernelCall& c, int i) {
  return static_cast<T*>(c.out[i].data);
}

// x, g, b; eps -> y, mean, rstd
template <class T>
void LayerNorm(const KernelCall& c) {
  const NormRows<T> rows(c.in[0]);
  const int64_t n = rows.width;
  const T eps = static_cast<T>(c.attrs[0].d);
  const T *g = In<T>(c, 1), *b = In<T>(c, 2);
  RowsIn<T> xs(c, 0, n);
  RowsOut<T> ys(c, 0, n);
  for (int64_t r = 0; r < rows.count; ++r) {
    const T* x = xs(r);
    T* y = ys(r);
    const T mean = SumOf<T>(n, [x](int64_t i) { return x[i]; }) / static_cast<T>(n);
    const T var = SumOf<T>(n, [x, mean](int64_t i) { return (x[i] - mean) * (x[i] - mean); }) /
                  static_cast<T>(n);
    const T rstd = T(1) / Sqrt(var + eps);
    for (int64_t i = 0; i < n; ++i) y[i] = Fma((x[i] - mean) * rstd, g[i], b[i]);
    Out<T>(c, 1)[r] = mean;
    Out<T>(c, 2)[r] = rstd;
  }
}

// dy, x, mean, rstd, g -> dx, dg, db
template <class T>
void LayerNormBackward(const KernelCall& c) {
  const NormRows<T> rows(c.in[0]);
  const int64_t n = rows.width;
  const T* g = In<T>(c, 4);
  T *dg = Out<T>(c, 1), *db = Out<T>(c, 2);
  for (int64_t i = 0; i < n; ++i) dg[i] = db[i] = T(0);
  RowsIn<T> dys(c, 0, n), xs(c, 1, n);
  RowsOut<T> dxs(c, 0, n);
  for (int64_t r = 0; r < rows.count; ++r) {
    const T *dy = dys(r), *x = xs(r);
    const T mean = In<T>(c, 2)[r], rstd = In<T>(c, 3)[r];
    T* dx = dxs(r);
    const T a = SumOf<T>(n, [=](int64_t i) { return dy[i] * g[i]; }) / static_cast<T>(n);
    const T b = SumOf<T>(n, [=](int64_t i) { return dy[i] * g[i] * ((x[i] - mean) * rstd); }) /
                static_cast<T>(n);
    for (int64_t i = 0; i < n; ++i) {
      const T h = (x[i] - mean) * rstd;
      dx[i] = rstd * (dy[i] * g[i] - a - h * b);
      dg[i] += dy[i] * h;
      db[i] += dy[i];
    }
  }
}

// x, g; eps -> y, rstd
template <class T>
void RmsNorm(const KernelCall& c) {
  const NormRows<T> rows(c.in[0]);
  const int64_t n = rows.width;
  const T eps = static_cast<T>(c.attrs[0].d);
  const T* g = In<T>(c, 1);
  RowsIn<T> xs(c, 0, n);
  RowsOut<T> ys(c, 0, n);
  for (int64_t r = 0; r < rows.count; ++r) {
    const T* x = xs(r);
    T* y = ys(r);
    const T square = SumOf<T>(n, [x](int64_t i) { return x[i] * x[i]; }) / static_cast<T>(n);
    const T rstd = T(1) / Sqrt(square + eps);
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * rstd * g[i];
    Out<T>(c, 1)[r] = rstd;
  }
}

// dy, x, rstd, g -> dx, dg
template <class T>
void RmsNormBackward(const KernelCall& c) {
  const NormRows<T> rows(c.in[0]);
  const int64_t n = rows.width;
  const T* g = In<T>(c, 3);
  T* dg = Out<T>(c, 1);
  for (int64_t i = 0; i < n; ++i) dg[i] = T(0);
  RowsIn<T> dys(c, 0, n), xs(c, 1, n);
  RowsOut<T> dxs(c, 0, n);
  for (int64_t r = 0; r < rows.count; ++r) {
    const T *dy = dys(r), *x = xs(r);
    const T rstd = In<T>(c, 2)[r];
    T* dx = dxs(r);
    const T b =
        SumOf<T>(n, [=](int64_t i) { return dy[i] * g[i] * (x[i] * rstd); }) / static_cast<T>(n);
    for (int64_t i = 0; i < n; ++i) {
      const T h = x[i] * rstd;
      dx[i] = rstd * (dy[i] * g[i] - h * b);
      dg[i] += dy[i] * h;
    }
  }
}

// What has the rows of x; the rest is as small as a row, or as the number of rows.
constexpr RowOperands kForward{.in = 0b1, .out = 0b1}, kBackward{.in = 0b11, .out = 0b1};

void LayerNormKernel(const KernelCall& c) {
  RunFloating(c, LayerNorm<double>, LayerNorm<float>, 0, kForward);
}
void LayerNormBackwardKernel(const KernelCall& c) {
  RunFloating(c, LayerNormBackward<double>, LayerNormBackward<float>, 0, kBackward);
}
void RmsNormKernel(const KernelCall& c) {
  RunFloating(c, RmsNorm<double>, RmsNorm<float>, 0, kForward);
}
void RmsNormBackwardKernel(const KernelCall& c) {
  RunFloating(c, RmsNormBackward<double>, RmsNormBackward<float>, 0, kBackward);
}

}  // namespace

void RegisterNorm(AddKernelFn add) {
  add("layer_norm", LayerNormKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("layer_norm_backward", LayerNormBackwardKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("rms_norm", RmsNormKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("rms_norm_backward", RmsNormBackwardKernel, kFloatDTypes, KernelLayout::kContiguous);
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor

// softmax and log_softmax along one dim. Rows along another dim than the last are gathered into a
// buffer.
#include "dtensor/ops/cpu/rows.h"
#include "dtensor/ops/cpu/widen.h"
#include "dtensor/ops/kernels.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

template <class T>
void SoftmaxRow(const T* x, T* y, int64_t n) {
  const T m = MaxOf(x, n);
  for (int64_t i = 0; i < n; ++i) y[i] = Exp(x[i] - m);
  const T sum = SumOf<T>(n, [y](int64_t i) { return y[i]; });
  const T scale = T(1) / sum;
  for (int64_t i = 0; i < n; ++i) y[i] *= scale;
}

template <class T>
void LogSoftmaxRow(const T* x, T* y, int64_t n) {
  const T m = MaxOf(x, n);
  const T sum = SumOf<T>(n, [x, m](int64_t i) { return Exp(x[i] - m); });
  const T shift = m + Log(sum);
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] - shift;
}

template <class T>
void SoftmaxBackwardRow(const T* dy, const T* y, T* dx, int64_t n) {
  const T dot = SumOf<T>(n, [dy, y](int64_t i) { return dy[i] * y[i]; });
  for (int64_t i = 0; i < n; ++i) dx[i] = (dy[i] - dot) * y[i];
}

template <class T>
void LogSoftmaxBackwardRow(const T* dy, const T* y, T* dx, int64_t n) {
  const T sum = SumOf<T>(n, [dy](int64_t i) { return dy[i]; });
  for (int64_t i = 0; i < n; ++i) dx[i] = dy[i] - Exp(y[i]) * sum;
}

// Calls row(in pointers, out, n) for every line along attrs[0] of the contiguous arrays.
template <class T, int kInputs, class Row>
void ForLines(const KernelCall& c, const Row& row) {
  const TensorRef& x = c.in[0];
  const int dim = x.ndim == 0 ? 0 : static_cast<int>(c.attrs[0].i);
  const int64_t n = x.ndim == 0 ? 1 : x.sizes[dim];
  const int64_t outer = ProductOf(x, 0, dim), inner = ProductOf(x, dim + 1, x.ndim);
  if (n == 0) return;
  T* buffer = nullptr;
  if (inner != 1) {
    buffer =
        static_cast<T*>(c.workspace->Allocate((kInputs + 1) * n * static_cast<int64_t>(sizeof(T))));
  }
  for (int64_t line = 0; line < outer * inner; ++line) {
    const int64_t base = line / inner * n * inner + line % inner;
    const T* in[kInputs];
    T* out = static_cast<T*>(c.out[0].data) + base;
    for (int k = 0; k < kInputs; ++k) {
      const T* p = static_cast<const T*>(c.in[k].data) + base;
      in[k] = p;
      if (inner == 1) continue;
      for (int64_t i = 0; i < n; ++i) buffer[k * n + i] = p[i * inner];
      in[k] = buffer + k * n;
    }
    T* result = inner == 1 ? out : buffer + kInputs * n;
    row(in, result, n);
    if (inner == 1) continue;
    for (int64_t i = 0; i < n; ++i) out[i * inner] = result[i];
  }
}

#define DT_LINES(name, inputs, call)                                             \
  template <class T>                                                             \
  void name##Lines(const KernelCall& c) {                                        \
    ForLines<T, inputs>(c, [](const T* const* in, T* out, int64_t n) { call; }); \
  }                                                                              \
  void name##Kernel(const KernelCall& c) {                                       \
    RunFloating(c, name##Lines<double>, name##Lines<float>);                     \
  }
DT_LINES(Softmax, 1, SoftmaxRow(in[0], out, n))
DT_LINES(LogSoftmax, 1, LogSoftmaxRow(in[0], out, n))
DT_LINES(SoftmaxBackward, 2, SoftmaxBackwardRow(in[0], in[1], out, n))
DT_LINES(LogSoftmaxBackward, 2, LogSoftmaxBackwardRow(in[0], in[1], out, n))
#undef DT_LINES

}  // namespace

void RegisterSoftmax(AddKernelFn add) {
  add("softmax", SoftmaxKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("log_softmax", LogSoftmaxKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("softmax_backward", SoftmaxBackwardKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("log_softmax_backward", LogSoftmaxBackwardKernel, kFloatDTypes, KernelLayout::kContiguous);
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor

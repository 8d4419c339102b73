// softmax and log_softmax along one dim. Lines along another dim than the last are gathered into a
// buffer, as many at a time as share a cache line.
#include "dtensor/ops/cpu/rows.h"
#include "dtensor/ops/cpu/widen.h"
#include "dtensor/ops/kernels.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

template <class T>
void SoftmaxRow(const T* x, T* y, int64_t n) {
  const T m = MaxOf(x, n);
  const T sum = SumOf<T>(n, [x, y, m](int64_t i) { return y[i] = Exp(x[i] - m); });
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

constexpr int64_t kTogether = 16;

// n x w elements, rows `step` apart, become w lines of n, `pitch` apart; and back.
template <class T>
void GatherLines(const T* from, int64_t step, int64_t n, int64_t w, T* to, int64_t pitch) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t k = 0; k < w; ++k) to[k * pitch + i] = from[i * step + k];
  }
}
template <class T>
void PutLines(const T* from, int64_t pitch, int64_t n, int64_t w, T* to, int64_t step) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t k = 0; k < w; ++k) to[i * step + k] = from[k * pitch + i];
  }
}

// Calls row(in pointers, out, n) for every line along attrs[0] of the contiguous arrays.
template <class T, int kInputs, class Row>
void ForLines(const KernelCall& c, const Row& row) {
  const TensorRef& x = c.in[0];
  const int dim = x.ndim == 0 ? 0 : static_cast<int>(c.attrs[0].i);
  const int64_t n = x.ndim == 0 ? 1 : x.sizes[dim];
  const int64_t outer = ProductOf(x, 0, dim), inner = ProductOf(x, dim + 1, x.ndim);
  if (n == 0 || outer == 0 || inner == 0) return;
  const T* in[kInputs];
  for (int k = 0; k < kInputs; ++k) in[k] = static_cast<const T*>(c.in[k].data);
  T* out = static_cast<T*>(c.out[0].data);
  if (inner == 1) {
    for (int64_t line = 0; line < outer; ++line, out += n) {
      row(in, out, n);
      for (const T*& p : in) p += n;
    }
    return;
  }
  const int64_t most = inner < kTogether ? inner : kTogether;
  // Lines a power of two apart would share a set of the cache.
  const int64_t pitch = n + 16;
  T* buffer = static_cast<T*>(
      c.workspace->Allocate((kInputs + 1) * most * pitch * static_cast<int64_t>(sizeof(T))));
  T* const results = buffer + kInputs * most * pitch;
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t first = 0; first < inner; first += most) {
      const int64_t base = o * n * inner + first, w = inner - first < most ? inner - first : most;
      for (int k = 0; k < kInputs; ++k) {
        GatherLines(in[k] + base, inner, n, w, buffer + k * most * pitch, pitch);
      }
      for (int64_t line = 0; line < w; ++line) {
        const T* at[kInputs];
        for (int k = 0; k < kInputs; ++k) at[k] = buffer + (k * most + line) * pitch;
        row(at, results + line * pitch, n);
      }
      PutLines(results, pitch, n, w, out + base, inner);
    }
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

// softmax and log_softmax along one dim. Lines along another dim than the last lie beside each
// other and are computed beside each other, to the same bits as alone.
#include <utility>

#include "dtensor/ops/cpu/rows.h"
#include "dtensor/ops/cpu/wide_rows.h"
#include "dtensor/ops/kernels.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

// What formulas ask of one line of n elements, and of lines beside each other. Functions take i,
// where an element is, and k, by which what belongs to its line is found.
template <class T>
class OneLine {
 public:
  struct PerLine {
    T value;
    T operator[](int64_t) const { return value; }
  };
  explicit OneLine(int64_t n) : n_(n) {}
  PerLine Max(const T* x) { return {MaxOf(x, n_)}; }
  template <class F>
  PerLine Sum(const F& f) {
    return {SumOf<T>(n_, [&f](int64_t i) { return f(i, 0); })};
  }
  template <class F>
  PerLine ForLines(const F& f) {
    return {f(0)};
  }
  template <class F>
  void ForElements(const F& f) {
    for (int64_t i = 0; i < n_; ++i) f(i, 0);
  }

 private:
  const int64_t n_;
};

// `width` lines, whose elements are `step` apart. Where the lines are all there are, many of their
// elements are one run.
template <class T>
class LinesBeside {
 public:
  using PerLine = T*;
  static constexpr int64_t kMost = 256;  // what is kept of them stays in the cache
  static int64_t Space(int64_t width) { return width * 4 * kLanes; }

  LinesBeside(int64_t n, int64_t width, int64_t step, T* space)
      : n_(n), width_(width), step_(step), at_once_(width == step ? kLanes : 1), space_(space) {}

  T* Max(const T* x) {
    T* most = Take(at_once_);
    T* nan = Take(at_once_);
    for (int64_t k = 0; k < at_once_ * width_; ++k) {
      most[k] = static_cast<T>(-__builtin_inf());
      nan[k] = T(0);
    }
    ForRuns([&](int64_t row, int64_t count) {
      const T* run = x + row * step_;
      _Pragma("GCC ivdep") for (int64_t k = 0; k < count; ++k) {
        most[k] = JoinByMax::Of(most[k], run[k]);
        nan[k] = JoinByNan::Of(nan[k], run[k]);
      }
    });
    JoinRows<JoinByMax>(most, at_once_);
    JoinRows<JoinByNan>(nan, at_once_);
    for (int64_t k = 0; k < width_; ++k) most[k] = nan[k] == nan[k] ? most[k] : nan[k];
    return Repeat(most);
  }

  template <class F>
  T* Sum(const F& f) {
    T* lanes = Take(kLanes);
    for (int64_t k = 0; k < kLanes * width_; ++k) lanes[k] = T(0);
    ForRuns([&](int64_t row, int64_t count) {
      T* lane = lanes + row % kLanes * width_;
      const int64_t first = row * step_;
      _Pragma("GCC ivdep") for (int64_t k = 0; k < count; ++k) lane[k] += f(first + k, k);
    });
    JoinRows<JoinBySum>(lanes, kLanes);
    return Repeat(lanes);
  }

  template <class F>
  T* ForLines(const F& f) {
    T* values = Take(at_once_);
    for (int64_t k = 0; k < width_; ++k) values[k] = f(k);
    return Repeat(values);
  }

  template <class F>
  void ForElements(const F& f) {
    ForRuns([&](int64_t row, int64_t count) {
      const int64_t first = row * step_;
      _Pragma("GCC ivdep") for (int64_t k = 0; k < count; ++k) f(first + k, k);
    });
  }

 private:
  T* Take(int64_t rows) {
    T* taken = space_;
    space_ += rows * width_;
    return taken;
  }
  // run(first row, elements) for every run.
  template <class Run>
  void ForRuns(const Run& run) {
    for (int64_t row = 0; row < n_; row += at_once_) {
      run(row, (n_ - row < at_once_ ? n_ - row : at_once_) * width_);
    }
  }
  // As JoinLanes does, in every line.
  template <class Join>
  void JoinRows(T* rows, int64_t count) {
    for (int64_t half = count / 2; half > 0; half /= 2) {
      for (int64_t k = 0; k < half * width_; ++k) {
        rows[k] = Join::Of(rows[k], rows[k + half * width_]);
      }
    }
  }
  // The first row, for every row of a run.
  T* Repeat(T* rows) {
    for (int64_t k = width_; k < at_once_ * width_; ++k) rows[k] = rows[k - width_];
    return rows;
  }

  const int64_t n_, width_, step_, at_once_;
  T* space_;
};

template <class T, class Lines>
void Softmax(Lines lines, const T* const* in, T* y) {
  const T* x = in[0];
  const auto m = lines.Max(x);
  const auto sum = lines.Sum([=](int64_t i, int64_t k) { return y[i] = Exp(x[i] - m[k]); });
  const auto scale = lines.ForLines([=](int64_t k) { return T(1) / sum[k]; });
  lines.ForElements([=](int64_t i, int64_t k) { y[i] *= scale[k]; });
}

template <class T, class Lines>
void LogSoftmax(Lines lines, const T* const* in, T* y) {
  const T* x = in[0];
  const auto m = lines.Max(x);
  const auto sum = lines.Sum([=](int64_t i, int64_t k) { return Exp(x[i] - m[k]); });
  const auto log_sum = lines.ForLines([=](int64_t k) { return Log(sum[k]); });
  // In this order, so that large numbers cancel first.
  lines.ForElements([=](int64_t i, int64_t k) { y[i] = (x[i] - m[k]) - log_sum[k]; });
}

template <class T, class Lines>
void SoftmaxBackward(Lines lines, const T* const* in, T* dx) {
  const T *dy = in[0], *y = in[1];
  const auto dot = lines.Sum([=](int64_t i, int64_t) { return dy[i] * y[i]; });
  lines.ForElements([=](int64_t i, int64_t k) { dx[i] = (dy[i] - dot[k]) * y[i]; });
}

template <class T, class Lines>
void LogSoftmaxBackward(Lines lines, const T* const* in, T* dx) {
  const T *dy = in[0], *y = in[1];
  const auto sum = lines.Sum([=](int64_t i, int64_t) { return dy[i]; });
  lines.ForElements([=](int64_t i, int64_t k) { dx[i] = dy[i] - Exp(y[i]) * sum[k]; });
}

// `width` of the lines of an operand that lie beside each other, in f32 where it is of 16 bits.
template <class T>
class LinesOf {
 public:
  LinesOf(const KernelCall& c, const TensorRef& t, int64_t n, int64_t inner, int64_t most)
      : t_(t), n_(n), inner_(inner) {
    if (!IsNarrow(t.dtype)) return;
    const int64_t bytes = n * most * static_cast<int64_t>(sizeof(float));
    wide_ = static_cast<float*>(c.workspace->Allocate(bytes));
  }
  // From element `base` on. Theirs are inner apart, or width.
  int64_t Step(int64_t width) const { return wide_ == nullptr ? inner_ : width; }
  const T* Read(int64_t base, int64_t width) {
    if (wide_ != nullptr) {
      ForRuns(width, [&](int64_t at, int64_t to, int64_t count) {
        Widen(t_, base + at, count, wide_ + to);
      });
    }
    return At(base);
  }
  T* At(int64_t base) const {
    if (wide_ == nullptr) return static_cast<T*>(t_.data) + base;
    return static_cast<T*>(static_cast<void*>(wide_));  // T is float here
  }
  void Write(int64_t base, int64_t width) {
    if (wide_ == nullptr) return;
    ForRuns(width, [&](int64_t at, int64_t from, int64_t count) {
      Narrow(wide_ + from, count, t_, base + at);
    });
  }

 private:
  template <class F>
  void ForRuns(int64_t width, const F& f) {
    if (width == inner_) return f(0, 0, n_ * width);
    for (int64_t i = 0; i < n_; ++i) f(i * inner_, i * width, width);
  }

  const TensorRef t_;
  const int64_t n_, inner_;
  float* wide_ = nullptr;
};

// Calls run(lines, in pointers, out) for the lines along attrs[0] of the contiguous arrays, of
// which those of 16 bits are left as they are.
template <class T, class Run, size_t... kInputs>
void ForLinesAlong(const KernelCall& c, const Run& run, std::index_sequence<kInputs...>) {
  const TensorRef& x = c.in[0];
  const int dim = x.ndim == 0 ? 0 : static_cast<int>(c.attrs[0].i);
  const int64_t n = x.ndim == 0 ? 1 : x.sizes[dim];
  const int64_t outer = ProductOf(x, 0, dim), inner = ProductOf(x, dim + 1, x.ndim);
  if (n == 0 || outer == 0 || inner == 0) return;
  if (inner == 1) {
    RowsIn<T> in[] = {RowsIn<T>(c, kInputs, n)...};
    RowsOut<T> out(c, 0, n);
    for (int64_t o = 0; o < outer; ++o) {
      const T* at[] = {in[kInputs](o)...};
      run(OneLine<T>(n), at, out(o));
    }
    return;
  }
  using Beside = LinesBeside<T>;
  const int64_t most = inner < Beside::kMost ? inner : Beside::kMost;
  const int64_t bytes = Beside::Space(most) * static_cast<int64_t>(sizeof(T));
  T* space = static_cast<T*>(c.workspace->Allocate(bytes));
  LinesOf<T> in[] = {LinesOf<T>(c, c.in[kInputs], n, inner, most)...};
  LinesOf<T> out(c, c.out[0], n, inner, most);
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t first = 0; first < inner; first += most) {
      const int64_t base = o * n * inner + first,
                    width = inner - first < most ? inner - first : most;
      const T* at[] = {in[kInputs].Read(base, width)...};
      run(Beside(n, width, out.Step(width), space), at, out.At(base));
      out.Write(base, width);
    }
  }
}

#define DT_LINES(name, inputs)                                                      \
  template <class T>                                                                \
  void name##Lines(const KernelCall& c) {                                           \
    ForLinesAlong<T>(                                                               \
        c, [](auto lines, const T* const* in, T* out) { name<T>(lines, in, out); }, \
        std::make_index_sequence<inputs>());                                        \
  }                                                                                 \
  void name##Kernel(const KernelCall& c) {                                          \
    constexpr RowOperands all{.in = (1 << inputs) - 1, .out = 1};                   \
    RunFloating(c, name##Lines<double>, name##Lines<float>, 0, all);                \
  }
DT_LINES(Softmax, 1)
DT_LINES(LogSoftmax, 1)
DT_LINES(SoftmaxBackward, 2)
DT_LINES(LogSoftmaxBackward, 2)
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

// Sums, products and extremes over any set of axes of a contiguous array, and amax_backward.
#include "dtensor/ops/cpu/rows.h"
#include "dtensor/ops/cpu/widen.h"
#include "dtensor/ops/kernels.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

// The array as alternating kept and reduced groups of dims; attrs[0] lists the axes, ascending.
struct Groups {
  int count = 0;
  int64_t size[kMaxDims];
  bool reduced[kMaxDims];
};

Groups GroupsOf(const TensorRef& x, const Attr& axes) {
  Groups g;
  int64_t next = 0;
  for (int d = 0; d < x.ndim; ++d) {
    const bool reduced = next < axes.n && axes.ints[next] == d;
    if (reduced) ++next;
    if (reduced && x.sizes[d] == 1) continue;  // a term alone is the result
    if (g.count > 0 && g.reduced[g.count - 1] == reduced) {
      g.size[g.count - 1] *= x.sizes[d];
    } else {
      g.size[g.count] = x.sizes[d];
      g.reduced[g.count++] = reduced;
    }
  }
  if (g.count == 0) {
    g.size[0] = 1;
    g.reduced[0] = false;
    g.count = 1;
  }
  return g;
}

template <class X>
DT_MATH X Value(X v) {
  return v;
}
DT_MATH float Value(BFloat16 v) { return ToFloat(v); }
DT_MATH float Value(Half v) { return ToFloat(v); }
DT_MATH uint8_t Value(Bool v) { return v.value != 0; }

template <class T>
static constexpr bool kIsFloat = T(0.5) != T(0);

template <class X>
static constexpr bool kIsBool = false;
template <>
constexpr bool kIsBool<Bool> = true;

// Folds read elements of type X as they are and compute in T: no converted copy of the input.
// Start: of nothing; Join: of two results; Term: what one element adds; Row: n elements in a row.
struct PlainTerms {
  // Up to so many columns stay in registers: where the compiler makes vectors of them.
  template <class T>
  static constexpr int64_t kNarrow = 16;
  template <class T>
  DT_MATH T Term(T x) {
    return x;
  }
};
// A row of terms that may be joined in any order, as integers may: the compiler finds the lanes.
template <class Fold, class T, class X>
DT_MATH T JoinRow(const X* x, int64_t n) {
  T all = Fold::template Start<T>();
  for (int64_t i = 0; i < n; ++i) all = Fold::Join(all, static_cast<T>(Value(x[i])));
  return all;
}

struct SumFold : PlainTerms {
  template <class T>
  static T Start() {
    return T(0);
  }
  template <class T>
  DT_MATH T Join(T a, T b) {
    return Add(a, b);
  }
  template <class T, class X>
  DT_MATH T Row(const X* x, int64_t n) {
    if constexpr (kIsFloat<T>) {
      return SumOf<T>(n, [x](int64_t i) { return static_cast<T>(Value(x[i])); });
    } else {
      return JoinRow<SumFold, T>(x, n);
    }
  }
};
struct SquareFold : SumFold {
  template <class T>
  DT_MATH T Term(T x) {
    return x * x;
  }
  template <class T, class X>
  DT_MATH T Row(const X* x, int64_t n) {
    return SumOf<T>(n, [x](int64_t i) { return Term(static_cast<T>(Value(x[i]))); });
  }
};
struct JoinByProduct {
  template <class T>
  DT_MATH T Of(T a, T b) {
    return Mul(a, b);
  }
};
struct ProdFold : PlainTerms {
  template <class T>
  static T Start() {
    return T(1);
  }
  template <class T>
  DT_MATH T Join(T a, T b) {
    return Mul(a, b);
  }
  template <class T, class X>
  DT_MATH T Row(const X* x, int64_t n) {
    if (n <= kLanes) return JoinRow<ProdFold, T>(x, n);  // what the lanes below come to
    // Two vectors, which wait for each other less than one. Their lanes are joined one after the
    // other: a long product is often subnormal on its way to 0, which a processor takes a hundred
    // cycles for, and by halves one of several numbers would be so at step after step.
    T lane[2 * kLanes];
    FillLanes<2 * kLanes, JoinByProduct>(
        T(1), n, [x](int64_t i) { return static_cast<T>(Value(x[i])); }, lane);
    T all = T(1);
    for (int k = 0; k < kLanes; ++k) all = Mul(all, Mul(lane[k], lane[k + kLanes]));
    return all;
  }
};

// The least and the greatest of a type: an infinity, if it has one.
template <class T>
static T Least() {
  if constexpr (kIsFloat<T>) return -static_cast<T>(__builtin_inf());
  if constexpr (sizeof(T) == 8) return static_cast<T>(INT64_MIN);
  if constexpr (sizeof(T) == 4) return static_cast<T>(INT32_MIN);
  return T(0);
}
template <class T>
static T Greatest() {
  if constexpr (kIsFloat<T>) return static_cast<T>(__builtin_inf());
  if constexpr (sizeof(T) == 8) return static_cast<T>(INT64_MAX);
  if constexpr (sizeof(T) == 4) return static_cast<T>(INT32_MAX);
  return static_cast<T>(UINT8_MAX);
}

struct MaxFold : PlainTerms {
  template <class T>
  static constexpr int64_t kNarrow = kIsFloat<T> ? 2 : 16;
  template <class T>
  static T Start() {
    return Least<T>();
  }
  template <class T>
  DT_MATH T Join(T a, T b) {
    return Maximum(a, b);
  }
  template <class T, class X>
  DT_MATH T Row(const X* x, int64_t n) {
    if constexpr (kIsFloat<T>) {
      if (n > 4) {  // up to there lanes cost more than they save
        return ExtremeOf<JoinByMax>(Start<T>(), n,
                                    [x](int64_t i) { return static_cast<T>(Value(x[i])); });
      }
    }
    return JoinRow<MaxFold, T>(x, n);
  }
};
struct MinFold : PlainTerms {
  template <class T>
  static constexpr int64_t kNarrow = kIsFloat<T> ? 2 : 16;
  template <class T>
  static T Start() {
    return Greatest<T>();
  }
  template <class T>
  DT_MATH T Join(T a, T b) {
    return Minimum(a, b);
  }
  template <class T, class X>
  DT_MATH T Row(const X* x, int64_t n) {
    if constexpr (kIsFloat<T>) {
      if (n > 4) {  // up to there lanes cost more than they save
        return ExtremeOf<JoinByMin>(Start<T>(), n,
                                    [x](int64_t i) { return static_cast<T>(Value(x[i])); });
      }
    }
    return JoinRow<MinFold, T>(x, n);
  }
};

// Calls row(offset in x, offset in the output) for every row of x in order: a row is the last
// group, at which its outputs begin where it is kept.
template <class F>
void ForEachRow(const Groups& g, F row) {
  const int64_t n = g.size[g.count - 1];
  const int inner = g.count - 2;  // the group of rows; those outside it are counted up
  int64_t index[kMaxDims] = {}, out_step[kMaxDims];
  int64_t times = 1, step = g.reduced[g.count - 1] ? 1 : n;
  for (int k = inner; k >= 0; --k) {
    out_step[k] = g.reduced[k] ? 0 : step;
    if (!g.reduced[k]) step *= g.size[k];
    if (k < inner) times *= g.size[k];
  }
  const int64_t rows = inner < 0 ? 1 : g.size[inner], row_step = inner < 0 ? 0 : out_step[inner];
  for (int64_t at = 0, out = 0; times > 0; --times) {
    for (int64_t r = 0; r < rows; ++r, at += n) row(at, out + r * row_step);
    for (int k = inner - 1; k >= 0; --k) {
      out += out_step[k];
      if (++index[k] < g.size[k]) break;
      out -= g.size[k] * out_step[k];
      index[k] = 0;
    }
  }
}

// Adds `rows` rows, `pitch` apart, to w neighbours of the output, which stay in registers: in
// memory every row would wait until the one before it has been written.
template <int w, class T, class Fold, class X>
void FoldColumns(const X* x, int64_t rows, int64_t pitch, T* out) {
  T all[w];
  for (int k = 0; k < w; ++k) all[k] = out[k];
  for (int64_t r = 0; r < rows; ++r, x += pitch) {
    for (int k = 0; k < w; ++k)
      all[k] = Fold::Join(all[k], Fold::Term(static_cast<T>(Value(x[k]))));
  }
  for (int k = 0; k < w; ++k) out[k] = all[k];
}

// Few columns of many rows: in the order of rows, as where there are many.
template <class T, class Fold, class X>
void FoldNarrow(const X* x, int64_t rows, int64_t columns, T* out) {
  int64_t j = 0;
  for (; j + 8 <= columns; j += 8) FoldColumns<8, T, Fold>(x + j, rows, columns, out + j);
  for (; j + 4 <= columns; j += 4) FoldColumns<4, T, Fold>(x + j, rows, columns, out + j);
  for (; j + 2 <= columns; j += 2) FoldColumns<2, T, Fold>(x + j, rows, columns, out + j);
  if (j < columns) FoldColumns<1, T, Fold>(x + j, rows, columns, out + j);
}

template <class T, class Fold, class X>
void FoldGroups(const Groups& g, const X* x, T* out) {
  const int64_t n = g.size[g.count - 1];
  if (g.reduced[g.count - 1]) {
    ForEachRow(g, [&](int64_t at, int64_t o) {
      out[o] = Fold::Join(out[o], Fold::template Row<T, X>(x + at, n));
    });
    return;
  }
  if (n <= Fold::template kNarrow<T> && g.count > 1) {  // the group before it is reduced
    Groups blocks = g;
    const int64_t rows = g.size[--blocks.count - 1];
    blocks.size[blocks.count - 1] = 1;
    int64_t at = 0;
    ForEachRow(blocks, [&](int64_t, int64_t o) {
      FoldNarrow<T, Fold>(x + at, rows, n, out + o * n);
      at += rows * n;
    });
    return;
  }
  ForEachRow(g, [&](int64_t at, int64_t o) {
    const X* const from = x + at;
    T* const to = out + o;
    _Pragma("GCC ivdep") for (int64_t i = 0; i < n; ++i) {
      to[i] = Fold::Join(to[i], Fold::Term(static_cast<T>(Value(from[i]))));
    }
  });
}

// Reads X, computes in T and writes T, but for 16-bit floats, which are rounded once.
template <class X, class T, class Fold>
void Reduce(const KernelCall& c) {
  constexpr bool kRounds = kIsFloat<T> && sizeof(X) == 2;
  const TensorRef &x = c.in[0], &out = c.out[0];
  const int64_t n = ProductOf(out, 0, out.ndim);
  auto* o = static_cast<T*>(kRounds ? c.workspace->Allocate(n * static_cast<int64_t>(sizeof(T)))
                                    : out.data);
  for (int64_t i = 0; i < n; ++i) o[i] = Fold::template Start<T>();
  if (ProductOf(x, 0, x.ndim) != 0) {
    FoldGroups<T, Fold>(GroupsOf(x, c.attrs[0]), static_cast<const X*>(x.data), o);
  }
  if constexpr (kIsBool<X> && sizeof(T) == 1) {
    for (int64_t i = 0; i < n; ++i) o[i] = o[i] != 0;  // the greatest byte, of nothing, is true
  }
  if constexpr (kRounds) {
    for (int64_t i = 0; i < n; ++i) RoundTo(o[i], static_cast<X*>(out.data) + i);
  }
}

template <class Fold>
void ReduceFloats(const KernelCall& c) {
  switch (c.in[0].dtype) {
    case DType::kF64:
      return Reduce<double, double, Fold>(c);
    case DType::kF32:
      return Reduce<float, float, Fold>(c);
    case DType::kBF16:
      return Reduce<BFloat16, float, Fold>(c);
    default:  // no other is registered
      return Reduce<Half, float, Fold>(c);
  }
}

// Sums and products of integers are int64, extremes have the type of the elements.
template <class Fold, class Wide32, class Wide8>
void ReduceKernel(const KernelCall& c) {
  switch (c.in[0].dtype) {
    case DType::kI64:
      return Reduce<int64_t, int64_t, Fold>(c);
    case DType::kI32:
      return Reduce<int32_t, Wide32, Fold>(c);
    case DType::kU8:
      return Reduce<uint8_t, Wide8, Fold>(c);
    case DType::kBool:
      return Reduce<Bool, Wide8, Fold>(c);
    default:
      return ReduceFloats<Fold>(c);
  }
}

// Number of elements equal to the maximum, then dy shared among them.
template <class T>
void AmaxShare(const Groups& g, const T* dy, const T* x, const T* y, T* count, T* dx) {
  const auto share = [&](int64_t i, int64_t o) {
    const bool tie = x[i] == y[o];  // where the maximum is NaN nothing is: 0 / 0, as in torch
    if (dx == nullptr) {
      count[o] += tie ? T(1) : T(0);
    } else {
      dx[i] = (tie ? dy[o] : T(0)) / count[o];
    }
  };
  const int64_t n = g.size[g.count - 1];
  const bool reduced = g.reduced[g.count - 1];
  ForEachRow(g, [&](int64_t at, int64_t o) {
    for (int64_t i = 0; i < n; ++i) share(at + i, reduced ? o : o + i);
  });
}

template <class T>
void AmaxBackward(const KernelCall& c) {
  const TensorRef& x = c.in[1];
  const int64_t n = ProductOf(c.in[2], 0, c.in[2].ndim);
  auto* count = static_cast<T*>(c.workspace->Allocate(n * static_cast<int64_t>(sizeof(T))));
  for (int64_t i = 0; i < n; ++i) count[i] = T(0);
  if (ProductOf(x, 0, x.ndim) == 0) return;
  const Groups g = GroupsOf(x, c.attrs[0]);
  const auto* dy = static_cast<const T*>(c.in[0].data);
  const auto* px = static_cast<const T*>(x.data);
  const auto* y = static_cast<const T*>(c.in[2].data);
  AmaxShare<T>(g, dy, px, y, count, nullptr);
  AmaxShare<T>(g, dy, px, y, count, static_cast<T*>(c.out[0].data));
}
void AmaxBackwardKernel(const KernelCall& c) {
  RunFloating(c, AmaxBackward<double>, AmaxBackward<float>);
}

}  // namespace

void RegisterReduce(AddKernelFn add) {
  add("sum", ReduceKernel<SumFold, int64_t, int64_t>, kAllDTypes, KernelLayout::kContiguous);
  add("prod", ReduceKernel<ProdFold, int64_t, int64_t>, kAllDTypes, KernelLayout::kContiguous);
  add("sum_squares", ReduceFloats<SquareFold>, kFloatDTypes, KernelLayout::kContiguous);
  for (const char* name : {"amax", "any"}) {
    add(name, ReduceKernel<MaxFold, int32_t, uint8_t>, kAllDTypes, KernelLayout::kContiguous);
  }
  for (const char* name : {"amin", "all"}) {
    add(name, ReduceKernel<MinFold, int32_t, uint8_t>, kAllDTypes, KernelLayout::kContiguous);
  }
  add("amax_backward", AmaxBackwardKernel, kFloatDTypes, KernelLayout::kContiguous);
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor

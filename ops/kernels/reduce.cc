// sum, amax and amax_backward over any set of axes of a contiguous array.
#include "ops/kernels.h"
#include "ops/kernels/rows.h"
#include "ops/widen.h"

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

struct SumFold {
  template <class T>
  static T Start() {
    return T(0);
  }
  template <class T>
  DT_MATH T Join(T a, T b) {
    return Add(a, b);
  }
  template <class T>
  DT_MATH T Row(const T* x, int64_t n) {
    return SumOf<T>(n, [x](int64_t i) { return x[i]; });
  }
};
struct MaxFold {
  template <class T>
  static T Start() {
    return T(-__builtin_inf());
  }
  template <class T>
  DT_MATH T Join(T a, T b) {
    return Maximum(a, b);
  }
  template <class T>
  DT_MATH T Row(const T* x, int64_t n) {
    return MaxOf(x, n);
  }
};
template <>
int64_t MaxFold::Start<int64_t>() {
  return INT64_MIN;
}
template <>
int64_t MaxFold::Row<int64_t>(const int64_t* x, int64_t n) {
  int64_t m = INT64_MIN;
  for (int64_t i = 0; i < n; ++i) m = x[i] > m ? x[i] : m;
  return m;
}
template <>
int64_t SumFold::Row<int64_t>(const int64_t* x, int64_t n) {
  int64_t s = 0;
  for (int64_t i = 0; i < n; ++i) s = Add(s, x[i]);
  return s;
}

// Folds groups [at, count) of x into out; both advance by their own extents.
template <class T, class Fold>
void FoldGroups(const Groups& g, int at, const T* x, T* out) {
  int64_t in_step = 1, out_step = 1;
  for (int k = at + 1; k < g.count; ++k) {
    in_step *= g.size[k];
    if (!g.reduced[k]) out_step *= g.size[k];
  }
  if (at == g.count - 1) {
    if (g.reduced[at]) {
      *out = Fold::Join(*out, Fold::template Row<T>(x, g.size[at]));
    } else {
      _Pragma("GCC ivdep") for (int64_t i = 0; i < g.size[at]; ++i) {
        out[i] = Fold::Join(out[i], x[i]);
      }
    }
    return;
  }
  for (int64_t i = 0; i < g.size[at]; ++i) {
    FoldGroups<T, Fold>(g, at + 1, x + i * in_step, g.reduced[at] ? out : out + i * out_step);
  }
}

// `start`: what a reduction of nothing gives, in the result's own dtype.
template <class T, class Fold>
void Reduce(const KernelCall& c, T start = Fold::template Start<T>()) {
  const TensorRef &x = c.in[0], &out = c.out[0];
  auto* o = static_cast<T*>(out.data);
  const int64_t n = ProductOf(out, 0, out.ndim);
  for (int64_t i = 0; i < n; ++i) o[i] = start;
  if (ProductOf(x, 0, x.ndim) == 0) return;
  FoldGroups<T, Fold>(GroupsOf(x, c.attrs[0]), 0, static_cast<const T*>(x.data), o);
}

void Sum64(const KernelCall& c) { Reduce<double, SumFold>(c); }
void Sum32(const KernelCall& c) { Reduce<float, SumFold>(c); }
void SumInt(const KernelCall& c) { Reduce<int64_t, SumFold>(c); }
void Max64(const KernelCall& c) { Reduce<double, MaxFold>(c); }
void Max32(const KernelCall& c) { Reduce<float, MaxFold>(c); }
void MaxInt(const KernelCall& c) { Reduce<int64_t, MaxFold>(c); }
void MaxInt32(const KernelCall& c) { Reduce<int64_t, MaxFold>(c, INT32_MIN); }
void MaxUnsigned(const KernelCall& c) { Reduce<int64_t, MaxFold>(c, 0); }  // uint8 and bool

void SumKernel(const KernelCall& c) {
  if (IsFloating(c.in[0].dtype)) return RunFloating(c, Sum64, Sum32);
  RunAsInt64(c, SumInt);
}
void AmaxKernel(const KernelCall& c) {
  if (IsFloating(c.in[0].dtype)) return RunFloating(c, Max64, Max32);
  const DType t = c.in[0].dtype;
  RunAsInt64(c, t == DType::kI64 ? MaxInt : t == DType::kI32 ? MaxInt32 : MaxUnsigned);
}

// Number of elements equal to the maximum, then dy shared among them.
template <class T>
void AmaxShare(const Groups& g, int at, const T* dy, const T* x, const T* y, T* count, T* dx) {
  int64_t in_step = 1, out_step = 1;
  for (int k = at + 1; k < g.count; ++k) {
    in_step *= g.size[k];
    if (!g.reduced[k]) out_step *= g.size[k];
  }
  for (int64_t i = 0; i < g.size[at]; ++i) {
    const int64_t o = g.reduced[at] ? 0 : i * out_step;
    if (at < g.count - 1) {
      AmaxShare(g, at + 1, dy + o, x + i * in_step, y + o, count + o,
                dx == nullptr ? nullptr : dx + i * in_step);
      continue;
    }
    const bool tie = x[i] == y[o];  // where the maximum is NaN nothing is: 0 / 0, as in torch
    if (dx == nullptr) {
      count[o] += tie ? T(1) : T(0);
    } else {
      dx[i] = (tie ? dy[o] : T(0)) / count[o];
    }
  }
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
  AmaxShare<T>(g, 0, dy, px, y, count, nullptr);
  AmaxShare<T>(g, 0, dy, px, y, count, static_cast<T*>(c.out[0].data));
}
void AmaxBackwardKernel(const KernelCall& c) {
  RunFloating(c, AmaxBackward<double>, AmaxBackward<float>);
}

}  // namespace

void RegisterReduce(AddKernelFn add) {
  add("sum", SumKernel, kAllDTypes, KernelLayout::kContiguous);
  add("amax", AmaxKernel, kAllDTypes, KernelLayout::kContiguous);
  add("amax_backward", AmaxBackwardKernel, kFloatDTypes, KernelLayout::kContiguous);
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor

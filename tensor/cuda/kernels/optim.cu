// Optimizer updates, norms and scaling, over arrays of any strides. An update reads and writes each
// of its operands once, in place.
#include <cmath>
#include <utility>
#include <vector>

#include "dtensor/tensor/cuda/kernels/fold_list.h"
#include "dtensor/tensor/cuda/numbers.h"

namespace dtensor::cuda {
namespace {

// What a parameter decays by: nothing at a rate of 0, though 0 times infinity is NaN.
template <class T>
__device__ T Decay(T rate, T p) {
  return rate != 0 ? rate * p : T(0);
}

// An update is a struct by value: Update(call) on the host, Run(in, out) per element.

// p, g; lr, weight_decay, maximize
template <class T>
struct Sgd {
  static constexpr int kIns = 2, kOuts = 1;
  T lr, decay, sign;
  explicit Sgd(const Attr* a)
      : lr(static_cast<T>(a[0].d)),
        decay(static_cast<T>(a[1].d)),
        sign(a[2].i != 0 ? T(-1) : T(1)) {}
  __device__ void Run(const T* in, T* out) const {
    out[0] = in[0] - lr * (sign * in[1] + Decay(decay, in[0]));
  }
};

// p, m, g; lr, momentum, dampening, weight_decay, nesterov, maximize, step
template <class T>
struct SgdMomentum {
  static constexpr int kIns = 3, kOuts = 2;
  T lr, momentum, keep, decay, sign;
  bool nesterov, first;
  explicit SgdMomentum(const Attr* a)
      : lr(static_cast<T>(a[0].d)),
        momentum(static_cast<T>(a[1].d)),
        keep(static_cast<T>(1 - a[2].d)),
        decay(static_cast<T>(a[3].d)),
        sign(a[5].i != 0 ? T(-1) : T(1)),
        nesterov(a[4].i != 0),
        first(a[6].i == 1) {}
  __device__ void Run(const T* in, T* out) const {
    const T d = sign * in[2] + Decay(decay, in[0]);
    const T b = first ? d : momentum * in[1] + keep * d;
    out[1] = b;
    out[0] = in[0] - lr * (nesterov ? d + momentum * b : b);
  }
};

// p, m, v, [x,] g; lr, beta1, beta2, eps, weight_decay, maximize, step. The decay is of the
// parameter (decoupled), or a part of the gradient.
template <class T, bool kAmsgrad, bool kDecoupled>
struct Adam {
  static constexpr int kIns = kAmsgrad ? 5 : 4, kOuts = kIns - 1;
  T shrink, decay, w1, b2, w2, size, root, eps, sign;
  explicit Adam(const Attr* a) {
    const double lr = a[0].d, beta1 = a[1].d, beta2 = a[2].d, t = static_cast<double>(a[6].i);
    const double bias1 = 1 - std::pow(beta1, t), bias2_root = std::sqrt(1 - std::pow(beta2, t));
    shrink = static_cast<T>(1 - lr * a[4].d);
    decay = static_cast<T>(a[4].d);
    w1 = static_cast<T>(1 - beta1);
    b2 = static_cast<T>(beta2);
    w2 = static_cast<T>(1 - beta2);
    size = static_cast<T>(lr / bias1);
    root = static_cast<T>(1 / bias2_root);
    eps = static_cast<T>(a[3].d);
    sign = a[5].i != 0 ? T(-1) : T(1);
  }
  __device__ void Run(const T* in, T* out) const {
    const T p = in[0], g = in[kIns - 1];
    const T d = kDecoupled ? sign * g : sign * g + Decay(decay, p);
    const T average = in[1] + w1 * (d - in[1]);
    out[1] = average;
    T second = b2 * in[2] + w2 * d * d;
    out[2] = second;
    if constexpr (kAmsgrad) {
      second = in[3] > second ? in[3] : second;
      out[3] = second;
    }
    const T from = kDecoupled ? p * shrink : p;
    out[0] = from - size * (average / (Root(second) * root + eps));
  }
};
template <class T>
using PlainAdam = Adam<T, false, false>;
template <class T>
using AdamAmsgrad = Adam<T, true, false>;
template <class T>
using AdamW = Adam<T, false, true>;
template <class T>
using AdamWAmsgrad = Adam<T, true, true>;

// p, s, g; lr, lr_decay, eps, weight_decay, maximize, step
template <class T>
struct Adagrad {
  static constexpr int kIns = 3, kOuts = 2;
  T lr, eps, decay, sign;
  explicit Adagrad(const Attr* a)
      : lr(static_cast<T>(a[0].d / (1 + (static_cast<double>(a[5].i) - 1) * a[1].d))),
        eps(static_cast<T>(a[2].d)),
        decay(static_cast<T>(a[3].d)),
        sign(a[4].i != 0 ? T(-1) : T(1)) {}
  __device__ void Run(const T* in, T* out) const {
    const T d = sign * in[2] + Decay(decay, in[0]);
    const T squares = in[1] + d * d;
    out[1] = squares;
    out[0] = in[0] - lr * (d / (Root(squares) + eps));
  }
};

// p, v, [b,] [a,] g; lr, alpha, eps, weight_decay, momentum, maximize
template <class T, bool kMomentum, bool kCentered>
struct Rmsprop {
  static constexpr int kA = kMomentum ? 3 : 2, kIns = kA + (kCentered ? 2 : 1), kOuts = kIns - 1;
  T lr, alpha, rest, eps, decay, momentum, sign;
  explicit Rmsprop(const Attr* a)
      : lr(static_cast<T>(a[0].d)),
        alpha(static_cast<T>(a[1].d)),
        rest(static_cast<T>(1 - a[1].d)),
        eps(static_cast<T>(a[2].d)),
        decay(static_cast<T>(a[3].d)),
        momentum(static_cast<T>(a[4].d)),
        sign(a[5].i != 0 ? T(-1) : T(1)) {}
  __device__ void Run(const T* in, T* out) const {
    const T d = sign * in[kOuts] + Decay(decay, in[0]);
    T second = alpha * in[1] + rest * d * d;
    out[1] = second;
    if constexpr (kCentered) {
      const T average = in[kA] + rest * (d - in[kA]);
      out[kA] = average;
      second = second - average * average;
    }
    T way = d / (Root(second) + eps);
    if constexpr (kMomentum) {
      way = momentum * in[2] + way;
      out[2] = way;
    }
    out[0] = in[0] - lr * way;
  }
};
template <class T>
using PlainRmsprop = Rmsprop<T, false, false>;
template <class T>
using RmspropMomentum = Rmsprop<T, true, false>;
template <class T>
using RmspropCentered = Rmsprop<T, false, true>;
template <class T>
using RmspropBoth = Rmsprop<T, true, true>;

// x, by: a float64 on the device
template <class T>
struct Scale {
  static constexpr int kIns = 1, kOuts = 1;
  const double* by;
  __device__ void Run(const T* in, T* out) const { out[0] = in[0] * static_cast<T>(*by); }
};

// Uniforms of (-1, 1) become a normal distribution between two numbers; x; mean, std, a, b. In
// float64 whatever the dtype. Newton's method on erf from a rational first guess (Giles 2012).
template <class T>
struct TruncatedNormal {
  static constexpr int kIns = 1, kOuts = 1;
  double mean, std, a, b;
  explicit TruncatedNormal(const Attr* attrs)
      : mean(attrs[0].d), std(attrs[1].d), a(attrs[2].d), b(attrs[3].d) {}
  __device__ static double ErfInv(double y) {
    if (!(fabs(y) < 1)) return y * static_cast<double>(INFINITY);
    const double w = -log((1 - y) * (1 + y));
    double x = w < 5 ? y * (1.50140941 + (w - 2.5) * (0.246640727 + (w - 2.5) * -0.00417768164))
                     : y * (2.83297682 + (sqrt(w) - 3) * 1.00167406);
    const double half_root_pi = 0.88622692545275801365;
    for (int i = 0; i < 6; ++i) x -= (erf(x) - y) * half_root_pi * exp(x * x);
    return x;
  }
  __device__ void Run(const T* in, T* out) const {
    const double v = ErfInv(static_cast<double>(in[0])) * std * sqrt(2.0) + mean;
    out[0] = static_cast<T>(v < a ? a : v > b ? b : v);
  }
};

template <int N>
struct Pointers {
  char* of[N];
};

// Element after element; the inputs come first, then the outputs, which may be inputs. The update
// is `now`, or lies at `place`.
template <class X, class Update, bool kOneRun>
__global__ void __launch_bounds__(kThreads, 1)
    RunUpdate(Update now, const Update* place, Strided<Update::kIns + Update::kOuts> places,
              Pointers<Update::kIns + Update::kOuts> data) {
  using T = Computed<X>;
  constexpr int kIns = Update::kIns, kAll = kIns + Update::kOuts;
  const Update update = place == nullptr ? now : *place;
  for (int64_t i = GridStart(); i < places.numel; i += GridStep()) {
    int32_t at[kAll];
    if constexpr (!kOneRun) places.Offsets(static_cast<uint32_t>(i), at);
    T in[kIns], out[Update::kOuts];
#pragma unroll
    for (int k = 0; k < kIns; ++k) {
      in[k] = Widen(reinterpret_cast<const X*>(data.of[k])[kOneRun ? i : at[k]]);
    }
    update.Run(in, out);
#pragma unroll
    for (int k = kIns; k < kAll; ++k) {
      Store(out[k - kIns], reinterpret_cast<X*>(data.of[k]) + (kOneRun ? i : at[k]));
    }
  }
}

template <class X, class Update>
void Launch(const KernelCall& c, const Update& update, const Update* place = nullptr) {
  constexpr int kIns = Update::kIns, kAll = kIns + Update::kOuts;
  const TensorRef* refs[kAll];
  for (int k = 0; k < kAll; ++k) {
    refs[k] = k < kIns ? &c.in[static_cast<size_t>(k)] : &c.out[static_cast<size_t>(k - kIns)];
  }
  const Arrays<kAll> arrays(refs);
  const auto run = arrays.IsOneRun() ? &RunUpdate<X, Update, true> : &RunUpdate<X, Update, false>;
  arrays.ForEach([&](const Strided<kAll>& places, char* const* data) {
    Pointers<kAll> pointers;
    for (int k = 0; k < kAll; ++k) pointers.of[k] = data[k];
    run<<<BlocksFor(places.numel), kThreads, 0, StreamOf(c)>>>(update, place, places, pointers);
    CheckLaunch();
  });
}
// --- lists --------------------------------------------------------------------------------------

// Call number i of a list, and whether another has its dtype and attributes.
KernelCall CallOf(const KernelCall& list, int ins, int outs, size_t i) {
  const size_t count = list.in.size() / static_cast<size_t>(ins);
  KernelCall one = list;
  one.in = list.in.subspan(i * static_cast<size_t>(ins), static_cast<size_t>(ins));
  one.out = list.out.subspan(i * static_cast<size_t>(outs), static_cast<size_t>(outs));
  one.attrs = list.attrs + i * (static_cast<size_t>(list.device->num_attrs) / count);
  return one;
}
bool AreAlike(const KernelCall& a, const KernelCall& b, int attrs) {
  if (a.in[0].dtype != b.in[0].dtype) return false;
  for (int k = 0; k < attrs; ++k) {
    if (a.attrs[k].i != b.attrs[k].i || a.attrs[k].d != b.attrs[k].d) return false;
  }
  return true;
}

// run(calls, how many) for calls that are alike, at most kMostListed at once, in the order in which
// the first of them come.
template <class Run>
void ForEachKind(const KernelCall& list, int ins, int outs, const Run& run) {
  const size_t count = list.in.size() / static_cast<size_t>(ins);
  const int attrs = list.device->num_attrs / static_cast<int>(count);
  std::vector<KernelCall> left;
  for (size_t i = 0; i < count; ++i) left.push_back(CallOf(list, ins, outs, i));
  while (!left.empty()) {
    std::vector<KernelCall> alike, others;
    for (const KernelCall& c : left) {
      const bool joins =
          alike.size() < kMostListed && (alike.empty() || AreAlike(alike[0], c, attrs));
      (joins ? alike : others).push_back(c);
    }
    run(alike);
    left = std::move(others);
  }
}

// Updates with equal numbers of tensors that are one run of elements each.
template <class Update>
struct UpdateList {
  explicit UpdateList(const Update& of_all) : update(of_all) {}
  Update update;
  const Update* place = nullptr;  // where it is read from instead
  int count = 0;
  unsigned blocks = 0, first[kMostListed];  // the first block of each
  int64_t numel[kMostListed];
  char* data[kMostListed][Update::kIns];  // outputs are the first inputs
};
constexpr int64_t kListChunk = 4096;  // elements of a block

template <class X, class Update>
__global__ void __launch_bounds__(kThreads)
    RunUpdateList(const __grid_constant__ UpdateList<Update> list) {
  using T = Computed<X>;
  constexpr int kIns = Update::kIns;
  const int k = EntryOf(list.first, list.count, blockIdx.x);
  const int64_t begin = (blockIdx.x - list.first[k]) * kListChunk, stop = begin + kListChunk;
  const int64_t end = stop < list.numel[k] ? stop : list.numel[k];
  X* data[kIns];
#pragma unroll
  for (int j = 0; j < kIns; ++j) data[j] = reinterpret_cast<X*>(list.data[k][j]);
  const Update update = list.place == nullptr ? list.update : *list.place;
#pragma unroll 2
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    T in[kIns], out[Update::kOuts];
#pragma unroll
    for (int j = 0; j < kIns; ++j) in[j] = Widen(data[j][i]);
    update.Run(in, out);
#pragma unroll
    for (int j = 0; j < Update::kOuts; ++j) Store(out[j], data[j] + i);
  }
}

// Whether the call can be an entry of a list.
template <class Update>
bool IsOneRunInPlace(const KernelCall& c) {
  constexpr int kIns = Update::kIns;
  const TensorRef* refs[kIns];
  for (int k = 0; k < kIns; ++k) refs[k] = &c.in[static_cast<size_t>(k)];
  for (int k = 0; k < Update::kOuts; ++k) {
    if (c.out[static_cast<size_t>(k)].data != refs[k]->data) return false;
  }
  return Arrays<kIns>(refs).IsOneRun();
}

template <class X, class Update>
void LaunchList(const KernelCall& c, const UpdateList<Update>& list) {
  if (list.count == 0) return;
  RunUpdateList<X, Update><<<list.blocks, kThreads, 0, StreamOf(c)>>>(list);
  CheckLaunch();
}
// make(call): the update of calls that are alike.
template <class X, class Update, class Make>
void LaunchAlike(const std::vector<KernelCall>& calls, const Make& make) {
  UpdateList<Update> list(make(calls[0]));
  list.place = PlaceOf(calls[0], list.update);
  if (OnlyNumbers()) return;
  for (const KernelCall& c : calls) {
    const int64_t n = NumelOf(c.in[0]);
    if (n == 0) continue;
    if (!IsOneRunInPlace<Update>(c)) {
      Launch<X>(c, list.update, list.place);
      continue;
    }
    list.first[list.count] = list.blocks;
    list.numel[list.count] = n;
    for (int k = 0; k < Update::kIns; ++k) {
      list.data[list.count][k] = static_cast<char*>(c.in[static_cast<size_t>(k)].data);
    }
    list.blocks += static_cast<unsigned>((n + kListChunk - 1) / kListChunk);
    ++list.count;
  }
  LaunchList<X>(calls[0], list);
}
template <template <class> class Update>
void UpdateListKernel(const KernelCall& all) {
  ForEachKind(all, Update<float>::kIns, Update<float>::kOuts, [](const auto& calls) {
    VisitFloat(calls[0].in[0].dtype, [&](auto e) {
      using X = decltype(e);
      using U = Update<Computed<X>>;
      LaunchAlike<X, U>(calls, [](const KernelCall& c) { return U(c.attrs); });
    });
  });
}

template <template <class> class Update>
void UpdateKernel(const KernelCall& c) {
  VisitFloat(c.in[0].dtype, [&](auto e) {
    using X = decltype(e);
    Launch<X>(c, Update<Computed<X>>(c.attrs));
  });
}
void ScaleKernel(const KernelCall& c) {
  VisitFloat(c.in[0].dtype, [&](auto e) {
    using X = decltype(e);
    Launch<X>(c, Scale<Computed<X>>{In<double>(c, 1)});
  });
}

// The calls of one scale_ have one number.
void ScaleListKernel(const KernelCall& all) {
  ForEachKind(all, 2, 1, [](const std::vector<KernelCall>& calls) {
    VisitFloat(calls[0].in[0].dtype, [&](auto e) {
      using X = decltype(e);
      using U = Scale<Computed<X>>;
      std::vector<KernelCall> same;
      for (const KernelCall& c : calls) {
        if (c.in[1].data == calls[0].in[1].data) {
          same.push_back(c);
        } else {
          ScaleKernel(c);
        }
      }
      LaunchAlike<X, U>(same, [](const KernelCall& c) { return U{In<double>(c, 1)}; });
    });
  });
}

// x; p -> the sum of |x|^p in float64
template <class X>
struct PowerSum {
  using Acc = double;
  const X* x;
  double* out;
  double power;
  __device__ Acc Start() const { return 0; }
  __device__ Acc Term(int64_t at, int64_t, int64_t) const {
    const double v = static_cast<double>(Widen(x[at]));
    return power == 2 ? v * v : pow(fabs(v), power);
  }
  __device__ Acc Join(Acc a, Acc b) const { return a + b; }
  __device__ void Finish(int64_t o, Acc acc) const { out[o] = acc; }
};
// NaN stays.
template <class X>
struct MaxAbs {
  using Acc = double;
  const X* x;
  double* out;
  __device__ Acc Start() const { return 0; }
  __device__ Acc Term(int64_t at, int64_t, int64_t) const {
    return fabs(static_cast<double>(Widen(x[at])));
  }
  __device__ Acc Join(Acc a, Acc b) const { return Maximum(a, b); }
  __device__ void Finish(int64_t o, Acc acc) const { out[o] = acc; }
};

FoldPlan Whole(const TensorRef& x) {
  int64_t axes[kMaxDims];
  for (int d = 0; d < x.ndim; ++d) axes[d] = d;
  return FoldPlan(x, axes, x.ndim);
}
void PowerSumKernel(const KernelCall& c) {
  VisitFloat(c.in[0].dtype, [&](auto e) {
    using X = decltype(e);
    RunFold(c, PowerSum<X>{In<X>(c, 0), Out<double>(c, 0), c.attrs[0].d}, Whole(c.in[0]));
  });
}
void MaxAbsKernel(const KernelCall& c) {
  VisitFloat(c.in[0].dtype, [&](auto e) {
    using X = decltype(e);
    RunFold(c, MaxAbs<X>{In<X>(c, 0), Out<double>(c, 0)}, Whole(c.in[0]));
  });
}

// make(call): its fold.
template <class Fold, class Make>
void FoldAlike(const std::vector<KernelCall>& calls, const Make& make, KernelFn alone) {
  FoldList<Fold> list;
  for (const KernelCall& c : calls) {
    const TensorRef* const refs[] = {&c.in[0]};
    if (!Arrays<1>(refs).IsOneRun()) {
      alone(c);
      continue;
    }
    const FoldPlan plan = Whole(c.in[0]);
    typename Fold::Acc* parts = nullptr;
    if (plan.chunks > 1) {
      parts = Scratch<typename Fold::Acc>(c, plan.chunks);
      if (parts == nullptr) return;
    }
    list.first[list.count] = list.blocks;
    list.runs[list.count] = {make(c), plan.n, plan.chunk, plan.chunks, plan.lanes, parts};
    list.blocks += static_cast<unsigned>(plan.chunks);
    ++list.count;
  }
  RunFoldList(calls[0], list);
}
void PowerSumListKernel(const KernelCall& all) {
  ForEachKind(all, 1, 1, [](const std::vector<KernelCall>& calls) {
    VisitFloat(calls[0].in[0].dtype, [&](auto e) {
      using Fold = PowerSum<decltype(e)>;
      FoldAlike<Fold>(
          calls,
          [](const KernelCall& c) {
            return Fold{In<decltype(e)>(c, 0), Out<double>(c, 0), c.attrs[0].d};
          },
          PowerSumKernel);
    });
  });
}
void MaxAbsListKernel(const KernelCall& all) {
  ForEachKind(all, 1, 1, [](const std::vector<KernelCall>& calls) {
    VisitFloat(calls[0].in[0].dtype, [&](auto e) {
      using Fold = MaxAbs<decltype(e)>;
      FoldAlike<Fold>(
          calls, [](const KernelCall& c) { return Fold{In<decltype(e)>(c, 0), Out<double>(c, 0)}; },
          MaxAbsKernel);
    });
  });
}

// Numbers of float64, one after the other.
struct NumberList {
  int count = 0;
  const double* at[kMostListed];
};
__global__ void AddNumbers(const __grid_constant__ NumberList list, bool goes_on, double* out) {
  double sum = goes_on ? *out : *list.at[0];
#pragma unroll 8
  for (int k = goes_on ? 0 : 1; k < list.count; ++k) sum = sum + *list.at[k];
  *out = sum;
}
void AddAllKernel(const KernelCall& c) {
  for (size_t i = 0; i < c.in.size(); i += kMostListed) {
    NumberList list;
    for (size_t k = i; k < c.in.size() && list.count < kMostListed; ++k) {
      list.at[list.count++] = static_cast<const double*>(c.in[k].data);
    }
    AddNumbers<<<1, 1, 0, StreamOf(c)>>>(list, i > 0, Out<double>(c, 0));
    CheckLaunch();
  }
}

}  // namespace

void AddOptimKernels(AddKernelFn add) {
  const auto floating = [add](const char* name, KernelFn fn) {
    add(name, fn, kFloatDTypes, KernelLayout::kStrided);
  };
  // Those of many calls at once have "[]" behind their names (dtensor/call_list.h).
#define DT_UPDATE(name, update)         \
  floating(name, UpdateKernel<update>); \
  floating(name "[]", UpdateListKernel<update>)
  DT_UPDATE("sgd_", Sgd);
  DT_UPDATE("sgd_momentum_", SgdMomentum);
  DT_UPDATE("adam_", PlainAdam);
  DT_UPDATE("adam_amsgrad_", AdamAmsgrad);
  DT_UPDATE("adamw_", AdamW);
  DT_UPDATE("adamw_amsgrad_", AdamWAmsgrad);
  DT_UPDATE("adagrad_", Adagrad);
  DT_UPDATE("rmsprop_", PlainRmsprop);
  DT_UPDATE("rmsprop_momentum_", RmspropMomentum);
  DT_UPDATE("rmsprop_centered_", RmspropCentered);
  DT_UPDATE("rmsprop_centered_momentum_", RmspropBoth);
#undef DT_UPDATE
  floating("power_sum", PowerSumKernel);
  floating("max_abs", MaxAbsKernel);
  floating("power_sum[]", PowerSumListKernel);
  floating("max_abs[]", MaxAbsListKernel);
  add("add_n", AddAllKernel, 1u << static_cast<int>(DType::kF64), KernelLayout::kStrided);
  floating("scale_", ScaleKernel);
  floating("scale_[]", ScaleListKernel);
  floating("truncated_normal_", UpdateKernel<TruncatedNormal>);
}

}  // namespace dtensor::cuda

// Convolutions and max pools: every element of a result gathers what goes into it, in a fixed
// order, so that gradients need no atomics. Narrow floats are summed in f32 and rounded once.
#include <type_traits>

#include "dtensor/ops/conv/window.h"
#include "dtensor/tensor/convert.h"
#include "dtensor/tensor/cuda/launch.h"
#include "dtensor/tensor/cuda/math.h"

namespace dtensor::cuda {
namespace {

namespace dev = ::dtensor::device_code;

// A place in a plane of three dims.
struct Place {
  int64_t at[kMaxWindowDims];
};
__device__ Place PlaceOf(int64_t i, int64_t second, int64_t third) {
  return {{i / third / second, i / third % second, i % third}};
}
// The input of output o at tap k of a dim; inside where it is one.
__device__ int64_t InputAt(const WindowDim& d, int64_t o, int64_t k) {
  return o * d.stride - d.before + k * d.dilation;
}
__device__ bool IsInside(const WindowDim& d, int64_t input) { return input >= 0 && input < d.in; }

// --- convolutions -------------------------------------------------------------------------------

// x [n, groups c, in], w [groups o, c, kernel], y [n, groups o, out], one of which is made from the
// others; b, for what is made, or null.
struct Conv {
  Windows windows;
  int64_t n, groups, c, o, made;
  void *x, *w, *y;
  const void* b;
};

template <class S>
struct ConvSum {
  using T = ComputedAs<S>;
  T sum = T(0);
  __device__ void Add(S a, S b) { sum = dev::Add(sum, dev::Mul(AsComputed(a), AsComputed(b))); }
  // The bias of channel c is added last.
  __device__ void Store(const Conv& conv, int64_t channel, S* to) {
    if (conv.b != nullptr) {
      sum = dev::Add(sum, AsComputed(static_cast<const S*>(conv.b)[channel]));
    }
    FromNumber(sum, to);
  }
};

template <class S>
__global__ void MakeY(const __grid_constant__ Conv conv) {
  const WindowDim(&d)[kMaxWindowDims] = conv.windows.d;
  const int64_t in = conv.windows.InPlane(), out = conv.windows.OutPlane();
  const int64_t taps = conv.windows.Taps();
  for (int64_t i = GridStart(); i < conv.made; i += GridStep()) {
    const Place o = PlaceOf(i % out, d[1].out, d[2].out);
    const int64_t channel = i / out % (conv.groups * conv.o), n = i / out / (conv.groups * conv.o);
    const int64_t group = channel / conv.o;
    const S* const x = static_cast<const S*>(conv.x) + (n * conv.groups + group) * conv.c * in;
    const S* const w = static_cast<const S*>(conv.w) + channel * conv.c * taps;
    ConvSum<S> sum;
    for (int64_t t = 0; t < conv.c * taps; ++t) {
      const Place k = PlaceOf(t % taps, d[1].kernel, d[2].kernel);
      const int64_t a = InputAt(d[0], o.at[0], k.at[0]), b = InputAt(d[1], o.at[1], k.at[1]);
      const int64_t c = InputAt(d[2], o.at[2], k.at[2]);
      if (!IsInside(d[0], a) || !IsInside(d[1], b) || !IsInside(d[2], c)) continue;
      sum.Add(x[t / taps * in + (a * d[1].in + b) * d[2].in + c], w[t]);
    }
    sum.Store(conv, channel, static_cast<S*>(conv.y) + i);
  }
}

// The output of which an input is tap k, or -1.
__device__ int64_t OutputAt(const WindowDim& d, int64_t input, int64_t k) {
  const int64_t first = input + d.before - k * d.dilation;
  return first >= 0 && first % d.stride == 0 && first / d.stride < d.out ? first / d.stride : -1;
}

template <class S>
__global__ void MakeX(const __grid_constant__ Conv conv) {
  const WindowDim(&d)[kMaxWindowDims] = conv.windows.d;
  const int64_t in = conv.windows.InPlane(), out = conv.windows.OutPlane();
  const int64_t taps = conv.windows.Taps();
  for (int64_t i = GridStart(); i < conv.made; i += GridStep()) {
    const Place x = PlaceOf(i % in, d[1].in, d[2].in);
    const int64_t channel = i / in % (conv.groups * conv.c), n = i / in / (conv.groups * conv.c);
    const int64_t group = channel / conv.c;
    const S* const y = static_cast<const S*>(conv.y) + (n * conv.groups + group) * conv.o * out;
    const S* const w =
        static_cast<const S*>(conv.w) + (group * conv.o * conv.c + channel % conv.c) * taps;
    ConvSum<S> sum;
    for (int64_t t = 0; t < conv.o * taps; ++t) {
      const int64_t of = t / taps;
      const Place k = PlaceOf(t % taps, d[1].kernel, d[2].kernel);
      const int64_t a = OutputAt(d[0], x.at[0], k.at[0]), b = OutputAt(d[1], x.at[1], k.at[1]);
      const int64_t c = OutputAt(d[2], x.at[2], k.at[2]);
      if (a < 0 || b < 0 || c < 0) continue;
      sum.Add(y[of * out + (a * d[1].out + b) * d[2].out + c], w[of * conv.c * taps + t % taps]);
    }
    sum.Store(conv, channel, static_cast<S*>(conv.x) + i);
  }
}

template <class S>
__global__ void MakeW(const __grid_constant__ Conv conv) {
  const WindowDim(&d)[kMaxWindowDims] = conv.windows.d;
  const int64_t in = conv.windows.InPlane(), out = conv.windows.OutPlane();
  const int64_t taps = conv.windows.Taps();
  for (int64_t i = GridStart(); i < conv.made; i += GridStep()) {
    const Place k = PlaceOf(i % taps, d[1].kernel, d[2].kernel);
    const int64_t channel = i / taps / conv.c, group = channel / conv.o;
    ConvSum<S> sum;
    for (int64_t t = 0; t < conv.n * out; ++t) {
      const int64_t n = t / out;
      const Place o = PlaceOf(t % out, d[1].out, d[2].out);
      const int64_t a = InputAt(d[0], o.at[0], k.at[0]), b = InputAt(d[1], o.at[1], k.at[1]);
      const int64_t c = InputAt(d[2], o.at[2], k.at[2]);
      if (!IsInside(d[0], a) || !IsInside(d[1], b) || !IsInside(d[2], c)) continue;
      const int64_t plane = (n * conv.groups + group) * conv.c + i / taps % conv.c;
      sum.Add(static_cast<const S*>(conv.x)[plane * in + (a * d[1].in + b) * d[2].in + c],
              static_cast<const S*>(conv.y)[(n * conv.groups * conv.o + channel) * out + t % out]);
    }
    sum.Store(conv, channel, static_cast<S*>(conv.w) + i);
  }
}

// Groups follow from the shapes: a rank may have some of them.
Conv ConvOf(const KernelCall& call, const TensorRef& x, const TensorRef& w, const TensorRef& y) {
  Conv c = {};
  c.windows = WindowsOf(call.attrs[0]);
  const int channel = x.ndim - 1 - c.windows.dims;
  c.n = 1;
  for (int d = 0; d < channel; ++d) c.n *= x.sizes[d];
  c.c = w.sizes[1];
  c.groups = c.c == 0 ? 1 : x.sizes[channel] / c.c;
  c.o = c.groups == 0 ? 0 : w.sizes[0] / c.groups;
  c.x = x.data;
  c.w = w.data;
  c.y = y.data;
  c.b = call.in.size() == 3 ? call.in[2].data : nullptr;
  c.made = NumelOf(call.out[0]);
  return c;
}

// `visit` launches the kernel of the elements' type.
template <class Visit>
void Launch(const KernelCall& call, const Visit& visit) {
  if (NumelOf(call.out[0]) == 0) return;
  VisitDType(call.in[0].dtype, visit);
  CheckLaunch();
}
void ConvY(const KernelCall& c) {
  const Conv conv = ConvOf(c, c.in[0], c.in[1], c.out[0]);
  Launch(c, [&](auto e) {
    MakeY<typename decltype(e)::type><<<BlocksFor(conv.made), kThreads, 0, StreamOf(c)>>>(conv);
  });
}
void ConvX(const KernelCall& c) {
  const Conv conv = ConvOf(c, c.out[0], c.in[1], c.in[0]);
  Launch(c, [&](auto e) {
    MakeX<typename decltype(e)::type><<<BlocksFor(conv.made), kThreads, 0, StreamOf(c)>>>(conv);
  });
}
void ConvW(const KernelCall& c) {
  const Conv conv = ConvOf(c, c.in[0], c.out[0], c.in[1]);
  Launch(c, [&](auto e) {
    MakeW<typename decltype(e)::type><<<BlocksFor(conv.made), kThreads, 0, StreamOf(c)>>>(conv);
  });
}

// --- max pools ----------------------------------------------------------------------------------

struct Pool {
  Windows windows;
  int64_t made;
};

template <class S>
__device__ ComputedAs<S> Least() {
  if constexpr (std::is_integral_v<S>) {
    return S(-1) > S(0) ? 0 : static_cast<int64_t>(~uint64_t{0} << (8 * sizeof(S) - 1));
  }
  return static_cast<ComputedAs<S>>(-__builtin_inff());
}

// One window each; of equal elements the first, of NaN the last, as torch.
template <class S>
__global__ void MaxPool(const __grid_constant__ Pool pool, const S* x, S* y, int64_t* indices) {
  const WindowDim(&d)[kMaxWindowDims] = pool.windows.d;
  const int64_t in = pool.windows.InPlane(), out = pool.windows.OutPlane();
  for (int64_t i = GridStart(); i < pool.made; i += GridStep()) {
    const Place o = PlaceOf(i % out, d[1].out, d[2].out);
    const WindowRange ra = RangeOf(d[0], o.at[0]), rb = RangeOf(d[1], o.at[1]);
    const WindowRange rc = RangeOf(d[2], o.at[2]);
    const S* const plane = x + i / out * in;
    ComputedAs<S> best = Least<S>();
    int64_t place = (ra.start * d[1].in + rb.start) * d[2].in + rc.start;
    for (int64_t a = ra.start; a < ra.end; a += ra.step) {
      for (int64_t b = rb.start; b < rb.end; b += rb.step) {
        for (int64_t c = rc.start; c < rc.end; c += rc.step) {
          const int64_t at = (a * d[1].in + b) * d[2].in + c;
          const auto v = AsComputed(plane[at]);
          if (v > best || v != v) {
            best = v;
            place = at;
          }
        }
      }
    }
    FromNumber(best, &y[i]);
    indices[i] = place;
  }
}

// The first and the last output whose window may hold an input.
struct Reach {
  int64_t first, last;
};
__device__ Reach ReachOf(const WindowDim& d, int64_t input) {
  Reach r;
  if (d.kernel == 0) {
    r = {input * d.out / d.in - 1, (input + 1) * d.out / d.in + 1};
  } else {
    const int64_t from = input + d.before - (d.kernel - 1) * d.dilation;
    r = {from <= 0 ? 0 : (from + d.stride - 1) / d.stride, (input + d.before) / d.stride};
  }
  return {r.first < 0 ? 0 : r.first, r.last < d.out ? r.last : d.out - 1};
}

// dy and indices [.., out] -> dx [.., in]
template <class S>
__global__ void MaxPoolBackward(const __grid_constant__ Pool pool, const S* dy,
                                const int64_t* indices, S* dx) {
  const WindowDim(&d)[kMaxWindowDims] = pool.windows.d;
  const int64_t in = pool.windows.InPlane(), out = pool.windows.OutPlane();
  for (int64_t i = GridStart(); i < pool.made; i += GridStep()) {
    const Place x = PlaceOf(i % in, d[1].in, d[2].in);
    const Reach ra = ReachOf(d[0], x.at[0]), rb = ReachOf(d[1], x.at[1]);
    const Reach rc = ReachOf(d[2], x.at[2]);
    ComputedAs<S> sum = 0;
    for (int64_t a = ra.first; a <= ra.last; ++a) {
      for (int64_t b = rb.first; b <= rb.last; ++b) {
        for (int64_t c = rc.first; c <= rc.last; ++c) {
          const int64_t o = i / in * out + (a * d[1].out + b) * d[2].out + c;
          if (indices[o] == i % in) sum += AsComputed(dy[o]);
        }
      }
    }
    FromNumber(sum, &dx[i]);
  }
}

void RunMaxPool(const KernelCall& c) {
  const Pool pool = {WindowsOf(c.attrs[0]), NumelOf(c.out[0])};
  Launch(c, [&](auto e) {
    using S = typename decltype(e)::type;
    if constexpr (!std::is_same_v<S, Bool>) {
      MaxPool<S><<<BlocksFor(pool.made), kThreads, 0, StreamOf(c)>>>(
          pool, static_cast<const S*>(c.in[0].data), static_cast<S*>(c.out[0].data),
          static_cast<int64_t*>(c.out[1].data));
    }
  });
}
void RunMaxPoolBackward(const KernelCall& c) {
  const Pool pool = {WindowsOf(c.attrs[0]), NumelOf(c.out[0])};
  Launch(c, [&](auto e) {
    using S = typename decltype(e)::type;
    if constexpr (!std::is_integral_v<S> && !std::is_same_v<S, Bool>) {
      MaxPoolBackward<S><<<BlocksFor(pool.made), kThreads, 0, StreamOf(c)>>>(
          pool, static_cast<const S*>(c.in[0].data), static_cast<const int64_t*>(c.in[1].data),
          static_cast<S*>(c.out[0].data));
    }
  });
}

}  // namespace

void AddWindowsKernels(AddKernelFn add) {
  for (const char* name : {"conv", "conv_bias"}) {
    add(name, &ConvY, kAllDTypes, KernelLayout::kContiguous);
  }
  for (const char* name : {"conv_input", "conv_input_bias"}) {
    add(name, &ConvX, kAllDTypes, KernelLayout::kContiguous);
  }
  add("conv_weight", &ConvW, kAllDTypes, KernelLayout::kContiguous);
  add("max_pool", &RunMaxPool, kAllDTypes & ~DTypeBit(DType::kBool), KernelLayout::kContiguous);
  add("max_pool_backward", &RunMaxPoolBackward, kFloatDTypes, KernelLayout::kContiguous);
}

}  // namespace dtensor::cuda

#include "dtensor/tensor/cpu/kernels/depthwise.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

// The outputs all of whose taps are inside of the input: [start, end).
struct Inner {
  int64_t start, end;
};
template <class T>
Inner InnerOf(const DepthwiseCall<T>& c) {
  const auto within = [](int64_t v, int64_t low, int64_t high) {
    return v < low ? low : v > high ? high : v;
  };
  const int64_t start = within(c.before, 0, c.out);
  return {start, within(c.in + c.before - (c.taps - 1) * c.dilation, start, c.out)};
}

// Calls tap(k, place in x) for the taps of an output that are inside.
template <class T, class F>
void ForTaps(const DepthwiseCall<T>& c, int64_t o, const F& tap) {
  for (int64_t k = 0; k < c.taps; ++k) {
    const int64_t at = o - c.before + k * c.dilation;
    if (at >= 0 && at < c.in) tap(k, at);
  }
}

template <class T, int kTaps>
struct RowOf {
  static void Run(const DepthwiseCall<T>& c, const Inner& inner, const T* x, const T* w, T bias,
                  T* y) {
    const auto edge = [&](int64_t o) {
      T all = bias;
      ForTaps(c, o, [&](int64_t k, int64_t at) { all += w[k] * x[at]; });
      y[o] = all;
    };
    for (int64_t o = 0; o < inner.start; ++o) edge(o);
    const T* const from = x - c.before;
    _Pragma("GCC ivdep") for (int64_t o = inner.start; o < inner.end; ++o) {
      T all = bias;
      for (int k = 0; k < kTaps; ++k) all += w[k] * from[o + k * c.dilation];
      y[o] = all;
    }
    for (int64_t o = inner.end; o < c.out; ++o) edge(o);
  }
};

// Adds to w what a row gives. Sixteen neighbours have sums of their own, by their place in the row.
template <class T, int kTaps>
struct WeightOf {
  static constexpr int kLanes = 16;
  typedef T Lanes __attribute__((vector_size(kLanes * sizeof(T))));

  static void Run(const DepthwiseCall<T>& c, const Inner& inner, const T* x, T* w, T, const T* y) {
    Lanes sums[kTaps] = {};
    const T* const from = x - c.before;
    int64_t o = inner.start;
    for (; o + kLanes <= inner.end; o += kLanes) {
      Lanes dy, in;
      __builtin_memcpy(&dy, y + o, sizeof(Lanes));
#pragma GCC unroll 8
      for (int k = 0; k < kTaps; ++k) {
        __builtin_memcpy(&in, from + o + k * c.dilation, sizeof(Lanes));
        sums[k] += dy * in;
      }
    }
    T rest[kTaps] = {};
    const auto edge = [&](int64_t at_o) {
      ForTaps(c, at_o, [&](int64_t k, int64_t at) { rest[k] += y[at_o] * x[at]; });
    };
    for (; o < inner.end; ++o) edge(o);
    for (o = 0; o < inner.start; ++o) edge(o);
    for (o = inner.end; o < c.out; ++o) edge(o);
    for (int k = 0; k < kTaps; ++k) {
      T lane[kLanes];
      __builtin_memcpy(lane, &sums[k], sizeof(lane));
      for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
      }
      w[k] += lane[0] + rest[k];
    }
  }
};

template <class T, template <class, int> class Part>
void ForRows(const DepthwiseCall<T>& c) {
  using Fn = decltype(&Part<T, 1>::Run);
  static constexpr Fn kFns[kMostDepthwiseTaps] = {Part<T, 1>::Run, Part<T, 2>::Run, Part<T, 3>::Run,
                                                  Part<T, 4>::Run, Part<T, 5>::Run, Part<T, 6>::Run,
                                                  Part<T, 7>::Run, Part<T, 8>::Run};
  const Fn run = kFns[c.taps - 1];
  const Inner inner = InnerOf(c);
  for (int64_t i = 0; i < c.n; ++i) {
    for (int64_t g = 0; g < c.channels; ++g) {
      const int64_t row = i * c.channels + g;
      run(c, inner, c.x + row * c.in, c.w + g * c.taps, c.b == nullptr ? T(0) : c.b[g],
          c.y + row * c.out);
    }
  }
}

template <class T>
void MakeWeight(const DepthwiseCall<T>& c) {
  for (int64_t i = 0; i < c.channels * c.taps; ++i) c.w[i] = T(0);
  ForRows<T, WeightOf>(c);
}

}  // namespace

void Depthwise(const DepthwiseCall<float>& c) { ForRows<float, RowOf>(c); }
void Depthwise(const DepthwiseCall<double>& c) { ForRows<double, RowOf>(c); }
void DepthwiseWeight(const DepthwiseCall<float>& c) { MakeWeight(c); }
void DepthwiseWeight(const DepthwiseCall<double>& c) { MakeWeight(c); }

}  // namespace DT_LEVEL_NS
}  // namespace dtensor

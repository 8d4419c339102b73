// Which elements along one dim an element of a result of the op resample is made of, and by what
// weights: on the CPU and in device code.
#pragma once

#include <cstdint>

#include "dtensor/ops/conv/resample.h"
#include "dtensor/ops/conv/window.h"

namespace dtensor {
namespace DT_LEVEL_NS {

// Elements At(k) by Weight(k) for k in [0, count).
template <class T>
struct Taps {
  enum class Kind : uint8_t { kEqual, kLinear, kCubic };
  Kind kind;
  int64_t count, first, step, last;  // those below 0 and above the last are at the end
  T part;                            // the weight of each; else where between two elements it is
  DT_HOST_DEVICE int64_t At(int64_t k) const {
    const int64_t i = first + k * step;
    return i < 0 ? 0 : i > last ? last : i;
  }
  DT_HOST_DEVICE T Weight(int64_t k) const {
    if (kind == Kind::kEqual) return part;
    if (kind == Kind::kLinear) return k == 0 ? T(1) - part : part;
    return k == 0 ? Far(part + 1) : k == 1 ? Near(part) : k == 2 ? Near(1 - part) : Far(2 - part);
  }

 private:
  // The convolution of Keys with a = -0.75.
  DT_HOST_DEVICE static T Near(T x) {
    const T a = T(-0.75);
    return ((a + 2) * x - (a + 3)) * x * x + 1;
  }
  DT_HOST_DEVICE static T Far(T x) {
    const T a = T(-0.75);
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a;
  }
};

// How far apart the places in x of neighbouring elements of a result are. `scale`: the factor
// given, or 0.
template <class T>
DT_HOST_DEVICE static inline T StepOf(const WindowDim& d, bool corners, double scale) {
  if (corners) return d.out > 1 ? static_cast<T>(d.in - 1) / static_cast<T>(d.out - 1) : T(0);
  return scale > 0 ? static_cast<T>(1.0 / scale) : static_cast<T>(d.in) / static_cast<T>(d.out);
}

template <class T>
DT_HOST_DEVICE static inline Taps<T> WindowTaps(const WindowDim& d, Resample mode, double scale,
                                                int64_t o) {
  const WindowRange r = RangeOf(d, o);
  const int64_t n = r.end <= r.start ? 0 : (r.end - r.start + r.step - 1) / r.step;
  T weight = T(1) / static_cast<T>(n);
  if (mode == Resample::kSum) weight = static_cast<T>(scale);
  if (mode == Resample::kMeanWithin && d.kernel > 0) {
    const int64_t start = o * d.stride - d.before, end = start + d.kernel;
    weight = T(1) / static_cast<T>((end < d.in + d.before ? end : d.in + d.before) - start);
  }
  return {Taps<T>::Kind::kEqual, n, r.start, r.step, d.in - 1, weight};
}

// Of element o of the result.
template <class T>
DT_HOST_DEVICE static inline Taps<T> TapsOf(const WindowDim& d, Resample mode, double scale,
                                            int64_t o) {
  using Kind = typename Taps<T>::Kind;
  if (mode <= Resample::kSum) return WindowTaps<T>(d, mode, scale, o);
  const bool nearest = mode == Resample::kNearest || mode == Resample::kNearestExact;
  if (!nearest && d.in == d.out && !(scale > 0 && scale != 1)) {
    return {Kind::kEqual, 1, o, 1, d.in - 1, T(1)};
  }
  const bool corners = mode == Resample::kLinearCorners || mode == Resample::kCubicCorners;
  const T step = StepOf<T>(d, corners, scale), at = static_cast<T>(o);
  const T size = static_cast<T>(d.in);
  T place = step * (at + T(0.5)) - T(0.5);
  if (corners || mode == Resample::kNearest) place = step * at;
  if (mode == Resample::kNearestExact) place = step * (at + T(0.5));
  const bool linear = mode == Resample::kLinear || mode == Resample::kLinearCorners;
  if (linear && place < 0) place = 0;
  if (!(place < size)) place = size;  // what may be made an integer: no more, and a number
  if (nearest) {  // in float32 where the last bits decide, whatever the dtype: as torch
    return {Kind::kEqual, 1, static_cast<int64_t>(static_cast<float>(place)), 1, d.in - 1, T(1)};
  }
  const auto floor = static_cast<int64_t>(__builtin_floor(static_cast<double>(place)));
  const int64_t low = floor < d.in - 1 ? floor : d.in - 1;
  T part = place - static_cast<T>(low);
  if (part > 1) part = 1;
  if (linear) return {Kind::kLinear, 2, low, 1, d.in - 1, part};
  return {Kind::kCubic, 4, low - 1, 1, d.in - 1, part};
}

// The most elements that any is made of.
static inline int64_t MostTaps(const WindowDim& d, Resample mode) {
  if (d.out == 0) return 0;
  if (mode <= Resample::kSum) return d.kernel > 0 ? d.kernel : d.in / d.out + 2;
  if (mode == Resample::kNearest || mode == Resample::kNearestExact) return 1;
  return mode == Resample::kLinear || mode == Resample::kLinearCorners ? 2 : 4;
}

// Whether every element of the result is the one of x that stands where it does.
template <class T>
static inline bool IsIdentity(const WindowDim& d, Resample mode, double scale) {
  bool same = d.in == d.out;
  for (int64_t o = 0; same && o < d.out; ++o) {
    const Taps<T> taps = TapsOf<T>(d, mode, scale, o);
    same = taps.count == 1 && taps.At(0) == o && taps.Weight(0) == 1;
  }
  return same;
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor

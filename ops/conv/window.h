// Windows that slide over the last dims of a tensor: the geometry that convolutions, pools and
// resampling share, as the one attribute `window` of their ops. Plain C++ without Abseil: kernel
// files include it.
#pragma once

#include <cstdint>

#include "dtensor/tensor/kernel.h"

namespace dtensor {

// One dim. Tap k of output o is input o * stride - before + k * dilation, or nothing where that is
// outside of [0, in). kernel = 0: an adaptive window, which cuts the input into `out` parts that
// may overlap by one.
struct WindowDim {
  int64_t in = 1, out = 1, kernel = 1, stride = 1, dilation = 1, before = 0;
};
inline constexpr int kWindowNumbers = 6;  // of one dim in the attribute, in the order above
inline constexpr int kMaxWindowDims = 3;

// The windows of a call; dims before the first are trivial, so that loops are over three.
struct Windows {
  WindowDim d[kMaxWindowDims];
  int dims = 0;
  DT_HOST_DEVICE int64_t InPlane() const { return d[0].in * d[1].in * d[2].in; }
  DT_HOST_DEVICE int64_t OutPlane() const { return d[0].out * d[1].out * d[2].out; }
  DT_HOST_DEVICE int64_t Taps() const { return d[0].kernel * d[1].kernel * d[2].kernel; }
};

// Static: level files must not share inline code.
static inline Windows WindowsOf(const Attr& window) {
  Windows w;
  w.dims = static_cast<int>(window.n) / kWindowNumbers;
  const int64_t* v = window.ints;
  for (int k = kMaxWindowDims - w.dims; k < kMaxWindowDims; ++k, v += kWindowNumbers) {
    w.d[k] = {v[0], v[1], v[2], v[3], v[4], v[5]};
  }
  return w;
}

// The inputs start, start + step, ... below end that window o reads, those outside left out.
struct WindowRange {
  int64_t start, end, step;
};
DT_HOST_DEVICE static inline WindowRange RangeOf(const WindowDim& d, int64_t o) {
  if (d.kernel == 0) return {o * d.in / d.out, ((o + 1) * d.in + d.out - 1) / d.out, 1};
  int64_t start = o * d.stride - d.before;
  const int64_t end = start + (d.kernel - 1) * d.dilation + 1;
  if (start < 0) start += (-start + d.dilation - 1) / d.dilation * d.dilation;
  return {start, end < d.in ? end : d.in, d.dilation};
}

}  // namespace dtensor

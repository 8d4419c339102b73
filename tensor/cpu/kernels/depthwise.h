// Convolutions of single channels along one dim, as in state-space models: a library reorders them
// for longer than they take.
#pragma once

#include <cstdint>

#include "dtensor/tensor/cpu/level.h"

namespace dtensor {

// x [n, channels, in], w [channels, taps], y [n, channels, out], b [channels] or null. Output o
// reads input o - before + k * dilation by tap k, and nothing where that is outside of [0, in).
template <class T>
struct DepthwiseCall {
  int64_t n, channels, in, out, taps, dilation, before;
  T *x, *w, *y;
  const T* b;
};
inline constexpr int64_t kMostDepthwiseTaps = 8;

// Of y from x, w and b; and of w from x and y. 1 to kMostDepthwiseTaps taps. The same bits at every
// level, and of an output wherever in the row it stands.
DT_AT_EACH_CPU_LEVEL(void Depthwise(const DepthwiseCall<float>&);
                     void Depthwise(const DepthwiseCall<double>&);
                     void DepthwiseWeight(const DepthwiseCall<float>&);
                     void DepthwiseWeight(const DepthwiseCall<double>&);)

}  // namespace dtensor

// The modes of the op resample: how a result along one dim is made of elements of x.
#pragma once

#include <cstdint>

namespace dtensor {

enum class Resample : int64_t {
  kMean,           // of a window, as far as it is inside of x
  kMeanWithin,     // the sum divided by what of the window is inside of x or its padding
  kSum,            // of a window, times the scale
  kNearest,        // the element at or before the place
  kNearestExact,   // the element whose centre is nearest
  kLinear,         // of the two elements around the place
  kLinearCorners,  // the same, with places of align_corners
  kCubic,          // of the four elements around the place
  kCubicCorners,
};
inline constexpr int64_t kNumResamples = 9;

}  // namespace dtensor

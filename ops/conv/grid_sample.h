// The attributes of the op grid_sample.
#pragma once

#include <cstdint>

namespace dtensor {

enum class GridMode : int64_t { kLinear, kNearest };
enum class GridPadding : int64_t { kZeros, kBorder, kReflection };

}  // namespace dtensor

// Neighbouring dims of an array as one: how products flatten their operands to matrices. Plain C++
// without Abseil: kernel files include it.
#pragma once

#include "dtensor/tensor/kernel.h"

namespace dtensor {

// Dims [from, to): their size, and the stride where they have one (flat).
struct DimGroup {
  int64_t size = 1, stride = 1;
  bool flat = true;
};
inline DimGroup GroupOf(const TensorRef& t, int from, int to) {
  DimGroup group;
  bool started = false;
  for (int d = to - 1; d >= from; --d) {
    if (t.sizes[d] == 1) continue;
    if (!started) {
      group.stride = t.strides[d];
    } else if (t.strides[d] != group.stride * group.size) {
      group.flat = false;
    }
    started = true;
    group.size *= t.sizes[d];
  }
  return group;
}

}  // namespace dtensor

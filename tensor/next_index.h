// NextIndex: the one loop over the indices of a box, for everything that walks strided arrays.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/base/attributes.h"

namespace dtensor {

// Moves `at` (a vector of indices) to the next index of a box of which dim d has size(d) >= 1, the
// last dim fastest. moved(d, by) is called for every dim whose index changed, so that offsets can
// go along. False after the last index; `at` is all zeros then, as at the start.
template <class At, class Size, class Moved>
ABSL_ATTRIBUTE_ALWAYS_INLINE inline bool NextIndex(At& at, const Size& size, const Moved& moved) {
  for (size_t d = at.size(); d-- > 0;) {
    const auto n = static_cast<int64_t>(size(d));
    if (static_cast<int64_t>(++at[d]) < n) {
      moved(d, int64_t{1});
      return true;
    }
    at[d] = 0;
    if (n > 1) moved(d, 1 - n);
  }
  return false;
}

}  // namespace dtensor

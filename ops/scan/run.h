// Running sums and products as other ops need them: from either end, and without the element
// itself.
#pragma once

#include "dtensor/ops/family.h"

namespace dtensor {

struct Run {
  bool reverse = false;    // from the last element down
  bool exclusive = false;  // each result without its own element
};
// x: floating or int64, of at least one dim; `dim` is not negative.
DTensor RunningSum(const DTensor& x, int64_t dim, Run run);
DTensor RunningProduct(const DTensor& x, int64_t dim, Run run);

}  // namespace dtensor

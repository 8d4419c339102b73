// Reversing and rolling a sharded dim: ranks send what changes owner. Inside of ops/.
#pragma once

#include <optional>

#include "dtensor/ops/ops.h"

namespace dtensor {

// x reversed over `dim`, or rolled by 0 < shift < size over it, and placed as x is, where that dim
// is cut in blocks; null where it is not, and where dispatch can reverse it
// with fewer bytes, by cutting another dim.
//   Comm: one exchange over the mesh dims that cut it, of the elements that change owner: never
//   more than
//         gathering. Gradients go the same way back.
DTensor FlipAcross(const DTensor& x, int dim);
DTensor RollAcross(const DTensor& x, int dim, int64_t shift);

}  // namespace dtensor

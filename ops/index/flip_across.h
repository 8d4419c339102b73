// flip over a sharded dim by exchange.
#pragma once

#include "dtensor/ops/ops.h"

namespace dtensor {

// The mesh dim that cuts `dim` of x into blocks, if one does, and one only; else -1.
int CutInBlocksBy(const DTensor& x, int dim);
// x reversed over a dim that this mesh dim cuts so; the result is cut as x is.
//   Comm: every rank sends and receives at most what it has of x.
DTensor FlipAcross(const DTensor& x, int dim, int mesh_dim);

}  // namespace dtensor

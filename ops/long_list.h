// Lists of integers that are as long as the data is, between tensors and plain code. Inside of
// ops/.
#pragma once

#include "dtensor/distribute.h"
#include "dtensor/tensor/rank_list.h"

namespace dtensor {

// The global values of integers, row-major. All ranks of the mesh call it.
RankList<int64_t> ListOf(const DTensor& x);

// int64 of this shape, replicated on the mesh; not defined: on Self.
DTensor FromList(const RankList<int64_t>& values, IntSpan shape, const DeviceMesh& mesh = {});

}  // namespace dtensor

// Mean and variance along any dims, and what a norm that uses them has as a gradient. Sharded dims
// are reduced over: small tensors move, never x.
#pragma once

#include "dtensor/ops/family.h"

namespace dtensor {

double CountOf(const DTensor& x, const DimList& dims);  // of elements along them

// Of the values along `dims`, which stay with size 1. The variance is divided by the count; centred
// squares are added up, so nothing cancels.
struct Statistics {
  DTensor mean, variance;
};
Statistics StatisticsOf(const DTensor& x, const DimList& dims);

// The gradient of x for y = (x - mean) * scale with the statistics of x along `dims`. Two sums,
// which go out as one.
DTensor StandardizedGradient(const DTensor& dy, const DTensor& y, const DTensor& scale,
                             const DimList& dims);

}  // namespace dtensor

// The windows of pools.
#pragma once

#include "dtensor/ops/conv/spatial.h"

namespace dtensor {

struct PoolArgs {
  const DimList &kernel_size, &stride, &padding, &dilation;
  bool ceil_mode;
};
WindowDims PoolWindows(absl::string_view op, const DTensor& x, int dims, const PoolArgs& args);
WindowDims AdaptiveWindows(absl::string_view op, const DTensor& x, int dims,
                           const DimList& output_size);

}  // namespace dtensor

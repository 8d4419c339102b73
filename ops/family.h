// What the header of every family of ops starts from.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "dtensor/autograd.h"
#include "dtensor/dispatch.h"
#include "dtensor/distribute.h"
#include "dtensor/distributed_tensor.h"

namespace dtensor {

using DimList = std::vector<int64_t>;

// Registers all shipped ops and kernels; called by every op function on first use.
void RegisterOps();

}  // namespace dtensor

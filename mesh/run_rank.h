// RunRank: the body of one rank, in whatever world. Private to mesh/.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "dtensor/mesh/launch.h"

namespace dtensor {

// Runs it on the calling thread. How it ends is known to the world.
void RunRank(const std::shared_ptr<World>& world, int64_t rank, DeviceType device,
             absl::FunctionRef<absl::Status(RankContext&)> body);

}  // namespace dtensor

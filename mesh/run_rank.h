// RunRank: the body of one rank, in whatever world; HowItEnded. Private to mesh/.
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

// What a world that this process has left ended with. What its ranks did when a wait failed or
// collectives differed goes to *report (null: nobody asks) and, where that is why it failed, into
// the file that DTENSOR_FLIGHT_REPORT names, which stderr says.
absl::Status HowItEnded(World& world, FlightReport* report);

}  // namespace dtensor

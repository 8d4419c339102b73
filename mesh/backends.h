// MakeBackend: which communicator serves a group, by the world, the device and the launcher.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "dtensor/mesh/comm_backend.h"
#include "dtensor/mesh/world.h"

namespace dtensor {

// The first backend of the table in backends.cc that serves the group, inside of `wrap` if there is
// one. With DTENSOR_LOG=comm the choice is printed to stderr, by the group's first member.
//   Errors: Unimplemented if none does; InvalidArgument for another DTENSOR_LOG.
absl::StatusOr<std::unique_ptr<CommBackend>> MakeBackend(World& world, const GroupRequest& group,
                                                         const WrapBackend& wrap);

}  // namespace dtensor

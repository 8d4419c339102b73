// MakeBackend: which communicator serves a group, by the world, the device and the launcher.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/mesh/comm_backend.h"
#include "dtensor/mesh/world.h"

namespace dtensor {

// What a line of backends.inc names.
struct BackendEntry {
  absl::string_view name, what;  // what: for DTENSOR_LOG=comm
  bool (*serves)(const World&, const GroupRequest&);
  std::unique_ptr<CommBackend> (*make)(World&, const GroupRequest&);
};

// Whether DTENSOR_LOG=comm. Errors: InvalidArgument for another DTENSOR_LOG.
absl::StatusOr<bool> LogsComm();

// The first backend of backends.inc that serves the group, inside of `wrap` if there is
// one. With DTENSOR_LOG=comm the choice is printed to stderr, by the group's first member.
//   Errors: Unimplemented if none does; InvalidArgument for another DTENSOR_LOG.
absl::StatusOr<std::unique_ptr<CommBackend>> MakeBackend(World& world, const GroupRequest& group,
                                                         const WrapBackend& wrap);

}  // namespace dtensor

// World::Exchange as a collective of its group: in step with the others, and as they are compared,
// recorded and ended. Private to mesh/.
#pragma once

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "dtensor/mesh/comm_backend.h"

namespace dtensor {

// `begin` sees the call before it starts, numbered: it puts this rank's bytes where the backend
// looks for them.
absl::Status RunHostExchange(CommBackend& backend, const std::string& label,
                             absl::string_view what_for,
                             absl::FunctionRef<void(const CollectiveCall&)> begin);

}  // namespace dtensor

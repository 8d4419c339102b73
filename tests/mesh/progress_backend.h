// A backend with a thread of its own, around one that has none: calls that overlap go on by
// themselves (CommCaps::overlap without deferred_pull), as on a device or with MPI's progress.
#pragma once

#include "dtensor/mesh/comm_backend.h"

namespace dtensor {

WrapBackend WithProgress();

}  // namespace dtensor

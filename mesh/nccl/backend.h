// The communicator of ranks that have a GPU each. Private to mesh/.
#pragma once

#include <cstdint>

#include "dtensor/mesh/comm_backend.h"

namespace dtensor {

// Of tests: `backend` is one of NCCL; its calls go in operations of at most so many elements.
void LimitNcclElements(CommBackend& backend, int64_t most);

}  // namespace dtensor

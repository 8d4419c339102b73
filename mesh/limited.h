// Limited: a communicator that does less than the one inside of it. A program runs as it would on
// MPI, gloo or NCCL, and tests see that it asks for no more than it may.
#pragma once

#include "dtensor/mesh/comm_backend.h"

namespace dtensor {

// For SpmdOptions::wrap: communicators with these capabilities at most. A call beyond them that the
// face (Comm) lets through ends the process. Without deferred_pull a backend that pulls cannot
// overlap either.
WrapBackend Limited(const CommCaps& most);

// Contiguous tensors, and in an exchange one piece to and one from each peer at most, as MPI and
// NCCL have them.
WrapBackend Packed();

}  // namespace dtensor

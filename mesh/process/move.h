// The data of collectives between processes, once all members have come to the call and agree.
// Private to mesh/.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "dtensor/mesh/comm_call.h"
#include "dtensor/mesh/process/group.h"

namespace dtensor {

inline char* At(const Tensor& t, int64_t byte) { return static_cast<char*>(t.data()) + byte; }

// Of a tensor whose rows a call's counts divide: the byte where each member's begin, and the end.
std::vector<int64_t> RowStarts(const CollectiveCall& call, const Tensor& whole);

// Waits for messages of a call.
using AwaitData = absl::FunctionRef<absl::Status(Transfers&)>;

// This member's part. Sums are made in rank order by whoever needs them, of parts that come
// straight from all others: so they have the bits that threads get, and every member sends and
// receives no more than any algorithm must. Between nodes of several ranks each that would be more
// than a node must send: those calls go by mesh/process/nodes.h.
absl::Status MoveBetweenProcesses(const CollectiveCall& call, ProcessGroup& group, AwaitData await);

}  // namespace dtensor

// Collectives as operations of NCCL. Private to mesh/.
#pragma once

#include <cstdint>

#include "dtensor/mesh/comm_call.h"
#include "dtensor/mesh/nccl/api.h"
#include "dtensor/tensor/kernel.h"

namespace dtensor::nccl {

// Most elements of one operation: NCCL takes more, but some of its versions counted in 32 bits.
inline constexpr int64_t kMostElements = (int64_t{1} << 31) - (1 << 20);

struct Target {
  const Api& api;
  CommHandle comm;
  StreamHandle stream;
  int me, size;
  int64_t most = kMostElements;
};

// Queues what this rank does of a call of contiguous tensors, as operations of one group: those of
// uneven counts are a broadcast or a reduction for each rank, exchanges are messages, and what is
// larger than `most` goes in pieces. A message's communicator has its two ranks. Returns NCCL's
// first error.
int QueueCall(const Target& to, const CollectiveCall& call);

// NCCL's maximum and minimum drop NaN where the library's keep it. Such reductions of floats bring
// every rank's term to where it is reduced.
bool NeedsTerms(const CollectiveCall& call);
// Queues that: `terms` [ranks, elements of out].
int QueueTerms(const Target& to, const CollectiveCall& call, const Tensor& terms);

}  // namespace dtensor::nccl

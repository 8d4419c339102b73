// The data movement of collectives between threads. Private to mesh/; the protocol around it, which
// makes touching the peers' memory safe, is in backend.cc.
#pragma once

#include "absl/types/span.h"
#include "dtensor/mesh/comm_call.h"
#include "dtensor/mesh/local/group.h"
#include "dtensor/mesh/reduce_ranks.h"

namespace dtensor {

// True if the call goes through staging memory, of `most` bytes per rank: decided by what its
// fingerprint holds, so alike on every rank. Of more than kStageBytes its tensors are contiguous.
bool IsStaged(const CollectiveCall& call, int64_t most = kStageBytes);
// Writes what this rank contributes.
void WriteStage(const CollectiveCall& call, int me, char* stage);
// Reads all ranks' stages into this rank's output. `cut`: those of a reduce-scatter begin with this
// rank's rows.
void ReadStages(const CollectiveCall& call, int me, absl::Span<const char* const> stages,
                bool cut = false);
// Where the rows of member `r` begin in what a reduce-scatter adds up; at r = n: where they end.
int64_t ScatterStartBytes(const CollectiveCall& call, int r);

// ReduceRanks at the active CPU level.
void ReduceContiguous(const ReduceRanksCall& call);
// This rank's part of the work on the memory of all ranks.
void MoveData(absl::Span<const CollectiveCall* const> calls, int me);
// All of it, on tensors of a device: queued on the calling rank's stream.
void QueueData(absl::Span<const CollectiveCall* const> calls);

// The elements of an all-reduce that rank `me` of n reduces. No two ranks write one cache line.
struct ReducedPart {
  int64_t start = 0, count = 0;
};
ReducedPart PartOfAllReduce(const Tensor& tensor, int64_t n, int me);
// This rank's part of an all-reduce of contiguous tensors: where the part begins in the ranks'
// inputs and outputs.
void AllReduceData(const CollectiveCall& call, int64_t count, absl::Span<const void* const> in,
                   absl::Span<void* const> out);

// Why the pieces that this rank receives do not match what the others send it; empty if they do.
std::string ExchangeMismatch(absl::Span<const CollectiveCall* const> calls, int me,
                             absl::Span<const int64_t> ranks);
// Adds up to 0 over the ranks iff all pieces match (but for collisions of 64-bit hashes).
uint64_t ExchangeBalance(const CollectiveCall& call, int me);

}  // namespace dtensor

// Dispatch: one op call. Cache lookup by (op, interned specs, attributes the rule read); on a miss
// dtensor/sharding chooses a strategy; inputs are redistributed, outputs allocated, the local
// kernel runs, the VJP is recorded.
#pragma once

#include <cstdint>
#include <string>

#include "dtensor/distributed_tensor.h"
#include "dtensor/errors.h"
#include "dtensor/op.h"
#include "dtensor/tensor/rank_state.h"

namespace dtensor {

using Inputs = absl::Span<const DTensor* const>;

struct DispatchOptions {
  // Layout the caller would like output 0 to have; breaks ties between strategies (and counts as
  // cost where it differs, but for a pending sum in place of a copy). Null: none.
  const Spec* like = nullptr;
};

// The non-throwing form, whatever kernels and decompositions throw. Errors: InvalidArgument and
// FailedPrecondition for uniform errors; rank-local ones (of memory, this rank's data, an exception
// of the kernel, a peer) are marked and have aborted the rank's groups if the op is on a mesh.
// Ranks that call an op with other attributes are caught where it redistributes an input; an op
// that does not communicate cannot tell.
absl::StatusOr<Values> Dispatch(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs = {},
                                const DispatchOptions& options = {});

// The throwing form, for op functions.
Values Call(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs = {},
            const DispatchOptions& options = {});
namespace internal {
// Call1 of any call, and where plans may hold launches (kept_launch.cc).
DTensor CallInGeneral(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
                      const DispatchOptions& options);
DTensor CallOrLaunchAgain(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
                          const DispatchOptions& options);
}  // namespace internal

// The same for an op of one output.
inline DTensor Call1(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs = {},
                     const DispatchOptions& options = {}) {
  const RankState* const rank = RankState::IfAny();
  if (rank != nullptr && rank->keeps_launches) {
    return internal::CallOrLaunchAgain(op, inputs, attrs, options);
  }
  return internal::CallInGeneral(op, inputs, attrs, options);
}

struct DispatchStats {
  int64_t hits = 0, misses = 0, entries = 0, evictions = 0;
  int64_t contiguous_copies = 0;  // inputs copied for kernels that want contiguous ones
  int64_t kept_launches = 0;      // calls on a device whose plan held all that the host does
};
DispatchStats GetDispatchStats();  // of the calling rank
void ClearDispatchCache();

}  // namespace dtensor

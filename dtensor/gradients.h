// Gradients on their way through the tape: terms are added up where they wait, and brought to where
// they have to be with as few collectives as possible. docs/adr/0003 has the rule. Internal to
// dtensor/.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "dtensor/impl.h"

namespace dtensor::internal {

// How the gradient of a leaf is kept: as the leaf, or as SetGradLayout says.
inline const Spec& LeafSpec(const Node& leaf) {
  return leaf.extra->grad_spec ? *leaf.extra->grad_spec : *leaf.out_specs[0];
}
// A contribution in another dtype.
absl::StatusOr<Contribution> Cast(Contribution c, DType dtype);

// Adds `c` to the contribution of equal placements and box, or appends it.
absl::Status Accumulate(Contributions* all, Contribution c);

// Makes of a contribution to `out`, which `cut` takes of `base`, one to a box of the base. False:
// it cannot say (a gradient that is sharded along the cut dim, or flat).
absl::StatusOr<bool> ToBase(const ViewCut& cut, const Spec& base, const Spec& out, Contribution* c);

// Joins what can be joined without communication: boxes of like placements that make up a larger
// box of `value`; and where some are pending sums over a mesh dim and none is cut there, all are.
absl::Status Join(const Spec& value, Contributions* all);

// The placements in which a joined sum enters the backward of `node`: those of output `slot`,
// pending where it may pass, and cut as it came where it is summed to less.
absl::StatusOr<SpecRef> EntersWith(const Node& node, int slot, const Contributions& joined);
// The placements in which a gradient that came as `joined` leaves a redistribution: those of its
// source, pending where nothing may move, and cut as it came where its source sums it to less.
absl::StatusOr<SpecRef> LeavesWith(const Node& redistribution, const Contributions& joined);

// The sum of joined contributions, in the placements of `target`. Null of none.
absl::StatusOr<DTensor> Combine(Contributions joined, const SpecRef& target);

// Brings what is pending on leaves to their placements and into `grad`, with one collective for
// many where that reduces over the same mesh dims. What `hold` holds back stays pending.
absl::Status SyncLeaves(absl::Span<const NodeRef> leaves, const GradSyncHold& hold);

}  // namespace dtensor::internal

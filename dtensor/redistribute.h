// Redistribute: the same global value in other placements, of the same mesh or of another one.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/spec.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {

// What a redistribution is expected to take: bytes that one rank receives, on average, and the time
// of the collectives that it is made of by a cost model. For choosing strategies, from global sizes
// only, so all ranks agree; in time that does not grow with the mesh. What is really moved where
// all sizes divide and nothing is flat or segmented.
struct MoveCost {
  double bytes = 0, us = 0;
};
MoveCost PriceMove(const DeviceMesh& mesh, IntSpan shape, DType dtype,
                   absl::Span<const Placement> from, absl::Span<const Placement> to,
                   const CostModel& cost);
// The bytes alone.
double RedistributeCost(const DeviceMesh& mesh, IntSpan shape, DType dtype,
                        absl::Span<const Placement> from, absl::Span<const Placement> to);
// The same; between meshes what the target's first rank receives.
double RedistributeCost(const Spec& from, const Spec& to);

// True if going from `from` to `to` needs a peer. The same on every rank.
bool NeedsCommunication(const Spec& from, const Spec& to);
// Whether what comes out is a view of the source, on every rank. Not where a rank needs a peer or
// would have to copy several boxes, nor where a new pending sum begins with zeros on some. The same
// on every rank.
bool MayBeView(const Spec& from, const Spec& to);
// "reduce_scatter over dp, then exchange over dp,tp", for messages: the collectives that it takes.
std::string DescribeRedistribution(const Spec& from, const Spec& to);

// Moves `local` (this rank's part under `from`, null outside of its mesh) to `to`. Same shape and
// dtype; what this rank holds already is never received. May return a view of `local` where nothing
// has to move (R -> S), or `local` itself; null outside of the target's mesh. All ranks of both
// meshes must call it; others may. A new Partial(sum | prod) holds the value on coordinate 0 and
// the neutral element elsewhere; a new Partial(avg | max | min) holds it everywhere.
//   Comm:     B(n-1)/n received from Partial to a cut, 2B(n-1)/n to
//             Replicate; else what the target lacks, in one exchange (dtensor/move_plan.h).
//   Errors:   InvalidArgument for meshes of different devices; those of the communicator.
absl::StatusOr<Tensor> RedistributeLocal(const Tensor& local, const Spec& from, const Spec& to);

// A redistribution under way: what it reads and writes is kept alive by it.
class PendingMove {
 public:
  virtual ~PendingMove() = default;
  virtual bool Done() const = 0;  // Finish waits for nobody
  // The moved tensor; waits for peers. To be called once.
  virtual absl::StatusOr<Tensor> Finish() = 0;
};
// As RedistributeLocal, but waits for no peer where one collective is enough; of two (a reduction
// whose results end elsewhere) the first one runs at once. Never null.
absl::StatusOr<std::unique_ptr<PendingMove>> StartRedistribution(const Tensor& local,
                                                                 const Spec& from, const Spec& to);

}  // namespace dtensor

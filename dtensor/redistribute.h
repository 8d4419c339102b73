// Redistribute: the same global value in other placements of the same mesh.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "mesh/launch.h"
#include "mesh/spec.h"
#include "tensor/tensor.h"

namespace dtensor {

// Modelled bytes that one rank receives: for choosing strategies, from global sizes only, so all
// ranks agree. Source of the terms: performance.md section 2.1.
double RedistributeCost(const DeviceMesh& mesh, IntSpan shape, DType dtype,
                        absl::Span<const Placement> from, absl::Span<const Placement> to);
inline double RedistributeCost(const Spec& from, const Spec& to) {
  return RedistributeCost(from.mesh(), from.shape(), from.dtype(), from.placements(),
                          to.placements());
}

// True if going from `from` to `to` needs a peer. The same on every rank.
bool NeedsCommunication(const Spec& from, const Spec& to);
// "all_reduce over tp", for messages: the first collective that it takes.
std::string DescribeRedistribution(const Spec& from, const Spec& to);

// Moves `local` (this rank's part under `from`) to `to`. Same mesh, shape and dtype. May return a
// view of `local` where nothing has to move (R -> S), or `local` itself. All ranks of the mesh must
// call it; on ranks outside it returns null. A new Partial(sum) holds the value on coordinate 0 and
// zeros elsewhere; a new Partial(avg | max | min) holds it everywhere.
//   Errors: InvalidArgument for a new Partial(prod) or a change between Partial kinds;
//   Unimplemented for flat shards; those of the communicator.
absl::StatusOr<Tensor> RedistributeLocal(const Tensor& local, const Spec& from, const Spec& to);

}  // namespace dtensor

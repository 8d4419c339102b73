// A mesh as the default of what makes things distributed, and what DistributeTensor does besides
// (dtensor/distribute.h).
#pragma once

#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/distribute.h"

namespace dtensor {

// While it is open, functions of this rank that are given no mesh use this one: DistributeTensor,
// DistributeModule and ParallelizeModule without one. Scopes nest.
//   Source: torch.distributed.DeviceMesh as a context manager
class MeshScope {
 public:
  // Errors: throws InvalidArgument for a null mesh.
  explicit MeshScope(DeviceMesh mesh);
  ~MeshScope();
  MeshScope(const MeshScope&) = delete;

 private:
  DeviceMesh outer_;
};
// The mesh of the innermost scope; null outside of all.
DeviceMesh CurrentMesh();
// The same for `function`. Errors: FailedPrecondition in its name if none is open.
absl::StatusOr<DeviceMesh> OpenMesh(absl::string_view function);

// Replicated.
inline DTensor DistributeTensor(const DTensor& full, const DeviceMesh& mesh) {
  return DistributeTensor(full, mesh, Placements(mesh.defined() ? mesh.ndim() : 0));
}
// On the current mesh; replicated, or as given. Errors: FailedPrecondition if no scope is open.
DTensor DistributeTensor(const DTensor& full);
DTensor DistributeTensor(const DTensor& full, PlacementSpan placements);
// The values of a tensor on Self of the rank with index `src_data_rank` of the mesh (row-major);
// the others give its shape and dtype. Where that rank's leaf needs grad, so does the new leaf, on
// all ranks of the mesh. src_data_rank < 0: every rank has the same values; recorded by autograd,
// whatever the tensor's history.
//   Comm:   a flag of every rank, one broadcast.
//   Errors: FailedPrecondition, on all ranks of the mesh, where one's tensor has a history.
//   Source: torch.distributed.tensor.distribute_tensor
DTensor DistributeTensor(const DTensor& full, const DeviceMesh& mesh, PlacementSpan placements,
                         int64_t src_data_rank);

}  // namespace dtensor

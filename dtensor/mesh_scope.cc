#include "dtensor/mesh_scope.h"

#include "absl/strings/str_cat.h"
#include "dtensor/errors.h"
#include "dtensor/impl.h"

namespace dtensor {
namespace {

struct OpenMeshes {  // of a rank
  DeviceMesh innermost;
};
OpenMeshes& Meshes() { return RankContext::Current().Slot<OpenMeshes>(); }

DeviceMesh OpenMeshOrThrow() { return ValueOrThrow(OpenMesh("distribute_tensor")); }

}  // namespace

MeshScope::MeshScope(DeviceMesh mesh) : outer_(Meshes().innermost) {
  if (!mesh.defined()) {
    Throw(InFunction("mesh_scope", absl::InvalidArgumentError("the mesh is null")));
  }
  Meshes().innermost = std::move(mesh);
}
MeshScope::~MeshScope() { Meshes().innermost = std::move(outer_); }

DeviceMesh CurrentMesh() { return Meshes().innermost; }

absl::StatusOr<DeviceMesh> OpenMesh(absl::string_view function) {
  if (DeviceMesh mesh = CurrentMesh(); mesh.defined()) return mesh;
  return InFunction(function, absl::FailedPreconditionError(
                                  "no mesh is given and no MeshScope is open; give one"));
}

DTensor DistributeTensor(const DTensor& full) { return DistributeTensor(full, OpenMeshOrThrow()); }

DTensor DistributeTensor(const DTensor& full, PlacementSpan placements) {
  return DistributeTensor(full, OpenMeshOrThrow(), placements);
}

DTensor DistributeTensor(const DTensor& full, const DeviceMesh& mesh, PlacementSpan placements,
                         int64_t src_data_rank) {
  if (src_data_rank < 0) return DistributeTensor(full, mesh, placements);
  const DTensor& here = internal::Here(full, "distribute_tensor");
  absl::Status status;
  if (!here.mesh().is_self()) {
    status = absl::InvalidArgumentError(absl::StrCat(
        "values of one rank are taken of a tensor on Self, got ", here.spec().ToString()));
  } else if (!here.is_leaf()) {
    status = absl::FailedPreconditionError(
        "values of one rank have no history on the others; give Detach() of the tensor");
  }
  if (!status.ok()) Throw(InFunction("distribute_tensor", status));
  DTensor t = DistributeTensor(here.local(), mesh, placements, src_data_rank);
  if (here.requires_grad()) t.RequiresGrad();
  return t;
}

}  // namespace dtensor

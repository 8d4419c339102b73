#include "dtensor/mesh_scope.h"

#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/errors.h"
#include "dtensor/impl.h"

namespace dtensor {
namespace {

struct OpenMeshes {  // of a rank
  DeviceMesh innermost;
};
OpenMeshes& Meshes() { return RankContext::Current().Slot<OpenMeshes>(); }

// What keeps this rank's tensor from giving, or being given, values.
absl::Status CheckSource(const DTensor& here) {
  if (!here.mesh().is_self()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "values of one rank are taken of a tensor on Self, got ", here.spec().ToString()));
  }
  if (here.is_leaf()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "values of one rank have no history on the others; give Detach() of the tensor");
}

// Whether the source's tensor takes a gradient. Every rank's tensor may be another: what is wrong
// with one of them is thrown on all, so that nobody waits for a broadcast.
bool AgreeOnSource(const DTensor& here, const DeviceMesh& mesh, int64_t source) {
  RankContext& context = RankContext::Current();
  const absl::Status mine = CheckSource(here);
  const bool alone = !mesh.defined() || mesh.is_self() || !mesh.Contains(context.rank()) ||
                     mesh.device() == DeviceType::kMeta || context.rehearses();
  if (alone || source >= mesh.size()) {  // the latter is refused by who distributes
    if (!mine.ok()) Throw(InFunction("distribute_tensor", mine));
    return here.requires_grad();
  }
  std::vector<int> dims(mesh.ndim());
  std::iota(dims.begin(), dims.end(), 0);
  const std::string text = mine.ok() ? (here.requires_grad() ? "g" : "-") : mine.ToString();
  const absl::StatusOr<std::vector<std::string>> all =
      context.Exchange(mesh, dims, "distribute_tensor", text);
  if (!all.ok()) Throw(TellPeers(mesh, InFunction("distribute_tensor", all.status())));
  if (!mine.ok()) Throw(InFunction("distribute_tensor", mine));
  for (size_t r = 0; r < all->size(); ++r) {
    if ((*all)[r].size() == 1) continue;
    Throw(InFunction("distribute_tensor", absl::FailedPreconditionError(absl::StrCat(
                                              "on rank ", mesh.Ranks()[r], ": ", (*all)[r]))));
  }
  return (*all)[source] == "g";
}

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
  const bool takes_gradient = AgreeOnSource(here, mesh, src_data_rank);
  DTensor t = DistributeTensor(here.local(), mesh, placements, src_data_rank);
  if (takes_gradient) t.RequiresGrad();
  return t;
}

}  // namespace dtensor

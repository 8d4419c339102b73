// DeviceMesh: an n-dimensional arrangement of ranks with named dims.
//
// Immutable cheap handle; knows no "own rank" and needs no O(world) memory unless built from an
// explicit rank list. Safe to share between ranks (threads).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "dtensor/tensor/kernel.h"
#include "dtensor/tensor/shape.h"

namespace dtensor {

class DeviceMesh {
 public:
  DeviceMesh() = default;  // null

  // Ranks 0 .. product(shape)-1 row-major. `names` empty or one per dim. Without a device: the
  // rank's.
  //   Errors: InvalidArgument for a size < 1, an overflow, a repeated or empty name, or a number of
  //   names other than the number of dims; CheckDevice's for a device that is not there.
  static absl::StatusOr<DeviceMesh> Create(IntSpan shape, std::vector<std::string> names = {},
                                           std::optional<DeviceType> device = {});
  // Explicit ranks, row-major. Errors: as Create; also duplicate or negative ranks (named), or a
  // number of ranks other than product(shape).
  static absl::StatusOr<DeviceMesh> FromRanks(IntSpan shape, std::vector<int64_t> ranks,
                                              std::vector<std::string> names = {},
                                              std::optional<DeviceType> device = {});
  // "dp=2,tp=2". Errors: InvalidArgument showing the form.
  static absl::StatusOr<DeviceMesh> Parse(absl::string_view text,
                                          std::optional<DeviceType> device = {});
  // The 0-dimensional mesh of one rank: where "local" tensors live. Equal on every rank. One per
  // device; without one the rank's (RankDevices::type).
  static const DeviceMesh& Self();
  static const DeviceMesh& Self(DeviceType device);
  // Throwing form of Create for programs.
  DeviceMesh(std::initializer_list<int64_t> shape, std::vector<std::string> names = {});

  bool defined() const { return rep_ != nullptr; }
  int ndim() const;
  int64_t size() const;  // number of ranks
  int64_t size(int mesh_dim) const;
  IntSpan shape() const;
  absl::Span<const std::string> names() const;  // "" where unnamed
  DeviceType device() const;
  bool is_self() const { return ndim() == 0; }

  // Errors: NotFound naming the dims there are.
  absl::StatusOr<int> DimIndex(absl::string_view name) const;
  // Rank at a coordinate (one index per mesh dim).
  int64_t RankAt(IntSpan coordinate) const;
  // False if `rank` is not in the mesh. The Self mesh contains every rank (coordinate empty).
  bool Coordinate(int64_t rank, Dims* coordinate) const;
  bool Contains(int64_t rank) const;
  // All ranks in row-major order: O(size).
  std::vector<int64_t> Ranks() const;
  // Whether both have the same ranks, in whatever order. O(dims) without a rank list.
  bool SameRanks(const DeviceMesh& other) const;
  // Largest rank of the mesh: what a world must have at least.
  int64_t MaxRank() const;
  int64_t MinRank() const;

  // The sub-mesh over the named dims, in the order given, that contains `rank`.
  //   Errors: NotFound for an unknown name, InvalidArgument for a repeated one or a rank outside.
  absl::StatusOr<DeviceMesh> SubMesh(absl::Span<const std::string> names, int64_t rank) const;
  absl::StatusOr<DeviceMesh> SubMeshByDims(absl::Span<const int> dims, int64_t rank) const;
  // All parallel copies of that sub-mesh.
  absl::StatusOr<std::vector<DeviceMesh>> AllSubMeshes(absl::Span<const std::string> names) const;
  // SubMesh for the calling rank (RankContext::Current()). Throws Error.
  DeviceMesh operator[](absl::string_view name) const;
  DeviceMesh operator[](std::initializer_list<absl::string_view> names) const;
  // One dim of all ranks, row-major.
  DeviceMesh Flatten(std::string name) const;
  // Same ranks, another shape. Errors: InvalidArgument if the products differ.
  absl::StatusOr<DeviceMesh> Reshape(IntSpan shape, std::vector<std::string> names = {}) const;

  uint64_t hash() const;         // structural, the same on every rank
  std::string ToString() const;  // "dp=2 tp=4", "2x4" where unnamed, "self"
  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b);

 private:
  struct Rep;
  explicit DeviceMesh(std::shared_ptr<const Rep> rep) : rep_(std::move(rep)) {}
  // Canonical handle: names checked, ranks that form a strided layout stored as one.
  static DeviceMesh Make(std::shared_ptr<Rep> rep);
  std::shared_ptr<const Rep> rep_;
};

}  // namespace dtensor

// What a redistribution costs, added up mesh dim by mesh dim: moves that begin alike, of which a
// search prices many, share the sum (strategy_cost.h). Which collectives a move is made of is what
// move_plan.h says, read off the placements instead of off every rank's boxes.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "dtensor/mesh/cost.h"
#include "dtensor/mesh/mesh.h"
#include "dtensor/mesh/placement.h"
#include "dtensor/redistribute.h"

namespace dtensor::internal {

// The groups of a mesh's ranks along some of its dims (a bit each), by a cost model.
class MeshGroups {
 public:
  MeshGroups(const DeviceMesh& mesh, const CostModel& cost) : mesh_(mesh), cost_(cost) {}
  const DeviceMesh& mesh() const { return mesh_; }
  double CollectiveUs(CollectiveKind kind, uint64_t dims, double bytes);

 private:
  struct Group {
    int64_t ranks;
    bool spans_nodes;
  };
  Group Measured(uint64_t dims);
  bool SpansNodes(uint64_t dims) const;

  const DeviceMesh& mesh_;
  const CostModel& cost_;
  std::optional<bool> mesh_spans_nodes_;
  absl::flat_hash_map<uint64_t, Group> groups_;
};

// Per element, over all ranks of the mesh dims that take part: terms - 1 messages to reduce it, one
// for every rank that wants it, less one if a rank that wants it has it (move_plan.h).
class MovePricing {
 public:
  // Mesh dim m, of n ranks: the next one.
  void Add(int m, int64_t n, const Placement& from, const Placement& to);
  // Of a tensor of this size in bytes.
  MoveCost Of(double bytes, MeshGroups* groups) const;
  // Bytes that the move costs at least, whatever becomes of the mesh dims that follow: `cut` ranks
  // of those that are cut or may be, and `pending` ranks of those that are pending and may be cut.
  // A rank's part is smallest where all are cut, but to reduce pays only where what is gained in
  // moving is more.
  double LeastBytes(double bytes, double cut, double pending) const {
    const double moved = wanting_ - held_;
    if (moved <= 1) pending = 1;
    return bytes * (terms_ * pending - 1 + moved) / (ranks_ * cut * pending);
  }

 private:
  // The ranks of a mesh dim must talk, or, of a replica that is cut, would in a group with others.
  void Group(uint64_t dim, const Placement& from, bool cut, bool cuts);

  double ranks_ = 1, terms_ = 1, wanting_ = 1, held_ = 1;
  uint64_t changed_ = 0;                 // tensor dims
  uint64_t dims_ = 0, reduce_dims_ = 0;  // mesh dims
  bool any_changed_ = false, gathers_ = true, terms_meet_readers_ = true;
};

}  // namespace dtensor::internal

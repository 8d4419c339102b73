// What a redistribution costs, added up mesh dim by mesh dim: moves that begin alike, of which a
// search prices many, share the sum (strategy_cost.h). Which collectives a move is made of is what
// move_plan.h says, read off the placements instead of off every rank's boxes.
#pragma once

#include <array>
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
    int64_t ranks = 0;  // 0: not measured yet
    bool spans_nodes = false;
  };
  static constexpr uint64_t kFew = 8;  // of three mesh dims at most
  Group Measured(uint64_t dims);
  bool SpansNodes(uint64_t dims) const;

  const DeviceMesh& mesh_;
  const CostModel& cost_;
  std::optional<bool> mesh_spans_nodes_;
  std::array<Group, kFew> few_;
  absl::flat_hash_map<uint64_t, Group> others_;
};

// What a move does on one mesh dim, read off the placements once: searches add it to many moves.
class MoveStep {
 public:
  // Mesh dim m, of n ranks. `same`: the placements are; else only what they cut is looked at.
  MoveStep(int m, int64_t n, const Placement& from, const Placement& to, bool same);

 private:
  friend class MovePricing;
  // By how much the ranks of this dim multiply those that take part, the terms of a sum and who
  // wants an element; `recut`: n if a cut may become another one.
  double ranks_ = 1, terms_ = 1, wanting_ = 1, recut_ = 1;
  // Tensor dims, and one bit that stands for any: those whose cut changes here, and those that
  // earlier mesh dims may not have cut otherwise if a cut is to find what it was.
  uint64_t changes_ = 0, rests_on_ = 0;
  uint64_t dim_ = 0, reduce_dim_ = 0;  // the mesh dim, where its ranks must talk
  bool same_ = true, flat_ = false, gathers_ = true, terms_meet_readers_ = true;
};

// Per element, over all ranks of the mesh dims that take part: terms - 1 messages to reduce it, one
// for every rank that wants it, less one if a rank that wants it has it (move_plan.h).
class MovePricing {
 public:
  // The step of the next mesh dim.
  void Add(const MoveStep& step) {
    ranks_ *= step.ranks_;
    terms_ *= step.terms_;
    wanting_ *= step.wanting_;
    if (IsLeft(step)) {
      if (step.flat_) {
        flat_recut_ *= step.recut_;
        flat_dims_ |= step.dim_;
      }
      return;
    }
    held_ /= step.recut_;
    changed_ |= step.changes_;
    if (step.dim_ == 0) return;
    dims_ |= step.dim_;
    reduce_dims_ |= step.reduce_dim_;
    gathers_ &= step.gathers_;
    terms_meet_readers_ &= step.terms_meet_readers_;
  }
  // Of a tensor of this size in bytes.
  MoveCost Of(double bytes, MeshGroups* groups) const;
  // Bytes that the move costs at least with one more step, whatever becomes of the mesh dims that
  // follow: `cut` ranks of those that are cut or may be, and `pending` ranks of those that are
  // pending and may be cut. A rank's part is smallest where all are cut, but to reduce pays only
  // where what is gained in moving is more.
  double LeastBytes(const MoveStep& step, double bytes, double cut, double pending) const {
    const double held = IsLeft(step) ? held_ : held_ / step.recut_;
    const double moved = wanting_ * step.wanting_ - held;
    if (moved <= 1) pending = 1;
    return bytes * (terms_ * step.terms_ * pending - 1 + moved) /
           (ranks_ * step.ranks_ * cut * pending);
  }

 private:
  // Nothing moves on the mesh dim of the step.
  bool IsLeft(const MoveStep& step) const { return step.same_ && (changed_ & step.rests_on_) == 0; }

  double ranks_ = 1, terms_ = 1, wanting_ = 1, held_ = 1;
  uint64_t changed_ = 0;                 // tensor dims, and whether any
  uint64_t dims_ = 0, reduce_dims_ = 0;  // mesh dims
  // Of flat pieces that were left alone so far: they are cut from what all others leave, so that a
  // later mesh dim cuts them anew where it changes.
  double flat_recut_ = 1;
  uint64_t flat_dims_ = 0;
  bool gathers_ = true, terms_meet_readers_ = true;
};

}  // namespace dtensor::internal

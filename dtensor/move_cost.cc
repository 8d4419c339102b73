// PriceMove: bytes and time of a redistribution in closed form. Which collectives it is made of is
// what move_plan.h says, read off the placements instead of off every rank's boxes.
#include <algorithm>

#include "absl/container/inlined_vector.h"
#include "dtensor/move_plan.h"
#include "dtensor/redistribute.h"

namespace dtensor {
namespace {

using PlacementView = absl::Span<const Placement>;

// Per element, over all ranks of the mesh dims that take part: terms - 1 messages to reduce it, one
// for every rank that wants it, less one if a rank that wants it has it (move_plan.h).
class Pricing {
 public:
  Pricing(const DeviceMesh& mesh, int ndim, PlacementView from, PlacementView to)
      : mesh_(mesh), from_(from), to_(to), changed_(ndim, false) {
    for (int m = 0; m < mesh.ndim(); ++m) Add(m);
  }

  // For a tensor of this size in bytes.
  MoveCost Of(double bytes, const CostModel& cost) const {
    const double reduced = bytes * (terms_ - 1) / ranks_;
    const double moved = bytes * (wanting_ - held_) / ranks_;
    MoveCost price = {reduced + moved, 0};
    if (reduce_dims_.empty()) {
      if (moved > 0) price.us = Us(gathers_ ? Kind::kAllGather : Kind::kExchange, moved, cost);
    } else if (terms_meet_readers_) {
      price.us = Us(Kind::kAllReduce, reduce_dims_, reduced + moved, cost);
    } else {
      price.us = Us(Kind::kReduceScatter, reduce_dims_, reduced, cost);
      if (moved > 0) price.us += Us(Kind::kExchange, moved, cost);
    }
    return price;
  }

 private:
  using Kind = CollectiveKind;
  using MeshDims = absl::InlinedVector<int, 4>;

  void Add(int m) {
    const Placement &a = from_[m], &b = to_[m];
    const auto n = static_cast<double>(mesh_.size(m));
    const bool same = a == b, cut = a.cuts(), cuts = b.cuts();
    if (!cut && !cuts && (same || !a.is_partial())) return;  // left alone
    // A cut finds what it was only if it is the same and no earlier cut of its dim has changed.
    const bool disturbed = cut && (a.is_flat() ? any_changed_ : changed_[a.dim()]);
    ranks_ *= n;
    if (a.is_partial()) terms_ *= n;
    if (!cuts) wanting_ *= n;
    if (cut && cuts && (!same || disturbed)) held_ /= n;
    if (n > 1 && (!same || disturbed)) Group(m, a, cut, cuts);
    if (same) return;
    any_changed_ = true;
    for (const Placement* p : {&a, &b}) {
      if (p->cuts_dim()) changed_[p->dim()] = true;
      if (p->is_flat()) std::fill(changed_.begin(), changed_.end(), true);
    }
  }

  // The ranks of mesh dim m must talk, or, of a replica that is cut, would in a group with others.
  void Group(int m, const Placement& from, bool cut, bool cuts) {
    dims_.push_back(m);
    if (from.is_partial()) {
      reduce_dims_.push_back(m);
      terms_meet_readers_ &= !cuts;
    } else {
      terms_meet_readers_ &= !cut;
    }
    gathers_ &= cut && !cuts;
  }

  double Us(Kind kind, double bytes, const CostModel& cost) const {
    return Us(kind, dims_, bytes, cost);
  }
  double Us(Kind kind, const MeshDims& dims, double bytes, const CostModel& cost) const {
    int64_t n = 1;
    for (int m : dims) n *= mesh_.size(m);
    return cost.CollectiveUs(kind, bytes, n, SpansNodes(dims, cost));
  }
  // Of the group that the mesh's first rank is in. Its outermost ranks tell where it lies.
  bool SpansNodes(const MeshDims& dims, const CostModel& cost) const {
    absl::InlinedVector<int64_t, 16> corners;
    for (uint64_t set = 0; set < (uint64_t{1} << dims.size()); ++set) {
      Dims at(mesh_.ndim(), 0);
      for (size_t k = 0; k < dims.size(); ++k) {
        if ((set >> k) & 1) at[dims[k]] = mesh_.size(dims[k]) - 1;
      }
      corners.push_back(mesh_.RankAt(at));
    }
    return cost.SpansNodes(corners);
  }

  const DeviceMesh& mesh_;
  const PlacementView from_, to_;
  absl::InlinedVector<bool, 8> changed_;  // by tensor dim
  bool any_changed_ = false;
  double ranks_ = 1, terms_ = 1, wanting_ = 1, held_ = 1;
  MeshDims dims_, reduce_dims_;
  bool gathers_ = true, terms_meet_readers_ = true;
};

}  // namespace

MoveCost PriceMove(const DeviceMesh& mesh, IntSpan shape, DType dtype, PlacementView from,
                   PlacementView to, const CostModel& cost) {
  if (from == to) return {};
  auto bytes = static_cast<double>(SizeOf(dtype));
  for (int64_t s : shape) bytes *= static_cast<double>(s);
  return Pricing(mesh, static_cast<int>(shape.size()), from, to).Of(bytes, cost);
}

double RedistributeCost(const DeviceMesh& mesh, IntSpan shape, DType dtype, PlacementView from,
                        PlacementView to) {
  return PriceMove(mesh, shape, dtype, from, to, CostModel()).bytes;
}

}  // namespace dtensor

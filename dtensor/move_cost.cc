#include "dtensor/move_cost.h"

#include "absl/container/inlined_vector.h"

namespace dtensor {
namespace internal {

double MeshGroups::CollectiveUs(CollectiveKind kind, uint64_t dims, double bytes) {
  Group& group = dims < kFew ? few_[dims] : others_[dims];
  if (group.ranks == 0) group = Measured(dims);
  return cost_.CollectiveUs(kind, bytes, group.ranks, group.spans_nodes);
}

MeshGroups::Group MeshGroups::Measured(uint64_t dims) {
  int64_t ranks = 1;
  for (int m = 0; m < mesh_.ndim(); ++m) {
    if ((dims >> m) & 1) ranks *= mesh_.size(m);
  }
  if (!mesh_spans_nodes_) mesh_spans_nodes_ = cost_.SpansNodes({mesh_.MinRank(), mesh_.MaxRank()});
  return {ranks, *mesh_spans_nodes_ && SpansNodes(dims)};
}

// Of the group that the mesh's first rank is in. Its outermost ranks tell where it lies.
bool MeshGroups::SpansNodes(uint64_t dims) const {
  absl::InlinedVector<int64_t, 16> corners;
  Dims at(mesh_.ndim(), 0);
  for (uint64_t set = dims;; set = (set - 1) & dims) {
    for (int m = 0; m < mesh_.ndim(); ++m) at[m] = (set >> m) & 1 ? mesh_.size(m) - 1 : 0;
    corners.push_back(mesh_.RankAt(at));
    if (set == 0) break;
  }
  return cost_.SpansNodes(corners);
}

MoveStep::MoveStep(int m, int64_t n, const Placement& from, const Placement& to, bool same)
    : same_(same) {
  constexpr uint64_t kAny = uint64_t{1} << 63;
  if (n == 1) {  // of one rank nothing becomes another part
    same_ = true;
    return;
  }
  const bool cut = from.cuts(), cuts = to.cuts();
  if (!cut && !cuts && (same_ || !from.is_partial())) {  // left alone
    same_ = true;
    return;
  }
  const auto ranks = static_cast<double>(n);
  ranks_ = ranks;
  if (from.is_partial()) terms_ = ranks;
  if (!cuts) wanting_ = ranks;
  if (cut && cuts) recut_ = ranks;
  if (cut) rests_on_ = from.is_flat() ? kAny : uint64_t{1} << from.dim();
  dim_ = uint64_t{1} << m;  // its ranks talk, or, of a replica that is cut, in a group with others
  if (from.is_partial()) reduce_dim_ = dim_;
  terms_meet_readers_ = from.is_partial() ? !cuts : !cut;
  gathers_ = cut && !cuts;
  flat_ = same_ && from.is_flat();
  if (same_) return;
  for (const Placement* p : {&from, &to}) {
    if (p->cuts_dim()) changes_ |= kAny | uint64_t{1} << p->dim();
    if (p->is_flat()) changes_ = ~uint64_t{0};
  }
}

MoveCost MovePricing::Of(double bytes, MeshGroups* groups) const {
  using Kind = CollectiveKind;
  if (changed_ != 0 && flat_dims_ != 0) {
    MovePricing cut_anew = *this;
    cut_anew.held_ /= flat_recut_;
    cut_anew.dims_ |= flat_dims_;
    cut_anew.gathers_ = cut_anew.terms_meet_readers_ = false;
    cut_anew.flat_dims_ = 0;
    return cut_anew.Of(bytes, groups);
  }
  const double reduced = bytes * (terms_ - 1) / ranks_;
  const double moved = bytes * (wanting_ - held_) / ranks_;
  MoveCost price = {reduced + moved, 0};
  if (reduce_dims_ == 0) {
    if (moved > 0) {
      price.us = groups->CollectiveUs(gathers_ ? Kind::kAllGather : Kind::kExchange, dims_, moved);
    }
  } else if (terms_meet_readers_) {
    price.us = groups->CollectiveUs(Kind::kAllReduce, reduce_dims_, reduced + moved);
  } else {
    price.us = groups->CollectiveUs(Kind::kReduceScatter, reduce_dims_, reduced);
    if (moved > 0) price.us += groups->CollectiveUs(Kind::kExchange, dims_, moved);
  }
  return price;
}

}  // namespace internal

MoveCost PriceMove(const DeviceMesh& mesh, IntSpan shape, DType dtype,
                   absl::Span<const Placement> from, absl::Span<const Placement> to,
                   const CostModel& cost) {
  if (from == to) return {};
  auto bytes = static_cast<double>(SizeOf(dtype));
  for (int64_t s : shape) bytes *= static_cast<double>(s);
  internal::MovePricing pricing;
  for (int m = 0; m < mesh.ndim(); ++m) {
    pricing.Add(internal::MoveStep(m, mesh.size(m), from[m], to[m], from[m] == to[m]));
  }
  internal::MeshGroups groups(mesh, cost);
  return pricing.Of(bytes, &groups);
}

double RedistributeCost(const DeviceMesh& mesh, IntSpan shape, DType dtype,
                        absl::Span<const Placement> from, absl::Span<const Placement> to) {
  return PriceMove(mesh, shape, dtype, from, to, CostModel()).bytes;
}

}  // namespace dtensor

#include "dtensor/move_plan.h"

#include <algorithm>
#include <map>
#include <utility>

#include "tensor/status.h"

namespace dtensor::internal {
namespace {

using PlacementView = absl::Span<const Placement>;
using MeshDims = absl::InlinedVector<int, 4>;

// The cuts of one tensor dim, outermost first, with the mesh dims that make them; dim -1: the flat
// ones. A mesh dim of one rank cuts nothing.
using Cut = std::pair<int, const Placement*>;
absl::InlinedVector<Cut, 4> CutsOf(const DeviceMesh& mesh, PlacementView placements, int dim) {
  absl::InlinedVector<Cut, 4> cuts;
  for (int m = 0; m < mesh.ndim(); ++m) {
    const Placement& p = placements[m];
    if (CutsTensor(p) && (p.is_flat() ? -1 : p.dim()) == dim && mesh.size(m) > 1) {
      cuts.push_back({m, &p});
    }
  }
  return cuts;
}

bool SameCut(const Cut& a, const Cut& b) { return a.first == b.first && *a.second == *b.second; }

bool IsPrefix(absl::Span<const Cut> a, absl::Span<const Cut> b) {
  return a.size() <= b.size() && std::equal(a.begin(), a.end(), b.begin(), SameCut);
}

int MaxCutDim(PlacementView from, PlacementView to) {
  int most = -1;
  for (const Placement& p : from) most = std::max(most, p.dim());
  for (const Placement& p : to) most = std::max(most, p.dim());
  return most;
}

// One of the two sides: the ranks' coordinates reduced to what decides their part, numbered.
class Side {
 public:
  Side(const Spec& spec, absl::Span<const int64_t> ranks) {
    std::map<Dims, int> ids;
    for (const int64_t rank : ranks) {
      Dims coordinate, key;
      DT_CHECK(spec.mesh().Coordinate(rank, &coordinate));
      for (int m = 0; m < spec.mesh().ndim(); ++m) {
        if (CutsTensor(spec.placement(m))) key.push_back(coordinate[m]);
      }
      const auto [it, fresh] = ids.try_emplace(key, static_cast<int>(regions_.size()));
      if (fresh) {
        regions_.push_back(RegionOf(spec, coordinate));
        members_.emplace_back();
      }
      members_[it->second].push_back(static_cast<int>(ids_.size()));
      ids_.push_back(it->second);
    }
  }
  // One part per rank.
  explicit Side(std::vector<Region> regions) : regions_(std::move(regions)) {
    for (int r = 0; r < static_cast<int>(regions_.size()); ++r) {
      ids_.push_back(r);
      members_.push_back({r});
    }
  }
  int parts() const { return static_cast<int>(regions_.size()); }
  int id(int rank) const { return ids_[rank]; }
  int ranks() const { return static_cast<int>(ids_.size()); }
  const Region& part(int id) const { return regions_[id]; }
  const Region& of(int rank) const { return regions_[ids_[rank]]; }
  const std::vector<int>& members(int id) const { return members_[id]; }

 private:
  std::vector<int> ids_;  // by group index
  std::vector<Region> regions_;
  std::vector<std::vector<int>> members_;  // group indices, ascending
};

// If the boxes (null: empty) lie one after the other along one dim of one box: that dim and box.
Rows FindRows(absl::Span<const Box* const> boxes) {
  Rows rows;
  const Box* first = nullptr;
  for (const Box* box : boxes) {
    if (first == nullptr) first = box;
  }
  if (first == nullptr || first->shape.empty()) return rows;
  for (int d = 0; d < static_cast<int>(first->shape.size()); ++d) {
    rows.counts.clear();
    rows.whole = *first;
    rows.whole.shape[d] = 0;
    bool fits = true;
    for (const Box* box : boxes) {
      rows.counts.push_back(box == nullptr ? 0 : box->shape[d]);
      if (box == nullptr) continue;
      Shape expected = rows.whole.shape;
      expected[d] = box->shape[d];
      fits &= box->shape == expected && box->strides == rows.whole.strides &&
              box->offset == first->offset + rows.whole.shape[d] * box->strides[d];
      rows.whole.shape[d] += box->shape[d];
      if (!fits) break;
    }
    if (!fits) continue;
    rows.dim = d;
    return rows;
  }
  return rows;
}

// Whether the rows are so many in a plain tensor of this shape, and not only in its memory, where
// the end of one row is the start of the next.
bool InsideOf(const Shape& shape, const Rows& rows) {
  if (rows.dim < 0 || rows.whole.shape.size() != shape.size()) return true;
  const int64_t size = shape[rows.dim], first = rows.whole.offset / rows.whole.strides[rows.dim];
  return first % size + rows.whole.shape[rows.dim] <= size;
}

class Planner {
 public:
  Planner(const Spec& from, const Spec& to, int64_t rank)
      : from_(from), to_(to), rank_(rank), same_mesh_(from.mesh() == to.mesh()) {}

  MovePlan Run() {
    FindPending();
    if (plan_.reduce_dims.empty() && JustCuts()) {
      ranks_ = {rank_};
      plan_.own = Overlap(Side(from_, ranks_).of(0), Side(to_, ranks_).of(0));
      return std::move(plan_);
    }
    plan_.move_dims = GroupDims();
    ranks_ = GroupRanks(plan_.move_dims);
    me_ = IndexOf(rank_);
    const Side source(from_, ranks_), target(to_, ranks_);
    const bool nobody_lacks = NobodyLacks(source, target);
    if (plan_.reduce_dims.empty()) {
      plan_.own = Overlap(source.of(me_), target.of(me_));
      if (!nobody_lacks) Move(source, target);
    } else if (nobody_lacks && TermsMeetTheirReaders(target)) {
      plan_.reduce = MovePlan::Reduce::kAllReduce;
      plan_.own = Overlap(source.of(me_), target.of(me_));
      const auto n = static_cast<int64_t>(GroupRanks(plan_.reduce_dims).size());
      plan_.received_numel = 2 * RegionNumel(target.of(me_)) * (n - 1) / n;
    } else {
      ReduceScatter(source, target, nobody_lacks);
    }
    return std::move(plan_);
  }

 private:
  bool JustCuts() const {
    return same_mesh_ && OnlyCuts(from_.mesh(), from_.placements(), to_.placements());
  }

  void FindPending() {
    for (int m = 0; m < from_.mesh().ndim(); ++m) {
      const Placement& p = from_.placement(m);
      if (!p.is_partial()) continue;
      plan_.op = p.reduce_op();
      if (from_.mesh().size(m) > 1 && !(same_mesh_ && p == to_.placement(m))) {
        plan_.reduce_dims.push_back(m);
      }
    }
  }

  // Mesh dims whose ranks must talk: those that change, and cuts inside of a cut that changes. Dims
  // that are replicated (or stay pending) on both sides are left alone, and so are unchanged cuts
  // that hold all others: each of their coordinates does the same by itself.
  MeshDims GroupDims() const {
    const DeviceMesh& mesh = from_.mesh();
    MeshDims dims;
    if (!same_mesh_) {
      for (int m = 0; m < mesh.ndim(); ++m) dims.push_back(m);
      return dims;
    }
    bool changes = false;  // any cut
    for (int m = 0; m < mesh.ndim(); ++m) {
      const Placement &a = from_.placement(m), &b = to_.placement(m);
      changes |= !(a == b) && (CutsTensor(a) || CutsTensor(b));
    }
    std::vector<bool> disturbed(from_.ndim(), false);  // by mesh dims before this one
    for (int m = 0; m < mesh.ndim(); ++m) {
      const Placement &a = from_.placement(m), &b = to_.placement(m);
      if (mesh.size(m) == 1) continue;
      if (a == b) {
        if (CutsTensor(a) && (a.is_flat() ? changes : disturbed[a.dim()])) dims.push_back(m);
        continue;
      }
      if (CutsTensor(a) || CutsTensor(b) || a.is_partial()) dims.push_back(m);
      for (const Placement* p : {&a, &b}) {
        if (CutsTensor(*p) && !p->is_flat()) disturbed[p->dim()] = true;
      }
    }
    return dims;
  }

  std::vector<int64_t> GroupRanks(const MeshDims& dims) const {
    return ValueOrThrow(from_.mesh().SubMeshByDims(dims, rank_)).Ranks();
  }
  int IndexOf(int64_t rank) const {
    return static_cast<int>(std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin());
  }

  static bool NobodyLacks(const Side& source, const Side& target) {
    for (int p = 0; p < source.ranks(); ++p) {
      const Region& want = target.of(p);
      if (RegionNumel(PackedOverlap(source.of(p), want)) != RegionNumel(want)) return false;
    }
    return true;
  }

  // Whether, everywhere, the ranks that hold the terms of some elements are those that want them.
  bool TermsMeetTheirReaders(const Side& target) const {
    std::map<Dims, int> parts;  // by the source's coordinate without the reduced dims
    for (int p = 0; p < target.ranks(); ++p) {
      Dims key;
      DT_CHECK(from_.mesh().Coordinate(ranks_[p], &key));
      for (const int m : plan_.reduce_dims) key[m] = 0;
      if (parts.try_emplace(key, target.id(p)).first->second != target.id(p)) return false;
    }
    return static_cast<int>(parts.size()) == target.parts();
  }

  void Move(const Side& source, const Side& target) {
    const bool all_want_all = target.parts() == 1 && source.parts() == source.ranks();
    if (all_want_all) return AllGather(source, target);
    Exchange(source, target);
  }

  void AllGather(const Side& source, const Side& target) {
    plan_.move = MovePlan::Move::kAllGather;
    int64_t before = 0;
    std::vector<BoxPair> firsts(source.ranks());
    std::vector<const Box*> boxes(source.ranks(), nullptr);
    bool single = true;
    for (int p = 0; p < source.ranks(); ++p) {
      std::vector<BoxPair> pairs = Overlap(source.of(p), target.of(me_));
      single &= pairs.size() <= 1;
      if (!pairs.empty()) {
        firsts[p] = pairs[0];
        boxes[p] = &firsts[p].b;
      }
      plan_.gather_counts.push_back(RegionNumel(source.of(p)));
      for (BoxPair& pair : pairs) {
        pair.a.offset += before;
        plan_.unpack.push_back(std::move(pair));
      }
      before += plan_.gather_counts.back();
    }
    if (single) plan_.gather_rows = FindRows(boxes);
    Exchange(source, target);  // for those who need no collective of one kind
    plan_.move = MovePlan::Move::kAllGather;
  }

  // Who has what I lack, and who takes what from me. Replicas take turns in serving.
  void Exchange(const Side& source, const Side& target) {
    plan_.move = MovePlan::Move::kExchange;
    plan_.own = Overlap(source.of(me_), target.of(me_));
    for (int part = 0; part < source.parts(); ++part) Serve(source, target, part);
  }

  void Serve(const Side& source, const Side& target, int part) {
    const std::vector<int>& owners = source.members(part);
    const bool mine = source.id(me_) == part;
    if (!mine && !Overlaps(source.part(part), target.of(me_))) return;
    if (!mine && owners.size() == 1) return Receive(source.part(part), target.of(me_), owners[0]);
    std::vector<int> wanted(target.parts(), -1);  // -1: not looked at yet
    size_t turn = 0;
    for (int p = 0; p < source.ranks(); ++p) {
      if (source.id(p) == part) continue;
      int& wants = wanted[target.id(p)];
      if (wants < 0) wants = Overlaps(source.part(part), target.of(p)) ? 1 : 0;
      if (wants == 0) continue;
      const int owner = owners[turn++ % owners.size()];
      if (p == me_) return Receive(source.part(part), target.of(me_), owner);
      if (owner != me_) continue;
      for (BoxPair& pair : Overlap(source.part(part), target.of(p))) {
        plan_.sends.push_back({p, std::move(pair.a)});
      }
    }
  }

  void Receive(const Region& part, const Region& want, int owner) {
    for (BoxPair& pair : Overlap(part, want)) {
      plan_.received_numel += pair.b.numel();
      plan_.recvs.push_back({owner, std::move(pair.b)});
    }
  }

  void ReduceScatter(const Side& source, const Side& target, bool nobody_lacks) {
    plan_.reduce = MovePlan::Reduce::kReduceScatter;
    const std::vector<Region> shares = Shares(source, target);
    int64_t before = 0;
    std::vector<BoxPair> firsts;
    bool single = true;
    const std::vector<int64_t> group = GroupRanks(plan_.reduce_dims);
    std::vector<bool> empty;
    for (const int64_t rank : group) {
      const Region& share = shares[IndexOf(rank)];
      std::vector<BoxPair> pairs = Overlap(source.of(me_), share);
      single &= pairs.size() <= 1;
      empty.push_back(pairs.empty());
      firsts.push_back(pairs.empty() ? BoxPair() : pairs[0]);
      for (BoxPair& pair : pairs) {
        pair.b.offset += before;
        plan_.pack.push_back(std::move(pair));
      }
      plan_.share_counts.push_back(RegionNumel(share));
      before += plan_.share_counts.back();
    }
    if (single) {
      std::vector<const Box*> boxes;
      for (size_t i = 0; i < firsts.size(); ++i) boxes.push_back(empty[i] ? nullptr : &firsts[i].a);
      plan_.share_rows = FindRows(boxes);
      if (!InsideOf(from_.local_shape(), plan_.share_rows)) plan_.share_rows.dim = -1;
    }
    plan_.received_numel = RegionNumel(shares[me_]) * (static_cast<int64_t>(group.size()) - 1);
    bool flat_source = false;
    for (const Placement& p : from_.placements()) flat_source |= p.is_flat();
    // Whether every share is what its rank wants; in the same order, but for flat sources that are
    // not just cut further.
    bool done = nobody_lacks && (!flat_source || JustCuts());
    for (int p = 0; p < target.ranks(); ++p) {
      done &= RegionNumel(shares[p]) == RegionNumel(target.of(p));
    }
    if (!done) Exchange(Side(shares), target);
  }

  // By group index, packed: what this rank reduces. All elements once.
  static std::vector<Region> Shares(const Side& source, const Side& target) {
    std::vector<Region> shares(source.ranks());
    std::vector<int64_t> sizes(source.ranks(), 0);
    for (int s = 0; s < source.parts(); ++s) {
      for (int t = 0; t < target.parts(); ++t) {
        const Region both = PackedOverlap(source.part(s), target.part(t));
        if (both.empty()) continue;
        std::vector<int> reducers;
        for (const int p : source.members(s)) {
          if (target.id(p) == t) reducers.push_back(p);
        }
        if (reducers.empty()) reducers = source.members(s);
        const int64_t numel = RegionNumel(both), n = static_cast<int64_t>(reducers.size());
        for (int64_t i = 0; i < n; ++i) {
          const int p = reducers[(i + t) % n];
          const int64_t start = numel * i / n, end = numel * (i + 1) / n;
          for (Block& block : PackedRange(both, start, end, sizes[p])) {
            shares[p].push_back(std::move(block));
          }
          sizes[p] += end - start;
        }
      }
    }
    return shares;
  }

  const Spec &from_, &to_;
  const int64_t rank_;
  const bool same_mesh_;
  MovePlan plan_;
  std::vector<int64_t> ranks_;  // of the group of move_dims
  int me_ = 0;
};

}  // namespace

bool OnlyCuts(const DeviceMesh& mesh, PlacementView from, PlacementView to) {
  const auto flats = CutsOf(mesh, from, -1);
  if (!IsPrefix(flats, CutsOf(mesh, to, -1))) return false;
  for (int d = 0; d <= MaxCutDim(from, to); ++d) {
    const auto a = CutsOf(mesh, from, d), b = CutsOf(mesh, to, d);
    if (!IsPrefix(a, b) || (!flats.empty() && a.size() != b.size())) return false;
  }
  return true;
}

MovePlan PlanMove(const Spec& from, const Spec& to, int64_t rank) {
  return Planner(from, to, rank).Run();
}

}  // namespace dtensor::internal

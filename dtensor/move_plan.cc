#include "dtensor/move_plan.h"

#include <algorithm>
#include <utility>

#include "dtensor/shares.h"
#include "dtensor/tensor/status.h"

namespace dtensor::internal {
namespace {

using PlacementView = absl::Span<const Placement>;
using MeshDims = absl::InlinedVector<int, 4>;

// Groups up to this size ask every rank whether it lacks anything; larger ones go by the rule of
// cuts, and may meet for an exchange in which nobody does.
constexpr int64_t kAskEveryRank = 1024;

// The cuts of one tensor dim, outermost first, with the mesh dims that make them; dim -1: the flat
// ones. A mesh dim of one rank cuts nothing.
using Cut = std::pair<int, const Placement*>;
absl::InlinedVector<Cut, 4> CutsOf(const DeviceMesh& mesh, PlacementView placements, int dim) {
  absl::InlinedVector<Cut, 4> cuts;
  for (int m = 0; m < mesh.ndim(); ++m) {
    const Placement& p = placements[m];
    if (p.cuts() && (p.is_flat() ? -1 : p.dim()) == dim && mesh.size(m) > 1) {
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

// If the boxes (null: empty) lie one after the other along one dim of one box: that dim and box.
RankRows FindRows(absl::Span<const Box* const> boxes) {
  RankRows rows;
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
bool InsideOf(const Shape& shape, const RankRows& rows) {
  if (rows.dim < 0 || rows.whole.shape.size() != shape.size()) return true;
  const int64_t size = shape[rows.dim], first = rows.whole.offset / rows.whole.strides[rows.dim];
  return first % size + rows.whole.shape[rows.dim] <= size;
}

// Which of the ranks that hold one part of the source serves a rank that wants elements of it: they
// take turns. The coordinates that want any are numbered, those of the longest mesh dim one after
// the other.
class Turns {
 public:
  Turns(const CoordinateBox& wanting, int64_t servers)
      : around_(wanting), servers_(servers), weights_(wanting.lo.size(), 0) {
    std::vector<int> dims(weights_.size());
    for (size_t m = 0; m < dims.size(); ++m) dims[m] = static_cast<int>(m);
    const auto length = [&](int m) { return around_.hi[m] - around_.lo[m] + 1; };
    std::stable_sort(dims.begin(), dims.end(), [&](int a, int b) { return length(a) > length(b); });
    int64_t weight = 1;
    for (const int m : dims) {
      weights_[m] = weight;
      weight *= length(m);
    }
    if (!dims.empty()) fastest_ = dims[0];
  }

  int64_t ServerOf(const Dims& coordinate) const {
    int64_t turn = 0;
    for (size_t m = 0; m < weights_.size(); ++m) {
      turn += (coordinate[m] - around_.lo[m]) * weights_[m];
    }
    return turn % servers_;
  }
  // Calls visit(coordinate) for those in the box that `server` serves.
  template <class Visit>
  void ForEachServed(const CoordinateBox& box, int64_t server, Visit visit) const {
    if (fastest_ < 0) return visit(box.lo);
    CoordinateBox starts = box;
    starts.hi[fastest_] = starts.lo[fastest_];
    ForEach(starts, [&](const Dims& start) {
      Dims at = start;
      at[fastest_] += (server - ServerOf(start) + servers_) % servers_;
      for (; at[fastest_] <= box.hi[fastest_]; at[fastest_] += servers_) visit(at);
    });
  }

 private:
  const CoordinateBox around_;
  const int64_t servers_;
  Dims weights_;
  int fastest_ = -1;
};

class MovePlanner {
 public:
  MovePlanner(const Spec& from, const Spec& to, int64_t rank)
      : from_(from),
        to_(to),
        rank_(rank),
        same_mesh_(from.mesh() == to.mesh()),
        source_(from),
        target_(to),
        of_source_(source_.All()),
        of_target_(target_.All()),
        shares_(source_, target_, of_source_, of_target_) {
    in_source_ = from.mesh().Coordinate(rank, &here_);
    in_target_ = to.mesh().Coordinate(rank, &there_);
    if (in_source_) mine_ = source_.At(here_);
    if (in_target_) want_ = target_.At(there_);
    plan_.between = !same_mesh_;
    FindPending();
    if (same_mesh_) FindGroup();
  }

  MovePlan Run() {
    plan_.own = Overlap(mine_, want_);
    const bool pending = !plan_.reduce_dims.empty();
    if (!pending && JustCuts()) return std::move(plan_);
    const bool nobody_lacks = NobodyLacks();
    if (!pending && !nobody_lacks) Move();
    if (pending && nobody_lacks && TermsMeetTheirReaders()) {
      plan_.reduce = MovePlan::Reduce::kAllReduce;
      const int64_t n = ReduceGroup().size();
      plan_.received_numel = 2 * RegionNumel(want_) * (n - 1) / n;
    } else if (pending) {
      ReduceScatter(nobody_lacks);
    }
    return std::move(plan_);
  }

  void AddCounts(bool packed, MovePlan* plan) {
    if (plan->reduce == MovePlan::Reduce::kReduceScatter) AddShareCounts(packed, plan);
    if (plan->move != MovePlan::Move::kAllGather) return;
    RankRows& rows = plan->gather_rows;
    const CoordinateBox group = GroupBox(plan->move_dims);
    const bool counted = rows.dim < 0 || !rows.counts.empty();
    const int64_t length = counted ? 0 : rows.whole.shape[rows.dim];
    int64_t before = 0;
    ForEach(group, [&](const Dims& at) {
      if (!counted) rows.counts.push_back(source_.RowsOf(plan->move_dims, length, at));
      if (!packed) return;
      const Region part = source_.At(at);
      for (BoxPair& pair : Overlap(part, want_)) {
        pair.a.offset += before;
        plan->unpack.push_back(std::move(pair));
      }
      plan->gather_counts.push_back(RegionNumel(part));
      before += plan->gather_counts.back();
    });
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

  // Leaves the mesh dims that take part, the others where this rank is.
  void FindGroup() {
    plan_.move_dims = GroupDims();
    for (int m = 0; m < from_.mesh().ndim(); ++m) {
      if (std::find(plan_.move_dims.begin(), plan_.move_dims.end(), m) != plan_.move_dims.end()) {
        continue;
      }
      of_source_.Pin(m, here_[m]);
      of_target_.Pin(m, here_[m]);
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
      changes |= !(a == b) && (a.cuts() || b.cuts());
    }
    std::vector<bool> disturbed(from_.ndim(), false);  // by mesh dims before this one
    for (int m = 0; m < mesh.ndim(); ++m) {
      const Placement &a = from_.placement(m), &b = to_.placement(m);
      if (mesh.size(m) == 1) continue;
      if (a == b) {
        if (a.cuts() && (a.is_flat() ? changes : disturbed[a.dim()])) dims.push_back(m);
        continue;
      }
      if (a.cuts() || b.cuts() || a.is_partial()) dims.push_back(m);
      for (const Placement* p : {&a, &b}) {
        if (p->cuts() && !p->is_flat()) disturbed[p->dim()] = true;
      }
    }
    return dims;
  }

  // The coordinates that differ from mine in `dims`.
  CoordinateBox GroupBox(absl::Span<const int> dims) const {
    CoordinateBox box{here_, here_};
    for (const int m : dims) {
      box.lo[m] = 0;
      box.hi[m] = from_.mesh().size(m) - 1;
    }
    return box;
  }
  CoordinateBox ReduceGroup() const { return GroupBox(plan_.reduce_dims); }
  bool CutByAll(const Parts& parts) const {
    for (int m = 0; m < parts.spec().mesh().ndim(); ++m) {
      const CoordinateBox& box = &parts == &source_ ? of_source_ : of_target_;
      if (box.lo[m] != box.hi[m] && !parts.cuts(m)) return false;
    }
    return true;
  }
  bool CutByNone(const Parts& parts) const {
    for (const int m : plan_.move_dims) {
      if (parts.cuts(m)) return false;
    }
    return true;
  }

  bool NobodyLacks() const {
    if (JustCuts()) return true;
    if (of_target_.size() > kAskEveryRank) return false;
    bool lacks = false;
    ForEach(of_target_, [&](const Dims& there) {
      if (lacks) return;
      Dims here = there;
      const bool inside = same_mesh_ || from_.mesh().Coordinate(to_.mesh().RankAt(there), &here);
      const Region want = target_.At(there);
      const Region has = inside ? source_.At(here) : Region();
      lacks = RegionNumel(PackedOverlap(has, want)) != RegionNumel(want);
    });
    return !lacks;
  }

  // Whether, everywhere, the ranks that hold the terms of some elements are those that want them.
  bool TermsMeetTheirReaders() const {
    if (!same_mesh_) return false;
    for (const int m : plan_.move_dims) {
      const bool reduced = std::find(plan_.reduce_dims.begin(), plan_.reduce_dims.end(), m) !=
                           plan_.reduce_dims.end();
      if (reduced == target_.cuts(m)) return false;
    }
    return true;
  }

  void Move() {
    if (same_mesh_ && CutByNone(target_) && CutByAll(source_)) {
      plan_.move = MovePlan::Move::kAllGather;
      if (GatherRows()) return;
      Serve();
      Ask();
      FindGatherRows();
      return;
    }
    plan_.move = MovePlan::Move::kExchange;
    Serve();
    Ask();
  }

  // An all-gather of rows, seen from the cuts alone.
  bool GatherRows() {
    std::vector<Interval> left;
    const int dim = target_.has_flat() ? -1 : source_.RowsOver(plan_.move_dims, here_, &left);
    if (dim < 0 || !OneBox({WithIndex(from_, here_, dim, left)}, want_, &plan_.gather_rows, dim,
                           /*of_b=*/true)) {
      return false;
    }
    plan_.received_numel = RegionNumel(want_) - RegionNumel(mine_);
    return true;
  }

  // If one box of `a` is what `b` has of it, and all of it: the rows of that box.
  static bool OneBox(const Region& a, const Region& b, RankRows* rows, int dim, bool of_b) {
    const std::vector<BoxPair> pairs = Overlap(a, b);
    if (pairs.size() != 1 || pairs[0].a.numel() != RegionNumel(a)) return false;
    rows->dim = dim;
    rows->whole = of_b ? pairs[0].b : pairs[0].a;
    return true;
  }

  // What a coordinate holds, but for one dim of which it holds `index`.
  static Block WithIndex(const Spec& spec, const Dims& coordinate, int dim,
                         const std::vector<Interval>& index) {
    Block block = BlockOf(spec, coordinate);
    block.index[dim] = index;
    block.shape[dim] = 0;
    for (const Interval& i : index) block.shape[dim] += i.length();
    block.strides = ContiguousStrides(block.shape);
    return block;
  }

  // The same from every piece, where more than one mesh dim or dim is cut.
  void FindGatherRows() {
    std::vector<BoxPair> firsts;
    std::vector<size_t> at;
    bool single = true;
    ForEach(GroupBox(plan_.move_dims), [&](const Dims& coordinate) {
      std::vector<BoxPair> pairs = Overlap(source_.At(coordinate), want_);
      single &= pairs.size() <= 1;
      at.push_back(pairs.empty() ? ~size_t{0} : firsts.size());
      if (!pairs.empty()) firsts.push_back(std::move(pairs[0]));
    });
    if (!single) return;
    std::vector<const Box*> boxes;
    for (const size_t i : at) boxes.push_back(i == ~size_t{0} ? nullptr : &firsts[i].b);
    plan_.gather_rows = FindRows(boxes);
  }

  // Who takes what from me.
  void Serve() {
    if (mine_.empty()) return;
    const CoordinateBox servers = shares_.PartAt(here_);
    const int64_t n = servers.size();
    const Turns turns(n == 1 ? of_target_ : target_.Around(mine_, of_target_), n);
    for (const CoordinateBox& box : target_.Holding(mine_, of_target_)) {
      turns.ForEachServed(box, servers.IndexOf(here_), [&](const Dims& there) {
        const int64_t peer = to_.mesh().RankAt(there);
        Dims here = there;
        if ((same_mesh_ || from_.mesh().Coordinate(peer, &here)) && servers.Contains(here)) return;
        Send(mine_, target_.At(there), peer);
      });
    }
  }

  // Who has what I lack.
  void Ask() {
    for (const CoordinateBox& box : source_.Holding(want_, of_source_)) {
      source_.ForEachPart(box, [&](const CoordinateBox& servers) {
        if (in_source_ && servers.Contains(here_)) return;
        const Region part = source_.At(servers.lo);
        const int64_t n = servers.size();
        const int64_t server =
            n == 1 ? 0 : Turns(target_.Around(part, of_target_), n).ServerOf(there_);
        Receive(part, want_, from_.mesh().RankAt(servers.At(server)));
      });
    }
  }

  void Send(const Region& held, const Region& want, int64_t peer) {
    for (BoxPair& pair : Overlap(held, want)) plan_.sends.push_back({peer, std::move(pair.a)});
  }
  void Receive(const Region& part, const Region& want, int64_t owner) {
    for (BoxPair& pair : Overlap(part, want)) {
      plan_.received_numel += pair.b.numel();
      plan_.recvs.push_back({owner, std::move(pair.b)});
    }
  }

  void ReduceScatter(bool nobody_lacks) {
    std::vector<Share> shares;
    if (in_source_) {
      plan_.reduce = MovePlan::Reduce::kReduceScatter;
      shares = shares_.Of(here_);
      int64_t numel = 0;
      for (const Share& share : shares) numel += RegionNumel(share.blocks);
      plan_.received_numel = numel * (ReduceGroup().size() - 1);
      ShareRows();
    }
    // Whether every share is what its rank wants; in the same order, but for flat sources that are
    // not just cut further.
    const bool one_reader_each = CutByAll(target_) || from_.numel() == 0;
    if (nobody_lacks && one_reader_each && (!source_.has_flat() || JustCuts())) return;
    ExchangeShares(shares);
  }

  // A reduce-scatter of rows, seen from the cuts alone: every rank's share is its part.
  void ShareRows() {
    std::vector<Interval> left;
    if (!same_mesh_ || source_.has_flat() || !shares_.NoneForeign() || !CutByAll(target_)) return;
    const int dim = target_.RowsOver(plan_.reduce_dims, there_, &left);
    if (dim < 0) return;
    OneBox({WithIndex(to_, there_, dim, left)}, mine_, &plan_.share_rows, dim, /*of_b=*/true);
  }

  void ExchangeShares(const std::vector<Share>& shares) {
    plan_.move = MovePlan::Move::kExchange;
    Region share;
    for (const Share& s : shares) {
      share.insert(share.end(), s.blocks.begin(), s.blocks.end());
      CoordinateBox readers = of_target_;
      for (int m = 0; m < to_.mesh().ndim(); ++m) {
        if (target_.cuts(m)) readers.Pin(m, s.target[m]);
      }
      const Region part = target_.At(s.target);
      ForEach(readers, [&](const Dims& there) {
        const int64_t peer = to_.mesh().RankAt(there);
        if (peer != rank_) Send(s.blocks, part, peer);
      });
    }
    plan_.own = Overlap(share, want_);
    if (!in_target_) return;
    const Dims target = shares_.TargetPart(there_);
    for (const CoordinateBox& box : source_.Holding(want_, of_source_)) {
      source_.ForEachPart(box, [&](const CoordinateBox& part) {
        const Region both = PackedOverlap(source_.At(part.lo), want_);
        shares_.ForEachReducer(part, target, both, [&](int64_t owner, const Region& blocks) {
          if (owner != rank_) Receive(blocks, want_, owner);
        });
      });
    }
  }

  void AddShareCounts(bool packed, MovePlan* plan) {
    RankRows& rows = plan->share_rows;
    if (rows.dim >= 0) {
      const int64_t length = rows.whole.shape[rows.dim];
      const int64_t row = length == 0 ? 0 : rows.whole.numel() / length;
      ForEach(ReduceGroup(), [&](const Dims& at) {
        rows.counts.push_back(target_.RowsOf(plan->reduce_dims, length, at));
        plan->share_counts.push_back(rows.counts.back() * row);
      });
      if (!packed) return;
      plan->share_counts.clear();
    }
    int64_t before = 0;
    std::vector<BoxPair> firsts;
    std::vector<bool> empty;
    bool single = true;
    ForEach(ReduceGroup(), [&](const Dims& at) {
      Region share;
      for (Share& s : shares_.Of(at)) {
        share.insert(share.end(), s.blocks.begin(), s.blocks.end());
      }
      std::vector<BoxPair> pairs = Overlap(mine_, share);
      single &= pairs.size() <= 1;
      empty.push_back(pairs.empty());
      firsts.push_back(pairs.empty() ? BoxPair() : pairs[0]);
      for (BoxPair& pair : pairs) {
        pair.b.offset += before;
        plan->pack.push_back(std::move(pair));
      }
      plan->share_counts.push_back(RegionNumel(share));
      before += plan->share_counts.back();
    });
    if (!single || rows.dim >= 0) return;
    std::vector<const Box*> boxes;
    for (size_t i = 0; i < firsts.size(); ++i) boxes.push_back(empty[i] ? nullptr : &firsts[i].a);
    rows = FindRows(boxes);
    if (!InsideOf(from_.local_shape(), rows)) rows.dim = -1;
  }

  const Spec &from_, &to_;
  const int64_t rank_;
  const bool same_mesh_;
  const Parts source_, target_;
  CoordinateBox of_source_, of_target_;  // coordinates that take part
  const Shares shares_;
  bool in_source_, in_target_;
  Dims here_, there_;
  Region mine_, want_;
  MovePlan plan_;
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
  return MovePlanner(from, to, rank).Run();
}

void AddCounts(const Spec& from, const Spec& to, int64_t rank, bool packed, MovePlan* plan) {
  MovePlanner(from, to, rank).AddCounts(packed, plan);
}

}  // namespace dtensor::internal

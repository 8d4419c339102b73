#include "dtensor/ops/index/owners.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
#include "dtensor/errors.h"
#include "dtensor/mesh/comm.h"
#include "dtensor/ops/index/pick.h"
#include "dtensor/ops/rows.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

class Requests {
 public:
  // For operands that RequestsFor found to lie right.
  Requests(const Spec& x, SpecRef picks, int dim, const DTensor& index, const MeshDims& cuts)
      : x_(&x),
        picks_(std::move(picks)),
        index_(index.Detach()),
        dim_(dim),
        by_row_(index.ndim() == 1),
        known_(index.has_values()),
        blocks_(BlocksOf(x, dim, cuts)),
        sent_(blocks_.size(), 0) {
    if (!x.in_mesh()) return;
    for (int d = 0; by_row_ && d < x.ndim(); ++d) width_ *= d == dim ? 1 : x.local_shape()[d];
    comm_ = ValueOrThrow(RankContext::Current().CommFor(x.mesh(), cuts));
    Ask(index.local());
  }

  const Spec& x() const { return *x_; }
  const Spec& picks() const { return *picks_; }
  const DTensor& index() const { return index_; }

  // Of this rank's part of x the rows that are asked from it, as this rank's picks; and the other
  // way, for each row that is asked from it what its pick has.
  DTensor Fetch(const DTensor& x) const {
    const DTensor answers = index_select(RowsOf(x), 0, asked_);
    return FromRows(index_select(Swapped(answers, got_, sent_), 0, back_), picks());
  }
  DTensor Deliver(const DTensor& picks) const {
    return Swapped(index_select(RowsOf(picks), 0, order_), sent_, got_);
  }

  // A part of x or of the picks as rows of what one pick names.
  DTensor RowsOf(const DTensor& part) const {
    if (!by_row_) return reshape(part, {part.numel(), 1});
    return reshape(transpose(part, 0, dim_), {part.size(dim_), width_});
  }
  // The reverse, for this rank's part of a tensor.
  DTensor FromRows(const DTensor& rows, const Spec& spec) const {
    Shape shape = spec.local_shape();
    if (!by_row_) return reshape(rows, shape);
    std::swap(shape[0], shape[dim_]);
    return contiguous(transpose(reshape(rows, shape), 0, dim_));
  }
  int64_t NumRows() const { return by_row_ ? x().local_shape()[dim_] : Numel(x().local_shape()); }
  // Rows that are asked from this rank: of all ranks, one after the other. int64 [n] on Self.
  const DTensor& asked() const { return asked_; }

 private:
  using Counts = std::vector<int64_t>;  // one for each rank
  using Picks = RankList<int64_t>;

  void Ask(const Tensor& index) {
    const int64_t n = index.numel(), ranks = comm_->size();
    Picks owners(n), rows(n, 0);
    if (known_) {
      FindOwners(ListOf(OnSelf(index)), &owners, &rows);
    } else {  // a rehearsal: as if all ranks were asked for as much
      for (int64_t p = 0; p < n; ++p) owners[p] = p * ranks / n;
    }
    for (const int64_t owner : owners) ++sent_[owner];
    Counts next(ranks, 0);  // by owner, where the next pick of it goes
    std::partial_sum(sent_.begin(), sent_.end() - 1, next.begin() + 1);
    Picks order(n), back(n), wanted(n);
    for (int64_t p = 0; p < n; ++p) {
      const int64_t i = next[owners[p]]++;
      order[i] = p;
      back[p] = i;
      wanted[i] = rows[p];
    }
    order_ = Here(order);
    back_ = Here(back);
    const Counts one(ranks, 1);
    const DTensor of_each = Here({sent_.begin(), sent_.end()});
    const DTensor counts = flatten(Swapped(unsqueeze(of_each, 1), one, one));
    got_ = known_ ? counts.ToVector<int64_t>() : sent_;
    const DTensor narrow = to(unsqueeze(Here(wanted), 1), DType::kI32);
    asked_ = to(flatten(Swapped(narrow, sent_, got_)), DType::kI64);
  }

  // Of each pick the index of its owner, and its row there.
  void FindOwners(const Picks& ids, Picks* owners, Picks* rows) const {
    int64_t inner = 1;
    const Shape& mine = picks().local_shape();
    for (size_t d = dim_ + 1; !by_row_ && d < mine.size(); ++d) inner *= mine[d];
    const int64_t size = x().shape()[dim_], span = std::max<int64_t>(mine[dim_] * inner, 1);
    for (int64_t p = 0; p < static_cast<int64_t>(ids.size()); ++p) {
      if (ids[p] < 0 || ids[p] >= size) {
        ThrowIfError(TellPeers(x().mesh(), RankLocal(absl::InvalidArgumentError(absl::StrCat(
                                               "index ", ids[p], " is out of range for a dim of ",
                                               size, " (position ", p, ")")))));
      }
      const auto owner = std::upper_bound(
          blocks_.begin(), blocks_.end(), ids[p],
          [](int64_t id, const std::vector<Rows>& block) { return id < block[0].end; });
      const Rows& block = (*owner)[0];
      (*owners)[p] = owner - blocks_.begin();
      int64_t& row = (*rows)[p] = ids[p] - block.begin;
      if (!by_row_) row = (p / span * (block.end - block.begin) + row) * inner + p % inner;
    }
  }

  DTensor Here(const Picks& values) const {
    const Shape shape = {static_cast<int64_t>(values.size())};
    if (known_) return FromList(values, shape, DeviceMesh::Self(x().mesh().device()));
    return OnSelf(ValueOrThrow(Tensor::Empty(shape, DType::kI64, index_.local().device())));
  }

  // Rows [n, width], of which `send` go to each rank in turn; `get` come from each.
  DTensor Swapped(const DTensor& rows, const Counts& send, const Counts& get) const {
    const int64_t n = std::accumulate(get.begin(), get.end(), int64_t{0});
    const Tensor from = ValueOrThrow(rows.local().Contiguous());
    const Tensor to = ValueOrThrow(Tensor::Empty({n, rows.size(1)}, rows.dtype(), from.device()));
    std::vector<Piece> sends, recvs;
    int64_t sent = 0, got = 0;
    for (int r = 0; r < comm_->size(); ++r) {
      if (send[r] > 0) sends.push_back({r, from.Slice(0, sent, send[r])});
      if (get[r] > 0) recvs.push_back({r, to.Slice(0, got, get[r])});
      sent += send[r];
      got += get[r];
    }
    Work work = comm_->Exchange(std::move(sends), std::move(recvs));
    ThrowIfError(TellPeers(x().mesh(), work.Wait()));
    return OnSelf(to);
  }

  const SpecRef x_, picks_;
  const DTensor index_;
  const int dim_;
  const bool by_row_, known_;  // known_: the index has values
  const RowsOfRanks blocks_;
  Comm* comm_ = nullptr;  // null outside of the mesh, where the rest is empty, too
  int64_t width_ = 1;     // elements of a row
  Counts sent_, got_;     // picks to each rank, and from each
  DTensor order_, back_;  // this rank's picks by owner, and where each of them is then
  DTensor asked_;
};

namespace {

// Whether `p`, of x or of what lies as its rows do, keeps its parts whole where they are.
bool Stays(const Placement& p) { return !p.is_partial() && !p.is_flat(); }

// The mesh dims that cut both alike, if all else fits; else none.
MeshDims CutsOfBoth(const Spec& x, int dim, const DTensor& index) {
  const bool by_row = index.ndim() == 1;
  if (x.mesh().is_self() || !(x.mesh() == index.mesh()) || (!by_row && index.ndim() != x.ndim())) {
    return {};
  }
  const MeshDims cuts = CutsOf(x, dim);
  if (cuts.empty() || CutsOf(index.spec(), by_row ? 0 : dim) != cuts) return {};
  for (int d = 0; !by_row && d < x.ndim(); ++d) {
    if (d != dim && index.size(d) != x.shape()[d]) return {};
  }
  for (int m = 0; m < x.mesh().ndim(); ++m) {
    if (std::find(cuts.begin(), cuts.end(), m) != cuts.end()) continue;
    const Placement &p = x.placement(m), &q = index.placements()[m];
    if (!Stays(p) || (by_row ? !q.is_replicate() : !(p == q))) return {};
  }
  return cuts;
}

// What reading at the index gives.
SpecRef PicksOf(const Spec& x, int dim, const DTensor& index) {
  Placements placements(index.placements().begin(), index.placements().end());
  Shape shape = index.shape();
  if (index.ndim() == 1) {
    shape = x.shape();
    shape[dim] = index.size(0);
    for (size_t m = 0; m < placements.size(); ++m) {
      Placement& p = placements[m];
      p = p.cuts_dim() ? p.WithDim(dim) : x.placement(static_cast<int>(m));
    }
  }
  return ValueOrThrow(
      RankContext::Current().specs().Intern(x.mesh(), placements, shape, x.dtype()));
}

// `part` of what this rank holds as a tensor that lies as `spec`.
DTensor Laid(const Spec& spec, absl::FunctionRef<DTensor()> part) {
  return OfParts(spec, [&] { return part().local(); });
}
DTensor Part(const DTensor& x) { return OnSelf(x.local()); }

Placements PlacementsOf(const Spec& spec) {
  return {spec.placements().begin(), spec.placements().end()};
}
DTensor LikeX(const RequestsPtr& r, const DTensor& g) {
  return g.Redistribute(PlacementsOf(r->x()));
}
DTensor LikePicks(const RequestsPtr& r, const DTensor& g) {
  return g.Redistribute(PlacementsOf(r->picks()));
}

// x with 0 in the rows that are asked for.
DTensor ClearedBy(const RequestsPtr& r, const DTensor& x) {
  const auto forward = [&]() -> Values {
    return {Laid(r->x(), [&] {
      const DTensor rows = r->RowsOf(Part(x));
      const DTensor none =
          zeros({r->asked().numel(), rows.size(1)}, {.dtype = rows.dtype(), .mesh = rows.mesh()});
      return r->FromRows(Write(rows, 0, r->asked(), none), r->x());
    })};
  };
  const auto backward = [r](const Values& grads) -> Values {
    return {ClearedBy(r, LikeX(r, grads[0]))};
  };
  return CustomFunction("scatter", {x}, forward, backward)[0];
}

using IntoRows = DTensor (*)(const DTensor& rows, int64_t dim, const DTensor& at,
                             const DTensor& src);
DTensor Into(const RequestsPtr& r, const DTensor& x, const DTensor& src, IntoRows into) {
  return Laid(r->x(), [&] {
    const DTensor rows = r->RowsOf(Part(x));
    return r->FromRows(into(rows, 0, r->asked(), r->Deliver(Part(src))), r->x());
  });
}

}  // namespace

RequestsPtr RequestsFor(const Spec& x, int64_t dim, const DTensor& index, const DTensor& src) {
  const auto d = static_cast<int>(dim);
  const MeshDims cuts = CutsOfBoth(x, d, index);
  if (cuts.empty() || x.numel() == 0 || index.numel() == 0) return {};
  if (index.dtype() != DType::kI64 && index.dtype() != DType::kI32) return {};
  if (x.numel() > std::numeric_limits<int32_t>::max()) return {};
  int64_t ranks = 1;
  for (const int m : cuts) ranks *= x.mesh().size(m);
  if (ranks == 1) return {};
  // What all ranks get together, but for the factor ranks - 1 that is in each.
  const int64_t width = (index.ndim() == 1 ? x.numel() / x.shape()[d] : 1) * SizeOf(x.dtype());
  const int64_t asking = index.numel() * (4 + width) / ranks + 8 * ranks;
  const int64_t picks = index.numel() * (8 + width);
  if (asking >= (src.defined() ? picks : std::min(picks, x.bytes()))) return {};
  SpecRef like = PicksOf(x, d, index);
  if (src.defined() && (!(src.mesh() == x.mesh()) ||
                        !(src.spec().is_replicated() || src.placements() == like->placements()))) {
    return {};
  }
  return std::make_shared<const Requests>(x, std::move(like), d, index, cuts);
}

DTensor PickBy(const RequestsPtr& r, const DTensor& x) {
  const auto forward = [&]() -> Values {
    return {Laid(r->picks(), [&] { return r->Fetch(Part(x)); })};
  };
  const auto backward = [r](const Values& grads) -> Values {
    return {AddUpBy(r, LikePicks(r, grads[0]))};
  };
  return CustomFunction("gather", {x}, forward, backward, {r->index()})[0];
}

DTensor AddUpBy(const RequestsPtr& r, const DTensor& dy) {
  const auto forward = [&]() -> Values {
    return {Laid(r->x(), [&] {
      const DTensor sums = AddUp(r->Deliver(Part(dy)), 0, r->asked(), r->NumRows());
      return r->FromRows(sums, r->x());
    })};
  };
  const auto backward = [r](const Values& grads) -> Values {
    return {PickBy(r, LikeX(r, grads[0]))};
  };
  return CustomFunction("gather_backward", {dy}, forward, backward)[0];
}

DTensor WriteBy(const RequestsPtr& r, const DTensor& x, const DTensor& src) {
  const DTensor from = LikePicks(r, src);
  const auto forward = [&]() -> Values { return {Into(r, x, from, Write)}; };
  const auto backward = [r](const Values& grads) -> Values {
    const DTensor g = LikeX(r, grads[0]);
    return {ClearedBy(r, g), PickBy(r, g)};
  };
  return CustomFunction("scatter", {x, from}, forward, backward, {r->index()})[0];
}

DTensor AddBy(const RequestsPtr& r, const DTensor& x, const DTensor& src) {
  const DTensor from = LikePicks(r, src);
  const auto forward = [&]() -> Values { return {Into(r, x, from, Add)}; };
  const auto backward = [r](const Values& grads) -> Values {
    const DTensor g = LikeX(r, grads[0]);
    return {g, PickBy(r, g)};
  };
  return CustomFunction("scatter_add", {x, from}, forward, backward, {r->index()})[0];
}

}  // namespace dtensor

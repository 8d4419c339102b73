#include "dtensor/redistribute.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tensor/status.h"

namespace dtensor {
namespace {

using PlacementView = absl::Span<const Placement>;

bool Cuts(const Placement& p) { return p.is_shard() || p.is_segmented(); }
bool CutsDim(const Placement& p, int dim) { return Cuts(p) && p.dim() == dim; }

// Whether mesh dim m may go from Replicate or Partial to `to[m]` by cutting the present local
// tensor: the cuts of the same tensor dim by mesh dims before it are final, and none comes after
// it.
bool CanCutNow(PlacementView cur, PlacementView to, int m) {
  if (!to[m].is_shard()) return false;
  const int d = to[m].dim();
  for (int j = 0; j < static_cast<int>(cur.size()); ++j) {
    if (j < m && (CutsDim(cur[j], d) || CutsDim(to[j], d)) && !(cur[j] == to[j])) return false;
    if (j > m && CutsDim(cur[j], d)) return false;
  }
  return true;
}

// What a transition does to one mesh dim when nothing is pending: the target with new Partials
// written as Replicate.
Placements WithoutNewPartials(PlacementView cur, PlacementView to) {
  Placements t(to.begin(), to.end());
  for (size_t m = 0; m < t.size(); ++m) {
    if (t[m].is_partial() && !(cur[m] == t[m])) t[m] = Replicate();
  }
  return t;
}

// Whether `target` is reached by cutting alone, mesh dim after mesh dim.
bool OnlyCuts(PlacementView cur, PlacementView target) {
  Placements at(cur.begin(), cur.end());
  for (int m = 0; m < static_cast<int>(at.size()); ++m) {
    if (at[m] == target[m]) continue;
    if (!at[m].is_replicate() || !CanCutNow(at, target, m)) return false;
    at[m] = target[m];
  }
  return true;
}

absl::Status Supported(const Spec& from, const Spec& to) {
  for (int m = 0; m < from.mesh().ndim(); ++m) {
    const Placement &a = from.placement(m), &b = to.placement(m);
    if (a == b) continue;
    if (a.is_flat() || b.is_flat()) {
      return absl::UnimplementedError(
          absl::StrCat("redistribution of flat shards: ", from.ToString(), " to ", to.ToString()));
    }
  }
  return absl::OkStatus();
}

class Mover {
 public:
  Mover(RankContext& context, Tensor local, const Spec& from, const Spec& to)
      : context_(context),
        local_(std::move(local)),
        spec_(from),
        mesh_(from.mesh()),
        cur_(from.placements().begin(), from.placements().end()),
        to_(to.placements().begin(), to.placements().end()) {}

  absl::StatusOr<Tensor> Run() {
    DT_RETURN_IF_ERROR(ReducePartials());
    const Placements target = WithoutNewPartials(cur_, to_);
    if (cur_ != target) DT_RETURN_IF_ERROR(MoveShards(target));
    DT_RETURN_IF_ERROR(MakePartials());
    return local_;
  }

 private:
  bool Pending(int m) const { return cur_[m].is_partial() && !(cur_[m] == to_[m]); }

  absl::Status ReducePartials() {
    bool any = false;
    for (int m = 0; m < mesh_.ndim(); ++m) any |= Pending(m);
    if (!any) return absl::OkStatus();
    // Cheapest first: cut what can be cut for nothing, then scatter, then reduce what is left.
    for (int m = 0; m < mesh_.ndim(); ++m) {
      if (cur_[m].is_replicate() && CanCutNow(cur_, to_, m)) CutLocally(m);
    }
    for (int m = 0; m < mesh_.ndim(); ++m) {
      if (Pending(m) && CanCutNow(cur_, to_, m)) DT_RETURN_IF_ERROR(ReduceScatter(m));
    }
    for (int m = 0; m < mesh_.ndim(); ++m) {
      if (Pending(m)) DT_RETURN_IF_ERROR(AllReduce(m));
    }
    return absl::OkStatus();
  }

  void CutLocally(int m) {
    const Placement& p = to_[m];
    const Interval cut =
        ShardInterval(local_.size(p.dim()), p.unit(), mesh_.size(m), spec_.coordinate()[m]);
    local_ = local_.Slice(p.dim(), cut.start, cut.length());
    cur_[m] = p;
  }

  absl::Status ReduceScatter(int m) {
    const Placement& p = to_[m];
    const int d = p.dim();
    const int64_t n = mesh_.size(m);
    std::vector<int64_t> counts;
    for (int64_t r = 0; r < n; ++r) {
      counts.push_back(ShardInterval(local_.size(d), p.unit(), n, r).length());
    }
    Shape shape = local_.shape();
    shape[d] = counts[spec_.coordinate()[m]];
    DT_ASSIGN_OR_RETURN(Tensor out, Tensor::Empty(shape, local_.dtype(), local_.device()));
    DT_ASSIGN_OR_RETURN(Comm * comm, context_.CommFor(mesh_, {m}));
    DT_RETURN_IF_ERROR(comm->ReduceScatter(local_.Transpose(0, d), out.Transpose(0, d),
                                           std::move(counts), cur_[m].reduce_op())
                           .Wait());
    local_ = std::move(out);
    cur_[m] = p;
    return absl::OkStatus();
  }

  absl::Status AllReduce(int m) {
    DT_ASSIGN_OR_RETURN(Tensor out, Tensor::Empty(local_.shape(), local_.dtype(), local_.device()));
    DT_ASSIGN_OR_RETURN(Comm * comm, context_.CommFor(mesh_, {m}));
    DT_RETURN_IF_ERROR(comm->AllReduce(local_, out, cur_[m].reduce_op()).Wait());
    local_ = std::move(out);
    cur_[m] = Replicate();
    return absl::OkStatus();
  }

  absl::Status MoveShards(const Placements& target) {
    if (!OnlyCuts(cur_, target)) {
      const auto dims = GroupDims(target);
      if (dims.size() == 1 && cur_[dims[0]].is_shard() && target[dims[0]].is_replicate()) {
        return AllGather(dims[0]);
      }
      return Exchange(target, dims);
    }
    for (int m = 0; m < mesh_.ndim(); ++m) {
      if (!(cur_[m] == target[m])) CutLocally(m);
    }
    return absl::OkStatus();
  }

  absl::Status AllGather(int m) {
    const Placement& p = cur_[m];
    const int d = p.dim();
    // The dim's size before this mesh dim cut it: other mesh dims leave it alone (GroupDims).
    const int64_t size = spec_.shape()[d], n = mesh_.size(m);
    std::vector<int64_t> counts;
    for (int64_t r = 0; r < n; ++r) {
      counts.push_back(ShardInterval(size, p.unit(), n, r).length());
    }
    Shape shape = local_.shape();
    shape[d] = size;
    DT_ASSIGN_OR_RETURN(Tensor out, Tensor::Empty(shape, local_.dtype(), local_.device()));
    DT_ASSIGN_OR_RETURN(Comm * comm, context_.CommFor(mesh_, {m}));
    DT_RETURN_IF_ERROR(
        comm->AllGather(local_.Transpose(0, d), out.Transpose(0, d), std::move(counts)).Wait());
    local_ = std::move(out);
    cur_[m] = Replicate();
    return absl::OkStatus();
  }

  // Mesh dims whose ranks must talk: the changed ones, and those that cut the same tensor dims.
  absl::InlinedVector<int, 4> GroupDims(const Placements& target) const {
    std::vector<bool> touched(spec_.ndim(), false);
    for (int m = 0; m < mesh_.ndim(); ++m) {
      if (cur_[m] == target[m]) continue;
      if (Cuts(cur_[m])) touched[cur_[m].dim()] = true;
      if (Cuts(target[m])) touched[target[m].dim()] = true;
    }
    absl::InlinedVector<int, 4> dims;
    for (int m = 0; m < mesh_.ndim(); ++m) {
      const bool cuts = (Cuts(cur_[m]) && touched[cur_[m].dim()]) ||
                        (Cuts(target[m]) && touched[target[m].dim()]);
      if (cuts || !(cur_[m] == target[m])) dims.push_back(m);
    }
    return dims;
  }

  using IndexLists = std::vector<std::vector<Interval>>;

  // Global indices per tensor dim of the rank at `coordinate` under `placements`.
  absl::StatusOr<IndexLists> IndexOf(const Placements& placements, const Dims& coordinate) {
    DT_ASSIGN_OR_RETURN(SpecRef spec,
                        context_.specs().Intern(mesh_, placements, spec_.shape(), spec_.dtype()));
    return LocalIndex(*spec, coordinate);
  }

  absl::Status Exchange(const Placements& target, absl::Span<const int> dims) {
    DT_ASSIGN_OR_RETURN(Comm * comm, context_.CommFor(mesh_, dims));
    const Dims& mine = spec_.coordinate();
    Placements plain_cur = cur_, plain_target = target;
    for (int m = 0; m < mesh_.ndim(); ++m) {  // pending sums that stay are cut like replicas
      if (plain_cur[m].is_partial()) plain_cur[m] = plain_target[m] = Replicate();
    }
    DT_ASSIGN_OR_RETURN(const IndexLists have, IndexOf(plain_cur, mine));
    DT_ASSIGN_OR_RETURN(const IndexLists want, IndexOf(plain_target, mine));
    Shape shape;
    for (const auto& list : want) {
      int64_t length = 0;
      for (const Interval& i : list) length += i.length();
      shape.push_back(length);
    }
    DT_ASSIGN_OR_RETURN(Tensor out, Tensor::Empty(shape, spec_.dtype(), local_.device()));
    std::vector<Piece> sends, recvs;
    for (int peer = 0; peer < comm->size(); ++peer) {
      Dims theirs;
      mesh_.Coordinate(comm->ranks()[peer], &theirs);
      if (peer == comm->index()) {
        std::vector<Tensor> from, into;
        Boxes(have, want, local_, out, &from, &into);
        for (size_t k = 0; k < from.size(); ++k) Copy(from[k], into[k]);
        continue;
      }
      if (!SameReplica(dims, mine, theirs)) continue;
      DT_ASSIGN_OR_RETURN(const IndexLists peer_have, IndexOf(plain_cur, theirs));
      DT_ASSIGN_OR_RETURN(const IndexLists peer_want, IndexOf(plain_target, theirs));
      std::vector<Tensor> views;
      Boxes(have, peer_want, local_, {}, &views, nullptr);
      for (Tensor& v : views) sends.push_back({peer, std::move(v)});
      views.clear();
      Boxes(peer_have, want, {}, out, nullptr, &views);
      for (Tensor& v : views) recvs.push_back({peer, std::move(v)});
    }
    DT_RETURN_IF_ERROR(comm->Exchange(std::move(sends), std::move(recvs)).Wait());
    local_ = std::move(out);
    cur_ = target;
    return absl::OkStatus();
  }

  // Each rank takes from the owner that sits at its own coordinate on the replicated dims.
  bool SameReplica(absl::Span<const int> dims, const Dims& a, const Dims& b) const {
    return std::all_of(dims.begin(), dims.end(),
                       [&](int m) { return Cuts(cur_[m]) || a[m] == b[m]; });
  }

  // The boxes in both index lists, in ascending order: views of `src` (holding `have`) and of `dst`
  // (holding `want`), where asked for.
  void Boxes(const IndexLists& have, const IndexLists& want, const Tensor& src, const Tensor& dst,
             std::vector<Tensor>* src_views, std::vector<Tensor>* dst_views) const {
    struct Run {
      int64_t src, dst, length;
    };
    std::vector<std::vector<Run>> runs(have.size());
    for (size_t d = 0; d < have.size(); ++d) {
      int64_t a_at = 0;
      for (const Interval& a : have[d]) {
        int64_t b_at = 0;
        for (const Interval& b : want[d]) {
          const int64_t start = std::max(a.start, b.start), end = std::min(a.end, b.end);
          if (start < end) {
            runs[d].push_back({a_at + start - a.start, b_at + start - b.start, end - start});
          }
          b_at += b.length();
        }
        a_at += a.length();
      }
      if (runs[d].empty()) return;
    }
    std::vector<size_t> at(have.size(), 0);
    while (true) {
      Tensor s = src, t = dst;
      for (size_t d = 0; d < runs.size(); ++d) {
        const Run& run = runs[d][at[d]];
        const int dim = static_cast<int>(d);
        if (src_views) s = s.Slice(dim, run.src, run.length);
        if (dst_views) t = t.Slice(dim, run.dst, run.length);
      }
      if (src_views) src_views->push_back(std::move(s));
      if (dst_views) dst_views->push_back(std::move(t));
      int d = static_cast<int>(runs.size()) - 1;
      while (d >= 0 && ++at[d] == runs[d].size()) at[d--] = 0;
      if (d < 0) return;
    }
  }

  absl::Status MakePartials() {
    for (int m = 0; m < mesh_.ndim(); ++m) {
      if (!to_[m].is_partial() || cur_[m] == to_[m]) continue;
      const ReduceOp op = to_[m].reduce_op();
      if ((op == ReduceOp::kSum || op == ReduceOp::kProd) && spec_.coordinate()[m] != 0) {
        DT_ASSIGN_OR_RETURN(local_, Tensor::Empty(local_.shape(), local_.dtype(), local_.device()));
        Fill(local_, op == ReduceOp::kSum ? 0 : 1);
      }
      cur_[m] = to_[m];
    }
    return absl::OkStatus();
  }

  RankContext& context_;
  Tensor local_;
  const Spec& spec_;  // the source: mesh, shape, dtype, coordinate
  const DeviceMesh& mesh_;
  Placements cur_, to_;
};

}  // namespace

double RedistributeCost(const DeviceMesh& mesh, IntSpan shape, DType dtype, PlacementView from,
                        PlacementView to) {
  if (from == to) return 0;
  double bytes = static_cast<double>(SizeOf(dtype));
  for (int64_t s : shape) bytes *= static_cast<double>(s);
  double held = bytes, wanted = bytes, overlap = 1, cost = 0;
  const int ndim = mesh.ndim();
  for (int m = 0; m < ndim; ++m) {
    const double n = static_cast<double>(mesh.size(m));
    if (Cuts(from[m]) || from[m].is_flat()) held /= n;
    if (Cuts(to[m]) || to[m].is_flat()) wanted /= n;
  }
  for (int m = 0; m < ndim; ++m) {  // cuts that cost nothing shrink what is reduced
    if (from[m].is_replicate() && Cuts(to[m])) held /= static_cast<double>(mesh.size(m));
  }
  for (int pass = 0; pass < 2; ++pass) {  // scatters before all-reduces
    for (int m = 0; m < ndim; ++m) {
      if (!from[m].is_partial() || to[m] == from[m]) continue;
      const double n = static_cast<double>(mesh.size(m));
      if (Cuts(to[m]) && pass == 0) {
        cost += held * (n - 1) / n;
        held /= n;
      } else if (!Cuts(to[m]) && pass == 1) {
        cost += 2 * held * (n - 1) / n;
      }
    }
  }
  // A cut overlaps what it was only if it is the same and no earlier cut of its dim has changed.
  absl::InlinedVector<bool, 8> changed(shape.size(), false);
  for (int m = 0; m < ndim; ++m) {
    const bool same = from[m] == to[m];
    if (Cuts(from[m]) && (!same || changed[from[m].dim()])) {
      overlap /= static_cast<double>(mesh.size(m));
    }
    if (!same && Cuts(from[m])) changed[from[m].dim()] = true;
    if (!same && Cuts(to[m])) changed[to[m].dim()] = true;
  }
  return cost + wanted * (1 - overlap);
}

bool NeedsCommunication(const Spec& from, const Spec& to) {
  const PlacementView a = from.placements(), b = to.placements();
  return !OnlyCuts(a, WithoutNewPartials(a, b));
}

std::string DescribeRedistribution(const Spec& from, const Spec& to) {
  for (int m = 0; m < from.mesh().ndim(); ++m) {
    const Placement &a = from.placement(m), &b = to.placement(m);
    if (a == b) continue;
    absl::string_view kind = "exchange";
    if (a.is_partial()) {
      kind = b.is_shard() ? "reduce_scatter" : "all_reduce";
    } else if (Cuts(a) && b.is_replicate()) {
      kind = "all_gather";
    } else if (a.is_replicate()) {
      continue;
    }
    const std::string& name = from.mesh().names()[m];
    return absl::StrCat(kind, " over ", name.empty() ? absl::StrCat("mesh dim ", m) : name);
  }
  return "nothing";
}

absl::StatusOr<Tensor> RedistributeLocal(const Tensor& local, const Spec& from, const Spec& to) {
  if (&from == &to) return local;
  DT_RETURN_IF_ERROR(Supported(from, to));
  if (!from.in_mesh()) return Tensor();
  return Mover(RankContext::Current(), local, from, to).Run();
}

}  // namespace dtensor

#include "dtensor/redistribute.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/base/attributes.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/move_plan.h"
#include "dtensor/rehearsal.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

using internal::MovePlan;
using internal::OnlyCuts;
using internal::RankRows;
using PlacementView = absl::Span<const Placement>;

// A plan with its communicators, in which its peers have numbers, and the specs it is for.
struct Planned {
  SpecRef from, to;
  MovePlan plan;
  bool views = false;  // MayBeView: else a rank that could have a view makes a copy, as others do
  bool flat = false;   // from: in flat pieces
  Comm* reduce_comm = nullptr;
  Comm* move_comm = nullptr;
  bool packed = false;  // one of them takes contiguous tensors only, or one piece per peer
};

bool HasFlat(const Spec& spec) {
  const PlacementView p = spec.placements();
  return std::any_of(p.begin(), p.end(), [](const Placement& one) { return one.is_flat(); });
}

absl::Status CheckMeshes(const DeviceMesh& from, const DeviceMesh& to) {
  const auto bad = [&](const std::string& why) {
    return absl::InvalidArgumentError(
        absl::StrCat("from mesh ", from.ToString(), " to mesh ", to.ToString(), ": ", why));
  };
  if (from == to) return absl::OkStatus();
  if (from.is_self() || to.is_self()) {
    return bad("one is local; use ToLocal, FullTensor or FromLocal");
  }
  if (from.device() != to.device()) return bad("their devices differ");
  return absl::OkStatus();
}

// From world ranks to indices in the group.
void NumberPeers(const Comm& comm, MovePlan* plan) {
  const absl::Span<const int64_t> ranks = comm.ranks();
  absl::flat_hash_map<int64_t, int64_t> index;  // where they do not ascend
  if (!std::is_sorted(ranks.begin(), ranks.end())) {
    for (size_t i = 0; i < ranks.size(); ++i) index[ranks[i]] = static_cast<int64_t>(i);
  }
  for (std::vector<MovePlan::PeerBox>* boxes : {&plan->sends, &plan->recvs}) {
    for (MovePlan::PeerBox& b : *boxes) {
      b.peer = index.empty() ? std::lower_bound(ranks.begin(), ranks.end(), b.peer) - ranks.begin()
                             : index.at(b.peer);
    }
  }
}

// Plans of one rank. Bounded: it starts anew when it is full, plans are cheap.
class PlanCache {
 public:
  absl::StatusOr<std::shared_ptr<const Planned>> Find(RankContext& context, const Spec& from,
                                                      const Spec& to) {
    const auto it = plans_.find({&from, &to});
    if (it != plans_.end()) return it->second;
    DT_RETURN_IF_ERROR(CheckMeshes(from.mesh(), to.mesh()));
    auto planned = std::make_shared<Planned>();
    planned->from = SpecRef(&from);
    planned->to = SpecRef(&to);
    planned->plan = internal::PlanMove(from, to, context.rank());
    const MovePlan& plan = planned->plan;
    planned->views = MayBeView(from, to);
    planned->flat = HasFlat(from);
    if (plan.reduce != MovePlan::Reduce::kNone) {
      DT_ASSIGN_OR_RETURN(planned->reduce_comm, context.CommFor(from.mesh(), plan.reduce_dims));
    }
    if (plan.move != MovePlan::Move::kNone) {
      DT_ASSIGN_OR_RETURN(planned->move_comm, plan.between
                                                  ? context.CommForUnion(from.mesh(), to.mesh())
                                                  : context.CommFor(from.mesh(), plan.move_dims));
      NumberPeers(*planned->move_comm, &planned->plan);
    }
    for (const Comm* comm : {planned->reduce_comm, planned->move_comm}) {
      if (comm == nullptr) continue;
      planned->packed |= !comm->caps().strided || !comm->caps().many_pieces;
    }
    internal::AddCounts(from, to, context.rank(), planned->packed, &planned->plan);
    if (plans_.size() >= kMost) plans_.clear();
    plans_[{&from, &to}] = planned;
    return planned;
  }

 private:
  static constexpr size_t kMost = 1024;
  absl::flat_hash_map<std::pair<const Spec*, const Spec*>, std::shared_ptr<const Planned>> plans_;
};

// The box of a tensor whose boxes were planned as if it were contiguous.
Tensor BoxOf(const Tensor& t, const Box& box) {
  const Strides planned = ContiguousStrides(t.shape());
  if (t.strides() == planned) return t.AsStrided(box.shape, box.strides, t.offset() + box.offset);
  int64_t offset = t.offset(), rest = box.offset;
  for (int d = 0; d < t.ndim(); ++d) {
    offset += rest / planned[d] * t.strides()[d];
    rest %= planned[d];
  }
  return t.AsStrided(box.shape, t.strides(), offset);
}

Tensor RowsOf(const Tensor& t, const RankRows& rows) {
  return BoxOf(t, rows.whole).Transpose(0, rows.dim);
}

Tensor Flat(const Tensor& contiguous) {
  return contiguous.AsStrided({contiguous.numel()}, {1}, contiguous.offset());
}

void CopyBoxes(const Tensor& a, const Tensor& b, absl::Span<const BoxPair> pairs) {
  for (const BoxPair& pair : pairs) Copy(BoxOf(a, pair.a), BoxOf(b, pair.b));
}

bool PlansToCommunicate(const MovePlan& plan) {
  return plan.move != MovePlan::Move::kNone || plan.reduce != MovePlan::Reduce::kNone;
}

// The neutral element of a sum or product that becomes pending there.
std::optional<int64_t> NeutralBegun(const Spec& from, const Spec& to, int mesh_dim) {
  const Placement& p = to.placement(mesh_dim);
  if (!p.is_partial() || (from.mesh() == to.mesh() && p == from.placement(mesh_dim))) return {};
  return NeutralOf(p.reduce_op());
}

// Runs a plan.
class Mover final : public PendingMove {
 public:
  Mover(RankContext& context, std::shared_ptr<const Planned> planned, Tensor local, bool overlap)
      : context_(context),
        planned_(std::move(planned)),
        plan_(planned_->plan),
        to_(*planned_->to),
        packed_(planned_->packed),
        overlap_(overlap),
        source_(std::move(local)) {}

  // Everything up to the last collective, which is started.
  absl::Status Start() {
    if ((packed_ && PlansToCommunicate(plan_)) || planned_->flat) {
      DT_ASSIGN_OR_RETURN(source_, source_.Contiguous());
    }
    if (plan_.reduce == MovePlan::Reduce::kReduceScatter) {
      DT_RETURN_IF_ERROR(ReduceScatter());
      if (plan_.move == MovePlan::Move::kNone) return absl::OkStatus();
      DT_RETURN_IF_ERROR(work_.Wait());
      source_ = std::move(out_);
    }
    switch (plan_.move) {
      case MovePlan::Move::kAllGather:
        return AllGather();
      case MovePlan::Move::kExchange:
        return Exchange();
      case MovePlan::Move::kNone:
        break;
    }
    DT_RETURN_IF_ERROR(TakeOwn());
    return plan_.reduce == MovePlan::Reduce::kAllReduce ? AllReduce() : absl::OkStatus();
  }

  bool Done() const override { return work_.Done(); }
  absl::StatusOr<Tensor> Finish() override {
    DT_RETURN_IF_ERROR(work_.Wait());
    if (!to_.in_mesh()) return Tensor();
    if (arrived_.defined()) {
      CopyBoxes(arrived_, out_, plan_.unpack);
      int64_t before = 0;
      for (const MovePlan::PeerBox& piece : plan_.recvs) {
        if (plan_.move != MovePlan::Move::kExchange) break;
        const int64_t n = piece.box.numel();
        const Tensor part = arrived_.AsStrided(piece.box.shape, ContiguousStrides(piece.box.shape),
                                               arrived_.offset() + before);
        Copy(part, BoxOf(out_, piece.box));
        before += n;
      }
    }
    DT_RETURN_IF_ERROR(MakePartials());
    return out_;
  }

 private:
  // Of the last collective.
  CommOptions LastOptions() const { return {.overlap = overlap_}; }
  absl::StatusOr<Tensor> Empty(IntSpan shape) const {
    return Tensor::Empty(shape, source_.dtype(), source_.device());
  }
  // Of no element where the rank is not in the target's mesh: a shape without dims has one.
  absl::Status MakeOut() {
    if (!to_.in_mesh()) {
      DT_ASSIGN_OR_RETURN(out_, Empty({0}));
      return absl::OkStatus();
    }
    DT_ASSIGN_OR_RETURN(
        out_, Tensor::EmptyChecked(to_.local_shape(), to_.local_strides(), source_.dtype(),
                                   source_.device(), to_.local_bytes()));
    return absl::OkStatus();
  }

  // What is wanted of the source: a view of it where it is one box, or nothing.
  absl::Status TakeOwn() {
    const bool result = plan_.reduce == MovePlan::Reduce::kNone;  // and not what is reduced next
    if (!to_.in_mesh()) return MakeOut();
    if (result && !planned_->views) {
      DT_RETURN_IF_ERROR(MakeOut());
      CopyBoxes(source_, out_, plan_.own);
      return absl::OkStatus();
    }
    if (Numel(to_.local_shape()) == 0) {
      // With the strides of the source: a view of an expanded tensor stays one. A rank that has
      // none has no tensor of those strides, either.
      const bool same =
          planned_->from->in_mesh() && source_.ndim() == static_cast<int>(to_.local_shape().size());
      out_ = source_.AsStrided(to_.local_shape(), same ? source_.strides() : to_.local_strides(),
                               source_.offset());
      return absl::OkStatus();
    }
    if (plan_.own.size() == 1) {
      const Tensor view = BoxOf(source_, plan_.own[0].a);
      if (view.shape() == to_.local_shape()) {
        out_ = view;
        return absl::OkStatus();
      }
      if (!result && view.is_contiguous()) {
        out_ = view.AsStrided(to_.local_shape(), to_.local_strides(), view.offset());
        return absl::OkStatus();
      }
    }
    if (result) return absl::InternalError("a view was planned of what is not one box");
    DT_RETURN_IF_ERROR(MakeOut());
    CopyBoxes(source_, out_, plan_.own);
    return absl::OkStatus();
  }

  absl::Status AllReduce() {
    Tensor in = std::move(out_);
    if (packed_) {
      DT_ASSIGN_OR_RETURN(in, in.Contiguous());
    }
    DT_RETURN_IF_ERROR(MakeOut());
    work_ = planned_->reduce_comm->AllReduce(std::move(in), out_, plan_.op, LastOptions());
    return absl::OkStatus();
  }

  // Leaves this rank's share in out_: the target, or packed where an exchange follows.
  absl::Status ReduceScatter() {
    Comm& comm = *planned_->reduce_comm;
    const CommOptions options = plan_.move == MovePlan::Move::kNone ? LastOptions() : CommOptions();
    const RankRows& rows = plan_.share_rows;
    const int64_t mine = plan_.share_counts[comm.index()];
    if (plan_.move == MovePlan::Move::kNone) {
      DT_RETURN_IF_ERROR(MakeOut());
    } else {
      DT_ASSIGN_OR_RETURN(out_, Empty({mine}));
    }
    if (UseRows(source_, rows)) {
      Shape shape = rows.whole.shape;
      shape[rows.dim] = rows.counts[comm.index()];
      const Tensor out = out_.AsStrided(shape, ContiguousStrides(shape), out_.offset());
      work_ = comm.ReduceScatter(RowsOf(source_, rows), out.Transpose(0, rows.dim), rows.counts,
                                 plan_.op, options);
      return absl::OkStatus();
    }
    int64_t total = 0;
    for (const int64_t count : plan_.share_counts) total += count;
    DT_ASSIGN_OR_RETURN(const Tensor in, Empty({total}));
    CopyBoxes(source_, in, plan_.pack);
    work_ = comm.ReduceScatter(in, Flat(out_), plan_.share_counts, plan_.op, options);
    return absl::OkStatus();
  }

  // Whether a collective may work on the rows as they lie. The same on every rank: where tensors
  // have to be contiguous, all are.
  bool UseRows(const Tensor& t, const RankRows& rows) const {
    if (rows.dim < 0) return false;
    return !packed_ || (rows.dim == 0 && BoxOf(t, rows.whole).is_contiguous());
  }

  absl::Status AllGather() {
    Comm& comm = *planned_->move_comm;
    const RankRows& rows = plan_.gather_rows;
    DT_RETURN_IF_ERROR(MakeOut());
    if (UseRows(out_, rows)) {
      Shape shape = rows.whole.shape;
      shape[rows.dim] = rows.counts[comm.index()];
      Strides strides = source_.strides();
      if (source_.shape() != shape) strides = ContiguousStrides(shape);  // flat, or empty
      const Tensor in = source_.AsStrided(shape, strides, source_.offset());
      work_ =
          comm.AllGather(in.Transpose(0, rows.dim), RowsOf(out_, rows), rows.counts, LastOptions());
      return absl::OkStatus();
    }
    if (!packed_) return Exchange();
    DT_ASSIGN_OR_RETURN(arrived_, Empty({out_.numel()}));
    work_ = comm.AllGather(Flat(source_), arrived_, plan_.gather_counts, LastOptions());
    return absl::OkStatus();
  }

  absl::Status Exchange() {
    if (!out_.defined()) DT_RETURN_IF_ERROR(MakeOut());
    std::vector<Piece> sends, recvs;
    if (packed_) {
      DT_RETURN_IF_ERROR(PackPieces(&sends, &recvs));
    } else {
      for (const auto& piece : plan_.sends) {
        sends.push_back({static_cast<int>(piece.peer), BoxOf(source_, piece.box)});
      }
      for (const auto& piece : plan_.recvs) {
        recvs.push_back({static_cast<int>(piece.peer), BoxOf(out_, piece.box)});
      }
    }
    // Once it is started another stream or thread may be writing to `out`: what is here comes
    // before.
    if (overlap_) CopyBoxes(source_, out_, plan_.own);
    work_ = planned_->move_comm->Exchange(std::move(sends), std::move(recvs), LastOptions());
    if (!overlap_) CopyBoxes(source_, out_, plan_.own);
    return absl::OkStatus();
  }

  // One contiguous piece to and from every peer, as an all-to-all(v) has. Boxes of one peer follow
  // each other in the plan.
  absl::Status PackPieces(std::vector<Piece>* sends, std::vector<Piece>* recvs) {
    const auto slices = [](const std::vector<MovePlan::PeerBox>& boxes, const Tensor& memory,
                           std::vector<Piece>* pieces) {
      int64_t start = 0;
      for (size_t i = 0; i < boxes.size();) {
        const auto peer = static_cast<int>(boxes[i].peer);
        int64_t n = 0;
        for (; i < boxes.size() && boxes[i].peer == peer; ++i) n += boxes[i].box.numel();
        pieces->push_back({peer, memory.Slice(0, start, n)});
        start += n;
      }
    };
    int64_t sent = 0, received = 0;
    for (const auto& piece : plan_.sends) sent += piece.box.numel();
    for (const auto& piece : plan_.recvs) received += piece.box.numel();
    DT_ASSIGN_OR_RETURN(const Tensor leaving, Empty({sent}));
    DT_ASSIGN_OR_RETURN(arrived_, Empty({received}));
    int64_t at = 0;
    for (const auto& piece : plan_.sends) {
      const Tensor from = BoxOf(source_, piece.box);
      Copy(from,
           leaving.AsStrided(from.shape(), ContiguousStrides(from.shape()), leaving.offset() + at));
      at += from.numel();
    }
    slices(plan_.sends, leaving, sends);
    slices(plan_.recvs, arrived_, recvs);
    return absl::OkStatus();
  }

  absl::Status MakePartials() {
    if (!to_.has_partial()) return absl::OkStatus();
    for (int m = 0; m < to_.mesh().ndim(); ++m) {
      if (to_.coordinate()[m] == 0) continue;
      if (const auto neutral = NeutralBegun(*planned_->from, to_, m)) {
        DT_RETURN_IF_ERROR(MakeOut());
        FillInt(out_, *neutral);
      }
    }
    return absl::OkStatus();
  }

  RankContext& context_;
  const std::shared_ptr<const Planned> planned_;
  const MovePlan& plan_;
  const Spec& to_;
  const bool packed_;  // collectives of contiguous tensors only
  const bool overlap_;
  Tensor source_;  // the local tensor, then the packed share
  Tensor out_;
  Tensor arrived_;  // what comes packed
  Work work_;
};

int64_t FirstRank(const DeviceMesh& mesh) { return mesh.RankAt(Dims(mesh.ndim(), 0)); }

// What all ranks agree on without being that rank.
MovePlan PlanOfFirstRank(const Spec& from, const Spec& to) {
  return internal::PlanMove(from, to, FirstRank(from.mesh()));
}

// Whether the part of every rank is one box of a part that has it: several segments are several
// boxes on one rank and one on another, and so is a flat piece of more than one dim.
bool IsOneBoxEverywhere(const Spec& spec) {
  for (int m = 0; m < spec.mesh().ndim(); ++m) {
    const Placement& p = spec.placement(m);
    if (p.is_segmented() && spec.mesh().size(m) > 1) return false;
    if (p.is_flat() && spec.shape().size() != 1) return false;
  }
  return true;
}

std::string MeshDimsName(const DeviceMesh& mesh, absl::Span<const int> dims) {
  return absl::StrJoin(dims, ",", [&](std::string* out, int m) {
    const std::string& name = mesh.names()[m];
    absl::StrAppend(out, name.empty() ? absl::StrCat("mesh dim ", m) : name);
  });
}

}  // namespace

double RedistributeCost(const Spec& from, const Spec& to) {
  if (from.mesh() == to.mesh()) {
    return RedistributeCost(from.mesh(), from.shape(), from.dtype(), from.placements(),
                            to.placements());
  }
  const MovePlan plan = internal::PlanMove(from, to, FirstRank(to.mesh()));
  return static_cast<double>(plan.received_numel * SizeOf(from.dtype()));
}

// Whether the placements alone do not say that every rank has what it needs.
static bool MayCommunicate(const Spec& from, const Spec& to) {
  const PlacementView a = from.placements(), b = to.placements();
  if (!(from.mesh() == to.mesh())) return true;
  for (size_t m = 0; m < a.size(); ++m) {
    if (a[m].is_partial() && !(a[m] == b[m]) && from.mesh().size(static_cast<int>(m)) > 1) {
      return true;
    }
  }
  return !OnlyCuts(from.mesh(), a, b);
}

// Cuts that are written in two ways may give each rank the same.
bool NeedsCommunication(const Spec& from, const Spec& to) {
  return MayCommunicate(from, to) && PlansToCommunicate(PlanOfFirstRank(from, to));
}

bool MayBeView(const Spec& from, const Spec& to) {
  for (int m = 0; m < to.mesh().ndim(); ++m) {
    if (to.mesh().size(m) > 1 && NeutralBegun(from, to, m)) return false;
  }
  // A flat source is made contiguous where it is not, which may be on some ranks.
  if (HasFlat(from) || !IsOneBoxEverywhere(from) || !IsOneBoxEverywhere(to)) return false;
  return from.mesh() == to.mesh() ? !MayCommunicate(from, to) : !NeedsCommunication(from, to);
}

std::string DescribeRedistribution(const Spec& from, const Spec& to) {
  const DeviceMesh& mesh = from.mesh();
  const MovePlan plan = PlanOfFirstRank(from, to);
  const auto text = [&](absl::string_view kind, absl::Span<const int> dims) {
    return absl::StrCat(kind, " over ", MeshDimsName(mesh, dims));
  };
  std::vector<std::string> steps;
  if (plan.reduce == MovePlan::Reduce::kAllReduce) {
    steps.push_back(text("all_reduce", plan.reduce_dims));
  }
  if (plan.reduce == MovePlan::Reduce::kReduceScatter) {
    steps.push_back(text("reduce_scatter", plan.reduce_dims));
  }
  if (plan.move == MovePlan::Move::kAllGather) {
    steps.push_back(text("all_gather", plan.move_dims));
  }
  if (plan.move == MovePlan::Move::kExchange) {
    steps.push_back(plan.between ? "exchange among the ranks of both meshes"
                                 : text("exchange", plan.move_dims));
  }
  return steps.empty() ? "nothing" : absl::StrJoin(steps, ", then ");
}

namespace {

// A redistribution that is started; null on a rank that holds nothing of it.
ABSL_ATTRIBUTE_ALWAYS_INLINE inline absl::StatusOr<std::unique_ptr<Mover>> StartMover(
    const Tensor& local, const Spec& from, const Spec& to, bool overlap) {
  if (!from.in_mesh() && !to.in_mesh()) {
    DT_RETURN_IF_ERROR(CheckMeshes(from.mesh(), to.mesh()));
    return nullptr;
  }
  RankContext& context = RankContext::Current();
  DT_ASSIGN_OR_RETURN(std::shared_ptr<const Planned> planned,
                      context.Slot<PlanCache>().Find(context, from, to));
  Tensor source = local;
  if (!source.defined()) {  // outside of the source's mesh: an empty part
    const DeviceType device =
        Rehearsal::Current() != nullptr ? DeviceType::kMeta : from.mesh().device();
    DT_ASSIGN_OR_RETURN(source, Tensor::Empty(from.local_shape(), from.dtype(), device));
  }
  auto mover = std::make_unique<Mover>(context, std::move(planned), std::move(source), overlap);
  DT_RETURN_IF_ERROR(mover->Start());
  return mover;
}

class DoneMove final : public PendingMove {
 public:
  explicit DoneMove(Tensor result) : result_(std::move(result)) {}
  bool Done() const override { return true; }
  absl::StatusOr<Tensor> Finish() override { return std::move(result_); }

 private:
  Tensor result_;
};

}  // namespace

absl::StatusOr<Tensor> RedistributeLocal(const Tensor& local, const Spec& from, const Spec& to) {
  if (&from == &to) return local;
  DT_ASSIGN_OR_RETURN(std::unique_ptr<Mover> mover, StartMover(local, from, to, /*overlap=*/false));
  return mover ? mover->Finish() : Tensor();
}

absl::StatusOr<std::unique_ptr<PendingMove>> StartRedistribution(const Tensor& local,
                                                                 const Spec& from, const Spec& to) {
  if (&from == &to) return std::make_unique<DoneMove>(local);
  DT_ASSIGN_OR_RETURN(std::unique_ptr<Mover> mover, StartMover(local, from, to, /*overlap=*/true));
  if (!mover) return std::make_unique<DoneMove>(Tensor());
  return mover;
}

}  // namespace dtensor

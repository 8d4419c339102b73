#include "dtensor/gradients.h"

#include <algorithm>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "dtensor/redistribute.h"
#include "dtensor/reducer.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/trace.h"

namespace dtensor::internal {
namespace {

bool IsPendingSum(const Placement& p) { return p.is_partial() && p.reduce_op() == ReduceOp::kSum; }

absl::StatusOr<SpecRef> WithPlacements(const Spec& spec, absl::Span<const Placement> placements) {
  if (spec.placements() == placements) return SpecRef(&spec);
  return RankContext::Current().specs().Intern(spec.mesh(), placements, spec.shape(), spec.dtype());
}

absl::StatusOr<SpecRef> WithShape(const Spec& spec, IntSpan shape) {
  return RankContext::Current().specs().Intern(spec.mesh(), spec.placements(), shape, spec.dtype());
}

bool ShardsDim(const Placement& p, int dim) {
  return p.is_flat() || (p.cuts_dim() && p.dim() == dim);
}

// --- boxes ---------------------------------------------------------------------------------------

// The part of `whole` that a box of `shape` covers. Dims in which it does not cover all are not
// sharded.
Tensor BoxIn(const Tensor& whole, const GradBox& box, IntSpan shape, IntSpan value) {
  Tensor part = whole;
  for (int d = 0; d < whole.ndim(); ++d) {
    if (shape[d] == value[d]) continue;
    const int64_t start = shape[d] == 0 ? 0 : box.start[d];
    part = part.Slice(d, start, shape[d], box.step[d]);
  }
  return part;
}

// The dim in which two boxes differ, if it is one, and both are dense there; else -1.
int JoinDim(const Contribution& a, const Contribution& b) {
  int dim = -1;
  for (int d = 0; d < a.tensor.ndim(); ++d) {
    const int64_t na = a.tensor.shape()[d], nb = b.tensor.shape()[d];
    if (a.box.start[d] == b.box.start[d] && na == nb && a.box.step[d] == b.box.step[d]) continue;
    const bool dense = (na == 1 || a.box.step[d] == 1) && (nb == 1 || b.box.step[d] == 1);
    if (dim >= 0 || !dense || na == 0 || nb == 0) return -1;
    dim = d;
  }
  return dim;
}

// One box that covers those of `parts`, which differ in `dim` only and leave no gap.
absl::StatusOr<Contribution> Union(absl::Span<const Contribution* const> parts, int dim) {
  const DTensor& first = parts[0]->tensor;
  Contribution all = {{}, true, parts[0]->box};
  int64_t end = 0, covered = 0;
  for (const Contribution* c : parts) {
    end = std::max(end, c->box.start[dim] + c->tensor.shape()[dim]);
    covered += c->tensor.shape()[dim];
  }
  all.box.step[dim] = 1;
  const int64_t start = all.box.start[dim];
  Shape shape = first.shape();
  shape[dim] = end - start;
  DT_ASSIGN_OR_RETURN(SpecRef spec, WithShape(first.spec(), shape));
  Tensor sum;
  if (spec->in_mesh()) {
    DT_ASSIGN_OR_RETURN(sum,
                        Tensor::Empty(spec->local_shape(), spec->dtype(), first.local().device()));
    const bool overlap = covered > end - start;
    if (overlap) Fill(sum, 0);
    for (const Contribution* c : parts) {
      const Tensor place = sum.Slice(dim, c->box.start[dim] - start, c->tensor.shape()[dim]);
      if (overlap) {
        AddInPlace(place, c->tensor.local());
      } else {
        Copy(c->tensor.local(), place);
      }
    }
  }
  all.tensor = MakeDTensor(RankContext::Current(), spec, std::move(sum));
  return all;
}

// Joins boxes of the placements of (*all)[first] that lie side by side along one dim.
absl::Status JoinBoxesLike(size_t first, Contributions* all) {
  std::vector<size_t> group = {first};
  int dim = -1;
  const Contribution& a = (*all)[first];
  for (size_t i = first + 1; i < all->size(); ++i) {
    const Contribution& b = (*all)[i];
    if (b.box.whole() || b.tensor.placements() != a.tensor.placements()) continue;
    const int differs = JoinDim(a, b);
    if (differs < 0 || (dim >= 0 && differs != dim)) continue;
    dim = differs;
    group.push_back(i);
  }
  if (group.size() == 1) return absl::OkStatus();
  const auto start = [&](size_t i) { return (*all)[i].box.start[dim]; };
  std::stable_sort(group.begin(), group.end(),
                   [&](size_t i, size_t k) { return start(i) < start(k); });
  std::vector<size_t> gone;
  for (size_t i = 0; i < group.size();) {
    std::vector<const Contribution*> parts;
    int64_t end = start(group[i]);
    size_t next = i;
    for (; next < group.size() && start(group[next]) <= end; ++next) {
      const Contribution& c = (*all)[group[next]];
      parts.push_back(&c);
      end = std::max(end, start(group[next]) + c.tensor.shape()[dim]);
    }
    if (parts.size() > 1) {
      DT_ASSIGN_OR_RETURN((*all)[group[i]], Union(parts, dim));
      gone.insert(gone.end(), group.begin() + i + 1, group.begin() + next);
    }
    i = next;
  }
  for (const size_t i : gone) (*all)[i].tensor = DTensor();
  all->erase(std::remove_if(all->begin(), all->end(),
                            [](const Contribution& c) { return !c.tensor.defined(); }),
             all->end());
  return absl::OkStatus();
}

// --- placements ----------------------------------------------------------------------------------

// Whether some contribution is a pending sum over the mesh dim and none is cut there.
bool Pending(const Contributions& all, const DeviceMesh& mesh, int mesh_dim) {
  bool pending = false;
  for (const Contribution& c : all) {
    if (!(c.tensor.mesh() == mesh)) return false;
    const Placement& p = c.tensor.placements()[mesh_dim];
    if (!p.is_replicate() && !IsPendingSum(p)) return false;
    pending |= IsPendingSum(p);
  }
  return pending;
}

absl::StatusOr<Contribution> MovedTo(const Contribution& c, const SpecRef& target) {
  if (c.tensor.spec_ref() == target) return c;
  DT_ASSIGN_OR_RETURN(DTensor moved, RedistributeRecorded(c.tensor, target));
  return Contribution{std::move(moved), true, c.box};
}

// Lets a gradient wait over the mesh dim. Where it would be cut there, what other mesh dims count
// on (lengths of flat pieces, sizes of segments) is no longer so: there it stays whole.
void LetWait(int mesh_dim, Placements* placements) {
  if (!(*placements)[mesh_dim].is_replicate()) {
    for (Placement& p : *placements) {
      if (p.is_sized()) p = Replicate();
    }
  }
  (*placements)[mesh_dim] = Partial();
}

bool IsLeaf(const Edge& edge) { return edge.node->kind == Node::Kind::kLeaf; }

// The only input that wants a gradient, or -1.
int OnlyInput(const Node& node) {
  int only = -1;
  for (size_t i = 0; i < node.edges.size(); ++i) {
    if (!node.edges[i].node) continue;
    if (only >= 0) return -1;
    only = static_cast<int>(i);
  }
  return only;
}

// Every value that the backward of `node` reads is a copy on the mesh dim.
bool AllReplicated(const Node& node, const Spec& out, int mesh_dim) {
  const auto replicated = [&](const SpecRef& s) {
    return !s || (s->mesh() == out.mesh() && s->placement(mesh_dim).is_replicate());
  };
  return std::all_of(node.in_specs.begin(), node.in_specs.end(), replicated) &&
         std::all_of(node.out_specs.begin(), node.out_specs.end(), replicated);
}

// One input, and its gradient is no larger or coarser than the output's.
bool GrowsNoSum(const Node& node, const Spec& out) {
  const int i = OnlyInput(node);
  if (i < 0) return false;
  const Spec& in = *node.in_specs[i];
  return in.numel() <= out.numel() && SizeOf(in.dtype()) >= SizeOf(out.dtype());
}

// The inputs' gradients will be pending sums whatever this one is.
bool InputsPend(const Node& node, int mesh_dim) {
  bool some = false;
  for (const Edge& edge : node.edges) {
    if (!edge.node) continue;
    const bool pends = (edge.node->pends >> mesh_dim) & 1;
    if (!pends && !IsLeaf(edge)) return false;
    some |= pends;
  }
  return some;
}

bool IsLinear(const Node& node) {
  return (node.kind == Node::Kind::kOp && node.op->vjp() != nullptr) ||
         (node.kind == Node::Kind::kCustom && node.extra->passes_sums);
}

// The gradients that the backward of `node` makes meet again in one value that is no larger than
// the output: a rotation, say, that was written with slices, products and an addition.
bool Rejoins(const Node& node, const Spec& out, int mesh_dim) {
  constexpr int kMostSteps = 32;
  const auto older = [](const Node* a, const Node* b) { return a->seq < b->seq; };
  std::vector<const Node*> open = {&node};  // a set, oldest first
  for (int step = 0; step < kMostSteps; ++step) {
    const Node& last = *open.back();
    if (!IsLinear(last) || !AllReplicated(last, out, mesh_dim)) return false;
    open.pop_back();
    for (const Edge& edge : last.edges) {
      if (!edge.node) continue;
      const auto at = std::lower_bound(open.begin(), open.end(), edge.node.get(), older);
      if (at == open.end() || *at != edge.node.get()) open.insert(at, edge.node.get());
    }
    if (open.size() == 1) {
      const Spec& value = *open[0]->out_specs[0];
      return open[0]->out_specs.size() == 1 && value.numel() <= out.numel() &&
             SizeOf(value.dtype()) >= SizeOf(out.dtype());
    }
  }
  return false;
}

bool SavesNothing(const Node& node) {
  return IsLinear(node) &&
         (node.op == nullptr || (node.op->saved_inputs() == 0 && node.op->saved_outputs() == 0));
}

// Whether a gradient that comes cut over a mesh dim, on which all that the node reads are copies,
// is summed to something smaller on its way: by the node, or by one that it hands it on to as it
// is. There it becomes a pending sum; brought to the node's placements first it would be gathered.
bool ShrinksWhatIsCut(const Node* node, int mesh_dim) {
  const auto bytes = [](const Spec& s) { return s.numel() * SizeOf(s.dtype()); };
  while (node != nullptr && node->kind == Node::Kind::kOp && SavesNothing(*node)) {
    const int i = OnlyInput(*node);
    if (i < 0 || node->out_specs.size() != 1) return false;
    const Spec &in = *node->in_specs[i], &out = *node->out_specs[0];
    if (mesh_dim >= out.mesh().ndim() || !AllReplicated(*node, out, mesh_dim)) return false;
    if (bytes(in) != bytes(out)) return bytes(in) < bytes(out);
    node = node->edges[i].node.get();
  }
  return false;
}

// `target`, cut as the only contribution is, where that is all they differ in and `passes`.
SpecRef CutLike(const Contributions& joined, SpecRef target,
                absl::FunctionRef<bool(int mesh_dim)> passes) {
  if (joined.size() != 1 || !joined[0].box.whole()) return target;
  const SpecRef& came = joined[0].tensor.spec_ref();
  if (!(came->mesh() == target->mesh()) || came->dtype() != target->dtype()) return target;
  for (int m = 0; m < target->mesh().ndim(); ++m) {
    const Placement &is = came->placement(m), &wanted = target->placement(m);
    if (is == wanted) continue;
    if (!is.is_shard() || !wanted.is_replicate() || !passes(m)) return target;
  }
  return came;
}

// Whether the gradient of the edge's value may wait at a leaf, as it is: nothing on its way there
// needs it reduced.
bool MayWait(const Edge& edge) {
  const Edge* at = &edge;
  while (at->node) {
    const Node& node = *at->node.get();
    if (node.kind == Node::Kind::kLeaf) return true;
    const int i = OnlyInput(node);
    const bool passes = node.kind == Node::Kind::kRedistribute || SavesNothing(node);
    if (i < 0 || !passes || !(node.in_specs[i]->mesh() == node.out_specs[at->slot]->mesh())) {
      return false;
    }
    at = &node.edges[i];
  }
  return false;
}

}  // namespace

bool GradSyncHold::Holds(const DeviceMesh& mesh, int mesh_dim) const {
  if (all || names.empty()) return all;
  return std::find(names.begin(), names.end(), mesh.names()[mesh_dim]) != names.end();
}

absl::StatusOr<SpecRef> GradientSpec(const Spec& spec) {
  if (!spec.has_partial()) return SpecRef(&spec);
  return WithPlacements(spec, WithoutPending(spec.placements()));
}

absl::StatusOr<Contribution> Cast(Contribution c, DType dtype) {
  const Spec& spec = c.tensor.spec();
  if (spec.dtype() == dtype) return c;
  RankContext& context = RankContext::Current();
  DT_ASSIGN_OR_RETURN(SpecRef target,
                      context.specs().Intern(spec.mesh(), spec.placements(), spec.shape(), dtype));
  Tensor local;
  if (c.tensor.local().defined()) {
    DT_ASSIGN_OR_RETURN(local, c.tensor.local().To(dtype));
  }
  c.tensor = MakeDTensor(context, std::move(target), std::move(local));
  c.owned = true;
  return c;
}

absl::Status Accumulate(Contributions* all, Contribution c) {
  for (Contribution& sum : *all) {
    if (!(sum.tensor.spec_ref() == c.tensor.spec_ref()) || !(sum.box == c.box)) continue;
    if (!c.tensor.local().defined()) return absl::OkStatus();
    if (!sum.owned && c.owned) std::swap(sum, c);
    const Tensor& add = c.tensor.local();
    if (!sum.owned) {
      DT_ASSIGN_OR_RETURN(Tensor copy, sum.tensor.local().Clone());
      sum.tensor = MakeDTensor(RankContext::Current(), c.tensor.spec_ref(), std::move(copy));
      sum.owned = true;
    }
    AddInPlace(sum.tensor.local(), add);
    return absl::OkStatus();
  }
  all->push_back(std::move(c));
  return absl::OkStatus();
}

absl::StatusOr<bool> ToBase(const ViewCut& cut, const Spec& base, const Spec& out,
                            Contribution* c) {
  if (!(c->tensor.mesh() == base.mesh())) return false;        // given by a custom backward
  if (!cut.drops && out.shape() == base.shape()) return true;  // all of it
  const int after = cut.drops ? 1 : 0;  // dims from cut.dim on count from one on in the base
  const auto base_dim = [&](int d) { return d + (d >= cut.dim ? after : 0); };
  Placements placements;
  for (int m = 0; m < base.mesh().ndim(); ++m) {
    Placement p = c->tensor.placements()[m];
    if (p.is_flat() || ShardsDim(base.placement(m), cut.dim)) return false;
    if (p.cuts_dim()) p = p.WithDim(base_dim(p.dim()));
    if (ShardsDim(p, cut.dim)) return false;
    placements.push_back(p);
  }
  GradBox box = {Dims(base.ndim(), 0), Dims(base.ndim(), 1)};
  box.start[cut.dim] = cut.start;
  box.step[cut.dim] = cut.step;
  for (int d = 0; !c->box.whole() && d < c->tensor.ndim(); ++d) {
    const int to = base_dim(d);
    box.start[to] += box.step[to] * c->box.start[d];
    box.step[to] *= c->box.step[d];
  }
  Shape shape = c->tensor.shape();
  if (cut.drops) shape.insert(shape.begin() + cut.dim, 1);
  RankContext& context = RankContext::Current();
  DT_ASSIGN_OR_RETURN(SpecRef spec,
                      context.specs().Intern(base.mesh(), placements, shape, base.dtype()));
  Tensor local = c->tensor.local();
  if (cut.drops && local.defined()) local = local.Unsqueeze(cut.dim);
  c->tensor = MakeDTensor(context, std::move(spec), std::move(local));
  c->box = std::move(box);
  return true;
}

namespace {

// What came cut of a value that is not: where another contribution is a pending sum it would keep
// that from passing.
absl::Status GatherBesideSums(const Spec& value, Contributions* all) {
  for (int m = 0; m < value.mesh().ndim(); ++m) {
    const auto at = [&](const Contribution& c) -> const Placement* {
      return c.tensor.mesh() == value.mesh() ? &c.tensor.placements()[m] : nullptr;
    };
    const bool pends = std::any_of(all->begin(), all->end(), [&](const Contribution& c) {
      return at(c) != nullptr && IsPendingSum(*at(c));
    });
    if (!pends || !value.placement(m).is_replicate()) continue;
    for (Contribution& c : *all) {
      if (at(c) == nullptr || !at(c)->is_shard()) continue;
      Placements whole(c.tensor.placements().begin(), c.tensor.placements().end());
      whole[m] = Replicate();
      DT_ASSIGN_OR_RETURN(const SpecRef target, WithPlacements(c.tensor.spec(), whole));
      DT_ASSIGN_OR_RETURN(c, MovedTo(c, target));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Join(const Spec& value, Contributions* all) {
  for (size_t i = 0; i < all->size(); ++i) {
    if (!(*all)[i].box.whole()) DT_RETURN_IF_ERROR(JoinBoxesLike(i, all));
  }
  for (Contribution& c : *all) {
    if (c.tensor.shape() == value.shape()) c.box = {};
  }
  if (all->size() < 2) return absl::OkStatus();
  DT_RETURN_IF_ERROR(GatherBesideSums(value, all));
  Contributions joined;
  for (Contribution& c : *all) {
    Contributions like;
    for (const Contribution& other : *all) {
      if (other.box == c.box && other.tensor.mesh() == c.tensor.mesh()) like.push_back(other);
    }
    Placements placements(c.tensor.placements().begin(), c.tensor.placements().end());
    for (int m = 0; m < c.tensor.mesh().ndim(); ++m) {
      if (Pending(like, c.tensor.mesh(), m)) placements[m] = Partial();
    }
    DT_ASSIGN_OR_RETURN(SpecRef target, WithPlacements(c.tensor.spec(), placements));
    DT_ASSIGN_OR_RETURN(Contribution moved, MovedTo(c, target));
    DT_RETURN_IF_ERROR(Accumulate(&joined, std::move(moved)));
  }
  *all = std::move(joined);
  return absl::OkStatus();
}

absl::StatusOr<SpecRef> EntersWith(const Node& node, int slot, const Contributions& joined) {
  const Spec& out = *node.out_specs[slot];
  DT_ASSIGN_OR_RETURN(SpecRef target, GradientSpec(out));
  const bool all_of_it = std::all_of(joined.begin(), joined.end(),
                                     [](const Contribution& c) { return c.box.whole(); });
  if (!all_of_it || !IsLinear(node)) return target;
  const GradSyncHold& hold = State().hold;
  Placements placements(target->placements().begin(), target->placements().end());
  for (int m = 0; m < out.mesh().ndim(); ++m) {
    if (!Pending(joined, out.mesh(), m)) continue;
    const bool passes = AllReplicated(node, out, m) &&
                        (GrowsNoSum(node, out) || InputsPend(node, m) || Rejoins(node, out, m));
    const bool waits = hold.Holds(out.mesh(), m) && SavesNothing(node) &&
                       !out.placement(m).is_partial() && OnlyInput(node) >= 0 &&
                       MayWait(node.edges[OnlyInput(node)]);
    if (passes || waits) LetWait(m, &placements);
  }
  DT_ASSIGN_OR_RETURN(target, WithPlacements(out, placements));
  return CutLike(joined, std::move(target), [&](int m) { return ShrinksWhatIsCut(&node, m); });
}

absl::StatusOr<SpecRef> LeavesWith(const Node& redistribution, const Contributions& joined) {
  const Spec &in = *redistribution.in_specs[0], &out = *redistribution.out_specs[0];
  DT_ASSIGN_OR_RETURN(SpecRef target, GradientSpec(in));
  if (!(in.mesh() == out.mesh())) return target;
  const GradSyncHold& hold = State().hold;
  Placements placements(target->placements().begin(), target->placements().end());
  for (int m = 0; m < in.mesh().ndim(); ++m) {
    if (!Pending(joined, in.mesh(), m)) continue;
    const bool passes = in.placement(m).is_replicate() && out.placement(m).is_replicate();
    const bool waits = hold.Holds(in.mesh(), m) && MayWait(redistribution.edges[0]);
    if (passes || waits) LetWait(m, &placements);
  }
  DT_ASSIGN_OR_RETURN(target, WithPlacements(in, placements));
  return CutLike(joined, std::move(target),
                 [&](int m) { return ShrinksWhatIsCut(redistribution.edges[0].node.get(), m); });
}

namespace {

// `target` for a box of the value: cut only where the box is as long as the value.
absl::StatusOr<SpecRef> BoxTarget(const Spec& target, IntSpan box) {
  Placements placements(target.placements().begin(), target.placements().end());
  for (Placement& p : placements) {
    if (p.is_flat() || (p.cuts_dim() && box[p.dim()] != target.shape()[p.dim()])) {
      p = Replicate();
    }
  }
  return RankContext::Current().specs().Intern(target.mesh(), placements, box, target.dtype());
}

absl::Status Reduce(Contributions* all, const SpecRef& target, Reducer* reducer) {
  for (Contribution& c : *all) {
    SpecRef to = target;
    if (!c.box.whole()) {
      DT_ASSIGN_OR_RETURN(to, BoxTarget(*target, c.tensor.shape()));
    }
    DT_RETURN_IF_ERROR(reducer->Add(&c, to));
  }
  return absl::OkStatus();
}

// Puts boxes in their places: what is left is of the whole value.
absl::StatusOr<Contributions> Unboxed(Contributions all, const SpecRef& target) {
  Contributions whole;
  for (Contribution& c : all) {
    if (c.box.whole()) DT_RETURN_IF_ERROR(Accumulate(&whole, std::move(c)));
  }
  for (Contribution& c : all) {
    if (c.box.whole() || !c.tensor.defined()) continue;
    DT_ASSIGN_OR_RETURN(SpecRef spec, WithShape(c.tensor.spec(), target->shape()));
    const auto same = [&](const Contribution& w) { return w.tensor.spec_ref() == spec; };
    auto at = std::find_if(whole.begin(), whole.end(), same);
    if (at == whole.end() || !at->owned) {
      Tensor zeros;
      if (spec->in_mesh()) {
        DT_ASSIGN_OR_RETURN(
            zeros, Tensor::Empty(spec->local_shape(), spec->dtype(), c.tensor.local().device()));
        Fill(zeros, 0);
        if (at != whole.end()) AddInPlace(zeros, at->tensor.local());
      }
      DTensor sum = MakeDTensor(RankContext::Current(), spec, std::move(zeros));
      if (at == whole.end()) at = whole.insert(whole.end(), Contribution());
      *at = {std::move(sum), true};
    }
    if (!spec->in_mesh()) continue;
    AddInPlace(BoxIn(at->tensor.local(), c.box, c.tensor.shape(), spec->shape()), c.tensor.local());
  }
  return whole;
}

// In its placements, of the whole value, all in one.
absl::StatusOr<Contribution> Sum(Contributions reduced, const SpecRef& target) {
  DT_ASSIGN_OR_RETURN(Contributions whole, Unboxed(std::move(reduced), target));
  Contributions total;
  for (const Contribution& c : whole) {
    DT_ASSIGN_OR_RETURN(Contribution moved, MovedTo(c, target));
    DT_RETURN_IF_ERROR(Accumulate(&total, std::move(moved)));
  }
  return total[0];
}

}  // namespace

absl::StatusOr<DTensor> Combine(Contributions joined, const SpecRef& target) {
  if (joined.empty()) return DTensor();
  if (joined.size() == 1 && joined[0].box.whole()) {
    DT_ASSIGN_OR_RETURN(Contribution moved, MovedTo(joined[0], target));
    return moved.tensor;
  }
  Reducer reducer;
  DT_RETURN_IF_ERROR(Reduce(&joined, target, &reducer));
  DT_RETURN_IF_ERROR(reducer.Flush());
  DT_ASSIGN_OR_RETURN(Contribution sum, Sum(std::move(joined), target));
  return sum.tensor;
}

namespace {

// What a leaf's gradient becomes now: the leaf's placements, and pending where it is held back.
absl::StatusOr<SpecRef> LeafTarget(const Spec& leaf, const Contributions& joined,
                                   const GradSyncHold& hold) {
  DT_ASSIGN_OR_RETURN(SpecRef target, GradientSpec(leaf));
  if (!hold.any()) return target;
  Placements placements(target->placements().begin(), target->placements().end());
  for (int m = 0; m < leaf.mesh().ndim(); ++m) {
    if (hold.Holds(leaf.mesh(), m) && Pending(joined, leaf.mesh(), m)) LetWait(m, &placements);
  }
  return WithPlacements(leaf, placements);
}

absl::Status Keep(LeafState* state, Contributions reduced, const SpecRef& target) {
  if (state->grad.defined()) {
    // What was read stays what it was: only memory that nobody else sees is added to.
    const bool ours = state->grad.impl()->refs == 1 && state->grad.impl()->local.buffer().unique();
    reduced.insert(reduced.begin(), {std::exchange(state->grad, DTensor()), ours});
  }
  DT_ASSIGN_OR_RETURN(Contribution sum, Sum(std::move(reduced), target));
  if (!sum.owned && sum.tensor.local().defined()) {
    DT_ASSIGN_OR_RETURN(Tensor copy, sum.tensor.local().Clone());
    sum.tensor = MakeDTensor(RankContext::Current(), target, std::move(copy));
  }
  state->grad = std::move(sum.tensor);
  return absl::OkStatus();
}

}  // namespace

absl::Status SyncLeaves(absl::Span<const NodeRef> leaves, const GradSyncHold& hold) {
  if (hold.all) return absl::OkStatus();
  NoGrad no_grad;
  Reducer reducer;
  struct Due {
    LeafState* state;
    SpecRef target, final;
    Contributions reduced;
  };
  std::vector<Due> all;
  all.reserve(leaves.size());  // the reducer keeps pointers to what it reduces
  for (const NodeRef& leaf : leaves) {
    LeafState& state = leaf->extra->leaf;
    if (state.pending.empty()) continue;
    const Spec& spec = LeafSpec(*leaf.get());
    const ScopedModule scope(RankContext::Current().trace(), leaf->module, leaf->Name());
    const Span span(SpanKind::kBackward, leaf->Name(),
                    [&] { return leaf->module == nullptr ? std::string() : *leaf->module; });
    DT_RETURN_IF_ERROR(Join(spec, &state.pending));
    Due& due = all.emplace_back();
    due.state = &state;
    DT_ASSIGN_OR_RETURN(due.target, LeafTarget(spec, state.pending, hold));
    DT_ASSIGN_OR_RETURN(due.final, GradientSpec(spec));
    due.reduced = std::exchange(state.pending, {});
    DT_RETURN_IF_ERROR(Reduce(&due.reduced, due.target, &reducer));
  }
  DT_RETURN_IF_ERROR(reducer.Flush());
  for (Due& due : all) {
    if (due.target == due.final) {
      DT_RETURN_IF_ERROR(Keep(due.state, std::move(due.reduced), due.target));
    } else {
      due.state->pending = std::move(due.reduced);
    }
  }
  return absl::OkStatus();
}

}  // namespace dtensor::internal

// Backward: one walk over the tape.
#include <algorithm>
#include <queue>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
#include "dtensor/errors.h"
#include "dtensor/gradients.h"
#include "dtensor/impl.h"
#include "dtensor/memo.h"
#include "dtensor/recompute.h"
#include "dtensor/redistribute.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/trace.h"

namespace dtensor {

using internal::Contribution;
using internal::Contributions;
using internal::Edge;
using internal::Node;
using internal::NodeRef;
using internal::State;

namespace {

// Nobody else can see this tensor's memory, it keeps no other (the rest of what it is a part of, or
// what it was to be a view of), and no two elements share a place (an expanded gradient has stride
// 0): so a sum may be formed in it, and it may stay with a leaf.
bool OnlyHere(const DTensor& t) {
  if (!t.defined() || t.impl()->refs != 1) return false;
  if (t.impl()->rare && t.impl()->rare->copy_of) return false;
  const Tensor& local = t.impl()->local;
  return !local.defined() || (local.buffer().unique() && local.is_contiguous() &&
                              local.buffer().bytes() == local.nbytes());
}

// What each term of a pending value has of its gradient: all of it in a sum, one nth in an average.
// What one of a maximum, minimum or product has depends on the others, which nobody knows here: all
// of it, as in PyTorch.
double ShareOfTerm(const Spec& value) {
  double share = 1;
  for (int m = 0; m < value.mesh().ndim(); ++m) {
    const Placement& p = value.placement(m);
    if (!p.is_partial() || p.reduce_op() != ReduceOp::kAvg) continue;
    share /= static_cast<double>(value.mesh().size(m));
  }
  return share;
}

// `t` itself for 1.
absl::StatusOr<Tensor> Scaled(const Tensor& t, double factor) {
  if (factor == 1 || !t.has_data()) return t;
  DT_ASSIGN_OR_RETURN(const Tensor wide, t.To(DType::kF64));
  DT_ASSIGN_OR_RETURN(const Tensor scaled, Tensor::Empty(t.shape(), DType::kF64, t.device()));
  Fill(scaled, factor);
  ReduceInPlace(scaled, wide, ReduceOp::kProd);
  return scaled.To(t.dtype());
}

// Whether leaves keep gradients as they came when a backward inside of `outer` (null: of none) has
// ended: then nobody else may write there.
bool LeavesKeep(const BackwardPass* outer) { return State().hold.any() || outer != nullptr; }

// A gradient of the program's in memory of its own.
absl::StatusOr<DTensor> Apart(const DTensor& given) {
  DT_ASSIGN_OR_RETURN(Tensor local, given.local().Clone());
  return internal::MakeDTensor(RankContext::Current(), given.spec_ref(), std::move(local));
}

}  // namespace

// One walk over the tape, newest node first.
class BackwardPass {
 public:
  absl::Status Run(const DTensor& root, DTensor gradient) {
    NoGrad no_grad;
    ScopedPhase phase(CommPhase::kBackward);
    struct Innermost {  // of this rank, also when a function of the user's throws
      explicit Innermost(BackwardPass* pass) : outer(std::exchange(State().backward, pass)) {}
      ~Innermost() { State().backward = outer; }
      BackwardPass* outer;
    } innermost(this);
    outer_ = innermost.outer;
    return Walk(root, std::move(gradient));
  }

 private:
  absl::Status Walk(const DTensor& root, DTensor gradient) {
    const auto named = [](const absl::Status& status) {
      return status.ok() ? status : InFunction("backward", status);
    };
    DT_RETURN_IF_ERROR(named(Contribute(internal::EdgeOf(root), {std::move(gradient)})));
    while (!ready_.empty()) {
      NodeRef node = ready_.top().node;
      ready_.pop();
      auto it = pending_.find(node.get());
      Slots slots = std::move(it->second);
      pending_.erase(it);
      const absl::Status status = Guarded(*node.get(), std::move(slots));
      if (!status.ok()) {
        // What ToLocal gave is this rank's alone; the gradient that it wants is not.
        const bool local = node->kind == Node::Kind::kToLocal;
        return TellPeers((local ? node->in_specs[0] : node->out_specs[0])->mesh(),
                         InFunction(absl::StrCat("backward of ", node->Name()), status));
      }
    }
    return named(FinishLeaves());
  }

  using Slots = absl::InlinedVector<Contributions, 1>;
  struct Ready {
    NodeRef node;
    bool operator<(const Ready& o) const { return node->seq < o.node->seq; }
  };

  absl::Status Contribute(const Edge& edge, Contribution c) {
    if (!edge.node || !c.tensor.defined()) return absl::OkStatus();
    Node* node = edge.node.get();
    const Spec& forward = *node->out_specs[edge.slot];
    const DTensor& g = c.tensor;
    if ((c.box.whole() && g.shape() != forward.shape()) || g.dtype() != forward.dtype() ||
        g.mesh().is_self() != forward.mesh().is_self()) {
      return absl::InternalError(absl::StrCat("the gradient given for a tensor ",
                                              forward.ToString(), " is ", g.spec().ToString()));
    }
    if (node->kind == Node::Kind::kLeaf) {
      AddLeaf(edge.node);
      DT_ASSIGN_OR_RETURN(c, internal::Cast(std::move(c), internal::LeafSpec(*node).dtype()));
      return internal::Accumulate(&node->extra->leaf.pending, std::move(c));
    }
    auto [it, fresh] = pending_.try_emplace(node);
    if (fresh) {
      it->second.resize(node->out_specs.size());
      ready_.push({edge.node});
    }
    return internal::Accumulate(&it->second[edge.slot], std::move(c));
  }

  void AddLeaf(const NodeRef& leaf) { leaves_[leaf.get()] = {leaf, ++contributions_}; }

  // Process; what a gradient function throws becomes its error.
  absl::Status Guarded(Node& node, Slots slots) {
    try {
      return Process(node, std::move(slots));
    } catch (...) {
      return CurrentException();
    }
  }

  absl::Status Process(Node& node, Slots slots) {
    const ScopedModule scope(RankContext::Current().trace(), node.module, node.Name());
    const Span span(SpanKind::kBackward, node.Name(),
                    [&] { return node.module == nullptr ? std::string() : *node.module; });
    if (node.released) {
      return absl::FailedPreconditionError(
          "a backward has already passed here and freed the saved values; run forward again");
    }
    switch (node.kind) {
      case Node::Kind::kRedistribute:
        return Redistribute(node, std::move(slots[0]));
      case Node::Kind::kToLocal:
        return ToLocal(node, std::move(slots[0]));
      case Node::Kind::kFromLocal:
        return FromLocal(node, std::move(slots[0]));
      default:
        return RunVjp(node, std::move(slots));
    }
  }

  // The sum of all contributions, in the placements of `target`.
  static absl::StatusOr<DTensor> Combine(Contributions all, const SpecRef& value,
                                         const SpecRef& target) {
    DT_RETURN_IF_ERROR(internal::Join(*value, &all));
    return internal::Combine(std::move(all), target);
  }

  // Straight to the source's placements, from however the gradient came. Ranks of one of two meshes
  // only do not know how: there it comes in the placements of the value first.
  absl::Status Redistribute(const Node& node, Contributions all) {
    DT_RETURN_IF_ERROR(internal::Join(*node.out_specs[0], &all));
    const Spec &from = *node.in_specs[0], &to = *node.out_specs[0];
    if (!from.mesh().SameRanks(to.mesh())) {
      DT_ASSIGN_OR_RETURN(SpecRef arrived, internal::GradientSpec(to));
      DT_ASSIGN_OR_RETURN(DTensor g, internal::Combine(std::move(all), arrived));
      DT_ASSIGN_OR_RETURN(SpecRef back, internal::GradientSpec(from));
      DT_ASSIGN_OR_RETURN(g, internal::RedistributeRecorded(g, back));
      return Contribute(node.edges[0], {std::move(g)});
    }
    DT_ASSIGN_OR_RETURN(SpecRef target, internal::LeavesWith(node, all));
    DT_ASSIGN_OR_RETURN(DTensor g, internal::Combine(std::move(all), target));
    const bool owned = OnlyHere(g);
    return Contribute(node.edges[0], {std::move(g), owned});
  }

  // Parts of a base wait there, in the placements in which they came, to be put together. False if
  // some cannot.
  absl::StatusOr<bool> HandToBase(Node& node, Contributions* all) {
    const ViewCut cut = node.op->cuts()(node.attrs);
    Contributions boxes;
    for (const Contribution& c : *all) {
      boxes.push_back(c);
      DT_ASSIGN_OR_RETURN(const bool can, internal::ToBase(cut, *node.in_specs[0],
                                                           *node.out_specs[0], &boxes.back()));
      if (!can) return false;
    }
    all->clear();
    node.released = true;
    for (Contribution& c : boxes) DT_RETURN_IF_ERROR(Contribute(node.edges[0], std::move(c)));
    return true;
  }

  absl::Status ToLocal(const Node& node, Contributions sums) {
    DT_ASSIGN_OR_RETURN(DTensor g, Combine(std::move(sums), node.out_specs[0], node.out_specs[0]));
    const Spec& source = *node.in_specs[0];
    RankContext& context = RankContext::Current();
    Placements placements = node.extra->grad_placements;
    double share = 1;
    if (placements.empty()) {
      share = ShareOfTerm(source);
      placements = WithoutPending(source.placements());
    }
    DT_ASSIGN_OR_RETURN(SpecRef spec, context.specs().Intern(source.mesh(), placements,
                                                             source.shape(), source.dtype()));
    if (spec->local_shape() != g.shape()) {  // on other ranks it may fit
      return RankLocal(absl::InvalidArgumentError(
          absl::StrCat("the local gradient has shape ", ToString(g.shape()),
                       ", but grad_placements ", ToString(placements), " give ",
                       ToString(spec->local_shape()), " on rank ", context.rank())));
    }
    DT_ASSIGN_OR_RETURN(Tensor local, Scaled(g.local(), 1 / share));
    return Contribute(node.edges[0], {internal::MakeDTensor(context, spec, std::move(local))});
  }

  absl::Status FromLocal(const Node& node, Contributions sums) {
    const Spec& out = *node.out_specs[0];
    RankContext& context = RankContext::Current();
    Placements placements = node.extra->grad_placements;
    double share = 1;
    if (placements.empty()) {
      share = ShareOfTerm(out);
      placements = WithoutPending(out.placements());
    }
    DT_ASSIGN_OR_RETURN(SpecRef target,
                        context.specs().Intern(out.mesh(), placements, out.shape(), out.dtype()));
    DT_ASSIGN_OR_RETURN(DTensor g, Combine(std::move(sums), node.out_specs[0], target));
    DT_ASSIGN_OR_RETURN(Tensor local, Scaled(g.local(), share));
    return Contribute(node.edges[0],
                      {internal::MakeDTensor(context, node.in_specs[0], std::move(local))});
  }

  absl::Status RunVjp(Node& node, Slots slots) {
    if (node.op != nullptr && node.op->cuts() != nullptr) {
      DT_ASSIGN_OR_RETURN(const bool done, HandToBase(node, &slots[0]));
      if (done) return absl::OkStatus();
    }
    Values grads(slots.size());
    for (size_t o = 0; o < slots.size(); ++o) {
      if (slots[o].empty()) continue;
      DT_RETURN_IF_ERROR(internal::Join(*node.out_specs[o], &slots[o]));
      DT_ASSIGN_OR_RETURN(SpecRef target,
                          internal::EntersWith(node, static_cast<int>(o), slots[o]));
      DT_ASSIGN_OR_RETURN(grads[o], internal::Combine(std::move(slots[o]), target));
    }
    if (node.extra && node.extra->region) DT_RETURN_IF_ERROR(node.extra->region->Fill());
    Values results;
    DT_RETURN_IF_ERROR(CheckVersions(node));
    if (node.kind == Node::Kind::kCustom) {
      results = node.extra->custom(grads);
      if (results.size() > node.edges.size()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "backward gave ", results.size(), " gradients for ", node.edges.size(), " inputs"));
      }
      results.resize(node.edges.size());
      DT_RETURN_IF_ERROR(TakeApart(grads, &results));
    } else {
      if (node.op->vjp() == nullptr) {
        return absl::UnimplementedError("this op has no gradient; give it one with .Vjp");
      }
      VjpCall call = node.MakeCall(std::move(grads));
      node.op->vjp()(call);
      results = std::move(call.results_);
    }
    node.released = true;
    for (const internal::Saved& s : node.saved_in) {
      if (s.tensor.defined()) internal::MemoReleased(*s.tensor.impl());
    }
    node.saved_in.clear();
    node.saved_out.clear();
    if (node.kind == Node::Kind::kCustom) node.extra->custom = nullptr;
    for (size_t i = 0; i < node.edges.size(); ++i) {
      const bool owned = OnlyHere(results[i]);
      DT_RETURN_IF_ERROR(Contribute(node.edges[i], {std::move(results[i]), owned}));
    }
    return absl::OkStatus();
  }

  // What a custom function gives may be memory that it writes to again (a buffer of messages).
  absl::Status TakeApart(const Values& grads, Values* results) const {
    if (!LeavesKeep(outer_)) return absl::OkStatus();
    for (DTensor& t : *results) {
      if (!t.defined() || OnlyHere(t) || !t.local().has_data()) continue;
      const bool passed_on = std::any_of(grads.begin(), grads.end(), [&](const DTensor& g) {
        return g.defined() && g.local().buffer().SharesWith(t.local().buffer());
      });
      if (passed_on) continue;
      DT_ASSIGN_OR_RETURN(t, Apart(t));
    }
    return absl::OkStatus();
  }

  static absl::Status CheckVersions(const Node& node) {
    const auto check = [&](const auto& saved, const auto& name) -> absl::Status {
      for (size_t i = 0; i < saved.size(); ++i) {
        if (!saved[i].tensor.defined()) continue;
        // The numbers are nothing to tell: how often a part is written to differs between ranks.
        if (saved[i].current_version() == saved[i].version) continue;
        return absl::FailedPreconditionError(absl::StrCat(
            "saved tensor ", name(static_cast<int>(i)), " (", saved[i].tensor.spec().ToString(),
            ") was changed in place after the forward; use the op that returns a new tensor, or "
            "clone() first"));
      }
      return absl::OkStatus();
    };
    DT_RETURN_IF_ERROR(check(node.saved_in, [&](int i) {
      return node.op != nullptr ? node.op->InputName(i) : absl::StrCat("#", i);
    }));
    return check(node.saved_out, [&](int i) { return node.op->output_names()[i]; });
  }

  // In the order in which they became ready, which is the same on every rank.
  absl::Status FinishLeaves() {
    std::vector<Ripe> ripe;
    for (const auto& [node, leaf] : leaves_) ripe.push_back(leaf);
    std::sort(ripe.begin(), ripe.end(),
              [](const Ripe& a, const Ripe& b) { return a.last < b.last; });
    if (outer_ != nullptr) {  // a backward inside of one: the outer one finishes
      for (const Ripe& leaf : ripe) outer_->AddLeaf(leaf.leaf);
      return absl::OkStatus();
    }
    std::vector<NodeRef> leaves;
    for (const Ripe& leaf : ripe) leaves.push_back(leaf.leaf);
    return internal::SyncLeaves(leaves, State().hold);
  }

  BackwardPass* outer_ = nullptr;
  absl::flat_hash_map<Node*, Slots> pending_;
  std::priority_queue<Ready> ready_;
  struct Ripe {
    NodeRef leaf;
    int64_t last;  // the number of its last contribution
  };
  absl::flat_hash_map<Node*, Ripe> leaves_;
  int64_t contributions_ = 0;
};

namespace {

absl::Status CheckRoot(const DTensor& t) {
  if (!t.requires_grad()) {
    return absl::FailedPreconditionError(absl::StrCat(
        t.spec().ToString(),
        " has no gradient history: no input required grad, or it was made under NoGrad"));
  }
  return internal::CheckFresh(*t.impl());
}

// Throws an error of Backward itself.
void Require(const absl::Status& status) {
  if (!status.ok()) Throw(InFunction("backward", status));
}

void BackwardFrom(const DTensor& root, DTensor gradient) {
  const absl::Status status = BackwardPass().Run(root, std::move(gradient));
  if (!status.ok()) Throw(TellPeers(root.mesh(), status));
}

}  // namespace

void DTensor::Backward() const {
  const DTensor& here = internal::Here(*this, "backward");
  Require(CheckRoot(here));
  if (numel() != 1) {
    Require(absl::InvalidArgumentError(
        absl::StrCat("needs a tensor of one element, got shape ", dtensor::ToString(shape()),
                     ": reduce it (sum, mean) or pass a gradient of this shape")));
  }
  SpecRef spec = ValueOrThrow(internal::GradientSpec(this->spec()));
  Tensor one;
  if (spec->in_mesh()) {
    absl::StatusOr<Tensor> made = Tensor::Empty(spec->local_shape(), dtype(), local().device());
    if (!made.ok()) Throw(TellPeers(mesh(), InFunction("backward", made.status())));
    one = *std::move(made);
    Fill(one, 1);
  }
  BackwardFrom(here, internal::MakeDTensor(RankContext::Current(), spec, std::move(one)));
}

void DTensor::Backward(const DTensor& gradient) const {
  const DTensor& here = internal::Here(*this, "backward");
  Require(CheckRoot(here));
  if (!gradient.defined() || gradient.shape() != shape() || gradient.dtype() != dtype() ||
      !(gradient.mesh() == mesh())) {
    Require(absl::InvalidArgumentError(
        absl::StrCat("the gradient must be like the tensor: ", spec().ToString(), ", got ",
                     gradient.defined() ? gradient.spec().ToString() : "null")));
  }
  DTensor given = internal::Here(gradient, "backward");
  if (LeavesKeep(State().backward) && given.local().has_data()) {
    absl::StatusOr<DTensor> apart = Apart(given);
    if (!apart.ok()) Throw(TellPeers(mesh(), InFunction("backward", apart.status())));
    given = *std::move(apart);
  }
  BackwardFrom(here, std::move(given));
}

}  // namespace dtensor

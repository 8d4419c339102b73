#include "dtensor/autograd.h"

#include <algorithm>
#include <queue>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dtensor/impl.h"
#include "dtensor/redistribute.h"
#include "tensor/status.h"
#include "tensor/trace.h"

namespace dtensor {
namespace internal {

void DeleteNode(Node* node) {
  // Long chains are unwound here one by one: recursion would be as deep as the tape is long.
  static thread_local std::vector<Node*> dying;
  static thread_local bool busy = false;
  dying.push_back(node);
  if (busy) return;
  busy = true;
  while (!dying.empty()) {
    Node* next = dying.back();
    dying.pop_back();
    Pool<Node>::Delete(next);
  }
  busy = false;
}

absl::string_view Node::Name() const {
  if (op != nullptr) return op->name();
  switch (kind) {
    case Kind::kRedistribute:
      return "redistribute";
    case Kind::kToLocal:
      return "to_local";
    case Kind::kFromLocal:
      return "from_local";
    case Kind::kLeaf:
      return "gradient";  // of a leaf: what bringing it to its placement is called
    default:
      return extra ? absl::string_view(extra->name) : "function";
  }
}

NodeRef NewNode(Node::Kind kind) {
  Node* node = Pool<Node>::New();
  node->kind = kind;
  node->seq = State().next_seq++;
  node->module = RankContext::Current().trace().module;
  return NodeRef(node);
}

Edge EdgeOf(const DTensor& t) {
  if (!t.defined() || !t.impl()->requires_grad) return {};
  return {t.impl()->node, t.impl()->slot};
}

void SetHistory(const DTensor& t, const NodeRef& node, int slot) {
  DTensorImpl& impl = *t.impl();
  impl.node = node;
  impl.slot = slot;
  impl.requires_grad = true;
}

void KeepAttrs(absl::Span<const Attr> attrs, Node* node) {
  node->attrs.assign(attrs.begin(), attrs.end());
  int64_t total = 0;
  for (const Attr& a : attrs) total += a.n;
  if (total == 0) return;
  if (!node->extra) node->extra = std::make_unique<Node::Extra>();
  std::vector<int64_t>& ints = node->extra->ints;
  ints.reserve(total);
  for (Attr& a : node->attrs) {
    if (a.kind != Attr::Kind::kInts) continue;
    const int64_t* start = ints.data() + ints.size();
    ints.insert(ints.end(), a.ints, a.ints + a.n);
    a.ints = start;
  }
}

absl::StatusOr<SpecRef> GradientSpec(const Spec& spec) {
  Placements p(spec.placements().begin(), spec.placements().end());
  for (Placement& x : p) {
    if (x.is_partial()) x = Replicate();
  }
  return RankContext::Current().specs().Intern(spec.mesh(), p, spec.shape(), spec.dtype());
}

namespace {

// Nobody else can see this tensor's memory and no two elements share a place (an expanded gradient
// has stride 0), so a sum may be formed in it.
bool OnlyHere(const DTensor& t) {
  if (!t.defined() || t.impl()->refs != 1) return false;
  const Tensor& local = t.impl()->local;
  return !local.defined() || (local.buffer().unique() && local.is_contiguous());
}

}  // namespace

absl::Status Accumulate(absl::InlinedVector<LeafState::Contribution, 2>* sums, DTensor g,
                        bool owned) {
  for (LeafState::Contribution& sum : *sums) {
    if (!(sum.tensor.spec_ref() == g.spec_ref())) continue;
    const Tensor& add = g.local();
    if (!add.defined()) return absl::OkStatus();
    if (!sum.owned) {
      DT_ASSIGN_OR_RETURN(Tensor copy, sum.tensor.local().Clone());
      sum.tensor = MakeDTensor(RankContext::Current(), g.spec_ref(), std::move(copy));
      sum.owned = true;
    }
    AddInPlace(sum.tensor.local(), add);
    return absl::OkStatus();
  }
  sums->push_back({std::move(g), owned});
  return absl::OkStatus();
}

absl::Status SyncLeaf(Node* leaf) {
  LeafState& state = leaf->extra->leaf;
  if (state.pending.empty()) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(SpecRef target, GradientSpec(*leaf->out_specs[0]));
  NoGrad no_grad;
  const ScopedModule scope(RankContext::Current().trace(), leaf->module, leaf->Name());
  const Span span(SpanKind::kBackward, leaf->Name(),
                  [&] { return leaf->module == nullptr ? std::string() : *leaf->module; });
  absl::InlinedVector<LeafState::Contribution, 2> sums;
  if (state.grad.defined()) {
    sums.push_back(
        {state.grad, state.grad.impl()->refs == 2 && state.grad.local().buffer().unique()});
  }
  for (LeafState::Contribution& c : state.pending) {
    const bool moved = !(c.tensor.spec_ref() == target);
    DT_ASSIGN_OR_RETURN(DTensor g,
                        RedistributeRecorded(c.tensor, target, RedistributeKind::kExplicit));
    const bool owned = moved ? OnlyHere(g) : c.owned;
    DT_RETURN_IF_ERROR(Accumulate(&sums, std::move(g), owned));
  }
  state.pending.clear();
  if (!sums[0].owned && sums[0].tensor.local().defined()) {
    DT_ASSIGN_OR_RETURN(Tensor copy, sums[0].tensor.local().Clone());
    sums[0].tensor = MakeDTensor(RankContext::Current(), target, std::move(copy));
  }
  state.grad = sums[0].tensor;
  return absl::OkStatus();
}

}  // namespace internal

using internal::Accumulate;
using internal::Edge;
using internal::LeafState;
using internal::Node;
using internal::NodeRef;
using internal::Saved;
using internal::State;

VjpCall::VjpCall(const Node& node, Values grads)
    : node_(node), grads_(std::move(grads)), results_(node.edges.size()) {}

const DTensor& VjpCall::in(int i) const { return node_.saved_in[i].tensor; }
const DTensor& VjpCall::out(int i) const { return node_.saved_out[i].tensor; }
const Spec& VjpCall::in_spec(int i) const { return *node_.in_specs[i]; }
int VjpCall::num_inputs() const { return static_cast<int>(node_.edges.size()); }
bool VjpCall::needs(int input) const { return static_cast<bool>(node_.edges[input].node); }
absl::Span<const Attr> VjpCall::attrs() const { return node_.attrs; }
void VjpCall::set(int input, DTensor gradient) { results_[input] = std::move(gradient); }
const Attr& VjpCall::Read(absl::string_view attr) const {
  const auto& names = node_.op->attr_names();
  const auto it = std::find(names.begin(), names.end(), attr);
  DT_CHECK_MSG(it != names.end(), absl::StrCat(node_.Name(), " has no attribute ", attr));
  return node_.attrs[it - names.begin()];
}

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
    DT_RETURN_IF_ERROR(Contribute(internal::EdgeOf(root), std::move(gradient), false));
    while (!ready_.empty()) {
      NodeRef node = ready_.top().node;
      ready_.pop();
      auto it = pending_.find(node.get());
      Slots slots = std::move(it->second);
      pending_.erase(it);
      absl::Status status = Process(*node.get(), std::move(slots));
      if (!status.ok()) {
        return absl::Status(status.code(),
                            absl::StrCat("[backward of ", node->Name(), "] ", status.message()));
      }
    }
    return FinishLeaves();
  }

  using Sums = absl::InlinedVector<LeafState::Contribution, 2>;
  using Slots = absl::InlinedVector<Sums, 1>;
  struct Ready {
    NodeRef node;
    bool operator<(const Ready& o) const { return node->seq < o.node->seq; }
  };

  absl::Status Contribute(const Edge& edge, DTensor g, bool owned) {
    if (!edge.node || !g.defined()) return absl::OkStatus();
    Node* node = edge.node.get();
    const Spec& forward = *node->out_specs[edge.slot];
    if (g.shape() != forward.shape() || g.dtype() != forward.dtype()) {
      return absl::InternalError(absl::StrCat("the gradient given for a tensor ",
                                              forward.ToString(), " is ", g.spec().ToString()));
    }
    if (node->kind == Node::Kind::kLeaf) {
      AddLeaf(edge.node);
      return Accumulate(&node->extra->leaf.pending, std::move(g), owned);
    }
    auto [it, fresh] = pending_.try_emplace(node);
    if (fresh) {
      it->second.resize(node->out_specs.size());
      ready_.push({edge.node});
    }
    return Accumulate(&it->second[edge.slot], std::move(g), owned);
  }

  void AddLeaf(const NodeRef& leaf) {
    const auto same = [&](const NodeRef& l) { return l.get() == leaf.get(); };
    if (std::none_of(leaves_.begin(), leaves_.end(), same)) leaves_.push_back(leaf);
  }

  // The sum of all contributions in one placement.
  absl::StatusOr<DTensor> Combine(Sums sums, const SpecRef& target) {
    if (sums.empty()) return DTensor();
    Sums total;
    for (LeafState::Contribution& c : sums) {
      const bool moved = !(c.tensor.spec_ref() == target);
      DT_ASSIGN_OR_RETURN(DTensor g, internal::RedistributeRecorded(
                                         c.tensor, target, internal::RedistributeKind::kExplicit));
      const bool owned = moved ? internal::OnlyHere(g) : c.owned;
      DT_RETURN_IF_ERROR(Accumulate(&total, std::move(g), owned));
    }
    return total[0].tensor;
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
      case Node::Kind::kRedistribute: {
        // Straight to the source's placement, from however the gradient came. Ranks of one of two
        // meshes only do not know how: there it comes in the placement of the value first.
        const Spec &from = *node.in_specs[0], &to = *node.out_specs[0];
        if (!from.mesh().SameRanks(to.mesh())) {
          DT_ASSIGN_OR_RETURN(SpecRef arrived, internal::GradientSpec(to));
          DT_ASSIGN_OR_RETURN(DTensor g, Combine(std::move(slots[0]), arrived));
          slots[0] = {{std::move(g), false}};
        }
        DT_ASSIGN_OR_RETURN(SpecRef target, internal::GradientSpec(from));
        DT_ASSIGN_OR_RETURN(DTensor g, Combine(std::move(slots[0]), target));
        return Contribute(node.edges[0], std::move(g), false);
      }
      case Node::Kind::kToLocal:
        return ToLocal(node, std::move(slots[0]));
      case Node::Kind::kFromLocal:
        return FromLocal(node, std::move(slots[0]));
      default:
        return RunVjp(node, std::move(slots));
    }
  }

  absl::Status ToLocal(const Node& node, Sums sums) {
    DT_ASSIGN_OR_RETURN(DTensor g, Combine(std::move(sums), node.out_specs[0]));
    const Spec& source = *node.in_specs[0];
    RankContext& context = RankContext::Current();
    DT_ASSIGN_OR_RETURN(SpecRef spec,
                        context.specs().Intern(source.mesh(), node.extra->grad_placements,
                                               source.shape(), source.dtype()));
    if (spec->local_shape() != g.shape()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the local gradient has shape ", ToString(g.shape()), ", but grad_placements ",
          ToString(node.extra->grad_placements), " give ", ToString(spec->local_shape())));
    }
    return Contribute(node.edges[0], internal::MakeDTensor(context, spec, g.local()), false);
  }

  absl::Status FromLocal(const Node& node, Sums sums) {
    const Spec& out = *node.out_specs[0];
    RankContext& context = RankContext::Current();
    DT_ASSIGN_OR_RETURN(
        SpecRef target,
        context.specs().Intern(out.mesh(), node.extra->grad_placements, out.shape(), out.dtype()));
    DT_ASSIGN_OR_RETURN(DTensor g, Combine(std::move(sums), target));
    return Contribute(node.edges[0], internal::MakeDTensor(context, node.in_specs[0], g.local()),
                      false);
  }

  absl::Status RunVjp(Node& node, Slots slots) {
    Values grads(slots.size());
    for (size_t o = 0; o < slots.size(); ++o) {
      if (slots[o].empty()) continue;
      DT_ASSIGN_OR_RETURN(SpecRef target, internal::GradientSpec(*node.out_specs[o]));
      DT_ASSIGN_OR_RETURN(grads[o], Combine(std::move(slots[o]), target));
    }
    Values results;
    DT_RETURN_IF_ERROR(CheckVersions(node));
    if (node.kind == Node::Kind::kCustom) {
      results = node.extra->custom(grads);
      results.resize(node.edges.size());
    } else {
      if (node.op->vjp() == nullptr) {
        return absl::UnimplementedError("this op has no gradient; give it one with .Vjp");
      }
      VjpCall call = node.MakeCall(std::move(grads));
      node.op->vjp()(call);
      results = std::move(call.results_);
    }
    node.released = true;
    node.saved_in.clear();
    node.saved_out.clear();
    if (node.kind == Node::Kind::kCustom) node.extra->custom = nullptr;
    for (size_t i = 0; i < node.edges.size(); ++i) {
      const bool owned = internal::OnlyHere(results[i]);
      DT_RETURN_IF_ERROR(Contribute(node.edges[i], std::move(results[i]), owned));
    }
    return absl::OkStatus();
  }

  static absl::Status CheckVersions(const Node& node) {
    const auto check = [&](const auto& saved, const auto& name) -> absl::Status {
      for (size_t i = 0; i < saved.size(); ++i) {
        if (!saved[i].tensor.defined()) continue;
        const uint64_t now = saved[i].tensor.local().buffer().version();
        if (now == saved[i].version) continue;
        return absl::FailedPreconditionError(absl::StrCat(
            "saved tensor ", name(static_cast<int>(i)), " (", saved[i].tensor.spec().ToString(),
            ") was changed in place after the forward: version ", now, ", saved at ",
            saved[i].version, "; use the op that returns a new tensor, or clone() first"));
      }
      return absl::OkStatus();
    };
    DT_RETURN_IF_ERROR(check(node.saved_in, [&](int i) {
      return node.op != nullptr ? node.op->InputName(i) : absl::StrCat("#", i);
    }));
    return check(node.saved_out, [&](int i) { return node.op->output_names()[i]; });
  }

  // All ranks finish the leaves in the same order: that of their creation.
  absl::Status FinishLeaves() {
    if (outer_ != nullptr) {  // a backward inside of one (Recompute): the outer one finishes
      for (NodeRef& leaf : leaves_) outer_->AddLeaf(leaf);
      return absl::OkStatus();
    }
    if (State().no_grad_sync) return absl::OkStatus();
    std::sort(leaves_.begin(), leaves_.end(),
              [](const NodeRef& a, const NodeRef& b) { return a->seq < b->seq; });
    for (const NodeRef& leaf : leaves_) DT_RETURN_IF_ERROR(internal::SyncLeaf(leaf.get()));
    return absl::OkStatus();
  }

  BackwardPass* outer_ = nullptr;
  absl::flat_hash_map<Node*, Slots> pending_;
  std::priority_queue<Ready> ready_;
  std::vector<NodeRef> leaves_;
};

namespace {

absl::Status CheckRoot(const DTensor& t) {
  if (!t.requires_grad()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "[backward] ", t.spec().ToString(),
        " has no gradient history: no input required grad, or it was made under NoGrad"));
  }
  return absl::OkStatus();
}

absl::Status BackwardFrom(const DTensor& root, DTensor gradient) {
  absl::Status status = BackwardPass().Run(root, std::move(gradient));
  if (status.ok() || absl::StartsWith(status.message(), "[backward")) return status;
  return absl::Status(status.code(), absl::StrCat("[backward] ", status.message()));
}

}  // namespace

void DTensor::Backward() const {
  const DTensor& here = internal::Here(*this, "backward");
  ThrowIfError(CheckRoot(here));
  if (numel() != 1) {
    ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
        "[backward] needs a tensor of one element, got shape ", dtensor::ToString(shape()),
        ": reduce it (sum, mean) or pass a gradient of this shape")));
  }
  SpecRef spec = ValueOrThrow(internal::GradientSpec(this->spec()));
  Tensor one;
  if (spec->in_mesh()) {
    one = ValueOrThrow(Tensor::Empty(spec->local_shape(), dtype(), local().device()));
    Fill(one, 1);
  }
  ThrowIfError(
      BackwardFrom(here, internal::MakeDTensor(RankContext::Current(), spec, std::move(one))));
}

void DTensor::Backward(const DTensor& gradient) const {
  const DTensor& here = internal::Here(*this, "backward");
  ThrowIfError(CheckRoot(here));
  if (!gradient.defined() || gradient.shape() != shape() || gradient.dtype() != dtype() ||
      !(gradient.mesh() == mesh())) {
    ThrowIfError(absl::InvalidArgumentError(
        absl::StrCat("[backward] the gradient must be like the tensor: ", spec().ToString(),
                     ", got ", gradient.defined() ? gradient.spec().ToString() : "null")));
  }
  ThrowIfError(BackwardFrom(here, internal::Here(gradient, "backward")));
}

Values CustomFunction(absl::string_view name, absl::Span<const DTensor> inputs,
                      absl::FunctionRef<Values()> forward, CustomBackward backward,
                      absl::Span<const DTensor> saves) {
  bool record = false;
  for (const DTensor& t : inputs) record |= t.defined() && t.requires_grad();
  record &= GradEnabled();
  Values outputs;
  {
    NoGrad no_grad;
    const ScopedOp scope(RankContext::Current().trace(), name);
    outputs = forward();
  }
  if (!record) return outputs;
  NodeRef node = internal::NewNode(Node::Kind::kCustom);
  node->extra = std::make_unique<Node::Extra>();
  node->extra->name = std::string(name);
  node->extra->custom = std::move(backward);
  for (const DTensor& t : inputs) {
    node->edges.push_back(t.defined() ? internal::EdgeOf(internal::Here(t, name)) : Edge());
    node->in_specs.push_back(t.defined() ? t.spec_ref() : SpecRef());
  }
  for (const DTensor& t : saves) {
    node->saved_in.push_back({t.Detach(), t.local().buffer().version()});
  }
  for (size_t o = 0; o < outputs.size(); ++o) {
    // An output that is an input, or shared, gets a handle of its own to carry the history.
    if (outputs[o].impl()->refs > 1 || outputs[o].impl()->node) outputs[o] = outputs[o].Detach();
    node->out_specs.push_back(outputs[o].spec_ref());
    if (IsFloating(outputs[o].dtype())) {
      internal::SetHistory(outputs[o], node, static_cast<int>(o));
    }
  }
  return outputs;
}

}  // namespace dtensor

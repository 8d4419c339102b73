#include "dtensor/autograd.h"

#include <algorithm>
#include <queue>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "dtensor/errors.h"
#include "dtensor/impl.h"
#include "dtensor/recompute.h"
#include "dtensor/redistribute.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/trace.h"

namespace dtensor {
namespace internal {

namespace {
// Nodes that die, one by one: recursion would be as deep as the tape is long. A plain pointer,
// which is there for as long as the thread is: tapes may end after thread_local objects did.
thread_local constinit std::vector<Node*>* dying = nullptr;
}  // namespace

void DeleteNode(Node* node) {
  if (dying != nullptr) return dying->push_back(node);
  std::vector<Node*> queue;
  dying = &queue;
  Pool<Node>::Delete(node);
  while (!queue.empty()) {
    Node* next = queue.back();
    queue.pop_back();
    Pool<Node>::Delete(next);
  }
  dying = nullptr;
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
  EngineState& state = State();
  Node* node = Pool<Node>::New();
  node->InsertAfter(&state.nodes);
  node->kind = kind;
  node->seq = state.next_seq++;
  node->module = RankContext::Current().trace().module;
  return NodeRef(node);
}

void SetHistory(const DTensor& t, const NodeRef& node, int slot) {
  DTensorImpl& impl = *t.impl();
  impl.node = node;
  impl.slot = slot;
  impl.requires_grad = true;
}

void MarkPending(absl::Span<const uint32_t> inputs_pend, Node* node) {
  for (size_t i = 0; i < inputs_pend.size(); ++i) {
    if (node->edges[i].node) node->edges[i].node->pends |= inputs_pend[i];
  }
}

void KeepAttrs(absl::Span<const Attr> attrs, Node* node) {
  int64_t total = 0;
  for (const Attr& a : attrs) {
    node->attrs.push_back(a);
    total += a.n;
  }
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

}  // namespace internal

using internal::Node;
using internal::NodeRef;
using internal::State;

VjpCall::VjpCall(const Node& node, Values grads)
    : node_(node), grads_(std::move(grads)), results_(node.edges.size()) {}

namespace {

// The gradient function of an op asks for what its declaration does not give it.
[[noreturn]] void ThrowVjp(const Node& node, absl::string_view what, int i) {
  Throw(absl::InvalidArgumentError(
      absl::StrCat("the gradient function of ", node.Name(), " ", what, " ", i)));
}

const DTensor& Read(const Node& node, absl::Span<const internal::Saved> saved,
                    absl::string_view what, int i) {
  if (i < 0 || i >= static_cast<int>(saved.size()) || !saved[i].tensor.defined()) {
    const bool unwanted = what == "input" && i >= 0 && i < static_cast<int>(saved.size()) &&
                          node.op != nullptr && node.op->Saves(i, ~uint32_t{0});
    ThrowVjp(node,
             absl::StrCat(unwanted ? "reads what its Vjp saves for gradients that are not wanted "
                                     "here (ask needs() first): "
                                   : "reads what its Vjp does not save: ",
                          what),
             i);
  }
  return saved[i].tensor;
}

}  // namespace

const DTensor& VjpCall::in(int i) const { return dtensor::Read(node_, node_.saved_in, "input", i); }
const DTensor& VjpCall::out(int i) const {
  return dtensor::Read(node_, node_.saved_out, "output", i);
}
const Spec& VjpCall::in_spec(int i) const {
  if (i < 0 || i >= static_cast<int>(node_.in_specs.size())) ThrowVjp(node_, "asks for input", i);
  return *node_.in_specs[i];
}
int VjpCall::num_inputs() const { return static_cast<int>(node_.edges.size()); }
bool VjpCall::needs(int input) const {
  if (input < 0 || input >= num_inputs()) ThrowVjp(node_, "asks for input", input);
  return static_cast<bool>(node_.edges[input].node);
}
void VjpCall::ThrowNoOutput(int output) const {
  ThrowVjp(node_, "asks for the gradient of output", output);
}
absl::Span<const Attr> VjpCall::attrs() const { return node_.attrs; }
void VjpCall::set(int input, DTensor gradient) {
  if (input < 0 || input >= num_inputs()) ThrowVjp(node_, "sets the gradient of input", input);
  results_[input] = std::move(gradient);
}
const Attr& VjpCall::Read(absl::string_view attr) const {
  const auto& names = node_.op->attr_names();
  const auto it = std::find(names.begin(), names.end(), attr);
  DT_CHECK_MSG(it != names.end(), absl::StrCat(node_.Name(), " has no attribute ", attr));
  return node_.attrs[it - names.begin()];
}

Values CustomFunction(absl::string_view name, absl::Span<const DTensor> inputs,
                      absl::FunctionRef<Values()> forward, CustomBackward backward,
                      absl::Span<const DTensor> saves, bool passes_sums) {
  const auto require = [&](const DTensor& t, const char* what) {
    if (!t.defined()) {
      Throw(InFunction(name, absl::InvalidArgumentError(absl::StrCat(what, " is null"))));
    }
    const absl::Status own = CheckOwn(t);
    if (!own.ok()) Throw(InFunction(name, own));
  };
  if (!backward) {
    Throw(InFunction(name, absl::InvalidArgumentError(
                               "the backward is null; one that gives no gradients returns {}")));
  }
  bool record = false;
  for (const DTensor& t : inputs) {
    if (!t.defined()) continue;
    require(t, "an input");
    record |= t.requires_grad();
  }
  record &= GradEnabled();
  for (const DTensor& t : inputs) {
    if (!GradEnabled() || !t.defined()) continue;
    const absl::Status fresh = internal::CheckFresh(*internal::Here(t, name).impl());
    if (!fresh.ok()) Throw(InFunction(name, fresh));
  }
  Values outputs;
  {
    NoGrad no_grad;
    const ScopedOp scope(RankContext::Current().trace(), name);
    try {
      outputs = forward();
    } catch (...) {  // what this rank alone met its peers learn, also if the program catches it
      const auto on = std::find_if(inputs.begin(), inputs.end(), [](const DTensor& t) {
        return t.defined() && !t.mesh().is_self();
      });
      (void)TellPeers(on == inputs.end() ? DeviceMesh() : on->mesh(), CurrentException());
      throw;
    }
  }
  for (const DTensor& t : outputs) require(t, "an output");
  for (const DTensor& t : saves) require(t, "a saved tensor");
  if (!record) return outputs;
  NodeRef node = internal::NewNode(Node::Kind::kCustom);
  node->extra = std::make_unique<Node::Extra>();
  node->extra->name = std::string(name);
  node->extra->custom = std::move(backward);
  node->extra->passes_sums = passes_sums;
  for (const DTensor& t : inputs) {
    node->edges.push_back(t.defined() ? internal::EdgeOf(internal::Here(t, name))
                                      : internal::Edge());
    node->in_specs.push_back(t.defined() ? t.spec_ref() : SpecRef());
  }
  for (const DTensor& t : saves) {
    node->saved_in.push_back({t.Detach(), t.local().buffer().version()});
  }
  for (size_t o = 0; o < outputs.size(); ++o) {
    // An output that is an input, or shared, gets a handle of its own to carry the history.
    if (outputs[o].impl()->refs > 1 || outputs[o].impl()->node) {
      outputs[o] = outputs[o].Detach();
      // Of an input it is a view as others are: what changes that in place makes it stale.
      const Buffer& memory = outputs[o].local().buffer();
      for (const DTensor& t : inputs) {
        if (t.defined() && memory.SharesWith(t.local().buffer())) {
          outputs[o].impl()->detached = false;
        }
      }
    }
    node->out_specs.push_back(outputs[o].spec_ref());
    if (IsFloating(outputs[o].dtype())) {
      internal::SetHistory(outputs[o], node, static_cast<int>(o));
    }
  }
  if (internal::State().recompute != nullptr) internal::RecomputeRegion::Note(node.get());
  return outputs;
}

}  // namespace dtensor

#include "dtensor/dtensor.h"

#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "dtensor/gradients.h"
#include "dtensor/impl.h"
#include "dtensor/memo.h"
#include "dtensor/memory.h"
#include "dtensor/redistribute.h"
#include "dtensor/rehearsal.h"
#include "tensor/status.h"

namespace dtensor {
namespace internal {

void Destroy(DTensorImpl* impl) { Pool<DTensorImpl>::Delete(impl); }
int64_t& RefCount(DTensorImpl* impl) { return impl->refs; }

DTensor MakeDTensor(RankContext& context, SpecRef spec, Tensor local) {
  DTensorImpl* impl = Pool<DTensorImpl>::New();
  impl->context_id = context.id();
  impl->spec = std::move(spec);
  impl->local = std::move(local);
  return DTensor::Adopt(impl);
}

namespace {

absl::Status NotOurs(const DTensorImpl& t) {
  return absl::InvalidArgumentError(
      absl::StrCat("the tensor ", t.spec->ToString(),
                   " belongs to another rank or world: tensors stay in the RunSpmd and on the rank "
                   "that made them"));
}

}  // namespace

absl::Status Settle(DTensorImpl& t) {
  if (t.context_id != 0) return absl::OkStatus();
  Rare& rare = *t.rare;
  if (rare.context_id != RankContext::Current().id()) return NotOurs(t);
  if (!rare.failed.ok()) return rare.failed;
  const std::unique_ptr<PendingMove> pending = std::move(rare.pending);
  absl::StatusOr<Tensor> moved = pending->Finish();
  if (!moved.ok()) return rare.failed = moved.status();
  t.local = *std::move(moved);
  t.context_id = rare.context_id;
  return absl::OkStatus();
}

absl::Status CheckOwner(const DTensor& t) {
  DTensorImpl& impl = *t.impl();
  if (impl.context_id == RankContext::Current().id()) return absl::OkStatus();
  return impl.context_id == 0 ? Settle(impl) : NotOurs(impl);
}

absl::Status CheckWritable(DTensorImpl& t) {
  DropMemos(t);
  RankContext& context = RankContext::Current();
  if (context.lends()) DT_RETURN_IF_ERROR(context.TakeBack(t.local.buffer()));
  if (t.lost_view) {
    return absl::InvalidArgumentError(
        "this was to be a view of a tensor that first had to be redistributed, so it is a copy and "
        "the other would not change; redistribute the base first, or clone() this");
  }
  for (int d = 0; d < t.local.ndim(); ++d) {
    if (t.local.strides()[d] == 0 && t.local.size(d) > 1) {
      return absl::InvalidArgumentError(
          "an expanded tensor cannot be changed in place: elements share memory; clone() it");
    }
  }
  return absl::OkStatus();
}

EngineState::EngineState() : memory_report([] { return DescribeMemory().ToString(); }) {
  const char* env = std::getenv("DTENSOR_STRICT");
  strict = env != nullptr && std::string(env) == "1";
}
EngineState& State() { return RankContext::Current().Slot<EngineState>(); }

Rare& RareOf(DTensorImpl& t) {
  if (!t.rare) t.rare = std::make_unique<Rare>();
  return *t.rare;
}

namespace {

absl::Status RefuseIfStrict(const Spec& from, const Spec& to) {
  if (!State().strict || !NeedsCommunication(from, to)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "strict mode: needs ", DescribeRedistribution(from, to), " to bring ", from.ToString(),
      " to ", ToString(to.placements()), "; redistribute explicitly or leave StrictRedistribute"));
}

// The data of RedistributeRecorded.
absl::StatusOr<DTensor> Moved(const DTensorImpl& source, const SpecRef& target,
                              RedistributeKind kind) {
  RankContext& context = RankContext::Current();
  EngineState& state = State();
  if (state.running == EngineState::Running::kPricing) {
    state.priced_bytes += RedistributeCost(*source.spec, *target);
    return MakeDTensor(context, target, Tensor());
  }
  if (kind == RedistributeKind::kAsync && state.rehearsal == nullptr) {
    const ScopedCallTag tag(&context.call_tag(), *source.spec, *target);
    DT_ASSIGN_OR_RETURN(std::unique_ptr<PendingMove> pending,
                        StartRedistribution(source.local, *source.spec, *target));
    if (!pending->Done()) {
      DTensor result = MakeDTensor(context, target, Tensor());
      Rare& rare = RareOf(*result.impl());
      rare.pending = std::move(pending);
      rare.context_id = std::exchange(result.impl()->context_id, 0);
      return result;
    }
    DT_ASSIGN_OR_RETURN(Tensor local, pending->Finish());
    if (local.defined() && local.buffer().SharesWith(source.local.buffer())) {
      DT_ASSIGN_OR_RETURN(local, local.Clone());
    }
    return MakeDTensor(context, target, std::move(local));
  }
  TraceState& trace = context.trace();
  const bool was_implicit = std::exchange(trace.implicit, kind == RedistributeKind::kImplicit);
  const ScopedCallTag tag(&context.call_tag(), *source.spec, *target);
  absl::StatusOr<Tensor> moved =
      state.rehearsal == nullptr
          ? RedistributeLocal(source.local, *source.spec, *target)
          : RedistributeLocal(RehearsedLocal(source.local), *source.spec, *target);
  trace.implicit = was_implicit;
  DT_RETURN_IF_ERROR(moved.status());
  // A result that the caller may write to has its own memory.
  if (kind == RedistributeKind::kExplicit && moved->defined() &&
      moved->buffer().SharesWith(source.local.buffer())) {
    moved = moved->Clone();
    DT_RETURN_IF_ERROR(moved.status());
  }
  return MakeDTensor(context, target, *std::move(moved));
}

}  // namespace

absl::StatusOr<DTensor> RedistributeRecorded(const DTensor& t, const SpecRef& target,
                                             RedistributeKind kind) {
  DTensorImpl& source = *t.impl();
  DT_RETURN_IF_ERROR(CheckOwner(t));
  if (source.spec == target) return t;
  EngineState& state = State();
  const bool record = state.grad_enabled && source.requires_grad;
  const bool memoise = kind == RedistributeKind::kShared || kind == RedistributeKind::kImplicit;
  if (kind == RedistributeKind::kImplicit) {  // whether or not a memo would serve
    DT_RETURN_IF_ERROR(RefuseIfStrict(*source.spec, *target));
  }
  if (memoise) {
    if (DTensor memo = FindMemo(source, target, record); memo.defined()) return memo;
  }
  DT_ASSIGN_OR_RETURN(DTensor result, Moved(source, target, kind));
  KeepMemoryStrides(source, result.impl());
  if (record) {
    NodeRef node = NewNode(Node::Kind::kRedistribute);
    node->edges.push_back(EdgeOf(t));
    node->in_specs.push_back(source.spec);
    node->out_specs.push_back(target);
    SetHistory(result, node, 0);
  }
  if (memoise && state.running != EngineState::Running::kPricing) KeepMemo(source, result, record);
  return result;
}

}  // namespace internal

using internal::DTensorImpl;
using internal::Node;
using internal::NodeRef;
using internal::State;

namespace {

const DTensorImpl& Deref(const DTensor& t, const char* what) {
  if (!t.defined()) {
    Throw(absl::InvalidArgumentError(absl::StrCat("[", what, "] the tensor is null")));
  }
  return *t.impl();
}

Placements AllReplicate(const DeviceMesh& mesh) { return Placements(mesh.ndim()); }

}  // namespace

const Spec& DTensor::spec() const { return *Deref(*this, "spec").spec; }
const SpecRef& DTensor::spec_ref() const { return Deref(*this, "spec").spec; }
const Tensor& DTensor::local() const {
  const DTensorImpl& impl = Deref(*this, "local");
  if (impl.context_id == 0) ThrowIfError(internal::Settle(*impl_));
  RankContext& context = RankContext::Current();
  if (context.lends()) ThrowIfError(context.TakeBack(impl.local.buffer()));
  return impl.local;
}

int64_t DTensor::size(int dim) const { return shape()[ValueOrThrow(NormalizeDim(dim, ndim()))]; }

namespace {
DTensor RedistributeTo(const DTensor& t, const DeviceMesh& mesh,
                       absl::Span<const Placement> placements, internal::RedistributeKind kind) {
  const auto named = [](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat("[redistribute] ", status.message()));
  };
  const Spec& s = t.spec();
  const ScopedOp scope(RankContext::Current().trace(), "redistribute");
  absl::StatusOr<SpecRef> target =
      RankContext::Current().specs().Intern(mesh, placements, s.shape(), s.dtype());
  if (!target.ok()) Throw(named(target.status()));
  absl::StatusOr<DTensor> result = internal::RedistributeRecorded(t, *target, kind);
  if (!result.ok()) Throw(named(result.status()));
  return *std::move(result);
}
}  // namespace

DTensor DTensor::Redistribute(absl::Span<const Placement> placements) const {
  return RedistributeTo(*this, mesh(), placements, internal::RedistributeKind::kExplicit);
}
DTensor DTensor::Redistribute(const DeviceMesh& mesh,
                              absl::Span<const Placement> placements) const {
  return RedistributeTo(*this, mesh, placements, internal::RedistributeKind::kExplicit);
}
DTensor DTensor::RedistributeAsync(absl::Span<const Placement> placements) const {
  return RedistributeTo(*this, mesh(), placements, internal::RedistributeKind::kAsync);
}
DTensor DTensor::RedistributeAsync(const DeviceMesh& mesh,
                                   absl::Span<const Placement> placements) const {
  return RedistributeTo(*this, mesh, placements, internal::RedistributeKind::kAsync);
}
DTensor DTensor::RedistributeShared(absl::Span<const Placement> placements) const {
  return RedistributeTo(*this, mesh(), placements, internal::RedistributeKind::kShared);
}

DTensor DTensor::ToLocal(absl::Span<const Placement> grad_placements) const {
  const DTensorImpl& source = Deref(*this, "to_local");
  ThrowIfError(internal::CheckOwner(*this));
  const Spec& s = *source.spec;
  RankContext& context = RankContext::Current();
  if (!s.in_mesh()) {
    Throw(absl::FailedPreconditionError(
        absl::StrCat("[to_local] rank ", context.rank(), " is not in mesh ", s.mesh().ToString())));
  }
  SpecRef local_spec =
      ValueOrThrow(context.specs().Intern(DeviceMesh::Self(), {}, s.local_shape(), s.dtype()));
  DTensor result = internal::MakeDTensor(context, local_spec, source.local);
  result.impl()->is_view = true;
  result.impl()->born_version = source.local.buffer().version();
  if (State().grad_enabled && source.requires_grad) {
    NodeRef node = internal::NewNode(Node::Kind::kToLocal);
    node->edges.push_back(internal::EdgeOf(*this));
    node->in_specs.push_back(source.spec);
    node->out_specs.push_back(local_spec);
    node->extra = std::make_unique<Node::Extra>();
    Placements& grads = node->extra->grad_placements;
    if (grad_placements.empty()) {
      grads.assign(s.placements().begin(), s.placements().end());
      for (Placement& p : grads) {
        if (p.is_partial()) p = Replicate();
      }
    } else {
      grads.assign(grad_placements.begin(), grad_placements.end());
    }
    ValueOrThrow(context.specs().Intern(s.mesh(), grads, s.shape(), s.dtype()));
    internal::SetHistory(result, node, 0);
  }
  return result;
}

DTensor DTensor::FullTensor() const { return Redistribute(AllReplicate(mesh())).ToLocal(); }

Tensor DTensor::FullLocal() const {
  NoGrad no_grad;
  const Spec& s = spec();
  if (!s.in_mesh() || local().device() == DeviceType::kMeta) {
    Throw(absl::FailedPreconditionError(absl::StrCat(
        "[values] ",
        s.in_mesh() ? "a tensor on a meta mesh or in a rehearsal (Explain) has no values: "
                    : absl::StrCat("rank ", RankContext::Current().rank(), " is not in the mesh: "),
        s.ToString())));
  }
  return Redistribute(AllReplicate(mesh())).local();
}

double DTensor::Item() const {
  if (numel() != 1) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat("[item] needs one element, got shape ", dtensor::ToString(shape()))));
  }
  return FullLocal().ToVector<double>()[0];
}

std::string DTensor::ToString() const {
  if (!defined()) return "null";
  std::string text = spec().ToString();
  if (spec().is_replicated() && local().defined()) absl::StrAppend(&text, " ", local().ToString());
  return text;
}

bool DTensor::requires_grad() const { return Deref(*this, "requires_grad").requires_grad; }
bool DTensor::is_leaf() const {
  const NodeRef& node = Deref(*this, "is_leaf").node;
  return !node || node->kind == Node::Kind::kLeaf;
}

DTensor& DTensor::RequiresGrad(bool value) {
  Deref(*this, "requires_grad");
  if (!is_leaf()) {
    Throw(absl::InvalidArgumentError(
        "[requires_grad] only a leaf can be told to record; use Detach() first"));
  }
  if (value && !IsFloating(dtype())) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat("[requires_grad] only floating tensors have gradients, this one is ",
                     absl::string_view(Name(dtype()).data(), Name(dtype()).size()))));
  }
  impl_->requires_grad = value;
  if (value && !impl_->node) {
    impl_->node = internal::NewNode(Node::Kind::kLeaf);
    impl_->node->out_specs.push_back(impl_->spec);
    impl_->node->extra = std::make_unique<Node::Extra>();
  }
  return *this;
}

DTensor DTensor::grad() const {
  const NodeRef& node = Deref(*this, "grad").node;
  if (!node || node->kind != Node::Kind::kLeaf) return {};
  ThrowIfError(internal::SyncLeaves({node}, {}));
  return node->extra->leaf.grad;
}

void SyncGradients(absl::Span<const DTensor> leaves) {
  std::vector<NodeRef> nodes;
  for (const DTensor& t : leaves) {
    if (!t.defined()) continue;
    const NodeRef& node = t.impl()->node;
    if (node && node->kind == Node::Kind::kLeaf) nodes.push_back(node);
  }
  ThrowIfError(internal::SyncLeaves(nodes, {}));
}

void DTensor::SetGrad(DTensor grad) {
  const NodeRef& node = Deref(*this, "set_grad").node;
  if (!node || node->kind != Node::Kind::kLeaf) {
    Throw(absl::InvalidArgumentError("[set_grad] only a leaf that requires grad has a gradient"));
  }
  if (grad.defined() && grad.shape() != shape()) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat("[set_grad] gradient ", dtensor::ToString(grad.shape()),
                     " of a tensor of shape ", dtensor::ToString(shape()))));
  }
  DTensor placed = std::move(grad);
  if (placed.defined()) {
    if (placed.dtype() != dtype() || !(placed.mesh() == mesh())) {
      Throw(absl::InvalidArgumentError(absl::StrCat("[set_grad] the gradient is ",
                                                    placed.spec().ToString(), ", the tensor ",
                                                    spec().ToString())));
    }
    NoGrad no_grad;
    const SpecRef target = ValueOrThrow(internal::GradientSpec(spec()));
    placed = placed.Redistribute(target->placements());
  }
  node->extra->leaf.pending.clear();
  node->extra->leaf.grad = std::move(placed);
}

void DTensor::ZeroGrad() {
  const NodeRef& node = Deref(*this, "zero_grad").node;
  if (!node || node->kind != Node::Kind::kLeaf) return;
  node->extra->leaf = {};
}

DTensor DTensor::Detach() const {
  const DTensorImpl& source = Deref(*this, "detach");
  if (source.context_id == 0) ThrowIfError(internal::Settle(*impl_));
  DTensor result = internal::MakeDTensor(RankContext::Current(), source.spec, source.local);
  result.impl()->is_view = true;
  result.impl()->detached = true;
  result.impl()->born_version = source.local.buffer().version();
  result.impl()->lost_view = source.lost_view;
  internal::KeepMemoryStrides(source, result.impl());
  return result;
}

NoGrad::NoGrad() : previous_(std::exchange(State().grad_enabled, false)) {}
NoGrad::~NoGrad() { State().grad_enabled = previous_; }
EnableGrad::EnableGrad() : previous_(std::exchange(State().grad_enabled, true)) {}
EnableGrad::~EnableGrad() { State().grad_enabled = previous_; }
NoGradSync::NoGradSync(std::vector<std::string> mesh_dims)
    : all_(State().hold.all), names_(State().hold.names.size()) {
  internal::GradSyncHold& hold = State().hold;
  hold.all |= mesh_dims.empty();
  hold.names.insert(hold.names.end(), mesh_dims.begin(), mesh_dims.end());
}
NoGradSync::~NoGradSync() {
  State().hold.all = all_;
  State().hold.names.resize(names_);
}
GradientBuckets::GradientBuckets(int64_t bytes)
    : previous_(std::exchange(State().bucket_bytes, bytes)) {}
GradientBuckets::~GradientBuckets() { State().bucket_bytes = previous_; }
StrictRedistribute::StrictRedistribute(bool strict)
    : previous_(std::exchange(State().strict, strict)) {}
StrictRedistribute::~StrictRedistribute() { State().strict = previous_; }
ImplicitReplication::ImplicitReplication()
    : previous_(std::exchange(State().implicit_replication, true)) {}
ImplicitReplication::~ImplicitReplication() { State().implicit_replication = previous_; }

bool GradEnabled() { return State().grad_enabled; }

}  // namespace dtensor

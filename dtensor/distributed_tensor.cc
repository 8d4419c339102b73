#include "dtensor/distributed_tensor.h"

#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "dtensor/errors.h"
#include "dtensor/gradients.h"
#include "dtensor/impl.h"
#include "dtensor/memo.h"
#include "dtensor/memory.h"
#include "dtensor/recompute.h"
#include "dtensor/redistribute.h"
#include "dtensor/rehearsal.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace internal {

void Destroy(DTensorImpl* impl) { Pool<DTensorImpl>::Delete(impl); }
void ThrowNull(const char* function) {
  Throw(InFunction(function, absl::InvalidArgumentError("the tensor is null")));
}
void ThrowBadDim(int dim, int ndim) { Throw(NormalizeDim(dim, ndim).status()); }
void ThrowNoInt64(uint64_t number) {
  Throw(absl::InvalidArgumentError(
      absl::StrCat("the number ", number,
                   " is above 2^63 - 1, the largest int64; pass a double if it may round")));
}

DTensor MakeDTensor(RankContext& context, SpecRef spec, Tensor local) {
  DTensorImpl* impl = Pool<DTensorImpl>::New();
  impl->context_id = context.id();
  impl->spec = std::move(spec);
  impl->local = std::move(local);
  if (context.rehearses()) impl->local = RehearsedLocal(impl->local);
  return DTensor::Adopt(impl);
}

absl::Status NotOurs(const DTensorImpl& t) {
  if (RankContext::IsOfRehearsal(OriginOf(t))) {
    return absl::InvalidArgumentError(
        absl::StrCat("the tensor ", t.spec->ToString(),
                     " was made in a rehearsal (Explain) that is over, so it has no values; what a "
                     "program keeps between calls it must not make there (a module: Cached)"));
  }
  return RankLocal(absl::InvalidArgumentError(
      absl::StrCat("the tensor ", t.spec->ToString(),
                   " belongs to another rank or world: tensors stay in the RunSpmd and on the rank "
                   "that made them (pass a Tensor instead)")));
}

absl::Status Settle(DTensorImpl& t) {
  if (t.context_id != 0) return absl::OkStatus();
  Rare& rare = *t.rare;
  if (!rare.failed.ok()) return rare.failed;
  if (rare.copy_of) {
    if (rare.copy_of.version() == rare.copied_version) return absl::OkStatus();
    return absl::FailedPreconditionError(
        "this was to be a view of a tensor that first had to be redistributed, so it is a copy, "
        "and "
        "that tensor was changed in place since; make the view again, or redistribute the tensor "
        "before it is viewed");
  }
  const std::unique_ptr<PendingMove> pending = std::move(rare.pending);
  absl::StatusOr<Tensor> moved = pending->Finish();
  if (!moved.ok()) return rare.failed = TellPeers(t.spec->mesh(), moved.status());
  t.local = *std::move(moved);
  t.context_id = rare.context_id;
  return absl::OkStatus();
}

absl::Status CheckOwner(const DTensor& t) {
  DTensorImpl& impl = *t.impl();
  if (impl.context_id == RankContext::Current().id()) return absl::OkStatus();
  return OriginOf(impl) == RankContext::Current().id() ? Settle(impl) : NotOurs(impl);
}

absl::StatusOr<const DTensor*> Entered(const DTensor& t) {
  if (t.impl()->context_id == RankContext::Current().id()) return &t;
  Rehearsal* rehearsal = Rehearsal::Current();
  if (rehearsal != nullptr) return rehearsal->Enter(t);
  DT_RETURN_IF_ERROR(CheckOwner(t));
  return &t;
}

const DTensor& HereSlowly(const DTensor& t, absl::string_view function) {
  absl::StatusOr<const DTensor*> here =
      t.defined() ? Entered(t) : absl::InvalidArgumentError("the tensor is null");
  if (!here.ok()) {
    const absl::Status named = InFunction(function, here.status());
    RankContext& context = RankContext::Current();
    // Whatever mesh it is on: this rank does not do what its peers do.
    const bool has_peers = context.world_size() > 1 && !context.rehearses();
    if (IsRankLocal(named) && has_peers) context.AbortAll(named);
    Throw(named);
  }
  return **here;
}

absl::Status CheckFreshView(const DTensorImpl& t) {
  const Buffer& buffer = t.local.buffer();
  // Without a history of its own (a leaf begins one) a view is only stale if its base got one.
  const bool has_history = t.requires_grad && t.node->kind != Node::Kind::kLeaf;
  const bool fresh = has_history ? t.born_version == buffer.version()
                                 : t.born_version >= buffer.recorded_version();
  if (fresh) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "an input is a view of a tensor that was changed in place after the view was made; make the "
      "view again");
}

absl::Status ViewIsUnrecorded() {
  return absl::InvalidArgumentError(
      "a view made under NoGrad of a tensor that requires grad cannot be changed in place while "
      "recording: its base would not know; write under NoGrad, too, or view a Detach()");
}

// What a place holds in the end would depend on the order of the elements that share it, and what
// becomes of a pending sum there is another one.
static absl::Status Expanded() {
  return absl::InvalidArgumentError(
      "an expanded tensor cannot be changed in place: elements share memory; clone() it");
}
[[gnu::noinline]] static absl::Status CheckApart(IntSpan shape, IntSpan strides) {
  for (size_t d = 0; d < shape.size(); ++d) {
    if (strides[d] == 0 && shape[d] > 1) return Expanded();
  }
  if (!MayRepeat(shape, strides)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "a tensor of windows that overlap cannot be changed in place: elements share memory; "
      "clone() it");
}

absl::Status CheckWritable(DTensorImpl& t) {
  DropMemos(t);
  RankContext& context = RankContext::Current();
  if (context.lends()) DT_RETURN_IF_ERROR(context.TakeBack(t.local.buffer()));
  if (t.rare && t.rare->copy_of) {
    return absl::InvalidArgumentError(
        "this was to be a view of a tensor that first had to be redistributed, so it is a copy and "
        "the other would not change; redistribute the base first, or make a new whole of it "
        "(select_scatter, slice_scatter); a clone() of this has values of its own");
  }
  // Alike on all ranks: one whose part has a single row or window of it, or nothing, refuses too.
  const Shape& shape = t.spec->shape();
  if (t.is_view && t.rare && !t.rare->memory_strides.empty()) {
    DT_RETURN_IF_ERROR(CheckApart(shape, t.rare->memory_strides));
  }
  const bool whole = t.local.ndim() == static_cast<int>(shape.size());
  bool plain = true;  // row-major, and something is there
  int64_t expected = 1;
  for (int d = t.local.ndim(); d-- > 0;) {
    const int64_t size = t.local.size(d), stride = t.local.strides()[d];
    if (stride == 0 && ((whole && shape[d] > 1) || size > 1)) return Expanded();
    plain &= size == 1 || (stride == expected && size != 0);
    expected *= size;
  }
  return plain ? absl::OkStatus() : CheckApart(t.local.shape(), t.local.strides());
}

EngineState::EngineState() : memory_report([] { return DescribeMemory().ToString(); }) {
  const char* env = std::getenv("DTENSOR_STRICT");
  const absl::string_view wish = env == nullptr ? "" : env;
  strict = wish == "1";
  if (strict || wish.empty() || wish == "0") return;
  Throw(absl::InvalidArgumentError(
      absl::StrCat("DTENSOR_STRICT is \"", wish, "\": give 1 (on) or 0 (off)")));
}

void BecomeCopyOf(const Buffer& buffer, uint64_t version, DTensorImpl* t) {
  Rare& rare = RareOf(*t);
  rare.copy_of = buffer;
  rare.copied_version = version;
  rare.context_id = OriginOf(*t);
  t->context_id = 0;
}

namespace {

absl::Status RefuseIfStrict(const Spec& from, const Spec& to) {
  if (!State().strict || !NeedsCommunication(from, to)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "strict mode: needs ", DescribeRedistribution(from, to), " to bring ", from.ToString(),
      " to ", ToString(to.placements()), "; redistribute explicitly or leave StrictRedistribute"));
}

// The data of RedistributeRecorded.
absl::StatusOr<DTensor> MoveData(const DTensorImpl& source, const SpecRef& target,
                                 RedistributeOptions options, bool implicit, bool record) {
  RankContext& context = RankContext::Current();
  EngineState& state = State();
  if (state.rehearsal != nullptr) state.rehearsal->NoteMove(*source.spec, *target);
  // Ranks of one of the meshes only learn it from nowhere else.
  const bool gradient = record && !source.spec->mesh().SameRanks(target->mesh());
  if (options.async) {
    const ScopedCallTag tag(&context.call_tag(), *source.spec, *target, gradient);
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
  const bool was_implicit = std::exchange(trace.implicit, implicit);
  const ScopedCallTag tag(&context.call_tag(), *source.spec, *target, gradient);
  absl::StatusOr<Tensor> moved = RedistributeLocal(source.local, *source.spec, *target);
  trace.implicit = was_implicit;
  DT_RETURN_IF_ERROR(moved.status());
  // A result that the caller may write to has its own memory.
  if (!options.shared && moved->defined() && moved->buffer().SharesWith(source.local.buffer())) {
    moved = moved->Clone();
    DT_RETURN_IF_ERROR(moved.status());
  }
  return MakeDTensor(context, target, *std::move(moved));
}

}  // namespace

absl::StatusOr<DTensor> RedistributeRecorded(const DTensor& given, const SpecRef& target,
                                             RedistributeOptions options, bool implicit, bool own) {
  if (options.async && options.shared) {
    return absl::InvalidArgumentError(
        "a redistribution is async or shared: who shares a result waits for it");
  }
  const DTensor* here = &given;
  if (given.impl()->context_id != RankContext::Current().id()) {
    DT_ASSIGN_OR_RETURN(here, Entered(given));
  }
  const DTensor& t = *here;
  DTensorImpl& source = *t.impl();
  EngineState& state = State();
  const bool record = state.grad_enabled && source.requires_grad;
  // An op has looked at its inputs before they are moved. A view without a history may be of what
  // has one by now.
  if (state.grad_enabled && !implicit) DT_RETURN_IF_ERROR(CheckFresh(source));
  if (source.spec == target && !options.async && !own) return t;
  if (implicit) {  // whether or not a memo would serve
    DT_RETURN_IF_ERROR(RefuseIfStrict(*source.spec, *target));
  } else if (state.recompute != nullptr) {  // ops tell what they read themselves
    RecomputeRegion::NoteMove(source);
  }
  if (options.shared) {
    if (DTensor memo = FindMemo(source, target, record); memo.defined()) return memo;
  }
  DT_ASSIGN_OR_RETURN(DTensor result, MoveData(source, target, options, implicit, record));
  KeepMemoryStrides(source, result.impl());
  if (record) {
    NodeRef node = NewNode(Node::Kind::kRedistribute);
    node->edges.push_back(EdgeOf(t));
    node->in_specs.push_back(source.spec);
    node->out_specs.push_back(target);
    SetHistory(result, node, 0);
  }
  if (options.shared) KeepMemo(source, result, record);
  return result;
}

}  // namespace internal

using internal::DTensorImpl;
using internal::Node;
using internal::NodeRef;
using internal::State;

namespace {

// For reading what never changes (the spec): of any rank's tensor.
const DTensorImpl& Deref(const DTensor& t, const char* what) {
  if (!t.defined()) internal::ThrowNull(what);
  return *t.impl();
}

// As internal::Here, but communication may be pending still.
DTensorImpl& Facts(const DTensor& t, const char* what) {
  Deref(t, what);
  if (internal::OriginOf(*t.impl()) == RankContext::Current().id()) return *t.impl();
  return *internal::Here(t, what).impl();
}

// An error of a function of `t`, named and told.
[[noreturn]] void Fail(const DTensor& t, const char* what, const absl::Status& status) {
  Throw(TellPeers(t.mesh(), InFunction(what, status)));
}

Placements AllReplicate(const DeviceMesh& mesh) { return Placements(mesh.ndim()); }

}  // namespace

const Tensor& DTensor::local() const {
  const DTensorImpl& impl = *internal::Here(*this, "local").impl();
  RankContext& context = RankContext::Current();
  if (context.lends()) {
    const absl::Status back = context.TakeBack(impl.local.buffer());
    if (!back.ok()) Fail(*this, "local", back);
  }
  return impl.local;
}

DTensor DTensor::Absent(const Spec& spec, bool requires_grad) {
  RankContext& context = RankContext::Current();
  if (spec.in_mesh()) {
    Throw(InFunction("absent", absl::InvalidArgumentError(absl::StrCat(
                                   "rank ", context.rank(), " is in the mesh: it holds a part of ",
                                   spec.ToString()))));
  }
  DTensor t = internal::MakeDTensor(context, SpecRef(&spec), Tensor());
  if (requires_grad) t.RequiresGrad();
  return t;
}
DTensor DTensor::Absent(const DeviceMesh& mesh, absl::Span<const Placement> placements,
                        IntSpan shape, DType dtype, bool requires_grad) {
  return Absent(
      *ValueOrThrow(RankContext::Current().specs().Intern(mesh, placements, shape, dtype)),
      requires_grad);
}

DTensor DTensor::Redistribute(absl::Span<const Placement> placements,
                              RedistributeOptions options) const {
  return Redistribute(mesh(), placements, options);
}
DTensor DTensor::Redistribute(const DeviceMesh& mesh, absl::Span<const Placement> placements,
                              RedistributeOptions options) const {
  const Spec& s = spec();
  TraceState& trace = RankContext::Current().trace();
  const bool is_step = !trace.op.empty();  // of a function, which keeps its results to itself
  const ScopedOp scope(trace, "redistribute");
  absl::StatusOr<SpecRef> target =
      RankContext::Current().specs().Intern(mesh, placements, s.shape(), s.dtype());
  if (!target.ok()) Fail(*this, "redistribute", target.status());
  absl::StatusOr<DTensor> result = internal::RedistributeRecorded(
      *this, *target, options, /*implicit=*/false, /*own=*/!options.shared && !is_step);
  if (!result.ok()) Fail(*this, "redistribute", result.status());
  return *std::move(result);
}

DTensor DTensor::ToLocal(absl::Span<const Placement> grad_placements) const {
  const DTensor& here = internal::Here(*this, "to_local");
  const DTensorImpl& source = *here.impl();
  const Spec& s = *source.spec;
  RankContext& context = RankContext::Current();
  if (!s.in_mesh()) {
    Fail(*this, "to_local",
         absl::FailedPreconditionError(
             absl::StrCat("rank ", context.rank(), " is not in mesh ", s.mesh().ToString())));
  }
  SpecRef local_spec = ValueOrThrow(
      context.specs().Intern(DeviceMesh::Self(s.mesh().device()), {}, s.local_shape(), s.dtype()));
  DTensor result = internal::MakeDTensor(context, local_spec, source.local);
  result.impl()->is_view = true;
  result.impl()->unrecorded = internal::StaysUnrecorded(source, State());
  result.impl()->born_version = source.local.buffer().version();
  internal::KeepCopyOf(source, result.impl());
  if (State().grad_enabled) {
    const absl::Status fresh = internal::CheckFresh(source);
    if (!fresh.ok()) Fail(*this, "to_local", fresh);
  }
  if (State().grad_enabled && source.requires_grad) {
    NodeRef node = internal::NewNode(Node::Kind::kToLocal);
    node->edges.push_back(internal::EdgeOf(here));
    node->in_specs.push_back(source.spec);
    node->out_specs.push_back(local_spec);
    node->extra = std::make_unique<Node::Extra>();
    node->extra->grad_placements.assign(grad_placements.begin(), grad_placements.end());
    if (!grad_placements.empty()) {
      const auto grads = context.specs().Intern(s.mesh(), grad_placements, s.shape(), s.dtype());
      if (!grads.ok()) Fail(*this, "to_local", Prefixed("grad_placements", grads.status()));
    }
    internal::SetHistory(result, node, 0);
  }
  return result;
}

DTensor DTensor::FullTensor() const { return Redistribute(AllReplicate(mesh())).ToLocal(); }

bool DTensor::has_values() const { return local().has_data() && spec().in_mesh(); }

Tensor internal::FullLocal(const DTensor& t) {
  NoGrad no_grad;
  const Spec& s = t.spec();
  if (!t.has_values()) {
    Throw(s.in_mesh()
              ? NoValues(absl::StrCat(
                    "[values] a tensor on a meta mesh or in a rehearsal (Explain) has no values: ",
                    s.ToString()))
              : absl::FailedPreconditionError(absl::StrCat("[values] rank ",
                                                           RankContext::Current().rank(),
                                                           " is not in the mesh: ", s.ToString())));
  }
  if (!s.is_replicated()) return t.Redistribute(AllReplicate(t.mesh())).local();
  if (State().recompute != nullptr) RecomputeRegion::NoteMove(*Here(t, "values").impl(), true);
  return t.local();
}

double DTensor::Item() const {
  if (numel() != 1) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat("[item] needs one element, got shape ", dtensor::ToString(shape()))));
  }
  return internal::FullLocal(*this).ToVector<double>()[0];
}

std::string DTensor::ToString() const {
  if (!defined()) return "null";
  std::string text = spec().ToString();
  if (spec().is_replicated() && local().defined()) absl::StrAppend(&text, " ", local().ToString());
  return text;
}

bool DTensor::requires_grad() const { return Facts(*this, "requires_grad").requires_grad; }
bool DTensor::is_leaf() const {
  const NodeRef& node = Facts(*this, "is_leaf").node;
  return !node || node->kind == Node::Kind::kLeaf;
}

DTensor& DTensor::RequiresGrad(bool value) {
  DTensorImpl& impl = Facts(*this, "requires_grad");
  if (!is_leaf()) {
    Throw(absl::InvalidArgumentError(
        "[requires_grad] only a leaf can be told to record; use Detach() first"));
  }
  if (value && !IsFloating(dtype())) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat("[requires_grad] only floating tensors have gradients, this one is ",
                     absl::string_view(Name(dtype()).data(), Name(dtype()).size()))));
  }
  if (impl.requires_grad != value) internal::DropMemos(impl);  // they record, or do not
  impl.requires_grad = value;
  if (value && !impl.node) {
    impl.node = internal::NewNode(Node::Kind::kLeaf);
    impl.node->out_specs.push_back(impl.spec);
    impl.node->extra = std::make_unique<Node::Extra>();
  }
  return *this;
}

DTensor DTensor::grad() const {
  const NodeRef& node = internal::Here(*this, "grad").impl()->node;
  if (!node || node->kind != Node::Kind::kLeaf) return {};
  const absl::Status synced = internal::SyncLeaves({node}, {});
  if (!synced.ok()) Fail(*this, "grad", synced);
  return node->extra->leaf.grad;
}

void SyncGradients(absl::Span<const DTensor> leaves) {
  std::vector<NodeRef> nodes;
  const DTensor* first = nullptr;
  for (const DTensor& t : leaves) {
    if (!t.defined()) continue;
    const NodeRef& node = internal::Here(t, "sync_gradients").impl()->node;
    if (!node || node->kind != Node::Kind::kLeaf) continue;
    nodes.push_back(node);
    if (first == nullptr) first = &t;
  }
  if (nodes.empty()) return;
  const absl::Status synced = internal::SyncLeaves(nodes, {});
  if (!synced.ok()) Fail(*first, "sync_gradients", synced);
}

void DTensor::ZeroGrad() {
  const NodeRef& node = internal::Here(*this, "zero_grad").impl()->node;
  if (!node || node->kind != Node::Kind::kLeaf) return;
  node->extra->leaf = {};
}

DTensor DTensor::Detach() const {
  const DTensorImpl& source = *internal::Here(*this, "detach").impl();
  DTensor result = internal::MakeDTensor(RankContext::Current(), source.spec, source.local);
  result.impl()->is_view = true;
  result.impl()->detached = true;
  result.impl()->born_version = source.local.buffer().version();
  internal::KeepCopyOf(source, result.impl());
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

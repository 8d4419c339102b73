#include "dtensor/dispatch.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
#include "dtensor/cache.h"
#include "dtensor/distribute.h"
#include "dtensor/impl.h"
#include "dtensor/memo.h"
#include "dtensor/recompute.h"
#include "dtensor/redistribute.h"
#include "dtensor/rehearsal.h"
#include "dtensor/sharding.h"
#include "tensor/status.h"
#include "tensor/trace.h"

namespace dtensor {

using internal::DispatchCache;
using internal::DispatchEntry;
using internal::DTensorImpl;
using internal::EngineState;
using internal::Node;
using internal::NodeRef;

namespace {

DispatchCache& Cache() { return RankContext::Current().Slot<DispatchCache>(); }

// Scratch memory of one kernel call.
class CallWorkspace final : public Workspace {
 public:
  explicit CallWorkspace(const std::shared_ptr<Allocator>& allocator) : allocator_(allocator) {}
  void* Allocate(int64_t bytes) override {
    buffers_.push_back(ValueOrThrow(Buffer::Allocate(allocator_, bytes)));
    return buffers_.back().data();
  }
  void Fail(std::string_view message) override {
    if (error_.empty()) error_ = std::string(message);
  }
  const std::string& error() const { return error_; }

 private:
  const std::shared_ptr<Allocator>& allocator_;
  std::vector<Buffer> buffers_;
  std::string error_;
};

absl::Status Explain(const OpDef& op, absl::Span<const DTensor> inputs, const absl::Status& cause) {
  std::vector<std::string> names;
  for (size_t i = 0; i < inputs.size(); ++i) names.push_back(op.InputName(static_cast<int>(i)));
  std::vector<NamedInput> named;
  for (size_t i = 0; i < inputs.size(); ++i) named.push_back({names[i], inputs[i]});
  return ExplainError(op.name(), named, cause);
}

// Slow path of input checks: says what is wrong, or applies ImplicitReplication.
class InputFixer {
 public:
  InputFixer(const OpDef& op, Inputs inputs) : op_(op) {
    for (const DTensor* t : inputs) values_.push_back(*t);
  }

  absl::StatusOr<Values> Fix() {
    const int expected = static_cast<int>(op_.input_names().size());
    if (op_.variadic() ? values_.empty() : static_cast<int>(values_.size()) != expected) {
      return Error(absl::StrCat("takes ", op_.variadic() ? "at least one" : absl::StrCat(expected),
                                " inputs, got ", values_.size()));
    }
    const uint64_t id = RankContext::Current().id();
    const DTensor* distributed = nullptr;
    for (size_t i = 0; i < values_.size(); ++i) {
      const std::string name = op_.InputName(static_cast<int>(i));
      if (!values_[i].defined()) return Error(absl::StrCat("input ", name, " is null"));
      if (values_[i].impl()->context_id == 0) {  // the first reader waits
        const absl::Status settled = internal::CheckOwner(values_[i]);
        if (!settled.ok()) {
          return Explain(
              op_, values_,
              absl::Status(settled.code(), absl::StrCat("input ", name, ": ", settled.message())));
        }
      }
      if (values_[i].impl()->context_id != id) {
        return Error(
            absl::StrCat("input ", name,
                         " belongs to another rank or world; a DTensor stays with the rank "
                         "that made it (pass a Tensor instead)"));
      }
      if (!values_[i].mesh().is_self() && distributed == nullptr) distributed = &values_[i];
    }
    if (distributed == nullptr) return values_;
    return OneMesh(*distributed);
  }

 private:
  absl::StatusOr<Values> OneMesh(const DTensor& distributed) {
    const DeviceMesh mesh = distributed.mesh();
    for (size_t i = 0; i < values_.size(); ++i) {
      if (values_[i].mesh() == mesh) continue;
      const std::string name = op_.InputName(static_cast<int>(i));
      if (!values_[i].mesh().is_self()) {
        return Error(absl::StrCat("inputs live on different meshes (", mesh.ToString(), " and ",
                                  values_[i].mesh().ToString(),
                                  "); bring them to one mesh first: ToLocal or FullTensor, then "
                                  "FromLocal or DistributeTensor"));
      }
      if (!internal::State().implicit_replication) {
        return Error(absl::StrCat("input ", name,
                                  " is a local tensor, another is distributed; use "
                                  "DistributeTensor(",
                                  name,
                                  ", mesh, {...}), or an "
                                  "ImplicitReplication scope to take local tensors as replicated"));
      }
      Placements replicate(mesh.ndim());
      values_[i] = FromLocal(values_[i], mesh, replicate);
    }
    return values_;
  }

  absl::Status Error(std::string why) const {
    return Explain(op_, values_, absl::InvalidArgumentError(why));
  }
  const OpDef& op_;
  Values values_;
};

// One call with checked inputs.
class OpRunner {
 public:
  OpRunner(RankContext& context, EngineState& state, const OpDef& op, Inputs inputs,
           absl::Span<const Attr> attrs)
      : context_(context), state_(state), op_(op), inputs_(inputs), attrs_(attrs) {}

  // What most calls are, without detours: a kernel on the inputs as they are, one new output.
  absl::Status RunStraight(const DispatchEntry& entry, DTensor* output) {
    TensorRef in[internal::kMaxStraightInputs];
    for (size_t i = 0; i < inputs_.size(); ++i) in[i] = inputs_[i]->impl()->local.ref();
    DTensorImpl* impl = internal::Pool<DTensorImpl>::New();
    *output = DTensor::Adopt(impl);
    impl->context_id = context_.id();
    impl->spec = entry.outs[0];
    const Spec& spec = *impl->spec;
    DT_RETURN_IF_ERROR(Tensor::EmptyInto(spec.local_shape(), spec.local_strides(), spec.dtype(),
                                         spec.local_bytes(), &impl->local));
    const TensorRef out = impl->local.ref();
    CallWorkspace workspace(context_.allocator());
    entry.kernel.fn({{in, inputs_.size()},
                     {&out, 1},
                     attrs_.data(),
                     {entry.offsets.data(), entry.offsets.size()},
                     nullptr,
                     &workspace});
    if (!workspace.error().empty()) return absl::InvalidArgumentError(workspace.error());
    if (!state_.grad_enabled || !AnyRequiresGrad()) return absl::OkStatus();
    return Record(entry, absl::MakeSpan(output, 1));
  }
  // Whether RunStraight may be taken; layouts can differ from call to call.
  bool GoesStraight(const DispatchEntry& entry) const {
    if (!entry.straight || state_.running != EngineState::Running::kPlain) return false;
    if (entry.kernel.layout == KernelLayout::kStrided) return true;
    return std::all_of(inputs_.begin(), inputs_.end(),
                       [](const DTensor* t) { return t->impl()->local.is_contiguous(); });
  }

  absl::Status Run(const DispatchEntry& entry, Values* outputs) {
    if (entry.decompose) return Decomposed(outputs);
    if (op_.in_place()) DT_RETURN_IF_ERROR(CheckInPlace());
    if (entry.moves) DT_RETURN_IF_ERROR(MoveInputs(entry));
    if (op_.view() != nullptr && state_.running != EngineState::Running::kPricing &&
        In(0).impl()->local.defined()) {
      DT_RETURN_IF_ERROR(RunView(entry, outputs));
    } else if (entry.runs && !state_.specs_only()) {
      DT_RETURN_IF_ERROR(RunKernel(entry, outputs));
    } else {
      DT_RETURN_IF_ERROR(SpecsOnly(entry, outputs));
    }
    if (state_.grad_enabled && AnyRequiresGrad()) return Record(entry, absl::MakeSpan(*outputs));
    return absl::OkStatus();
  }

 private:
  const DTensor& In(size_t i) const {
    return moved_.empty() || !moved_[i].defined() ? *inputs_[i] : moved_[i];
  }
  bool AnyRequiresGrad() const {
    for (const DTensor* t : inputs_) {
      if (t->impl()->requires_grad) return true;
    }
    return false;
  }

  absl::Status CheckInPlace() const {
    DTensorImpl& self = *inputs_[0]->impl();
    if (state_.grad_enabled) {
      if (self.requires_grad && self.node->kind == Node::Kind::kLeaf) {
        return absl::InvalidArgumentError(
            "a leaf that requires grad cannot be changed in place while recording; do it under "
            "NoGrad, or on a clone()");
      }
      if (self.is_view && AnyRequiresGrad()) {
        return absl::InvalidArgumentError(
            "a view cannot be changed in place while recording: its base would not know; clone() "
            "it, or use the op that returns a new tensor");
      }
    }
    return internal::CheckWritable(self);
  }

  absl::Status MoveInputs(const DispatchEntry& entry) {
    const ScopedOp scope(context_.trace(), op_.name());
    moved_.resize(inputs_.size());
    const ScopedCallTag tag(&context_.call_tag(), entry.call_text, entry.call_hash);
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (!entry.targets[i]) continue;
      absl::StatusOr<DTensor> t = internal::RedistributeRecorded(
          *inputs_[i], entry.targets[i], internal::RedistributeKind::kImplicit);
      if (!t.ok()) {
        return absl::Status(
            t.status().code(),
            absl::StrCat("input ", op_.InputName(static_cast<int>(i)), ": ", t.status().message()));
      }
      moved_[i] = *std::move(t);
    }
    return absl::OkStatus();
  }

  absl::Status SpecsOnly(const DispatchEntry& entry, Values* outputs) {
    if (op_.in_place()) {
      outputs->push_back(*inputs_[0]);
      return absl::OkStatus();
    }
    for (const SpecRef& spec : entry.outs) {
      Tensor local;
      const bool rehearsal = state_.running == EngineState::Running::kRehearsal;
      if (spec->in_mesh() && (rehearsal || spec->mesh().device() == DeviceType::kMeta)) {
        DT_ASSIGN_OR_RETURN(local,
                            Tensor::Empty(spec->local_shape(), spec->dtype(), DeviceType::kMeta));
      }
      outputs->push_back(internal::MakeDTensor(context_, spec, std::move(local)));
    }
    return absl::OkStatus();
  }

  absl::Status RunView(const DispatchEntry& entry, Values* outputs) {
    const Tensor& in = In(0).impl()->local;
    DT_ASSIGN_OR_RETURN(Tensor out, op_.view()(in, entry.outs[0]->local_shape(), attrs_));
    const bool shares = out.buffer().SharesWith(in.buffer());
    outputs->push_back(internal::MakeDTensor(context_, entry.outs[0], std::move(out)));
    DTensorImpl& impl = *outputs->back().impl();
    impl.is_view = shares;
    impl.born_version = impl.local.buffer().version();
    impl.lost_view = !moved_.empty() || In(0).impl()->lost_view;
    if (impl.spec->mesh().is_self()) return absl::OkStatus();  // the local tensor tells
    const IntSpan strides = internal::MemoryStrides(*inputs_[0]->impl());
    return strides.empty() && !op_.view_reorders() ? absl::OkStatus() : FollowView(strides, &impl);
  }

  // Sets the memory strides of a view of a one-device tensor with these strides.
  absl::Status FollowView(IntSpan strides, DTensorImpl* view) {
    const Spec& base = inputs_[0]->spec();
    const Strides row_major = ContiguousStrides(base.shape());
    DT_ASSIGN_OR_RETURN(
        const Tensor whole,
        Tensor::EmptyChecked(Shape(base.shape().begin(), base.shape().end()),
                             strides.empty() ? row_major : Strides(strides.begin(), strides.end()),
                             base.dtype(), DeviceType::kMeta, /*bytes=*/0));
    const IntSpan shape = view->spec->shape();
    DT_ASSIGN_OR_RETURN(const Tensor out,
                        op_.view()(whole, Shape(shape.begin(), shape.end()), attrs_));
    if (!out.is_contiguous()) internal::RareOf(*view).memory_strides = out.strides();
    return absl::OkStatus();
  }

  absl::Status MakeOutputs(const DispatchEntry& entry, Values* outputs) {
    if (op_.in_place()) {
      outputs->push_back(*inputs_[0]);
      return absl::OkStatus();
    }
    for (const SpecRef& spec : entry.outs) {
      absl::StatusOr<Tensor> local =
          Tensor::EmptyChecked(spec->local_shape(), spec->local_strides(), spec->dtype(),
                               DeviceType::kCpu, spec->local_bytes());
      DT_RETURN_IF_ERROR(local.status());
      outputs->push_back(internal::MakeDTensor(context_, spec, *std::move(local)));
    }
    return absl::OkStatus();
  }

  // Shares memory with `out` in other than the same places: the kernel would read what it wrote.
  static bool Overlaps(const Tensor& t, const Tensor& out) {
    return t.buffer().SharesWith(out.buffer()) &&
           !(t.offset() == out.offset() && t.strides() == out.strides() &&
             t.shape() == out.shape());
  }

  // Local inputs as the kernel wants them: contiguous, or stretched to the output's shape.
  absl::Status KernelInputs(const DispatchEntry& entry, const Tensor& out) {
    const bool contiguous = entry.kernel.layout == KernelLayout::kContiguous;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const Tensor& local = In(i).impl()->local;
      if (entry.stretch && local.shape() != out.shape()) {
        Tensor from = local;
        if (i > 0 && op_.in_place() && Overlaps(local, out)) {
          DT_ASSIGN_OR_RETURN(from, local.Clone());
        }
        copies_.push_back(from.Expand(out.shape()));
        refs_.push_back(copies_.back().ref());
      } else if (i > 0 && op_.in_place() && Overlaps(local, out)) {
        DT_ASSIGN_OR_RETURN(Tensor copy, local.Clone());
        copies_.push_back(std::move(copy));
        refs_.push_back(copies_.back().ref());
      } else if (contiguous && !local.is_contiguous() && !(op_.in_place() && i == 0)) {
        DT_ASSIGN_OR_RETURN(Tensor copy, local.Contiguous());
        ++Cache().stats.contiguous_copies;
        copies_.push_back(std::move(copy));
        refs_.push_back(copies_.back().ref());
      } else {
        refs_.push_back(local.ref());
      }
    }
    return absl::OkStatus();
  }

  absl::Status RunKernel(const DispatchEntry& entry, Values* outputs) {
    DT_RETURN_IF_ERROR(MakeOutputs(entry, outputs));
    copies_.reserve(inputs_.size());  // refs_ point into it
    DT_RETURN_IF_ERROR(KernelInputs(entry, (*outputs)[0].impl()->local));
    absl::InlinedVector<TensorRef, 3> outs;
    for (const DTensor& t : *outputs) outs.push_back(t.impl()->local.ref());
    CallWorkspace workspace(context_.allocator());
    KernelCall call;
    call.in = {refs_.data(), refs_.size()};
    call.out = {outs.data(), outs.size()};
    call.attrs = attrs_.data();
    call.factors = {entry.offsets.data(), entry.offsets.size()};
    call.workspace = &workspace;
    entry.kernel.fn(call);
    if (op_.in_place()) (*outputs)[0].impl()->local.buffer().BumpVersion();
    if (!workspace.error().empty()) return absl::InvalidArgumentError(workspace.error());
    return absl::OkStatus();
  }

  // A decomposition runs other ops without recording; the op itself is what the tape sees.
  absl::Status Decomposed(Values* outputs) {
    absl::InlinedVector<DTensor, 4> values;
    for (const DTensor* t : inputs_) values.push_back(*t);
    {
      NoGrad no_grad;
      const ScopedOp scope(context_.trace(), op_.name());
      *outputs = op_.decompose()(values, attrs_);
    }
    for (DTensor& t : *outputs) {
      if (t.impl()->refs > 1) t = t.Detach();
    }
    if (!state_.grad_enabled || !AnyRequiresGrad()) return absl::OkStatus();
    DispatchEntry plain;
    for (const DTensor& t : *outputs) plain.outs.push_back(t.spec_ref());
    return Record(plain, absl::MakeSpan(*outputs));
  }

  absl::Status CheckView(const DTensorImpl& impl) const {
    if (!impl.is_view || impl.detached) return absl::OkStatus();
    const Buffer& buffer = impl.local.buffer();
    // Without a history of its own a view is only stale if its base got one.
    const bool fresh = impl.requires_grad ? impl.born_version == buffer.version()
                                          : impl.born_version >= buffer.recorded_version();
    if (fresh) return absl::OkStatus();
    return absl::FailedPreconditionError(
        "an input is a view of a tensor that was changed in place after the view was made; make "
        "the view again");
  }

  absl::Status Record(const DispatchEntry& entry, absl::Span<DTensor> outputs) {
    bool floating = false;
    for (const DTensor& t : outputs) floating |= IsFloating(t.dtype());
    if (!floating) return absl::OkStatus();
    NodeRef node = internal::NewNode(Node::Kind::kOp);
    node->op = &op_;
    internal::KeepAttrs(attrs_, node.get());
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const DTensor& t = In(i);
      DT_RETURN_IF_ERROR(CheckView(*t.impl()));
      node->edges.push_back(internal::EdgeOf(t));
      node->in_specs.push_back(t.impl()->spec);
    }
    if (op_.saved_inputs() != 0) {
      node->saved_in.resize(inputs_.size());
      for (size_t i = 0; i < inputs_.size(); ++i) {
        if (!((op_.saved_inputs() >> i) & 1)) continue;
        // What an in-place op read and then overwrote is no longer there: its version tells.
        const DTensor& t = In(i);
        const Buffer& buffer = t.impl()->local.buffer();
        const bool overwritten =
            op_.in_place() && i > 0 && buffer.SharesWith(outputs[0].impl()->local.buffer());
        node->saved_in[i] = {t, buffer.version() - (overwritten ? 1 : 0)};
        if (t.impl()->rare) internal::MemoSaved(*t.impl());
      }
    }
    for (const SpecRef& spec : entry.outs) node->out_specs.push_back(spec);
    if (op_.saved_outputs() != 0) {
      node->saved_out.resize(outputs.size());
      for (size_t o = 0; o < outputs.size(); ++o) {
        if (!((op_.saved_outputs() >> o) & 1)) continue;
        const DTensorImpl& out = *outputs[o].impl();
        // Without history: an output that saved itself would keep itself alive.
        node->saved_out[o] = {internal::MakeDTensor(context_, out.spec, out.local),
                              out.local.buffer().version()};
      }
    }
    if (op_.in_place()) outputs[0].impl()->local.buffer().MarkRecorded();
    for (size_t o = 0; o < outputs.size(); ++o) {
      if (IsFloating(outputs[o].dtype())) {
        internal::SetHistory(outputs[o], node, static_cast<int>(o));
      }
    }
    if (entry.pends) internal::MarkPending(entry.inputs_pend, node.get());
    if (state_.recompute != nullptr && (op_.saved_inputs() | op_.saved_outputs()) != 0) {
      internal::RecomputeRegion::Note(node.get());
    }
    return absl::OkStatus();
  }

  RankContext& context_;
  EngineState& state_;
  const OpDef& op_;
  Inputs inputs_;
  absl::Span<const Attr> attrs_;
  absl::InlinedVector<DTensor, 4> moved_;
  absl::InlinedVector<TensorRef, 4> refs_;
  absl::InlinedVector<Tensor, 2> copies_;
};

// True if every input is usable as it is: not null, of this rank, on one mesh.
bool InputsFit(const OpDef& op, Inputs inputs, uint64_t context_id) {
  if (inputs.empty() || (!op.variadic() && inputs.size() != op.input_names().size())) return false;
  for (const DTensor* t : inputs) {
    const DTensorImpl* impl = t->impl();
    if (impl == nullptr || impl->context_id != context_id) return false;
  }
  return true;
}

bool OneMesh(Inputs inputs) {
  for (const DTensor* t : inputs) {
    if (!(t->mesh() == inputs[0]->mesh())) return false;
  }
  return true;
}

absl::Status ExplainCall(const OpDef& op, Inputs inputs, const absl::Status& status) {
  absl::InlinedVector<DTensor, 4> values;
  for (const DTensor* t : inputs) values.push_back(*t);
  return Explain(op, values, status);
}

// A cached call. Null: not cached, or inputs that have to be looked at first.
const DispatchEntry* FindEntry(RankContext& context, const OpDef& op, Inputs inputs,
                               absl::Span<const Attr> attrs, const DispatchOptions& options) {
  if (!InputsFit(op, inputs, context.id())) return nullptr;
  return context.Slot<DispatchCache>().Find(op, inputs, attrs, options.like);
}

absl::Status DispatchInto(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
                          const DispatchOptions& options, const DispatchEntry* entry,
                          Values* outputs) {
  RankContext& context = RankContext::Current();
  Values fixed;
  absl::InlinedVector<const DTensor*, 4> fixed_inputs;
  if (entry == nullptr) {
    if (!InputsFit(op, inputs, context.id()) || !OneMesh(inputs)) {
      DT_ASSIGN_OR_RETURN(fixed, InputFixer(op, inputs).Fix());
      for (const DTensor& t : fixed) fixed_inputs.push_back(&t);
      inputs = fixed_inputs;
    }
    absl::StatusOr<const DispatchEntry*> made =
        context.Slot<DispatchCache>().FindOrPlan(context, op, inputs, attrs, options.like);
    if (!made.ok()) return ExplainCall(op, inputs, made.status());
    entry = *made;
  }
  EngineState& state = context.Slot<EngineState>();
  const Span span(SpanKind::kOp, op.name());
  if (state.rehearsal != nullptr) state.rehearsal->Note(op, inputs, *entry);
  const absl::Status status = OpRunner(context, state, op, inputs, attrs).Run(*entry, outputs);
  return status.ok() ? status : ExplainCall(op, inputs, status);
}

}  // namespace

absl::StatusOr<Values> Dispatch(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
                                const DispatchOptions& options) {
  Values outputs;
  try {
    const DispatchEntry* entry = FindEntry(RankContext::Current(), op, inputs, attrs, options);
    DT_RETURN_IF_ERROR(DispatchInto(op, inputs, attrs, options, entry, &outputs));
  } catch (const Error& error) {  // from kernels' workspaces and nested op functions
    return error.status();
  }
  return outputs;
}

absl::Status ExplainError(absl::string_view op, absl::Span<const NamedInput> inputs,
                          const absl::Status& cause) {
  // The first line says what is wrong; what follows it (a flight report) stays behind.
  const absl::string_view message = cause.message();
  const size_t line = std::min(message.find('\n'), message.size());
  std::string text = absl::StrCat("[", op, "] ", message.substr(0, line));
  const char* before = "; inputs: ";
  for (const NamedInput& in : inputs) {
    if (in.optional && !in.value.defined()) continue;
    absl::StrAppend(&text, std::exchange(before, ", "), in.name, " = ",
                    in.value.defined() ? in.value.spec().ToString() : "null");
  }
  RankContext& context = RankContext::Current();
  absl::StrAppend(&text, " (rank ", context.rank(), " of ", context.world_size(), ")",
                  message.substr(line));
  return absl::Status(cause.code(), text);
}

Values Call(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
            const DispatchOptions& options) {
  Values outputs;
  const DispatchEntry* entry = FindEntry(RankContext::Current(), op, inputs, attrs, options);
  const absl::Status status = DispatchInto(op, inputs, attrs, options, entry, &outputs);
  if (!status.ok()) ThrowIfError(status);
  return outputs;
}

DTensor Call1(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
              const DispatchOptions& options) {
  RankContext& context = RankContext::Current();
  const DispatchEntry* entry = FindEntry(context, op, inputs, attrs, options);
  if (entry != nullptr) {
    OpRunner runner(context, context.Slot<EngineState>(), op, inputs, attrs);
    if (runner.GoesStraight(*entry)) {
      DTensor output;
      const absl::Status status = runner.RunStraight(*entry, &output);
      if (!status.ok()) ThrowIfError(ExplainCall(op, inputs, status));
      return output;
    }
  }
  Values outputs;
  const absl::Status status = DispatchInto(op, inputs, attrs, options, entry, &outputs);
  if (!status.ok()) ThrowIfError(status);
  return std::move(outputs[0]);
}

DispatchStats GetDispatchStats() {
  DispatchCache& cache = Cache();
  cache.stats.entries = cache.entries();
  return cache.stats;
}
void ClearDispatchCache() { Cache().Clear(); }

}  // namespace dtensor

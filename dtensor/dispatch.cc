#include "dtensor/dispatch.h"

#include <algorithm>
#include <array>

#include "absl/base/casts.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/autograd.h"
#include "dtensor/cache.h"
#include "dtensor/call_list.h"
#include "dtensor/call_workspace.h"
#include "dtensor/distribute.h"
#include "dtensor/impl.h"
#include "dtensor/implicit_warning.h"
#include "dtensor/intercept.h"
#include "dtensor/memo.h"
#include "dtensor/mesh/hash.h"
#include "dtensor/recompute.h"
#include "dtensor/redistribute.h"
#include "dtensor/rehearsal.h"
#include "dtensor/sharding.h"
#include "dtensor/tensor/device_graph.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/trace.h"
#include "dtensor/watch.h"

namespace dtensor {

using internal::CallWorkspace;
using internal::DispatchCache;
using internal::DispatchEntry;
using internal::DTensorImpl;
using internal::EngineState;
using internal::Node;
using internal::NodeRef;

namespace {

// Ranks that call an op with other attributes are caught where it communicates.
uint64_t HashAttrs(uint64_t hash, absl::Span<const Attr> attrs) {
  for (const Attr& attr : attrs) {
    hash = HashMix(hash, absl::bit_cast<uint64_t>(attr.d) ^ static_cast<uint64_t>(attr.i));
    for (int64_t k = 0; k < attr.n; ++k) hash = HashMix(hash, static_cast<uint64_t>(attr.ints[k]));
  }
  return hash;
}

// Every error of a call leaves through here: in the op's name, and told to peers where they wait.
absl::Status CallError(const OpDef& op, absl::Span<const DTensor> inputs,
                       const absl::Status& cause) {
  const auto distributed = std::find_if(inputs.begin(), inputs.end(), [](const DTensor& t) {
    return t.defined() && !t.mesh().is_self();
  });
  const DeviceMesh mesh = distributed == inputs.end() ? DeviceMesh() : distributed->mesh();
  std::vector<std::string> names;
  for (size_t i = 0; i < inputs.size(); ++i) names.push_back(op.InputName(static_cast<int>(i)));
  std::vector<NamedInput> named;
  for (size_t i = 0; i < inputs.size(); ++i) named.push_back({names[i], inputs[i]});
  return TellPeers(mesh, ExplainError(op.name(), named, cause));
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
    const DTensor* distributed = nullptr;
    for (size_t i = 0; i < values_.size(); ++i) {
      const std::string name = op_.InputName(static_cast<int>(i));
      if (!values_[i].defined()) return Error(absl::StrCat("input ", name, " is null"));
      const absl::StatusOr<const DTensor*> here = internal::Entered(values_[i]);
      if (!here.ok()) {
        return CallError(op_, values_, Prefixed(absl::StrCat("input ", name), here.status()));
      }
      values_[i] = **here;
      if (!values_[i].mesh().is_self() && distributed == nullptr) distributed = &values_[i];
    }
    if (distributed == nullptr) return values_;
    return OneMesh(*distributed);
  }

 private:
  // Meshes may differ in their ranks alone.
  static std::string OfRanks(const DeviceMesh& mesh) {
    constexpr size_t kMost = 8;
    std::vector<int64_t> ranks = mesh.Ranks();
    const bool all = ranks.size() <= kMost;
    if (!all) ranks.resize(kMost);
    return absl::StrCat(mesh.ToString(), " of ranks ", absl::StrJoin(ranks, ", "),
                        all ? "" : ", ...");
  }
  absl::StatusOr<Values> OneMesh(const DTensor& distributed) {
    const DeviceMesh mesh = distributed.mesh();
    for (size_t i = 0; i < values_.size(); ++i) {
      if (values_[i].mesh() == mesh) continue;
      const std::string name = op_.InputName(static_cast<int>(i));
      if (!values_[i].mesh().is_self()) {
        return Error(absl::StrCat("inputs live on different meshes (", OfRanks(mesh), " and ",
                                  OfRanks(values_[i].mesh()),
                                  "); bring one to the other's first: Redistribute(mesh, {...})"));
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
    return CallError(op_, values_, absl::InvalidArgumentError(why));
  }
  const OpDef& op_;
  Values values_;
};

// One call with checked inputs and its plan. What every call goes through is inlined, what few need
// is not: a cached op costs a few hundred instructions, and a function more is twenty of them.
#define DT_ALWAYS_INLINE [[gnu::always_inline]] inline
#define DT_RARE [[gnu::noinline]]

class OpRun {
 public:
  OpRun(RankContext& context, EngineState& state, const OpDef& op, Inputs inputs,
        absl::Span<const Attr> attrs, const DispatchEntry& entry, bool histories_matter)
      : context_(context),
        state_(state),
        op_(op),
        inputs_(inputs),
        attrs_(attrs),
        entry_(entry),
        in_(inputs.data()),
        histories_matter_(histories_matter) {}

  // Fills `outputs`, which are null.
  DT_ALWAYS_INLINE absl::Status Run(absl::Span<DTensor> outputs) {
    if (histories_matter_ && state_.grad_enabled && MakesFloats()) {
      records_ = AnyRequiresGrad();
      DT_RETURN_IF_ERROR(CheckHistories());
    }
    return entry_.plain ? RunPlain(outputs) : RunSpecially(outputs);
  }

 private:
  // Input i where the plan wants it.
  const DTensor& In(size_t i) const { return *in_[i]; }
  const Tensor& InData(size_t i) const { return in_[i]->impl()->local; }
  // Else this rank is not in the mesh, or nothing has values: on a meta mesh, in a rehearsal.
  bool HasData() const { return InData(0).has_data(); }
  bool AnyRequiresGrad() const {
    for (const DTensor* t : inputs_) {
      if (t->impl()->requires_grad) return true;
    }
    return false;
  }
  // What a decomposition makes is not known before.
  bool MakesFloats() const {
    for (const SpecRef& out : entry_.outs) {
      if (IsFloating(out->dtype())) return true;
    }
    return entry_.decompose;
  }

  // To new outputs, with inputs where the plan wants them.
  DT_ALWAYS_INLINE absl::Status RunPlain(absl::Span<DTensor> outputs) {
    DT_RETURN_IF_ERROR(MakeOutputs(outputs));
    if (HasData()) DT_RETURN_IF_ERROR(RunKernel(outputs));
    return RecordIfAsked(outputs);
  }

  DT_RARE absl::Status RunSpecially(absl::Span<DTensor> outputs) {
    if (entry_.decompose) return Decompose(outputs);
    if (op_.in_place()) DT_RETURN_IF_ERROR(CheckInPlace(outputs.size()));
    Moved moved;
    if (entry_.moves) DT_RETURN_IF_ERROR(MoveInputs(&moved));
    if (op_.view() != nullptr) {
      DT_RETURN_IF_ERROR(View(&outputs[0]));
      return RecordIfAsked(outputs);
    }
    if (!op_.in_place()) return RunPlain(outputs);
    for (size_t o = 0; o < outputs.size(); ++o) outputs[o] = *inputs_[o];
    if (HasData()) DT_RETURN_IF_ERROR(RunKernel(outputs));
    return RecordIfAsked(outputs);
  }

  absl::Status RecordIfAsked(absl::Span<DTensor> outputs) {
    return records_ ? Record(outputs) : absl::OkStatus();
  }

  // A decomposition runs other ops without recording; the op itself is what the tape sees.
  DT_RARE absl::Status Decompose(absl::Span<DTensor> outputs) {
    const internal::DispatchCache::Hold hold(state_.cache);  // of entry_
    DT_RETURN_IF_ERROR(RunDecomposition(outputs));
    return RecordIfAsked(outputs);
  }
  absl::Status RunDecomposition(absl::Span<DTensor> outputs) {
    absl::InlinedVector<DTensor, 4> values;
    for (const DTensor* t : inputs_) values.push_back(*t);
    const NoGrad no_grad;
    const ScopedOp scope(context_.trace(), op_.name());
    Values made = op_.decompose()(values, attrs_);
    if (made.size() != outputs.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("its decomposition gives ", made.size(), " tensors, not ", outputs.size()));
    }
    for (size_t o = 0; o < outputs.size(); ++o) {
      if (!made[o].defined()) return absl::InvalidArgumentError("its decomposition gives a null");
      if (made[o].impl()->refs > 1) {
        outputs[o] = made[o].Detach();
        for (const DTensor& t : values) {  // of which it is a view as others are
          const bool shares = t.local().buffer().SharesWith(outputs[o].local().buffer());
          if (shares) outputs[o].impl()->detached = false;
        }
        continue;
      }
      outputs[o] = std::move(made[o]);
      // Of what nobody but the decomposition had.
      outputs[o].impl()->is_view = outputs[o].impl()->unrecorded = false;
    }
    return absl::OkStatus();
  }

  DT_RARE absl::Status CheckInPlace(size_t outputs) const {
    for (size_t o = 1; o < outputs; ++o) {
      DT_RETURN_IF_ERROR(CheckWritten(*inputs_[o]->impl()));
      for (size_t p = 0; p < o; ++p) {
        if (inputs_[o]->impl() == inputs_[p]->impl()) return WrittenTwice(p, o);
      }
    }
    return CheckWritten(*inputs_[0]->impl());
  }

  absl::Status WrittenTwice(size_t p, size_t o) const {
    return absl::InvalidArgumentError(absl::StrCat(
        "inputs ", op_.InputName(static_cast<int>(p)), " and ", op_.InputName(static_cast<int>(o)),
        " are one tensor, and both are changed in place: give a clone() of it"));
  }

  DT_ALWAYS_INLINE absl::Status CheckWritten(DTensorImpl& self) const {
    if (state_.grad_enabled) {
      if (self.requires_grad && self.node->kind == Node::Kind::kLeaf && !self.node->stands_in) {
        return absl::InvalidArgumentError(
            "a leaf that requires grad cannot be changed in place while recording; do it under "
            "NoGrad, or on a clone()");
      }
      if (self.is_view && AnyRequiresGrad()) {
        return absl::InvalidArgumentError(
            "a view cannot be changed in place while recording: its base would not know; make a "
            "new whole of it (select_scatter, slice_scatter, where, stack), or write under NoGrad; "
            "a clone() has values of its own");
      }
      if (self.unrecorded) return internal::ViewIsUnrecorded();
    }
    return internal::CheckWritable(self);
  }

  // What in_ points to where inputs were moved.
  struct Moved {
    absl::InlinedVector<DTensor, 4> values;
    absl::InlinedVector<const DTensor*, 4> inputs;
  };
  absl::Status MoveInputs(Moved* moved) {
    if (state_.call_list != nullptr) state_.call_list->Run();
    moved->values.resize(inputs_.size());
    moved->inputs.assign(inputs_.begin(), inputs_.end());
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (!entry_.targets[i]) continue;
      DT_RETURN_IF_ERROR(Move(static_cast<int>(i), &moved->values[i]));
      moved->inputs[i] = &moved->values[i];
    }
    in_ = moved->inputs.data();
    return absl::OkStatus();
  }

  absl::Status Move(int i, DTensor* moved) {
    const ScopedOp scope(context_.trace(), op_.name());
    const ScopedCallTag tag(&context_.call_tag(), entry_.call_text,
                            HashAttrs(entry_.call_hash, attrs_));
    const SpecRef& target = entry_.targets[i];
    internal::WarnOfImplicitMove(context_, op_, i, *inputs_[i]->spec_ref(), *target);
    absl::StatusOr<DTensor> t =
        internal::RedistributeRecorded(*inputs_[i], target, {.shared = true}, /*implicit=*/true);
    if (!t.ok()) return Prefixed(absl::StrCat("input ", op_.InputName(i)), t.status());
    *moved = *std::move(t);
    return absl::OkStatus();
  }

  // Whether the output is a view or a copy is decided for the one-device tensor, whose strides all
  // ranks know: local strides may allow one where they do not elsewhere.
  DT_RARE absl::Status View(DTensor* output) {
    const DTensorImpl& base = *inputs_[0]->impl();
    const Tensor& in = InData(0);
    Tensor out;
    if (in.defined()) {
      DT_ASSIGN_OR_RETURN(out,
                          op_.view()(in, entry_.outs[0]->local_shape(), attrs_, entry_.offsets));
    }
    bool shares = out.defined() && out.buffer().SharesWith(in.buffer());
    bool is_view = shares;
    Strides strides;  // of the result on one device; empty: row-major
    if (!base.spec->mesh().is_self()) DT_RETURN_IF_ERROR(ViewOnOneDevice(&is_view, &strides));
    if (shares && !is_view) {
      DT_ASSIGN_OR_RETURN(out, out.Clone());
      shares = false;
    }
    *output = internal::MakeDTensor(context_, entry_.outs[0], std::move(out));
    DTensorImpl& impl = *output->impl();
    impl.is_view = is_view;
    impl.unrecorded = is_view && internal::StaysUnrecorded(base, state_);
    impl.born_version = impl.local.buffer().version();
    if (!strides.empty()) internal::RareOf(impl).memory_strides = std::move(strides);
    if (!is_view) return absl::OkStatus();
    if (in.defined() && (entry_.moves || !shares)) {
      internal::BecomeCopyOf(base.local.buffer(), base.local.buffer().version(), &impl);
    }
    internal::KeepCopyOf(base, &impl);
    return absl::OkStatus();
  }

  // Sees the one-device tensor that input 0 stands for: whether that shares its memory with the
  // result, and the result's strides unless they are row-major.
  absl::Status ViewOnOneDevice(bool* is_view, Strides* strides) const {
    const IntSpan from = internal::MemoryStrides(*inputs_[0]->impl());
    *is_view = true;
    if (from.empty() && !op_.view_reorders()) return absl::OkStatus();
    const Spec& base = inputs_[0]->spec();
    DT_ASSIGN_OR_RETURN(const Tensor whole,
                        Tensor::EmptyChecked(base.shape(),
                                             from.empty() ? ContiguousStrides(base.shape())
                                                          : Strides(from.begin(), from.end()),
                                             base.dtype(), DeviceType::kMeta, /*bytes=*/0));
    DT_ASSIGN_OR_RETURN(const Tensor out, op_.view()(whole, entry_.outs[0]->shape(), attrs_, {}));
    *is_view = out.buffer().SharesWith(whole.buffer());
    if (!out.is_contiguous()) *strides = out.strides();
    return absl::OkStatus();
  }

  // New tensors where the inputs are; without memory on a rank that is not in the mesh.
  DT_ALWAYS_INLINE absl::Status MakeOutputs(absl::Span<DTensor> outputs) {
    const Tensor& like = InData(0);
    for (size_t o = 0; o < outputs.size(); ++o) {
      const SpecRef& spec = entry_.outs[o];
      if (!like.defined()) {
        outputs[o] = internal::MakeDTensor(context_, spec, Tensor());
        continue;
      }
      Buffer memory;
      if (entry_.kernel.fn != nullptr && like.device() != DeviceType::kMeta) {
        DT_RETURN_IF_ERROR(Buffer::AllocateInto(
            entry_.device == nullptr ? CurrentAllocator() : entry_.device->memory(),
            spec->local_bytes(), &memory));
      } else {
        DT_RETURN_IF_ERROR(NewMemory(like.device(), spec->local_bytes(), &memory));
      }
      outputs[o] = DTensor::Adopt(
          internal::Pool<DTensorImpl>::New(context_.id(), spec, std::move(memory), like.device()));
    }
    return absl::OkStatus();
  }

  DT_ALWAYS_INLINE absl::Status RunKernel(absl::Span<DTensor> outputs) {
    constexpr size_t kFew = 6;
    if (inputs_.size() + outputs.size() > kFew) return RunKernelOfMany(outputs);
    TensorRef refs[kFew];
    return RunKernelOn(outputs, refs);
  }
  DT_RARE absl::Status RunKernelOfMany(absl::Span<DTensor> outputs) {
    std::vector<TensorRef> refs(inputs_.size() + outputs.size());
    return RunKernelOn(outputs, refs.data());
  }
  // `refs` has room for inputs and outputs.
  DT_ALWAYS_INLINE absl::Status RunKernelOn(absl::Span<DTensor> outputs, TensorRef* refs) {
    const absl::Span<TensorRef> in(refs, inputs_.size());
    const absl::Span<TensorRef> out(refs + in.size(), outputs.size());
    for (size_t i = 0; i < in.size(); ++i) in[i] = InData(i).ref();
    for (size_t o = 0; o < out.size(); ++o) out[o] = outputs[o].impl()->local.ref();
    return entry_.any_input ? CallKernel(in, out) : AdaptAndCall(outputs, in, out);
  }

  // On a device that works on its own it is queued: what it finds wrong is told where the host
  // waits.
  DT_ALWAYS_INLINE absl::Status CallKernel(absl::Span<const TensorRef> in,
                                           absl::Span<const TensorRef> out) {
    CallWorkspace workspace(entry_.device);
    KernelCall call = {{in.data(), in.size()},
                       {out.data(), out.size()},
                       attrs_.data(),
                       {entry_.offsets.data(), entry_.offsets.size()},
                       nullptr,
                       &workspace};
    if (entry_.device != nullptr) {
      if (state_.call_list != nullptr || DeviceGraph::Current() != nullptr) [[unlikely]] {
        DT_RETURN_IF_ERROR(BeforeQueueing());
      }
      call.stream = entry_.device->stream();
      call.device = &entry_.device_call;
    }
    entry_.kernel.fn(call);
    if (workspace.error().empty()) return absl::OkStatus();
    return RankLocal(absl::InvalidArgumentError(workspace.error()));  // of this rank's data
  }
  DT_RARE absl::Status BeforeQueueing() const {
    if (state_.call_list != nullptr) state_.call_list->Run();
    if (DeviceGraph::Current() != nullptr && HasChangingNumbers(op_)) {
      return DeviceGraph::Allows("its kernel takes the step and the learning rate as they are now");
    }
    return absl::OkStatus();
  }

  // To the CallList that is open: with other calls of the op.
  DT_RARE void KeepBack(absl::Span<const Tensor> adapted, absl::Span<const DTensor> outputs) const {
    std::vector<Tensor> in, out;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      in.push_back(!adapted.empty() && adapted[i].defined() ? adapted[i] : InData(i));
    }
    for (const DTensor& t : outputs) out.push_back(t.impl()->local);
    state_.call_list->Keep(op_, entry_.list, *entry_.device, std::move(in), std::move(out), attrs_);
  }

  // Where the kernel may not take the inputs as they are.
  DT_RARE absl::Status AdaptAndCall(absl::Span<const DTensor> outputs, absl::Span<TensorRef> in,
                                    absl::Span<const TensorRef> outs) {
    absl::InlinedVector<Tensor, 2> adapted;
    for (size_t i = 0; i < in.size(); ++i) {
      if (Fits(i, outputs)) continue;
      if (state_.call_list != nullptr) state_.call_list->Run();
      adapted.resize(in.size());  // once: refs point into it
      DT_ASSIGN_OR_RETURN(adapted[i], Adapted(i, outputs));
      in[i] = adapted[i].ref();
    }
    absl::Status status;
    if (state_.call_list == nullptr || entry_.list.fn == nullptr) {
      status = CallKernel(in, outs);
    } else {
      KeepBack(adapted, outputs);
    }
    if (op_.in_place()) {
      for (const DTensor& out : outputs) out.impl()->local.buffer().BumpVersion();
    }
    return status;
  }

  // Shares memory with an output: the kernel would read what it wrote, but for one that works place
  // by place on the same places.
  bool Overlaps(const Tensor& t, absl::Span<const DTensor> outputs) const {
    for (const DTensor& o : outputs) {
      const Tensor& out = o.impl()->local;
      if (t.buffer().SharesWith(out.buffer()) &&
          !(op_.elementwise() && t.offset() == out.offset() && t.strides() == out.strides() &&
            t.shape() == out.shape())) {
        return true;
      }
    }
    return false;
  }

  // Whether the kernel takes local input i as it is.
  bool Fits(size_t i, absl::Span<const DTensor> outputs) const {
    const Tensor& local = InData(i);
    const bool written = op_.in_place() && i < outputs.size();
    if (op_.in_place() && (written || Overlaps(local, outputs))) return written;
    if (entry_.stretch && local.shape() != outputs[0].impl()->local.shape()) return false;
    return entry_.kernel.layout == KernelLayout::kStrided || local.is_contiguous();
  }

  // What the kernel takes instead: apart from the outputs, stretched to their shape, or contiguous.
  absl::StatusOr<Tensor> Adapted(size_t i, absl::Span<const DTensor> outputs) {
    const Tensor &local = InData(i), &out = outputs[0].impl()->local;
    const bool overlaps = op_.in_place() && Overlaps(local, outputs);
    const bool stretched = entry_.stretch && local.shape() != out.shape();
    if (!overlaps && stretched) return local.Expand(out.shape());
    DT_ASSIGN_OR_RETURN(Tensor copy, local.Clone());
    if (!overlaps) ++state_.cache.stats.contiguous_copies;
    return stretched ? copy.Expand(out.shape()) : copy;
  }

  // Before anything is written: of what the program passed, which a move may have copied.
  DT_RARE absl::Status CheckHistories() const {
    for (const DTensor* t : inputs_) DT_RETURN_IF_ERROR(internal::CheckFresh(*t->impl()));
    return absl::OkStatus();
  }

  // What a node keeps of an input. Not the input itself, unless it is a leaf: changed in place by
  // something made of this node's outputs (x += x * w) it has a history, and would keep itself
  // alive.
  DTensor WithoutHistory(const DTensor& t) const {
    const DTensorImpl& impl = *t.impl();
    const bool leaf = impl.node && impl.node->kind == Node::Kind::kLeaf;
    if (leaf) return t;
    if (!impl.rare) return internal::MakeDTensor(context_, impl.spec, impl.local);
    if (!impl.node && !impl.rare->memo.empty()) return t;   // backward may find one
    return impl.rare->memo_of != nullptr ? t : t.Detach();  // memos count who saved them
  }

  // Whether input i, which is not written to as such, lies in memory that is.
  bool OverwritesOf(const Buffer& buffer, size_t i, absl::Span<const DTensor> outputs) const {
    return i >= outputs.size() && buffer &&  // outside of the mesh nobody has any
           std::any_of(outputs.begin(), outputs.end(), [&](const DTensor& out) {
             return buffer.SharesWith(out.impl()->local.buffer());
           });
  }

  DT_RARE absl::Status Record(absl::Span<DTensor> outputs) {
    NodeRef node = internal::NewNode(Node::Kind::kOp);
    node->op = &op_;
    internal::KeepAttrs(attrs_, node.get());
    uint32_t wanted = 0;  // gradients
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const DTensor& t = In(i);
      node->edges.push_back(internal::EdgeOf(t));
      if (node->edges.back().node) wanted |= 1u << std::min<size_t>(i, 31);
      node->in_specs.push_back(t.impl()->spec);
    }
    if (op_.saved_inputs() != 0) {
      node->saved_in.resize(inputs_.size());
      for (size_t i = 0; i < inputs_.size(); ++i) {
        if (!op_.Saves(i, wanted)) continue;
        const DTensor& t = In(i);
        const bool watch = &t != inputs_[i] && MayBeView(inputs_[i]->spec(), t.spec());
        const Buffer& buffer = (watch ? *inputs_[i] : t).impl()->local.buffer();
        // What an in-place op read and then overwrote is no longer there: its version tells. What
        // it writes to itself it does not save.
        const bool overwritten = op_.in_place() && OverwritesOf(buffer, i, outputs);
        node->saved_in[i] = {WithoutHistory(t), buffer.version() - (overwritten ? 1 : 0)};
        if (watch) node->saved_in[i].watched = buffer;
        if (t.impl()->rare) internal::MemoSaved(*t.impl());
      }
    }
    if (op_.saved_outputs() != 0) node->saved_out.resize(outputs.size());
    if (op_.in_place()) {
      for (const DTensor& out : outputs) out.impl()->local.buffer().MarkRecorded();
    }
    for (size_t o = 0; o < outputs.size(); ++o) {
      const DTensorImpl& out = *outputs[o].impl();
      node->out_specs.push_back(out.spec);
      if ((op_.saved_outputs() >> o) & 1) {
        // Without history: an output that saved itself would keep itself alive.
        node->saved_out[o] = {internal::MakeDTensor(context_, out.spec, out.local),
                              out.local.buffer().version()};
      }
      if (IsFloating(outputs[o].dtype())) {
        internal::SetHistory(outputs[o], node, static_cast<int>(o));
      }
    }
    if (entry_.pends) internal::MarkPending(entry_.inputs_pend, node.get());
    if (state_.recompute != nullptr && (op_.saved_inputs() | op_.saved_outputs()) != 0) {
      internal::RecomputeRegion::Note(node.get());
    }
    return absl::OkStatus();
  }

  RankContext& context_;
  EngineState& state_;
  const OpDef& op_;
  const Inputs inputs_;
  const absl::Span<const Attr> attrs_;
  const DispatchEntry& entry_;
  const DTensor* const* in_;  // inputs_, or where they were moved to
  const bool histories_matter_;
  bool records_ = false;
};

// True if every input is usable as it is: not null, of this rank, on one mesh. Whether histories
// matter is what is seen at once: a view without one may be of something that has one by now.
DT_ALWAYS_INLINE bool InputsFit(const OpDef& op, Inputs inputs, uint64_t context_id,
                                bool* histories_matter) {
  if (!op.Takes(inputs.size())) return false;
  bool matter = false;
  for (const DTensor* t : inputs) {
    const DTensorImpl* impl = t->impl();
    if (impl == nullptr || impl->context_id != context_id) return false;
    matter |= impl->requires_grad | impl->is_view;
  }
  *histories_matter = matter;
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
  return CallError(op, values, status);
}

// What was thrown in a call: by a kernel, or by an op that this one is made of.
absl::Status ExplainThrown(const OpDef& op, Inputs inputs) {
  const absl::Status status = CurrentException();
  const std::optional<ErrorOrigin> origin = OriginOf(status);
  if (!origin) return ExplainCall(op, inputs, status);
  return ExplainCall(op, inputs, Prefixed(absl::StrCat("in ", origin->function), origin->cause));
}

// What a call runs on where the inputs could not be taken as they came.
struct FixedInputs {
  Values values;
  absl::InlinedVector<const DTensor*, 4> pointers;
};

// The plan of a call that is not in the cache, or whose inputs have to be looked at first: `inputs`
// then points into `fixed`.
absl::StatusOr<const DispatchEntry*> Prepare(RankContext& context, EngineState& state,
                                             const OpDef& op, absl::Span<const Attr> attrs,
                                             const DispatchOptions& options, Inputs* inputs,
                                             std::unique_ptr<FixedInputs>* fixed) {
  bool histories_matter;
  if (!InputsFit(op, *inputs, context.id(), &histories_matter) || !OneMesh(*inputs)) {
    *fixed = std::make_unique<FixedInputs>();
    DT_ASSIGN_OR_RETURN((*fixed)->values, InputFixer(op, *inputs).Fix());
    for (const DTensor& t : (*fixed)->values) (*fixed)->pointers.push_back(&t);
    *inputs = (*fixed)->pointers;
  }
  absl::StatusOr<const DispatchEntry*> entry =
      state.cache.FindOrPlan(context, op, *inputs, attrs, options.like);
  return entry.ok() ? entry : ExplainCall(op, *inputs, entry.status());
}

// Who watches may call ops, and one of them may need the place of this one's plan.
DT_RARE absl::Status RunWatched(RankContext& context, EngineState& state, const OpDef& op,
                                Inputs inputs, absl::Span<const Attr> attrs,
                                const DispatchEntry& entry, bool histories_matter,
                                absl::Span<DTensor> outputs) {
  const DispatchCache::Hold hold(state.cache);
  state.watcher->Note(op, inputs, attrs, entry);
  OpRun run(context, state, op, inputs, attrs, entry, histories_matter);
  absl::Status status = run.Run(outputs);
  return status.ok() ? std::move(status) : ExplainCall(op, inputs, status);
}

// A call that has a plan, of inputs as it wants them.
DT_ALWAYS_INLINE absl::Status RunPlanned(RankContext& context, EngineState& state, const OpDef& op,
                                         Inputs inputs, absl::Span<const Attr> attrs,
                                         const DispatchEntry& entry, bool histories_matter,
                                         absl::Span<DTensor> outputs) {
  const Span span(SpanKind::kOp, op.name());
  if (state.watcher != nullptr) [[unlikely]] {
    return RunWatched(context, state, op, inputs, attrs, entry, histories_matter, outputs);
  }
  OpRun run(context, state, op, inputs, attrs, entry, histories_matter);
  absl::Status status = run.Run(outputs);
  return status.ok() ? std::move(status) : ExplainCall(op, inputs, status);
}

// Any other call.
DT_RARE absl::Status RunUnplanned(RankContext& context, EngineState& state, const OpDef& op,
                                  Inputs inputs, absl::Span<const Attr> attrs,
                                  const DispatchOptions& options, absl::Span<DTensor> outputs) {
  std::unique_ptr<FixedInputs> fixed;
  try {
    DT_ASSIGN_OR_RETURN(const DispatchEntry* const entry,
                        Prepare(context, state, op, attrs, options, &inputs, &fixed));
    return RunPlanned(context, state, op, inputs, attrs, *entry, /*histories_matter=*/true,
                      outputs);
  } catch (...) {
    return ExplainThrown(op, inputs);
  }
}

// A call, from its inputs to its outputs (null before, one for each of the op's).
DT_ALWAYS_INLINE absl::Status RunCall(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
                                      const DispatchOptions& options, absl::Span<DTensor> outputs) {
  RankContext& context = RankContext::Current();
  EngineState& state = context.Slot<EngineState>();
  const DispatchEntry* entry = nullptr;
  bool histories_matter;
  if (InputsFit(op, inputs, context.id(), &histories_matter)) {
    entry = state.cache.Find(op, inputs, attrs, options.like);
  }
  try {
    if (state.interceptor != nullptr) [[unlikely]] {
      if (const auto* scope = InterceptCalls::Wanting(state.interceptor, op)) {
        const absl::Status status = scope->Run(op, inputs, attrs, options, outputs);
        return status.ok() ? status : ExplainCall(op, inputs, status);
      }
    }
    if (entry == nullptr) [[unlikely]] {
      return RunUnplanned(context, state, op, inputs, attrs, options, outputs);
    }
    return RunPlanned(context, state, op, inputs, attrs, *entry, histories_matter, outputs);
  } catch (...) {
    return ExplainThrown(op, inputs);
  }
}

absl::Status RunCallOutOfLine(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
                              const DispatchOptions& options, absl::Span<DTensor> outputs) {
  return RunCall(op, inputs, attrs, options, outputs);
}

}  // namespace

absl::StatusOr<Values> Dispatch(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
                                const DispatchOptions& options) {
  try {
    Values outputs(op.num_outputs());
    DT_RETURN_IF_ERROR(RunCallOutOfLine(op, inputs, attrs, options, absl::MakeSpan(outputs)));
    return outputs;
  } catch (...) {  // no memory for the handles
    return CurrentException();
  }
}

Values Call(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
            const DispatchOptions& options) {
  Values outputs(op.num_outputs());
  const absl::Status status = RunCallOutOfLine(op, inputs, attrs, options, absl::MakeSpan(outputs));
  if (!status.ok()) ThrowIfError(status);
  return outputs;
}

DTensor internal::CallInGeneral(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
                                const DispatchOptions& options) {
  if (op.num_outputs() != 1) return std::move(Call(op, inputs, attrs, options)[0]);
  DTensor output;
  absl::Status status;
  switch (inputs.size()) {  // in code for as many
    case 1:
      status = RunCall(op, {inputs.data(), 1}, attrs, options, absl::MakeSpan(&output, 1));
      break;
    case 2:
      status = RunCall(op, {inputs.data(), 2}, attrs, options, absl::MakeSpan(&output, 1));
      break;
    default:
      status = RunCallOutOfLine(op, inputs, attrs, options, absl::MakeSpan(&output, 1));
  }
  if (!status.ok()) ThrowIfError(status);
  return output;
}

DispatchStats GetDispatchStats() {
  DispatchCache& cache = internal::State().cache;
  cache.stats.entries = cache.entries();
  return cache.stats;
}
void ClearDispatchCache() { internal::State().cache.Clear(); }

}  // namespace dtensor

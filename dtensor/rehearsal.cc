#include "dtensor/rehearsal.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/impl.h"
#include "dtensor/memo.h"
#include "dtensor/redistribute.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

using internal::EngineState;
using internal::State;

Rehearsal::Rehearsal(const CostModel& cost)
    : rank_(RankContext::Current()),
      outer_(std::exchange(State().rehearsal, this)),
      outer_watcher_(std::exchange(State().watcher, static_cast<internal::CallWatcher*>(this))),
      backward_(std::exchange(State().backward, nullptr)),
      recompute_(std::exchange(State().recompute, nullptr)),
      outer_cost_(std::exchange(RankContext::Current().trace().cost, &cost)),
      counter_(Allocator::CreateCounting()),
      counting_(counter_),
      random_(RngSnapshot::Take()),
      hidden_(RankContext::Current().trace()),
      memos_(State().memo_scope == nullptr ? nullptr : std::make_unique<internal::MemoScope>()) {}

Rehearsal::~Rehearsal() {
  EngineState& state = State();
  state.rehearsal = outer_;
  state.watcher = outer_watcher_;
  state.backward = backward_;
  state.recompute = recompute_;
  RankContext::Current().trace().cost = outer_cost_;
  random_.Restore();
}

Rehearsal* Rehearsal::Current() { return State().rehearsal; }

absl::StatusOr<const DTensor*> Rehearsal::Enter(const DTensor& t) {
  const uint64_t origin = internal::OriginOf(*t.impl());
  if (origin == RankContext::Current().id()) {
    DT_RETURN_IF_ERROR(internal::Settle(*t.impl()));
    return &t;
  }
  const DTensor* from = &t;
  if (origin != rank_.outside()) {
    if (outer_ == nullptr) return internal::NotOurs(*t.impl());
    const RehearsedRank::Outside outside(rank_);
    DT_ASSIGN_OR_RETURN(from, outer_->Enter(t));
  }
  const auto known = twins_.find(from->impl());
  if (known != twins_.end()) {
    DT_RETURN_IF_ERROR(internal::Settle(*known->second.twin.impl()));
    return &known->second.twin;
  }
  DT_ASSIGN_OR_RETURN(DTensor twin, MakeTwin(*from));
  Twin& kept = twins_[from->impl()];
  kept = {*from, std::move(twin)};
  DT_RETURN_IF_ERROR(CopyHistory(kept.original, kept.twin));
  DT_RETURN_IF_ERROR(CopyMemos(kept.original, kept.twin));
  DT_RETURN_IF_ERROR(internal::Settle(*kept.twin.impl()));
  return &kept.twin;
}

absl::StatusOr<Buffer> Rehearsal::TwinOf(const Buffer& buffer) {
  Buffer& twin = buffers_[buffer.identity()];
  if (!twin) {
    DT_ASSIGN_OR_RETURN(const Tensor bytes,
                        Tensor::Empty({buffer.bytes()}, DType::kU8, DeviceType::kMeta));
    twin = bytes.buffer();
    twin.CopyVersions(buffer);
  }
  return twin;
}

absl::StatusOr<DTensor> Rehearsal::MakeTwin(const DTensor& t) {
  const internal::DTensorImpl& of = *t.impl();
  Tensor local;
  if (of.local.defined()) {
    DT_ASSIGN_OR_RETURN(Buffer buffer, TwinOf(of.local.buffer()));
    local = of.local.OnMeta(std::move(buffer));
  } else if (of.spec->in_mesh()) {  // communication is pending
    DT_ASSIGN_OR_RETURN(local,
                        Tensor::Empty(of.spec->local_shape(), of.spec->dtype(), DeviceType::kMeta));
  }
  const DTensor twin = internal::MakeDTensor(RankContext::Current(), of.spec, std::move(local));
  internal::DTensorImpl& impl = *twin.impl();
  impl.is_view = of.is_view;
  impl.detached = of.detached;
  impl.unrecorded = of.unrecorded;
  impl.owned = of.owned;
  impl.born_version = of.born_version;
  internal::KeepMemoryStrides(of, &impl);
  if (of.rare && of.rare->copy_of) {
    DT_ASSIGN_OR_RETURN(const Buffer buffer, TwinOf(of.rare->copy_of));
    internal::BecomeCopyOf(buffer, of.rare->copied_version, &impl);
  }
  return twin;
}

// Backward ends at what was made outside: there a twin is a leaf.
absl::Status Rehearsal::CopyHistory(const DTensor& from, const DTensor& twin) {
  if (!from.impl()->requires_grad) return absl::OkStatus();
  DTensor(twin).RequiresGrad();
  const internal::Node& node = *from.impl()->node.get();
  internal::Node& leaf = *twin.impl()->node.get();
  leaf.pends = node.pends;
  leaf.seq = node.seq;  // leaves are finished in the order of their creation
  leaf.stands_in = node.kind != internal::Node::Kind::kLeaf;
  if (leaf.stands_in) return absl::OkStatus();
  leaf.module = node.module;
  leaf.extra->grad_spec = node.extra->grad_spec;
  const internal::LeafState& gradients = node.extra->leaf;
  internal::LeafState& copy = leaf.extra->leaf;
  if (gradients.grad.defined()) {
    DT_ASSIGN_OR_RETURN(const DTensor* grad, Enter(gradients.grad));
    copy.grad = *grad;
  }
  for (const auto& contribution : gradients.pending) {
    DT_ASSIGN_OR_RETURN(const DTensor* term, Enter(contribution.tensor));
    copy.pending.push_back(contribution);
    copy.pending.back().tensor = *term;
  }
  return absl::OkStatus();
}

// What a tensor was moved to before is not moved again: no more is its twin.
absl::Status Rehearsal::CopyMemos(const DTensor& from, const DTensor& twin) {
  if (!from.impl()->rare) return absl::OkStatus();
  for (const internal::Memo& memo : from.impl()->rare->memo) {
    internal::Memo copy = memo;
    if (memo.recorded && twin.requires_grad()) {
      DT_ASSIGN_OR_RETURN(copy.result, MovedBefore(twin, memo.result.spec_ref()));
    } else {
      DT_ASSIGN_OR_RETURN(const DTensor* result, Enter(memo.result));
      copy.result = *result;
    }
    copy.result_version = copy.result.impl()->local.buffer().version();
    if (twin.impl()->owned) internal::RareOf(*copy.result.impl()).memo_of = twin.impl();
    internal::RareOf(*twin.impl()).memo.push_back(std::move(copy));
  }
  return absl::OkStatus();
}

// With the history of that move, which is not told.
absl::StatusOr<DTensor> Rehearsal::MovedBefore(const DTensor& twin, const SpecRef& target) {
  const HiddenCommTraces hidden(RankContext::Current().trace());
  const EnableGrad recording;
  const double moved = moved_bytes_;
  internal::RecomputeRun* const recompute = std::exchange(State().recompute, nullptr);
  absl::StatusOr<DTensor> result = internal::RedistributeRecorded(twin, target);
  State().recompute = recompute;
  moved_bytes_ = moved;
  return result;
}

DTensor Rehearsal::Cached(const void* owner, const std::string& key,
                          absl::FunctionRef<DTensor()> make) {
  const auto known = cached_.find({owner, key});
  if (known != cached_.end()) return known->second;
  return cached_[{owner, key}] = make();
}

void Rehearsal::NoteMove(const Spec& from, const Spec& to) {
  moved_bytes_ += RedistributeCost(from, to);
}

void Rehearsal::Note(const OpDef& op, Inputs inputs, absl::Span<const Attr>,
                     const internal::DispatchEntry& entry) {
  std::vector<std::string> in, out;
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::string text =
        absl::StrCat(op.InputName(static_cast<int>(i)), " ", ToString(inputs[i]->placements()));
    if (i < entry.targets.size() && entry.targets[i]) {
      absl::StrAppend(&text, " => ", ToString(entry.targets[i]->placements()));
    }
    in.push_back(std::move(text));
  }
  for (const SpecRef& spec : entry.outs) out.push_back(ToString(spec->placements()));
  const TraceState& trace = RankContext::Current().trace();
  ops_.push_back({trace.module == nullptr ? "" : *trace.module,
                  std::string(trace.op.empty() ? absl::string_view(op.name()) : trace.op),
                  trace.phase,
                  absl::StrCat(op.name(), ": ", absl::StrJoin(in, ", "), " -> ",
                               entry.decompose ? "made of other ops" : absl::StrJoin(out, ", "))});
}

Tensor internal::RehearsedLocal(const Tensor& local) {
  if (!RankContext::Current().rehearses() || !local.has_data()) return local;
  return ValueOrThrow(Tensor::Empty(local.shape(), local.dtype(), DeviceType::kMeta));
}

}  // namespace dtensor

#include "dtensor/rehearsal.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/impl.h"
#include "tensor/status.h"

namespace dtensor {

using internal::EngineState;
using internal::State;

Rehearsal::Rehearsal(const CostModel& cost)
    : counter_(Allocator::CreateCounting()),
      counting_(counter_),
      random_(RngSnapshot::Take()),
      hidden_(RankContext::Current().trace()) {
  EngineState& state = State();
  if (state.rehearsal != nullptr) {
    Throw(absl::FailedPreconditionError("[rehearsal] another one is open on this rank"));
  }
  state.running = EngineState::Running::kRehearsal;
  state.rehearsal = this;
  TraceState& trace = RankContext::Current().trace();
  trace.rehearsal = true;
  trace.cost = &cost;
}

Rehearsal::~Rehearsal() {
  EngineState& state = State();
  state.running = EngineState::Running::kPlain;
  state.rehearsal = nullptr;
  TraceState& trace = RankContext::Current().trace();
  trace.rehearsal = false;
  trace.cost = nullptr;
  random_.Restore();
}

Rehearsal* Rehearsal::Current() { return State().rehearsal; }

void Rehearsal::Note(const OpDef& op, Inputs inputs, const internal::DispatchEntry& entry) {
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
  if (Rehearsal::Current() == nullptr || !local.defined() || local.device() == DeviceType::kMeta) {
    return local;
  }
  return ValueOrThrow(Tensor::Empty(local.shape(), local.dtype(), DeviceType::kMeta));
}

}  // namespace dtensor

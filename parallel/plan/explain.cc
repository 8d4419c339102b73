#include "dtensor/parallel/plan/explain.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "dtensor/rehearsal.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

// A model's parameters and buffers in the rehearsal that is open: recipes get tensors, on meta,
// while this is.
class RehearsedParameters {
 public:
  explicit RehearsedParameters(const std::vector<NamedParameter>& all) {
    for (const NamedParameter& named : all) {
      Parameter* p = named.parameter;
      all_.push_back(p);
      saved_.push_back(p->it_->tensor);
      if (p->materialized()) {
        ValueOrThrow(Rehearsal::Current()->Enter(p->it_->tensor));  // is there from the start
      } else {
        p->MakeMeta();
      }
    }
  }
  ~RehearsedParameters() {
    for (size_t i = 0; i < saved_.size(); ++i) all_[i]->it_->tensor = saved_[i];
  }
  RehearsedParameters(const RehearsedParameters&) = delete;

  int64_t bytes() const {
    int64_t bytes = 0;
    for (const Parameter* p : all_) bytes += p->is_buffer() ? 0 : LocalBytes(p->tensor());
    return bytes;
  }
  int64_t gradient_bytes() const {
    int64_t bytes = 0;
    for (const Parameter* p : all_) {
      const DTensor g = p->tensor().grad();
      if (g.defined()) bytes += LocalBytes(g);
    }
    return bytes;
  }

 private:
  static int64_t LocalBytes(const DTensor& t) {
    return t.spec().in_mesh() ? t.spec().local_bytes() : 0;
  }
  std::vector<Parameter*> all_;
  std::vector<DTensor> saved_;
};

namespace {

void BackwardOf(const Values& outputs, const ExplainOptions& options) {
  if (options.loss) return options.loss(outputs).Backward();
  for (const DTensor& y : outputs) {
    if (!y.defined() || !y.requires_grad()) continue;
    const internal::NodeRef& node = y.impl()->node;
    if (node && node->released) continue;  // the program's own backward was here
    const Placements whole = WithoutPending(y.placements());
    y.Backward(empty(y.shape(), {.dtype = y.dtype(), .mesh = y.mesh(), .placements = whole}));
  }
}

ModuleCall& CallOf(const std::string& module, const std::string& op, CommPhase phase,
                   std::vector<ModuleCall>* calls) {
  const auto it = std::find_if(calls->begin(), calls->end(), [&](const ModuleCall& c) {
    return c.module == module && c.op == op && c.phase == phase;
  });
  if (it != calls->end()) return *it;
  return *calls->insert(calls->end(), {module, op, phase});
}

std::vector<ModuleCall> CallsOf(const std::vector<RehearsedOp>& ops, const CommTrace& trace) {
  std::vector<ModuleCall> calls;
  for (const RehearsedOp& op : ops) {
    ModuleCall& call = CallOf(op.module, op.op, op.phase, &calls);
    ++call.count;
    if (std::find(call.strategies.begin(), call.strategies.end(), op.strategy) ==
        call.strategies.end()) {
      call.strategies.push_back(op.strategy);
    }
  }
  for (const CommRow& row : trace.Rows(CommBy::kOp)) {
    CallOf(row.module, row.op, row.phase, &calls).comm.push_back(row);
  }
  return calls;
}

void Append(const CommRow& row, std::string* text) {
  absl::StrAppendFormat(text, "    %-16s%-10s%-10s%8d%16d%12.1f\n", std::string(Name(row.kind)),
                        row.mesh_dims, row.implicit ? "implicit" : "", row.count, row.bytes,
                        row.modelled_us);
}

}  // namespace

std::string ModuleExplanation::ToString(bool all) const {
  std::string text = absl::StrFormat("    %-16s%-10s%-10s%8s%16s%12s\n", "collective", "mesh dims",
                                     "", "count", "bytes", "us");
  for (const ModuleCall& call : calls) {
    if (!all && call.comm.empty()) continue;
    absl::StrAppend(&text, call.module.empty() ? "-" : call.module, "  ",
                    call.op.empty() ? "-" : call.op, "  ",
                    absl::string_view(Name(call.phase).data(), Name(call.phase).size()), "\n");
    for (const std::string& s : call.strategies) absl::StrAppend(&text, "    ", s, "\n");
    for (const CommRow& row : call.comm) Append(row, &text);
  }
  for (const CommPhase phase : {CommPhase::kForward, CommPhase::kBackward}) {
    absl::StrAppend(&text, "all of ", absl::string_view(Name(phase).data(), Name(phase).size()),
                    "\n");
    for (const CommRow& row : totals) {
      if (row.phase == phase) Append(row, &text);
    }
  }
  absl::StrAppend(&text, "bytes of this rank: parameters ", parameter_bytes, ", gradients ",
                  gradient_bytes, ", at most ", peak_bytes, " at one time\n");
  absl::StrAppendFormat(&text, "modelled time of all collectives: %.1f us\n", modelled_us);
  if (!ended.empty()) absl::StrAppend(&text, "ended early: ", ended, "\n");
  return text;
}

namespace {

absl::StatusOr<ModuleExplanation> Rehearse(absl::FunctionRef<Values(const Values&)> program,
                                           const std::vector<NamedParameter>& parameters,
                                           const Values& inputs, const ExplainOptions& options) {
  try {
    ModuleExplanation e;
    Rehearsal rehearsal(options.cost ? *options.cost : RankContext::Current().cost_model());
    const RehearsedParameters held(parameters);
    e.parameter_bytes = held.bytes();
    const CommTrace trace;
    try {
      const Values outputs = program(inputs);
      if (options.backward) BackwardOf(outputs, options);
    } catch (const Error& error) {
      if (!IsNoValues(error.status())) throw;
      e.ended = error.what();
      if (!rehearsal.ops().empty()) {
        const RehearsedOp& last = rehearsal.ops().back();
        absl::StrAppend(&e.ended, "; asked for after ", last.strategy,
                        last.module.empty() ? "" : " in ", last.module);
      }
    }
    e.peak_bytes = rehearsal.peak_bytes();
    e.calls = CallsOf(rehearsal.ops(), trace);
    e.events = trace.events();
    e.totals = trace.Rows();
    e.modelled_us = trace.ModelledUs();
    e.gradient_bytes = held.gradient_bytes();  // last: it reduces what waits, here only
    return e;
  } catch (...) {
    return CurrentException();
  }
}

}  // namespace

absl::StatusOr<ModuleExplanation> Explain(Module& model, const Values& inputs,
                                          const ExplainOptions& options) {
  return Rehearse([&](const Values& in) { return model(in); }, model.NamedTensors(), inputs,
                  options);
}

absl::StatusOr<ModuleExplanation> Explain(absl::FunctionRef<Values(const Values&)> program,
                                          const Values& inputs, const ExplainOptions& options) {
  return Rehearse(program, {}, inputs, options);
}

}  // namespace dtensor

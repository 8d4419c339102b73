#include "dtensor/recompute.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "dtensor/memo.h"
#include "dtensor/mesh_scope.h"
#include "dtensor/tensor/status.h"
#include "dtensor/watch.h"

namespace dtensor {
namespace internal {

// A run of the function, which notes what its ops read: also those that record nothing or save
// nothing, since what they make is made again.
class RecomputeWatch final : CallWatcher {
 public:
  explicit RecomputeWatch(RecomputeRun run)
      : run_(std::move(run)),
        outer_(std::exchange(State().recompute, &run_)),
        outer_watcher_(std::exchange(State().watcher, static_cast<CallWatcher*>(this))) {}
  ~RecomputeWatch() override {
    State().recompute = outer_;
    State().watcher = outer_watcher_;
  }
  RecomputeWatch(const RecomputeWatch&) = delete;
  const RecomputeRun& run() const { return run_; }

 private:
  void Note(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
            const DispatchEntry& entry) override {
    RecomputeRegion::Reads* reads = State().recompute == &run_ ? run_.open_reads() : nullptr;
    for (size_t i = 0; reads != nullptr && i < inputs.size(); ++i) {
      reads->push_back(RecomputeRegion::ReadOf(&op, static_cast<int>(i), *inputs[i]->impl()));
      const bool writes = op.in_place() && i < static_cast<size_t>(op.num_outputs());
      if (writes) RecomputeRegion::NoteWrite(*inputs[i]->impl());
    }
    if (outer_watcher_ != nullptr) outer_watcher_->Note(op, inputs, attrs, entry);
  }

  RecomputeRun run_;
  RecomputeRun* const outer_;
  CallWatcher* const outer_watcher_;
};

namespace {

void DropValues(Node* node) {
  for (const Saved& s : node->saved_in) {
    if (s.tensor.defined()) MemoReleased(*s.tensor.impl());
  }
  node->saved_in.clear();
  node->saved_out.clear();
  if (node->kind == Node::Kind::kCustom) node->extra->custom = nullptr;
}

std::string NameOf(const Node& node) {
  const bool own = node.kind == Node::Kind::kCustom;
  return absl::StrCat(own ? "the CustomFunction " : "", node.Name());
}

// What is known to exchange one of a name for the other.
absl::string_view HintOf(const Node* now, const Node* before) {
  if (before == nullptr || now->kind == before->kind || now->Name() != before->Name()) return "";
  return "; a scope that answers the call (LossParallel, InterceptCalls) must be open in both or "
         "neither: keep it open over Backward";
}

}  // namespace

Node::Extra::~Extra() {
  if (region) region->Forget(step);
}

void RecomputeRegion::TakeInputs(const Values& inputs) {
  inputs_ = inputs;  // with their names
  versions_.clear();
  wanted_.clear();
  for (DTensor& t : inputs_) {
    versions_.push_back(t.defined() ? t.local().buffer().version() : 0);
    wanted_.push_back(t.defined() && t.requires_grad());
    // Changed in place by something made of the results (x += f(x)) an input has a history, and
    // would keep this region, and so itself, alive.
    if (t.defined()) t = t.Detach();
  }
  before_ = RngSnapshot::Take();
  outer_ = nullptr;
}

Values RecomputeRegion::Record(const std::function<Values(const Values&)>& fn,
                               const Values& inputs) {
  RecomputeRun* run = State().recompute;
  if (run != nullptr && run->mode != Mode::kDrop) return Nested(run, fn, inputs);
  const auto region = std::make_shared<RecomputeRegion>();
  region->fn_ = fn;
  region->module_ = RankContext::Current().trace().module;
  region->implicit_replication_ = State().implicit_replication;
  region->mesh_ = CurrentMesh();
  if (run == nullptr) {
    region->TakeInputs(inputs);
    region->written_ = std::make_shared<absl::flat_hash_set<const void*>>();
  } else {  // values of the outer region are not kept, so not as inputs either
    region->outer_ = run->region->shared_from_this();
    region->written_ = run->region->written_;
    run->region->AddStep(nullptr, region);
  }
  const RecomputeWatch scope({region.get(), Mode::kDrop});
  Values outputs = fn(inputs);
  region->reads_ = {};  // nothing comes after them that would be made again
  return outputs;
}

// A call inside of a function that runs again.
Values RecomputeRegion::Nested(RecomputeRun* run, const std::function<Values(const Values&)>& fn,
                               const Values& inputs) {
  if (run->mode == Mode::kRefill) {
    RecomputeRegion& outer = *run->region;
    const Step& step = outer.NextStep(run);
    if (!step.is_nested) {
      Throw(absl::FailedPreconditionError(
          "the function calls Recompute where it did not the first time"));
    }
    if (const auto nested = step.nested.lock()) nested->TakeInputs(inputs);
    if (run->next == outer.steps_.size()) throw Done();
  }
  const RecomputeWatch scope({run->region, Mode::kIgnore});
  return fn(inputs);
}

RecomputeRegion::Step& RecomputeRegion::NextStep(RecomputeRun* run) {
  if (run->next >= steps_.size()) throw Done();
  Step& step = steps_[run->next++];
  run->failed = CheckReads(step, std::exchange(run->reads, {}));
  if (!run->failed.ok()) throw Done();
  return step;
}

void RecomputeRegion::AddStep(Node* node, std::shared_ptr<RecomputeRegion> nested) {
  const bool is_nested = nested != nullptr;
  steps_.push_back({node, std::move(nested), is_nested, std::exchange(reads_, {})});
}

RecomputeRegion::Read RecomputeRegion::ReadOf(const OpDef* op, int input, const DTensorImpl& t) {
  const Buffer none;
  const Buffer& buffer = t.local.defined() ? t.local.buffer() : none;
  return {op, input, buffer.identity(), buffer.version(), t.spec};
}

std::string RecomputeRegion::Read::What() const {
  if (op != nullptr) return absl::StrCat("input ", op->InputName(input), " of ", op->name());
  if (input < 0) return input == -1 ? "a tensor that is redistributed" : "a tensor that is read";
  return absl::StrCat("saved tensor #", input, " of a CustomFunction");
}

void RecomputeRegion::NoteMove(const DTensorImpl& source, bool numbers) {
  if (Reads* reads = State().recompute->open_reads()) {
    reads->push_back(ReadOf(nullptr, numbers ? -2 : -1, source));
  }
}

void RecomputeRegion::NoteWrite(const DTensorImpl& t) {
  const RecomputeRun& run = *State().recompute;
  if (run.mode == Mode::kDrop && t.local.defined()) {
    run.region->written_->insert(t.local.buffer().identity());
  }
}

absl::Status RecomputeRegion::CheckReads(const Step& step, const Reads& now) const {
  // They differ where something is done the first time only (a table that is kept).
  const auto same = [](const Read& a, const Read& b) { return a.op == b.op && a.input == b.input; };
  if (!std::equal(now.begin(), now.end(), step.reads.begin(), step.reads.end(), same)) {
    return absl::OkStatus();
  }
  for (size_t i = 0; i < now.size(); ++i) {
    const Read& before = step.reads[i];
    if (now[i].memory != before.memory || now[i].version == before.version) continue;
    if (written_->contains(before.memory)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        now[i].What(), " (", now[i].spec->ToString(),
        ") was changed in place after the forward, and Recompute reads it again; use the op that "
        "returns a new tensor, or clone() first"));
  }
  return absl::OkStatus();
}

void RecomputeRegion::Note(Node* node) {
  RecomputeRun& run = *State().recompute;
  RecomputeRegion& region = *run.region;
  Reads* reads = node->kind == Node::Kind::kCustom ? run.open_reads() : nullptr;
  for (size_t i = 0; reads != nullptr && i < node->saved_in.size(); ++i) {
    reads->push_back(ReadOf(nullptr, static_cast<int>(i), *node->saved_in[i].tensor.impl()));
  }
  if (run.mode == Mode::kDrop) {
    if (!node->extra) node->extra = std::make_unique<Node::Extra>();
    node->extra->region = region.shared_from_this();
    node->extra->step = region.steps_.size();
    region.AddStep(node, nullptr);
  }
  if (run.mode != Mode::kRefill) return DropValues(node);
  const Step& step = region.NextStep(&run);
  Node* to = step.node;
  if (step.is_nested || (to != nullptr && (to->op != node->op || to->kind != node->kind))) {
    Throw(absl::FailedPreconditionError(absl::StrCat(
        "the function runs ", NameOf(*node), " where it ran ",
        to == nullptr ? "Recompute" : NameOf(*to), " the first time", HintOf(node, to))));
  }
  if (to != nullptr) {
    to->saved_in = std::move(node->saved_in);
    to->saved_out = std::move(node->saved_out);
    if (node->kind == Node::Kind::kCustom) to->extra->custom = std::move(node->extra->custom);
  }
  DropValues(node);
  if (run.next == region.steps_.size()) throw Done();
}

absl::Status RecomputeRegion::CheckInputs() const {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (!inputs_[i].defined()) continue;
    if (inputs_[i].local().buffer().version() == versions_[i]) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("input ", i, " of Recompute (", inputs_[i].spec().ToString(),
                     ") was changed in place after the forward; use the op that returns a new "
                     "tensor, or clone() first"));
  }
  return absl::OkStatus();
}

absl::Status RecomputeRegion::Fill() {
  if (filled_) return absl::OkStatus();
  const RecomputeRun* run = State().recompute;
  for (const RecomputeRegion* r = run == nullptr || run->mode != Mode::kDrop ? nullptr
                                                                             : run->region;
       r != nullptr; r = r->outer_.get()) {
    if (r == this) {
      return absl::FailedPreconditionError(
          "Backward inside of a function that Recompute runs needs values that are not kept there; "
          "call it after Recompute has returned");
    }
  }
  const std::shared_ptr<RecomputeRegion> alive = shared_from_this(), outer = outer_;
  if (outer) DT_RETURN_IF_ERROR(outer->Fill());
  if (outer_) return absl::FailedPreconditionError("the function did not come here again");
  DT_RETURN_IF_ERROR(CheckInputs());
  DT_RETURN_IF_ERROR(Rerun());
  filled_ = true;
  fn_ = nullptr;
  inputs_.clear();
  for (Step& step : steps_) step.reads = {};
  return absl::OkStatus();
}

absl::Status RecomputeRegion::Rerun() {
  if (steps_.empty()) return absl::OkStatus();
  struct Restore {  // the generators go back to where they are now, also when the function throws
    RngSnapshot now = RngSnapshot::Take();
    ~Restore() { now.Restore(); }
  } restore;
  before_.Restore();
  Values leaves = inputs_;
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (!leaves[i].defined()) continue;
    leaves[i] = leaves[i].Detach();
    if (wanted_[i]) leaves[i].RequiresGrad();
  }
  const EnableGrad recording;
  const bool implicit = std::exchange(State().implicit_replication, implicit_replication_);
  const absl::Cleanup back = [implicit] { State().implicit_replication = implicit; };
  std::optional<MeshScope> on;
  if (mesh_.defined()) on.emplace(mesh_);
  const ScopedModule scope(RankContext::Current().trace(), module_);
  const MemoScope memos;  // as a module's call has: a parameter that is used twice moves once
  const RecomputeWatch watch({this, Mode::kRefill});
  try {
    fn_(leaves);
  } catch (const Done&) {
    return watch.run().failed;
  }
  DT_RETURN_IF_ERROR(watch.run().failed);
  // Done, and the function caught it.
  if (watch.run().next == steps_.size()) return absl::OkStatus();
  return absl::FailedPreconditionError("the function did less than the first time");
}

}  // namespace internal

void RunOnce(absl::FunctionRef<void()> body) {
  if (internal::RunsAgain()) return;
  internal::RecomputeRun* const run = internal::State().recompute;
  const bool outer = run != nullptr && std::exchange(run->once, true);
  const absl::Cleanup close = [&] {
    if (run != nullptr) run->once = outer;
  };
  const NoGrad no_grad;
  body();
}

Values Recompute(const std::function<Values(const Values&)>& fn, const Values& inputs) {
  if (!fn) Throw(InFunction("recompute", absl::InvalidArgumentError("the function is null")));
  return GradEnabled() ? internal::RecomputeRegion::Record(fn, inputs) : fn(inputs);
}

}  // namespace dtensor

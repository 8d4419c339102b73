#include "dtensor/recompute.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/memo.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace internal {
namespace {

class ScopedRun {
 public:
  explicit ScopedRun(RecomputeRun run)
      : run_(run), outer_(std::exchange(State().recompute, &run_)) {}
  ~ScopedRun() { State().recompute = outer_; }
  ScopedRun(const ScopedRun&) = delete;

 private:
  RecomputeRun run_;
  RecomputeRun* outer_;
};

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
  inputs_ = inputs;
  for (const DTensor& t : inputs) {
    versions_.push_back(t.defined() ? t.local().buffer().version() : 0);
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
  if (run == nullptr) {
    region->TakeInputs(inputs);
  } else {  // values of the outer region are not kept, so not as inputs either
    region->outer_ = run->region->shared_from_this();
    run->region->steps_.push_back({nullptr, region, true});
  }
  const ScopedRun scope({region.get(), Mode::kDrop});
  return fn(inputs);
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
  const ScopedRun scope({run->region, Mode::kIgnore});
  return fn(inputs);
}

RecomputeRegion::Step& RecomputeRegion::NextStep(RecomputeRun* run) {
  if (run->next >= steps_.size()) throw Done();
  return steps_[run->next++];
}

void RecomputeRegion::Note(Node* node) {
  RecomputeRun& run = *State().recompute;
  RecomputeRegion& region = *run.region;
  if (run.mode == Mode::kDrop) {
    if (!node->extra) node->extra = std::make_unique<Node::Extra>();
    node->extra->region = region.shared_from_this();
    node->extra->step = region.steps_.size();
    region.steps_.push_back({node});
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
  const std::shared_ptr<RecomputeRegion> alive = shared_from_this(), outer = outer_;
  if (outer) DT_RETURN_IF_ERROR(outer->Fill());
  if (outer_) return absl::FailedPreconditionError("the function did not come here again");
  DT_RETURN_IF_ERROR(CheckInputs());
  DT_RETURN_IF_ERROR(Rerun());
  filled_ = true;
  fn_ = nullptr;
  inputs_.clear();
  return absl::OkStatus();
}

absl::Status RecomputeRegion::Rerun() {
  if (steps_.empty()) return absl::OkStatus();
  struct Restore {  // the generators go back to where they are now, also when the function throws
    RngSnapshot now = RngSnapshot::Take();
    ~Restore() { now.Restore(); }
  } restore;
  before_.Restore();
  Values leaves = inputs_;  // with their names
  for (DTensor& t : leaves) {
    if (!t.defined()) continue;
    const bool wants = t.requires_grad();
    t = t.Detach();
    if (wants) t.RequiresGrad();
  }
  const EnableGrad recording;
  const ScopedModule scope(RankContext::Current().trace(), module_);
  const ScopedRun run({this, Mode::kRefill});
  try {
    fn_(leaves);
  } catch (const Done&) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError("the function did less than the first time");
}

}  // namespace internal

Values Recompute(const std::function<Values(const Values&)>& fn, const Values& inputs) {
  return GradEnabled() ? internal::RecomputeRegion::Record(fn, inputs) : fn(inputs);
}

}  // namespace dtensor

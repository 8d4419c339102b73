#include "dtensor/parallel/pipeline/pipeline.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
#include "dtensor/errors.h"
#include "dtensor/gradients.h"
#include "dtensor/impl.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/rehearsal.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

using internal::Incoming;
using internal::StagePort;
using internal::StageTransfers;
using Kind = PipelineAction::Kind;

[[noreturn]] void Refuse(absl::string_view why) {
  Throw(absl::InvalidArgumentError(absl::StrCat("[pipeline] ", why)));
}

Placements ReplicatedOn(const DeviceMesh& mesh) { return Placements(mesh.ndim()); }

DTensor ZerosOf(const Spec& spec) {
  return zeros(spec.shape(), {spec.dtype(), spec.mesh(),
                              Placements(spec.placements().begin(), spec.placements().end())});
}

// A pending value with its terms added up: neighbours get results, not terms.
DTensor Settled(const DTensor& t) {
  if (!t.spec().has_partial()) return t;
  Placements placements;
  for (const Placement& p : t.placements()) {
    placements.push_back(p.is_partial() ? Placement(Replicate()) : p);
  }
  return t.Redistribute(placements);
}

// One backward of several results.
void BackwardOf(const Values& results, const Values& grads) {
  if (results.size() == 1) return results[0].Backward(grads[0]);
  const auto forward = [&]() -> Values {
    const DeviceMesh& mesh = results[0].mesh();
    return {zeros({}, {.dtype = DType::kF64, .mesh = mesh, .placements = ReplicatedOn(mesh)})};
  };
  const auto backward = [&grads](const Values&) { return grads; };
  CustomFunction("stage", results, forward, backward)[0].Backward();
}

}  // namespace

Pipeline::Pipeline(const DeviceMesh& mesh, std::vector<PipelineStage> stages,
                   const PipelineOptions& options)
    : mesh_(mesh),
      stages_(std::move(stages)),
      sync_last_(options.sync_last),
      group_(options.group),
      mesh_dim_(ValueOrThrow(mesh.DimIndex(options.mesh_dim))) {
  for (const std::string& name : sync_last_) ThrowIfError(mesh.DimIndex(name).status());
  const auto ranks = static_cast<int>(mesh.size(mesh_dim_));
  const int count = static_cast<int>(stages_.size());
  if (count == 0 || count % ranks != 0) {
    Refuse(absl::StrCat(count, " stages on the ", ranks, " ranks of mesh dim ", options.mesh_dim,
                        "; each rank has as many as the others"));
  }
  for (int s = 0; s < count; ++s) {
    if (stages_[s].forward == nullptr) Refuse(absl::StrCat("stage ", s, " has no function"));
    for (const Module* module : stages_[s].modules) {
      if (module == nullptr) Refuse(absl::StrCat("a module of stage ", s, " is null"));
    }
    for (const Parameter* parameter : stages_[s].borrows) {
      if (parameter == nullptr) {
        Refuse(absl::StrCat("a parameter that stage ", s, " borrows is null"));
      }
    }
    meshes_.push_back(StageMesh(mesh, options.mesh_dim, s));
  }
  if (options.own_schedule.has_value()) {
    schedule_ = *options.own_schedule;
    ThrowIfError(CheckPipelineSchedule(schedule_));
    if (schedule_.stages != count || static_cast<int>(schedule_.ranks.size()) != ranks) {
      Refuse(absl::StrCat("the schedule is of ", schedule_.stages, " stages on ",
                          schedule_.ranks.size(), " ranks, the pipeline has ", count, " on ",
                          ranks));
    }
  } else {
    schedule_ = ValueOrThrow(
        MakePipelineSchedule(options.schedule, ranks, options.microbatches, count / ranks));
  }
  Dims at;
  if (!mesh.Coordinate(RankContext::Current().rank(), &at)) {
    Throw(absl::FailedPreconditionError(absl::StrCat("[pipeline] rank ",
                                                     RankContext::Current().rank(),
                                                     " is not in the mesh ", mesh.ToString())));
  }
  actions_ = ValueOrThrow(WithTransfers(schedule_))[at[mesh_dim_]];
  for (int s = 0; s < count; ++s) {
    for (Parameter* parameter : stages_[s].borrows)
      loaned_.push_back({parameter, Owner(*parameter), s});
  }
}

int Pipeline::Owner(const Parameter& parameter) const {
  for (int s = 0; s < stages(); ++s) {
    for (const Module* module : stages_[s].modules) {
      for (const Parameter* own : module->Parameters()) {
        if (own == &parameter || own->IsTiedTo(parameter)) return s;
      }
    }
  }
  Refuse("a stage borrows a parameter that no stage has");
}

std::vector<bool> Pipeline::Modes() const {
  std::vector<bool> modes = {GradEnabled()};
  for (const PipelineStage& stage : stages_) {
    for (Module* module : stage.modules) {
      for (const NamedModule& m : module->NamedModules()) modes.push_back(m.module->training());
      for (const Parameter* p : module->Parameters()) modes.push_back(p->requires_grad());
    }
  }
  return modes;
}

Values Pipeline::RunStage(int stage, const Values& inputs) const {
  Values results = stages_[stage].forward(inputs);
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) Refuse(absl::StrCat("result ", i, " of stage ", stage, " is null"));
    if (!(results[i].mesh() == meshes_[stage])) {
      Refuse(absl::StrCat("result ", i, " of stage ", stage, " is on mesh ",
                          results[i].mesh().ToString(), ", the stage is on ",
                          meshes_[stage].ToString(), " of ranks from ", meshes_[stage].MinRank()));
    }
    results[i] = Settled(results[i]);
  }
  return results;
}

SpecRef Pipeline::On(int stage, const Spec& spec) const {
  return ValueOrThrow(RankContext::Current().specs().Intern(meshes_[stage], spec.placements(),
                                                            spec.shape(), spec.dtype()));
}

// Of stages that are elsewhere a rank knows what they give, too: it goes through all of them once,
// without their work.
const Pipeline::Shapes& Pipeline::ShapesOf(const Values& inputs, const std::vector<bool>& modes) {
  std::vector<StagePort> kinds = StagePort::OfAll(inputs);
  for (const auto& known : shapes_) {
    if (known->inputs == kinds && known->modes == modes) return *known;
  }
  auto shapes = std::make_unique<Shapes>();
  shapes->inputs = std::move(kinds);
  shapes->modes = modes;
  const Rehearsal rehearsal(RankContext::Current().cost_model());
  Values values = inputs;
  const auto arrives = [this](int stage, const StagePort& port) {
    DTensor t = ZerosOf(*On(stage, *port.spec));
    if (port.requires_grad) t.RequiresGrad();
    return port.InItsOrder(t);
  };
  for (int s = 0; s < stages(); ++s) {
    for (const Loaned& loan : loaned_) {
      if (loan.to != s) continue;
      values.push_back(arrives(s, StagePort::Of(loan.parameter->tensor())));
    }
    const uint64_t before = DefaultGenerator().offset();
    std::vector<StagePort> ports = StagePort::OfAll(RunStage(s, values));
    shapes->words.push_back(DefaultGenerator().offset() - before);
    values.clear();
    for (const StagePort& port : ports) {
      if (s + 1 == stages()) break;
      values.Add(port.name, arrives(s + 1, port));
    }
    shapes->ports.push_back(std::move(ports));
  }
  shapes_.push_back(std::move(shapes));
  return *shapes_.back();
}

// One step of a pipeline on one rank.
class Pipeline::Run {
 public:
  Run(Pipeline& pipeline, absl::Span<const Values> inputs, std::vector<const Shapes*> shapes,
      const Loss& loss, bool train)
      : p_(pipeline),
        inputs_(inputs),
        loss_(loss),
        train_(train),
        shapes_(std::move(shapes)),
        transfers_(p_.mesh_, p_.meshes_, p_.group_) {
    for (const Shapes* shapes : shapes_) {
      offsets_.push_back(next_offset_);
      for (const uint64_t words : shapes->words) next_offset_ += words;
    }
    backwards_left_.assign(static_cast<size_t>(p_.stages()), p_.schedule_.microbatches);
    Borrow();
  }

  void Do(const PipelineAction& a) {
    switch (a.kind) {
      case Kind::kForward:
        return Forward(a.stage, a.microbatch);
      case Kind::kBackward:
        return train_ ? Backward(a.stage, a.microbatch) : void();
      case Kind::kSendForward:
        return Send(a, Kept(a).results);
      case Kind::kRecvForward:
        return Receive(a);
      case Kind::kSendBackward:
        return train_ ? Send(a, InputGradients(a)) : void();
      case Kind::kRecvBackward:
        return train_ ? Receive(a) : void();
    }
  }

  // Once all is done.
  DTensor Finish() {
    if (train_) GiveBack();
    transfers_.WaitForSent();
    ThrowIfError(DefaultGenerator().SetOffset(next_offset_));
    if (train_ && !Alone()) MarkAbsentGradients();
    const NoGrad no_grad;
    const DeviceMesh& last = p_.meshes_.back();
    const DTensor total = total_.defined()
                              ? total_.Redistribute(ReplicatedOn(last))
                              : DTensor::Absent(last, ReplicatedOn(last), {}, DType::kF64);
    return total.Redistribute(p_.mesh_, ReplicatedOn(p_.mesh_));
  }

 private:
  struct Passed {
    Values inputs, results;
  };
  using Place = std::pair<int, int64_t>;  // stage and microbatch

  Passed& Kept(const PipelineAction& a) { return passed_.at({a.stage, a.microbatch}); }
  const std::vector<StagePort>& PortsOf(int stage, int64_t m) const {
    return shapes_[m]->ports[stage];
  }
  bool IsLast(int stage) const { return stage + 1 == p_.stages(); }
  // Whether the neighbour is on this rank, which hands over what others send.
  bool Alone() const { return p_.schedule_.ranks.size() == 1; }

  void Forward(int stage, int64_t m) {
    Passed& now = passed_[{stage, m}];
    now.inputs = stage == 0 ? inputs_[m] : Arrived(Kind::kRecvForward, stage, m);
    uint64_t offset = offsets_[m];
    for (int s = 0; s < stage; ++s) offset += shapes_[m]->words[s];
    ThrowIfError(DefaultGenerator().SetOffset(offset));
    Values all = now.inputs;
    for (size_t i = 0; i < p_.loaned_.size(); ++i) {
      if (p_.loaned_[i].to == stage) all.push_back(borrowed_[i]);
    }
    now.results = p_.RunStage(stage, all);
    CheckPorts(stage, m, now.results, DefaultGenerator().offset() - offset);
    if (IsLast(stage)) AddLoss(m, &now);
    if (train_) return;
    now.inputs.clear();
    if (IsLast(stage)) now.results.clear();
  }

  void AddLoss(int64_t m, Passed* now) {
    if (loss_ == nullptr) Refuse("the loss has no function");
    const uint64_t offset = DefaultGenerator().offset();
    const DTensor loss = loss_(m, now->results);
    if (DefaultGenerator().offset() != offset) {
      Refuse("the loss draws random numbers, which is for stages to do");
    }
    if (!loss.defined() || loss.numel() != 1) {
      Refuse(loss.defined()
                 ? absl::StrCat("a loss has one element, this one is ", ToString(loss.shape()))
                 : "the loss is null");
    }
    if (!(loss.mesh() == p_.meshes_.back())) {
      Refuse(absl::StrCat("the loss is on mesh ", loss.mesh().ToString(), ", the last stage on ",
                          p_.meshes_.back().ToString()));
    }
    const auto wants = [](const DTensor& t) { return t.requires_grad(); };
    if (train_ && !loss.requires_grad() &&
        std::any_of(now->results.begin(), now->results.end(), wants)) {
      Refuse("the loss has no gradient history, and what it is made of has one");
    }
    now->results = {loss};
    const NoGrad no_grad;
    const DTensor value = to(reshape(loss.Detach(), {}), DType::kF64);
    total_ = total_.defined() ? total_ + value : value;
  }

  // The receiver counts on them, and whoever draws next on how far the generator moved.
  void CheckPorts(int stage, int64_t m, const Values& results, uint64_t words) const {
    const std::vector<StagePort>& ports = PortsOf(stage, m);
    bool same = results.size() == ports.size() && words == shapes_[m]->words[stage];
    for (size_t i = 0; same && i < ports.size(); ++i) {
      same = results[i].spec_ref() == ports[i].spec && results.name(i) == ports[i].name &&
             (!train_ || results[i].requires_grad() == ports[i].requires_grad);
    }
    if (!same) {
      Refuse(
          absl::StrCat("stage ", stage,
                       " does not give what it gives when it is rehearsed, or draws other random "
                       "numbers; what it does may depend on shapes, not on values"));
    }
  }

  void Backward(int stage, int64_t m) {
    std::optional<NoGradSync> later;
    if (--backwards_left_[stage] > 0) later.emplace(p_.sync_last_);
    Passed& now = passed_.at({stage, m});
    if (IsLast(stage)) {
      if (now.results[0].requires_grad()) now.results[0].Backward();
    } else {
      Values results, grads = Arrived(Kind::kRecvBackward, stage, m);
      for (size_t i = 0; i < now.results.size(); ++i) {
        if (PortsOf(stage, m)[i].requires_grad) results.push_back(now.results[i]);
      }
      if (!results.empty()) BackwardOf(results, grads);
    }
    now.results.clear();
    if (stage == 0) passed_.erase({stage, m});
  }

  // What goes back to the stage before.
  Values InputGradients(const PipelineAction& a) {
    Values grads;
    for (const DTensor& input : Kept(a).inputs) {
      if (!input.requires_grad()) continue;
      const DTensor grad = input.grad();
      grads.push_back(grad.defined() ? grad : zeros_like(input));
    }
    passed_.erase({a.stage, a.microbatch});
    return grads;
  }

  // --- between stages ----------------------------------------------------------------------------

  static std::string NameOf(const PipelineAction& a, bool back) {
    return absl::StrCat("microbatch ", a.microbatch, back ? " backward" : " forward");
  }

  void Send(const PipelineAction& a, const Values& values) {
    const bool back = a.kind == Kind::kSendBackward;
    transfers_.Send(a.stage, back ? a.stage - 1 : a.stage + 1, NameOf(a, back), values);
    if (!back && !train_) passed_.erase({a.stage, a.microbatch});
  }

  void Receive(const PipelineAction& a) {
    const bool back = a.kind == Kind::kRecvBackward;
    const int from = back ? a.stage + 1 : a.stage - 1;
    std::vector<StagePort> ports;
    for (const StagePort& port : PortsOf(back ? a.stage : from, a.microbatch)) {
      if (!back) {
        ports.push_back(Taken(a.stage, port));
      } else if (port.requires_grad) {
        ports.push_back({port.spec});
      }
    }
    incoming_.emplace(std::tuple(a.kind, a.stage, a.microbatch),
                      transfers_.Receive(from, a.stage, NameOf(a, back), ports));
  }

  // What another stage gives, as `stage` takes it.
  StagePort Taken(int stage, const StagePort& port) const {
    return {p_.On(stage, *port.spec), port.requires_grad && train_, port.memory, port.name};
  }

  // What was received for a forward or a backward; on one rank what its neighbour made.
  Values Arrived(Kind kind, int stage, int64_t m) {
    if (Alone()) return HandedOver(kind == Kind::kRecvBackward, stage, m);
    const auto found = incoming_.find({kind, stage, m});
    DT_CHECK(found != incoming_.end());
    Values values = found->second.Wait();
    incoming_.erase(found);
    return values;
  }
  Values HandedOver(bool back, int stage, int64_t m) {
    if (back) return InputGradients({Kind::kBackward, stage + 1, m});
    Values values;
    const Values& results = passed_.at({stage - 1, m}).results;
    for (size_t i = 0; i < results.size(); ++i) {
      const StagePort port = Taken(stage, StagePort::Of(results[i]));
      values.Add(results.name(i), port.Leaf(results[i].local()));
    }
    if (!train_) passed_.erase({stage - 1, m});
    return values;
  }

  // --- what stages borrow ------------------------------------------------------------------------

  bool Here(int stage) const { return p_.meshes_[stage].Contains(RankContext::Current().rank()); }

  // The values of parameters of other stages, as leaves of their own.
  void Borrow() {
    std::vector<std::pair<size_t, Incoming>> coming;
    for (size_t i = 0; i < p_.loaned_.size(); ++i) {
      const auto& [parameter, from, to] = p_.loaned_[i];
      const DTensor tensor = parameter->tensor();
      const StagePort port = Taken(to, StagePort::Of(tensor));
      borrowed_.emplace_back();
      if (Here(from) && Here(to)) {
        borrowed_[i] = port.Leaf(tensor.local());
      } else if (Here(from)) {
        transfers_.Send(from, to, "a borrowed parameter", {tensor});
      } else if (Here(to)) {
        coming.emplace_back(i, transfers_.Receive(from, to, "a borrowed parameter", {port}));
      }
    }
    for (auto& [i, incoming] : coming) borrowed_[i] = incoming.Wait()[0];
    for (size_t i = 0; i < p_.loaned_.size(); ++i) {
      if (!borrowed_[i].defined() || !borrowed_[i].requires_grad()) continue;
      const SpecRef kept = GradientOf(p_.loaned_[i]);
      borrowed_[i].SetGradLayout(kept->dtype(), kept->placements());
    }
  }
  // As the parameter keeps its gradient, on the mesh of the stage that has it or, with `borrowed`,
  // of the one that borrows it.
  SpecRef GradientOf(const Loaned& loan, bool borrowed = true) const {
    const DTensor& tensor = loan.parameter->tensor();
    return p_.On(borrowed ? loan.to : loan.from, internal::LeafSpec(*tensor.impl()->node.get()));
  }

  // Their gradients to where they are from.
  void GiveBack() {
    const char* const what = "the gradient of a borrowed parameter";
    for (size_t i = 0; i < p_.loaned_.size(); ++i) {
      const auto& [parameter, from, to] = p_.loaned_[i];
      DTensor tensor = parameter->tensor(), grad;
      if (!tensor.requires_grad()) continue;
      if (Here(to)) {
        grad = borrowed_[i].grad();
        if (!grad.defined()) grad = ZerosOf(*GradientOf(p_.loaned_[i]));
      }
      const StagePort port = {GradientOf(p_.loaned_[i], /*borrowed=*/false)};
      if (Here(from) && Here(to)) {
        grad = port.Leaf(grad.local());
      } else if (Here(to)) {
        transfers_.Send(to, from, what, {grad});
      } else if (Here(from)) {
        grad = transfers_.Receive(to, from, what, {port}).Wait()[0];
      }
      if (!Here(from)) continue;
      const NoGrad no_grad;
      const DTensor own = tensor.grad();
      tensor.SetGrad(own.defined() ? own + dtensor::to(grad, own.dtype()) : grad);
    }
  }

  // Parameters of stages that are elsewhere have gradients there: an optimizer here counts their
  // updates, too. Which of them have is told by the ranks that have them.
  void MarkAbsentGradients() const {
    std::vector<std::pair<int, DTensor>> all;  // with the stage
    for (int s = 0; s < p_.stages(); ++s) {
      for (Module* module : p_.stages_[s].modules) {
        for (Parameter* parameter : module->Parameters()) all.emplace_back(s, parameter->tensor());
      }
    }
    std::string mine;
    for (const auto& [s, t] : all) mine.push_back(Here(s) && t.grad().defined() ? '1' : '0');
    const std::vector<std::string> told = ValueOrThrow(RankContext::Current().Exchange(
        p_.mesh_, {p_.mesh_dim_}, "which parameters of a pipeline have gradients", mine));
    for (size_t i = 0; i < all.size(); ++i) {
      auto& [s, t] = all[i];
      if (Here(s) || !t.requires_grad() || t.spec().in_mesh()) continue;
      if (told[p_.schedule_.RankOf(s)].at(i) == '1') t.SetGrad(DTensor::Absent(t.spec()));
    }
  }

  Pipeline& p_;
  const absl::Span<const Values> inputs_;
  const Loss& loss_;
  const bool train_;
  const std::vector<const Shapes*> shapes_;             // per microbatch
  std::vector<uint64_t> offsets_;                       // of the generator: a microbatch begins
  uint64_t next_offset_ = DefaultGenerator().offset();  // and all are over
  std::vector<int64_t> backwards_left_;
  std::map<Place, Passed> passed_;
  std::map<std::tuple<Kind, int, int64_t>, Incoming> incoming_;
  StageTransfers transfers_;
  std::vector<DTensor> borrowed_;  // per loan, null where this rank has no part in it
  DTensor total_;                  // on the last stage's ranks
};

DTensor Pipeline::Step(absl::Span<const Values> inputs, const Loss& loss) {
  if (!GradEnabled()) {
    Throw(absl::FailedPreconditionError(
        "[pipeline] inside of NoGrad a step has no gradients; Evaluate does the forwards alone"));
  }
  return Go(inputs, loss, /*train=*/true);
}

DTensor Pipeline::Evaluate(absl::Span<const Values> inputs, const Loss& loss) {
  const NoGrad no_grad;
  return Go(inputs, loss, /*train=*/false);
}

DTensor Pipeline::Go(absl::Span<const Values> inputs, const Loss& loss, bool train) {
  if (static_cast<int64_t>(inputs.size()) != schedule_.microbatches) {
    Refuse(absl::StrCat("the schedule has ", schedule_.microbatches,
                        " microbatches, got inputs of ", inputs.size()));
  }
  for (const Values& values : inputs) {
    for (const DTensor& t : values) {
      if (t.defined() && internal::Here(t, "pipeline").mesh() == meshes_[0]) continue;
      Refuse(t.defined() ? absl::StrCat("inputs are on the mesh of stage 0, ",
                                        meshes_[0].ToString(), "; got one on ", t.mesh().ToString())
                         : "an input is null");
    }
  }
  if (runs_) {
    Throw(
        absl::FailedPreconditionError("[pipeline] a step of this pipeline is going on, whose "
                                      "stages and loss cannot begin another"));
  }
  runs_ = true;
  const absl::Cleanup over = [this] { runs_ = false; };
  constexpr size_t kMostShapes = 64;
  if (shapes_.size() > kMostShapes) shapes_.clear();
  std::vector<const Shapes*> shapes;
  try {
    const std::vector<bool> modes = Modes();
    for (const Values& values : inputs) shapes.push_back(&ShapesOf(values, modes));
  } catch (...) {
    Throw(TellPeers(mesh_, CurrentException()));
  }
  // From here on ranks do different things.
  std::string where = "before the first microbatch";
  try {
    Run run(*this, inputs, std::move(shapes), loss, train);
    for (const PipelineAction& a : actions_) {
      const bool forward =
          a.kind == Kind::kForward || a.kind == Kind::kSendForward || a.kind == Kind::kRecvForward;
      where = absl::StrCat(forward ? "forward" : "backward", " of microbatch ", a.microbatch,
                           " in stage ", a.stage);
      run.Do(a);
    }
    where = "after the last microbatch";
    return run.Finish();
  } catch (...) {
    const absl::Status why = CurrentException();
    // What a peer told is known to all.
    if (CulpritOf(why).has_value() && (why.code() == absl::StatusCode::kAborted ||
                                       why.code() == absl::StatusCode::kDeadlineExceeded)) {
      Throw(why);
    }
    Throw(TellPeers(mesh_, RankLocal(Prefixed(absl::StrCat("[pipeline] ", where), why))));
  }
}

}  // namespace dtensor

#include "dtensor/parallel/pipeline/pipeline.h"

#include <algorithm>
#include <deque>
#include <map>
#include <tuple>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
#include "dtensor/errors.h"
#include "dtensor/impl.h"
#include "dtensor/mesh/call_tag.h"
#include "dtensor/mesh/comm.h"
#include "dtensor/mesh/comm_trace.h"
#include "dtensor/mesh/hash.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/rehearsal.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

using Kind = PipelineAction::Kind;

[[noreturn]] void Refuse(absl::string_view why) {
  Throw(absl::InvalidArgumentError(absl::StrCat("[pipeline] ", why)));
}

Placements ReplicatedOn(const DeviceMesh& mesh) { return Placements(mesh.ndim()); }

// A pending value with its terms added up: neighbours get results, not terms.
DTensor Settled(const DTensor& t) {
  if (!t.spec().has_partial()) return t;
  Placements placements;
  for (const Placement& p : t.placements()) {
    placements.push_back(p.is_partial() ? Placement(Replicate()) : p);
  }
  return t.Redistribute(placements);
}

Strides MemoryOf(const DTensor& t) {
  const IntSpan strides = MemoryStrides(t);
  return Strides(strides.begin(), strides.end());
}

// As another tensor's values lie in memory on one device: `memory` is MemoryOf that.
DTensor WithMemory(DTensor t, const Strides& memory) {
  if (!memory.empty()) internal::RareOf(*t.impl()).memory_strides = memory;
  return t;
}

// What a stage takes from the one before: a leaf, whose gradient goes back.
DTensor Leaf(const SpecRef& spec, Tensor local, bool requires_grad, const Strides& memory) {
  DTensor leaf =
      WithMemory(internal::MakeDTensor(RankContext::Current(), spec, std::move(local)), memory);
  if (requires_grad) leaf.RequiresGrad();
  return leaf;
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
  const auto port_of = [](const DTensor& t) {
    return Port{t.spec_ref(), t.requires_grad(), MemoryOf(t)};
  };
  std::vector<Port> kinds;
  for (const DTensor& t : inputs) kinds.push_back(port_of(t));
  for (const auto& known : shapes_) {
    if (known->inputs == kinds && known->modes == modes) return *known;
  }
  auto shapes = std::make_unique<Shapes>();
  shapes->inputs = std::move(kinds);
  shapes->modes = modes;
  const Rehearsal rehearsal(*RankContext::Current().cost_model());
  Values values = inputs;
  const auto like = [](const SpecRef& spec, bool requires_grad, const Strides& memory) {
    DTensor t =
        zeros(spec->shape(),
              {.dtype = spec->dtype(),
               .mesh = spec->mesh(),
               .placements = Placements(spec->placements().begin(), spec->placements().end())});
    if (requires_grad) t.RequiresGrad();
    return WithMemory(t, memory);
  };
  for (int s = 0; s < stages(); ++s) {
    for (const Loaned& loan : loaned_) {
      if (loan.to != s) continue;
      const DTensor tensor = loan.parameter->tensor();
      values.push_back(like(On(s, tensor.spec()), tensor.requires_grad(), MemoryOf(tensor)));
    }
    const uint64_t before = DefaultGenerator().offset();
    std::vector<Port> ports;
    for (const DTensor& t : RunStage(s, values)) ports.push_back(port_of(t));
    shapes->words.push_back(DefaultGenerator().offset() - before);
    values.clear();
    for (const Port& port : ports) {
      if (s + 1 == stages()) break;
      values.push_back(like(On(s + 1, *port.spec), port.requires_grad, port.memory));
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
      : p_(pipeline), inputs_(inputs), loss_(loss), train_(train), shapes_(std::move(shapes)) {
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
    for (Sent& sent : sent_) ThrowIfError(sent.work.Wait());
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
  struct Incoming {
    Values values;
    std::vector<Work> works;
  };
  struct Sent {
    Work work;
    Tensor data;
  };
  using Place = std::pair<int, int64_t>;  // stage and microbatch

  Passed& Kept(const PipelineAction& a) { return passed_.at({a.stage, a.microbatch}); }
  const std::vector<Port>& PortsOf(int stage, int64_t m) const { return shapes_[m]->ports[stage]; }
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
    const std::vector<Port>& ports = PortsOf(stage, m);
    bool same = results.size() == ports.size() && words == shapes_[m]->words[stage];
    for (size_t i = 0; same && i < ports.size(); ++i) {
      same = results[i].spec_ref() == ports[i].spec &&
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

  // --- transfers ---------------------------------------------------------------------------------

  // Of this rank and the one at its place in the neighbour's mesh. Whether both ways over an edge
  // share an order of calls or not, all transfers have one.
  Comm& CommOf(int from, int to, int* peer) {
    const int64_t me = RankContext::Current().rank();
    const bool sends = p_.meshes_[from].Contains(me);
    Dims at;
    DT_CHECK(p_.meshes_[sends ? from : to].Coordinate(me, &at));
    const int64_t other = p_.meshes_[sends ? to : from].RankAt(at);
    std::vector<int64_t> both = {std::min(me, other), std::max(me, other)};
    *peer = me < other ? 1 : 0;
    const DeviceMesh pair = ValueOrThrow(DeviceMesh::FromRanks(
        {2}, both, {absl::StrCat("stage ", from, " to ", to)}, p_.mesh_.device()));
    return *ValueOrThrow(RankContext::Current().CommFor(pair, {0}));
  }

  // Calls post(comm, peer) under the name of what is sent from one stage to another.
  template <class Post>
  void Transfer(int from, int to, const std::string& what, const Post& post) {
    int peer = 0;
    Comm& comm = CommOf(from, to, &peer);
    RankContext& context = RankContext::Current();
    const ScopedPhase phase(from < to ? CommPhase::kForward : CommPhase::kBackward);
    const ScopedOp op(context.trace(), "pipeline");
    const auto text = std::make_shared<const std::string>(what);
    const ScopedCallTag tag(&context.call_tag(), text, HashRange(1, what));
    post(comm, peer);
  }

  // Its memory is the message's until that has arrived.
  void SendPart(Comm& comm, int peer, const DTensor& value) {
    const Tensor local = ValueOrThrow(value.Detach().local().Contiguous());
    if (local.numel() == 0) return;
    Work work = comm.Exchange({{peer, local}}, {}, {.overlap = true});
    if (work.Done()) {
      ThrowIfError(work.Wait());
    } else {
      sent_.push_back({std::move(work), local});
    }
  }
  DTensor ReceivePart(Comm& comm, int peer, const SpecRef& spec, bool requires_grad,
                      const Strides& memory, std::vector<Work>* works) {
    Tensor local =
        ValueOrThrow(Tensor::Empty(spec->local_shape(), spec->dtype(), spec->mesh().device()));
    if (local.numel() > 0) {
      works->push_back(comm.Exchange({}, {{peer, local}}, {.overlap = true}));
    }
    return Leaf(spec, std::move(local), requires_grad, memory);
  }

  void Send(const PipelineAction& a, const Values& values) {
    const bool back = a.kind == Kind::kSendBackward;
    const std::string what =
        absl::StrCat("microbatch ", a.microbatch, back ? " backward" : " forward");
    Transfer(a.stage, back ? a.stage - 1 : a.stage + 1, what, [&](Comm& comm, int peer) {
      for (const DTensor& value : values) SendPart(comm, peer, value);
    });
    if (!back && !train_) passed_.erase({a.stage, a.microbatch});
    while (!sent_.empty() && sent_.front().work.Done()) {
      ThrowIfError(sent_.front().work.Wait());
      sent_.pop_front();
    }
  }

  void Receive(const PipelineAction& a) {
    const bool back = a.kind == Kind::kRecvBackward;
    const int from = back ? a.stage + 1 : a.stage - 1;
    Incoming& in = incoming_[{a.kind, a.stage, a.microbatch}];
    const std::string what =
        absl::StrCat("microbatch ", a.microbatch, back ? " backward" : " forward");
    Transfer(from, a.stage, what, [&](Comm& comm, int peer) {
      for (const Port& port : PortsOf(back ? a.stage : from, a.microbatch)) {
        if (back && !port.requires_grad) continue;
        const SpecRef spec = back ? port.spec : p_.On(a.stage, *port.spec);
        const bool requires_grad = !back && port.requires_grad && train_;
        in.values.push_back(ReceivePart(comm, peer, spec, requires_grad,
                                        back ? Strides() : port.memory, &in.works));
      }
    });
  }

  // --- what stages borrow ------------------------------------------------------------------------

  bool Here(int stage) const { return p_.meshes_[stage].Contains(RankContext::Current().rank()); }

  // The values of parameters of other stages, as leaves of their own.
  void Borrow() {
    std::vector<Work> works;
    for (const Loaned& loan : p_.loaned_) {
      const DTensor tensor = loan.parameter->tensor();
      const bool wants = tensor.requires_grad() && train_;
      DTensor& leaf = borrowed_.emplace_back();
      if (Here(loan.from) && Here(loan.to)) {
        leaf = Leaf(p_.On(loan.to, tensor.spec()), tensor.local(), wants, MemoryOf(tensor));
      } else if (Here(loan.from) || Here(loan.to)) {
        Transfer(loan.from, loan.to, "a borrowed parameter", [&](Comm& comm, int peer) {
          if (Here(loan.from)) {
            SendPart(comm, peer, tensor);
          } else {
            leaf = ReceivePart(comm, peer, p_.On(loan.to, tensor.spec()), wants, MemoryOf(tensor),
                               &works);
          }
        });
      }
    }
    for (Work& work : works) ThrowIfError(work.Wait());
  }

  // Their gradients to where they are from.
  void GiveBack() {
    for (size_t i = 0; i < p_.loaned_.size(); ++i) {
      const Loaned& loan = p_.loaned_[i];
      DTensor tensor = loan.parameter->tensor();
      if (!tensor.requires_grad() || !(Here(loan.from) || Here(loan.to))) continue;
      DTensor grad;
      if (Here(loan.to)) {
        grad = borrowed_[i].grad();
        if (!grad.defined()) grad = zeros_like(borrowed_[i]);
      }
      if (Here(loan.from) && Here(loan.to)) {
        grad = Leaf(tensor.spec_ref(), grad.local(), false, {});
      } else {
        std::vector<Work> works;
        Transfer(loan.to, loan.from, "the gradient of a borrowed parameter",
                 [&](Comm& comm, int peer) {
                   if (Here(loan.to)) return SendPart(comm, peer, grad);
                   grad = ReceivePart(comm, peer, tensor.spec_ref(), false, {}, &works);
                 });
        for (Work& work : works) ThrowIfError(work.Wait());
      }
      if (!Here(loan.from)) continue;
      const NoGrad no_grad;
      const DTensor own = tensor.grad();
      tensor.SetGrad(own.defined() ? own + to(grad, own.dtype()) : grad);
    }
  }

  // What was received for a forward or a backward; on one rank what its neighbour made.
  Values Arrived(Kind kind, int stage, int64_t m) {
    if (Alone()) return HandedOver(kind == Kind::kRecvBackward, stage, m);
    const auto found = incoming_.find({kind, stage, m});
    DT_CHECK(found != incoming_.end());
    for (Work& work : found->second.works) ThrowIfError(work.Wait());
    Values values = std::move(found->second.values);
    incoming_.erase(found);
    return values;
  }
  Values HandedOver(bool back, int stage, int64_t m) {
    if (back) return InputGradients({Kind::kBackward, stage + 1, m});
    Values values;
    const Passed& from = passed_.at({stage - 1, m});
    for (const DTensor& result : from.results) {
      values.push_back(Leaf(result.spec_ref(), result.local(), result.requires_grad() && train_,
                            MemoryOf(result)));
    }
    if (!train_) passed_.erase({stage - 1, m});
    return values;
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
  std::deque<Sent> sent_;
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

#include "dtensor/parallel/optim/optim.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/impl.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/module/agree.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

void Require(bool ok, absl::string_view who, absl::string_view what, double got) {
  if (ok) return;
  Throw(absl::InvalidArgumentError(absl::StrCat("[", who, "] ", what, ", got ", got)));
}

// A number from 0 on, but infinity.
void RequireSize(absl::string_view who, absl::string_view what, double got) {
  Require(got >= 0, who, absl::StrCat(what, " must not be negative"), got);
  Require(std::isfinite(got), who, absl::StrCat(what, " must be finite"), got);
}

Placements CopyOf(absl::Span<const Placement> p) { return {p.begin(), p.end()}; }

// The tensor on the mesh, in the placements and the dtype of `spec`: rounded before it is moved,
// widened after.
DTensor Brought(DTensor t, const Spec& spec) {
  if (SizeOf(spec.dtype()) < SizeOf(t.dtype())) t = to(t, spec.dtype());
  if (!(t.mesh() == spec.mesh())) {
    t = t.Redistribute(spec.mesh(), spec.placements());
  } else if (t.placements() != spec.placements()) {
    t = t.Redistribute(spec.placements());
  }
  return to(t, spec.dtype());
}

SpecRef SpecOf(const NamedParameter& p, const StateLayout& layout) {
  absl::StatusOr<SpecRef> spec = RankContext::Current().specs().Intern(
      layout.mesh, layout.placements, p.parameter->shape(), layout.dtype);
  absl::Status status = spec.status();
  if (status.ok() && (*spec)->has_partial()) {
    status = absl::InvalidArgumentError("a state is not a pending sum");
  }
  if (status.ok() && !IsFloating(layout.dtype)) {
    status = absl::InvalidArgumentError("a state is floating");
  }
  if (status.ok() && !IsFloating(layout.reduce_dtype.value_or(layout.dtype))) {
    status = absl::InvalidArgumentError("gradients are floating");
  }
  if (status.ok()) return *std::move(spec);
  Throw(Prefixed(absl::StrCat("[optimizer] the state layout of ", p.fqn), status));
}

// How gradients are added up: where the state is, unless that is on another mesh.
SpecRef GradientSpecOf(const DTensor& parameter, const StateLayout& layout) {
  const bool same_mesh = layout.mesh == parameter.mesh();
  return ValueOrThrow(RankContext::Current().specs().Intern(
      parameter.mesh(), same_mesh ? layout.placements : parameter.placements(), parameter.shape(),
      layout.reduce_dtype.value_or(layout.dtype)));
}

// Of its tensor, also before there is one.
SpecRef SpecOf(const Parameter& p) {
  if (p.materialized()) return p.tensor().spec_ref();
  return ValueOrThrow(
      RankContext::Current().specs().Intern(p.mesh(), p.placements(), p.shape(), p.dtype()));
}

// A loaded state where it belongs; a copy, for steps change it in place.
DTensor Copied(const DTensor& value, const Spec& spec) {
  return value.mesh() == spec.mesh()
             ? clone(value.Redistribute(spec.placements()))
             : DistributeTensor(value.local(), spec.mesh(), spec.placements());
}

void CheckGroup(const ParameterGroup& group) {
  if (group.has == nullptr) {
    Throw(absl::InvalidArgumentError(
        "[optimizer] a group of parameters needs `has`, which says what is in it"));
  }
  const double decay = group.weight_decay.value_or(0);
  RequireSize("optimizer", "weight_decay of a group", decay);
  RequireSize("optimizer", "lr_scale of a group", group.lr_scale);
}

// By their names states are saved and loaded.
void CheckNames(const std::vector<NamedParameter>& parameters) {
  absl::flat_hash_set<std::string> names;
  for (const NamedParameter& p : parameters) {
    std::vector<std::string> mine = p.aliases;
    mine.push_back(p.fqn);
    for (const std::string& name : mine) {
      if (names.insert(name).second) continue;
      Throw(absl::InvalidArgumentError(absl::StrCat(
          "[optimizer] two parameters are called \"", name,
          "\"; parameters of several models need names that differ: put another fqn in front")));
    }
  }
}

// The number of updates that a state dict says. "": it is one, else what is wrong with it.
std::string StepOf(const DTensor& value, int64_t* step) {
  *step = -1;
  if (!value.defined()) return "is null";
  const std::string must = ", must be one whole number, 0 or more";
  if (value.numel() != 1) return absl::StrCat("is ", ToString(value.shape()), must);
  const double number = value.Item();
  if (!(number >= 0 && number <= 9007199254740992.0 && number == std::floor(number))) {
    return absl::StrCat("is ", number, must);
  }
  *step = static_cast<int64_t>(number);
  return "";
}

// New values into parameters. So many are on their way at a time: enough to wait for none of them
// alone, and no second copy of a model.
void BringBack(const std::vector<DTensor>& values, const std::vector<DTensor>& parameters) {
  constexpr size_t kAhead = 64;
  std::vector<DTensor> moved(values.size());
  const auto send = [&](size_t i) {
    const DTensor& parameter = parameters[i];
    if (values[i].impl() == parameter.impl()) return;
    moved[i] = to(values[i], parameter.dtype());
    if (!(moved[i].spec_ref() == parameter.spec_ref())) {
      moved[i] = moved[i].Redistribute(parameter.mesh(), parameter.placements(), {.async = true});
    }
  };
  for (size_t i = 0; i < values.size() + kAhead; ++i) {
    if (i < values.size()) send(i);
    if (i < kAhead) continue;
    const DTensor value = std::move(moved[i - kAhead]);
    if (value.defined()) copy_(parameters[i - kAhead], value);
  }
}

}  // namespace

StateLayout LikeParameter(const Parameter& parameter) {
  const SpecRef spec = SpecOf(parameter);
  return {spec->dtype(), spec->mesh(), CopyOf(spec->placements())};
}

StateLayoutFn FlatState(std::string mesh_dim, std::optional<DType> dtype) {
  return [mesh_dim, dtype](const Parameter& parameter) {
    StateLayout like = LikeParameter(parameter);
    const SpecRef spec = SpecOf(parameter);
    like.dtype = dtype.value_or(SizeOf(spec->dtype()) > 4 ? spec->dtype() : DType::kF32);
    const absl::StatusOr<int> dim = like.mesh.is_self()
                                        ? absl::StatusOr<int>(absl::NotFoundError(""))
                                        : like.mesh.DimIndex(mesh_dim);
    if (!dim.ok() || !like.placements[*dim].is_replicate()) return like;
    const int64_t ranks = like.mesh.size(*dim);
    const int64_t n = Numel(LocalShape(*spec, Dims(like.mesh.ndim(), 0)));
    std::vector<int64_t> lengths(ranks, n / ranks);
    for (int64_t r = 0; r < n % ranks; ++r) ++lengths[r];
    StateLayout flat = like;
    flat.placements[*dim] = FlatShard(std::move(lengths));
    const bool fits = RankContext::Current()
                          .specs()
                          .Intern(flat.mesh, flat.placements, spec->shape(), flat.dtype)
                          .ok();
    return fits ? flat : like;
  };
}

ParameterGroup VectorsDoNotDecay() {
  return {.has = [](const NamedParameter& p) { return p.parameter->shape().size() < 2; },
          .weight_decay = 0};
}

Optimizer::Optimizer(const std::vector<NamedParameter>& parameters, double lr,
                     std::vector<std::string> state_names, const StateLayoutFn& layout,
                     std::vector<ParameterGroup> groups)
    : lr_(lr), state_names_(std::move(state_names)), groups_(std::move(groups)) {
  for (const ParameterGroup& group : groups_) CheckGroup(group);
  const std::vector<NamedParameter> distinct = Distinct(parameters);
  CheckNames(distinct);
  for (const NamedParameter& p : distinct) {
    const DTensor& tensor = p.parameter->tensor();  // refuses recipes
    if (!IsFloating(tensor.dtype())) continue;      // it never has a gradient
    const StateLayout wanted = layout(*p.parameter);
    Slot slot = {.parameter = p, .identity = p.parameter->identity(), .spec = SpecOf(p, wanted)};
    while (slot.group < groups_.size() && !groups_[slot.group].has(p)) ++slot.group;
    slot.state.resize(StateNames(slot).size());
    const SpecRef gradients = GradientSpecOf(tensor, wanted);
    // Else as the parameter, also where an optimizer before this one had it otherwise.
    p.parameter->KeepGradients(gradients == tensor.spec_ref() ? SpecRef() : gradients);
    slots_.push_back(std::move(slot));
  }
}

bool Optimizer::HasMaster(const Slot& slot) const {
  return slot.spec->dtype() != slot.parameter.parameter->dtype();
}

std::vector<std::string> Optimizer::StateNames(const Slot& slot) const {
  std::vector<std::string> names = state_names_;
  if (HasMaster(slot)) names.push_back("master");
  return names;
}

// States before the first update.
void Optimizer::Begin(Slot* slot) const {
  const Spec& spec = *slot->spec;
  for (size_t i = 0; i < slot->state.size(); ++i) {
    DTensor& s = slot->state[i];
    if (s.defined()) continue;
    s = i == state_names_.size() ? Brought(slot->parameter.parameter->tensor().Detach(), spec)
                                 : full(spec.shape(), InitialState(i),
                                        {.dtype = spec.dtype(),
                                         .mesh = spec.mesh(),
                                         .placements = CopyOf(spec.placements())});
  }
}

// What is updated: the parameter itself where the state is like it.
DTensor Optimizer::ValueInState(const Slot& slot) const {
  const DTensor& parameter = slot.parameter.parameter->tensor();
  if (HasMaster(slot)) return slot.state.back();
  return parameter.spec_ref() == slot.spec ? parameter : Brought(parameter, *slot.spec);
}

// A parameter of two slots would be updated twice, and nothing goes from a mesh to Self and back.
void Optimizer::CheckParameters() const {
  for (const Slot& slot : slots_) {
    const Parameter& mine = *slot.parameter.parameter;
    if (mine.mesh().is_self() != slot.spec->mesh().is_self()) {
      Throw(absl::FailedPreconditionError(
          absl::StrCat("[optimizer] ", slot.parameter.fqn, " is on mesh ", mine.mesh().ToString(),
                       ", its state on ", slot.spec->mesh().ToString(),
                       ": make the optimizer after ParallelizeModule or DistributeModule")));
    }
    if (mine.identity() == slot.identity) continue;
    for (const Slot& other : slots_) {
      if (&other == &slot || !other.parameter.parameter->IsTiedTo(mine)) continue;
      Throw(absl::FailedPreconditionError(
          absl::StrCat("[optimizer] ", slot.parameter.fqn, " was tied to ", other.parameter.fqn,
                       " after the optimizer was made; make it after Tie")));
    }
  }
}

void Optimizer::Step() {
  CheckParameters();
  ScopedPhase phase(CommPhase::kOptimizer);
  NoGrad no_grad;
  std::vector<DTensor> leaves;
  for (const Slot& slot : slots_) leaves.push_back(slot.parameter.parameter->tensor());
  SyncGradients(leaves);
  for (size_t group = 0; group <= groups_.size(); ++group) {
    RankContext::Current().rehearses() ? RehearseGroup(group) : StepGroup(group);
  }
}

// What StepGroup communicates. A rehearsal has no numbers: it leaves parameters and states alone.
void Optimizer::RehearseGroup(size_t group) const {
  std::vector<DTensor> values, parameters;
  for (const Slot& slot : slots_) {
    const DTensor parameter = slot.parameter.parameter->tensor(), grad = parameter.grad();
    if (slot.group != group || !grad.defined() || !parameter.requires_grad()) continue;
    const bool begins = HasMaster(slot) && !slot.state.back().defined();
    values.push_back(begins ? Brought(parameter.Detach(), *slot.spec) : ValueInState(slot));
    parameters.push_back(parameter);
    Brought(grad, *slot.spec);
  }
  BringBack(values, parameters);
}

void Optimizer::StepGroup(size_t group) {
  Batch batch;
  batch.lr = lr_;
  if (group < groups_.size()) {
    batch.lr *= groups_[group].lr_scale;
    batch.weight_decay = groups_[group].weight_decay;
  }
  batch.states.resize(state_names_.size());
  std::vector<DTensor> parameters;
  std::vector<Slot*> updated;
  for (Slot& slot : slots_) {
    if (slot.group != group) continue;
    const DTensor parameter = slot.parameter.parameter->tensor(), grad = parameter.grad();
    // A gradient may come to one that was frozen after its forward.
    if (!grad.defined() || !parameter.requires_grad()) continue;
    Begin(&slot);
    parameters.push_back(parameter);
    batch.steps.push_back(slot.step + 1);
    updated.push_back(&slot);
    batch.values.push_back(ValueInState(slot));
    batch.grads.push_back(Brought(grad, *slot.spec));
    for (size_t i = 0; i < state_names_.size(); ++i) batch.states[i].push_back(slot.state[i]);
  }
  Update(batch);
  for (Slot* slot : updated) ++slot->step;  // not of an update that failed
  BringBack(batch.values, parameters);
}

void Optimizer::set_lr(double lr) {
  RequireSize("optimizer", "lr", lr);
  lr_ = lr;
}

void Optimizer::ZeroGrad() {
  for (Slot& slot : slots_) DTensor(slot.parameter.parameter->tensor()).ZeroGrad();
}

std::vector<int64_t> Optimizer::StepCounts() const {
  std::vector<int64_t> counts;
  for (const Slot& slot : slots_) counts.push_back(slot.step);
  return counts;
}

void Optimizer::SetStepCounts(absl::Span<const int64_t> counts) {
  DT_CHECK(counts.size() == slots_.size());
  for (size_t i = 0; i < slots_.size(); ++i) slots_[i].step = counts[i];
}

std::vector<DTensor> Optimizer::Written() const {
  std::vector<DTensor> all;
  for (const Slot& slot : slots_) {
    all.push_back(slot.parameter.parameter->tensor());
    for (const DTensor& s : slot.state) {
      if (s.defined()) all.push_back(s);
    }
  }
  return all;
}

void Optimizer::AddTo(StateDict* all, const Slot& slot) const {
  if (slot.step == 0) return;
  const std::vector<std::string> names = StateNames(slot);
  for (size_t i = 0; i < names.size(); ++i) {
    all->emplace_back(absl::StrCat(slot.parameter.fqn, "/", names[i]), slot.state[i]);
  }
  all->emplace_back(absl::StrCat(slot.parameter.fqn, "/step"),
                    full({}, static_cast<double>(slot.step), {.dtype = DType::kF64}));
}

StateDict Optimizer::GetStateDict() const {
  StateDict all;
  for (const Slot& slot : slots_) AddTo(&all, slot);
  return all;
}

absl::StatusOr<StateDict> Optimizer::GetStateDictOfAll() const {
  constexpr int64_t kElsewhere = -1;  // nothing of it is on this rank
  const int64_t me = RankContext::Current().rank();
  const auto has = [me](const DeviceMesh& mesh) { return mesh.is_self() || mesh.Contains(me); };
  std::vector<std::string> names;
  std::vector<int64_t> mine;
  for (const Slot& slot : slots_) {
    names.push_back(slot.parameter.fqn);
    const bool here = has(slot.parameter.parameter->mesh()) || has(slot.spec->mesh());
    mine.push_back(here ? slot.step : kElsewhere);
  }
  DT_ASSIGN_OR_RETURN(
      const std::vector<std::string> said,
      internal::ExchangeListed(
          "optimizer_state", names,
          std::string(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(int64_t))));
  StateDict all;
  for (size_t i = 0; i < slots_.size(); ++i) {
    std::optional<int64_t> step;
    size_t of = 0;  // the rank that says so
    for (size_t r = 0; r < said.size(); ++r) {
      int64_t theirs;
      std::memcpy(&theirs, said[r].data() + i * sizeof(theirs), sizeof(theirs));
      if (theirs == kElsewhere) continue;
      if (step && *step != theirs) {
        return absl::FailedPreconditionError(absl::StrCat(
            "[optimizer_state] ", names[i], " was updated ", *step, " times on rank ", of, ", and ",
            theirs, " times on rank ", r, ": all ranks that have a part of it step alike"));
      }
      if (!step) of = r;
      step = theirs;
    }
    Slot slot = slots_[i];
    if (mine[i] == kElsewhere) {
      slot.step = step.value_or(slot.step);
      for (DTensor& s : slot.state) {
        if (!s.defined()) s = DTensor::Absent(*slot.spec);
      }
    }
    AddTo(&all, slot);
  }
  return all;
}

std::vector<std::pair<std::string, SpecRef>> Optimizer::StateSpecs() const {
  std::vector<std::pair<std::string, SpecRef>> all;
  const SpecRef count =
      ValueOrThrow(RankContext::Current().specs().Intern(DeviceMesh::Self(), {}, {}, DType::kF64));
  for (const Slot& slot : slots_) {
    for (const std::string& name : StateNames(slot)) {
      all.emplace_back(absl::StrCat(slot.parameter.fqn, "/", name), slot.spec);
    }
    all.emplace_back(absl::StrCat(slot.parameter.fqn, "/step"), count);
  }
  return all;
}

Optimizer::Keys Optimizer::KeysOfStates() const {
  Keys keys;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    const NamedParameter& p = slots_[slot].parameter;
    std::vector<std::string> names = StateNames(slots_[slot]);
    names.push_back("step");
    std::vector<std::string> fqns = p.aliases;
    fqns.push_back(p.fqn);
    for (const std::string& fqn : fqns) {
      for (size_t i = 0; i < names.size(); ++i) {
        keys.try_emplace(absl::StrCat(fqn, "/", names[i]), slot, i);
      }
    }
  }
  return keys;
}

void Optimizer::LoadStateDict(const StateDict& state) {
  NoGrad no_grad;
  const Keys keys = KeysOfStates();
  std::vector<Slot> loaded = slots_;
  std::vector<std::string> problems;
  std::vector<std::vector<bool>> given;  // by slot: each state, and the step last
  for (Slot& slot : loaded) {
    internal::Here(slot.parameter.parameter->tensor(), "optimizer state");
    slot.step = 0;
    slot.state.assign(slot.state.size(), DTensor());
    given.emplace_back(slot.state.size() + 1, false);
  }
  for (const auto& [key, value] : state) {
    const auto found = keys.find(key);
    if (found == keys.end()) {
      problems.push_back(absl::StrCat("unexpected ", key));
      continue;
    }
    const auto [at, i] = found->second;
    Slot& slot = loaded[at];
    const bool counts = i == slot.state.size();
    std::string problem = counts ? StepOf(value, &slot.step) : Misfit(value, *slot.spec);
    if (given[at][i]) problem = "is there twice";
    given[at][i] = true;
    if (!problem.empty()) {
      problems.push_back(absl::StrCat(key, " ", problem));
    } else if (!counts) {
      slot.state[i] = Copied(value, *slot.spec);
    }
  }
  for (size_t at = 0; at < loaded.size(); ++at) {
    const Slot& slot = loaded[at];
    const std::vector<std::string> names = StateNames(slot);
    for (size_t i = 0; slot.step >= 0 && i < names.size(); ++i) {
      if (given[at][i] == (slot.step > 0)) continue;
      problems.push_back(absl::StrCat(slot.parameter.fqn, " needs both step and ", names[i]));
    }
  }
  if (!problems.empty()) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat("[optimizer state] nothing was loaded: ", absl::StrJoin(problems, "; "))));
  }
  slots_ = std::move(loaded);
}

SGD::SGD(const std::vector<NamedParameter>& parameters, const SGDOptions& options,
         const StateLayoutFn& layout, std::vector<ParameterGroup> groups)
    : Optimizer(parameters, options.lr,
                options.momentum != 0 ? std::vector<std::string>{"momentum_buffer"}
                                      : std::vector<std::string>{},
                layout, std::move(groups)),
      options_(options) {
  RequireSize("SGD", "lr", options.lr);
  RequireSize("SGD", "momentum", options.momentum);
  RequireSize("SGD", "weight_decay", options.weight_decay);
  Require(std::isfinite(options.dampening), "SGD", "dampening must be finite", options.dampening);
  Require(!options.nesterov || (options.momentum > 0 && options.dampening == 0), "SGD",
          "nesterov needs a momentum and no dampening", options.momentum);
}

void SGD::Update(const Batch& batch) {
  const SGDOptions now = batch.With(options_);
  sgd_(batch.values, batch.states.empty() ? std::vector<DTensor>() : batch.states[0], batch.grads,
       batch.steps, now);
}

namespace {

// Of Adam and AdamW.
std::vector<std::string> AdamStates(bool amsgrad) {
  std::vector<std::string> names = {"exp_avg", "exp_avg_sq"};
  if (amsgrad) names.push_back("max_exp_avg_sq");
  return names;
}

template <class Options>
void CheckAdam(absl::string_view who, const Options& o) {
  RequireSize(who, "lr", o.lr);
  RequireSize(who, "eps", o.eps);
  RequireSize(who, "weight_decay", o.weight_decay);
  Require(o.beta1 >= 0 && o.beta1 < 1, who, "beta1 must be in [0, 1)", o.beta1);
  Require(o.beta2 >= 0 && o.beta2 < 1, who, "beta2 must be in [0, 1)", o.beta2);
}

// The list of a state that not every set of options has.
std::vector<DTensor> StateOrNone(const std::vector<std::vector<DTensor>>& states, size_t i,
                                 bool has) {
  return has ? states[i] : std::vector<DTensor>();
}

}  // namespace

AdamW::AdamW(const std::vector<NamedParameter>& parameters, const AdamWOptions& options,
             const StateLayoutFn& layout, std::vector<ParameterGroup> groups)
    : Optimizer(parameters, options.lr, AdamStates(options.amsgrad), layout, std::move(groups)),
      options_(options) {
  CheckAdam("AdamW", options);
}

void AdamW::Update(const Batch& batch) {
  const AdamWOptions now = batch.With(options_);
  adamw_(batch.values, batch.states[0], batch.states[1], StateOrNone(batch.states, 2, now.amsgrad),
         batch.grads, batch.steps, now);
}

Adam::Adam(const std::vector<NamedParameter>& parameters, const AdamOptions& options,
           const StateLayoutFn& layout, std::vector<ParameterGroup> groups)
    : Optimizer(parameters, options.lr, AdamStates(options.amsgrad), layout, std::move(groups)),
      options_(options) {
  CheckAdam("Adam", options);
}

void Adam::Update(const Batch& batch) {
  const AdamOptions now = batch.With(options_);
  adam_(batch.values, batch.states[0], batch.states[1], StateOrNone(batch.states, 2, now.amsgrad),
        batch.grads, batch.steps, now);
}

Adagrad::Adagrad(const std::vector<NamedParameter>& parameters, const AdagradOptions& options,
                 const StateLayoutFn& layout, std::vector<ParameterGroup> groups)
    : Optimizer(parameters, options.lr, {"sum"}, layout, std::move(groups)), options_(options) {
  RequireSize("Adagrad", "lr", options.lr);
  RequireSize("Adagrad", "lr_decay", options.lr_decay);
  RequireSize("Adagrad", "eps", options.eps);
  RequireSize("Adagrad", "weight_decay", options.weight_decay);
  RequireSize("Adagrad", "initial_accumulator_value", options.initial_accumulator_value);
}

void Adagrad::Update(const Batch& batch) {
  const AdagradOptions now = batch.With(options_);
  adagrad_(batch.values, batch.states[0], batch.grads, batch.steps, now);
}

namespace {

std::vector<std::string> RMSpropStates(const RMSpropOptions& options) {
  std::vector<std::string> names = {"square_avg"};
  if (options.momentum != 0) names.push_back("momentum_buffer");
  if (options.centered) names.push_back("grad_avg");
  return names;
}

}  // namespace

RMSprop::RMSprop(const std::vector<NamedParameter>& parameters, const RMSpropOptions& options,
                 const StateLayoutFn& layout, std::vector<ParameterGroup> groups)
    : Optimizer(parameters, options.lr, RMSpropStates(options), layout, std::move(groups)),
      options_(options) {
  RequireSize("RMSprop", "lr", options.lr);
  RequireSize("RMSprop", "alpha", options.alpha);
  RequireSize("RMSprop", "eps", options.eps);
  RequireSize("RMSprop", "momentum", options.momentum);
  RequireSize("RMSprop", "weight_decay", options.weight_decay);
}

void RMSprop::Update(const Batch& batch) {
  const RMSpropOptions now = batch.With(options_);
  const bool moves = now.momentum != 0;
  rmsprop_(batch.values, batch.states[0], StateOrNone(batch.states, 1, moves),
           StateOrNone(batch.states, moves ? 2 : 1, now.centered), batch.grads, now);
}

}  // namespace dtensor

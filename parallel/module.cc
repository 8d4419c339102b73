#include "parallel/module.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "dtensor/implicit_warning.h"
#include "dtensor/memo.h"
#include "dtensor/names.h"
#include "dtensor/rehearsal.h"
#include "tensor/status.h"
#include "tensor/trace.h"

namespace dtensor {
namespace {

std::string Joined(absl::string_view prefix, absl::string_view name) {
  return prefix.empty() ? std::string(name) : absl::StrCat(prefix, ".", name);
}

}  // namespace

// --- Parameter ----------------------------------------------------------------------------------

const DTensor& Parameter::tensor() const {
  if (!tensor_.defined()) {
    Throw(absl::FailedPreconditionError(absl::StrCat(
        "parameter ", fqn(), " is a recipe without values; call Materialize(model) first")));
  }
  return tensor_;
}

std::string Parameter::fqn() const {
  return owner_ == nullptr ? name_ : Joined(owner_->fqn(), name_);
}

int64_t Parameter::numel() const { return ValueOrThrow(CheckedNumel(shape_)); }

DTensor Parameter::Draw(const DeviceMesh& mesh, const Placements& placements) const {
  const TensorOptions options = {.dtype = dtype_, .mesh = mesh, .placements = placements};
  if (init_.kind == Init::Kind::kZeros) return zeros(shape_, options);
  if (init_.kind == Init::Kind::kOnes) return ones(shape_, options);
  const DTensor t = empty(shape_, options);
  if (init_.kind == Init::Kind::kNormal) normal_(t, init_.a, init_.b);
  if (init_.kind == Init::Kind::kUniform) uniform_(t, init_.a, init_.b);
  if (init_.kind == Init::Kind::kFunction) init_.function(t);
  return t;
}

void Parameter::Materialize() {
  if (tensor_.defined()) return;
  Placements placements = placements_;
  placements.resize(mesh_.ndim());
  tensor_ = Draw(mesh_, placements);
  tensor_.impl()->owned = true;
  if (IsFloating(dtype_)) BecomeLeaf();
}

void Parameter::MakeMeta() {
  tensor_ = empty(shape_, {.dtype = dtype_, .mesh = mesh_, .placements = placements_});
  tensor_.impl()->owned = true;
  if (IsFloating(dtype_)) BecomeLeaf();
}

void Parameter::BecomeLeaf() {
  TraceState& trace = RankContext::Current().trace();
  const ScopedModule scope(trace, owner_ == nullptr ? nullptr : owner_->TracePath());
  tensor_.RequiresGrad();
}

void Parameter::SkipMaterialize() const {
  if (tensor_.defined()) return;
  Draw(ValueOrThrow(DeviceMesh::Create({1}, {}, DeviceType::kMeta)), {Replicate()});
}

absl::Status Parameter::CheckPlace(const DeviceMesh& mesh,
                                   absl::Span<const Placement> placements) const {
  if (!mesh_.is_self() && !(mesh_ == mesh)) {
    return absl::InvalidArgumentError(
        absl::StrCat("is on mesh ", mesh_.ToString(), ", not on ", mesh.ToString()));
  }
  for (const Placement& p : placements) {
    if (!p.is_partial()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "cannot be ", p.ToString(), ": an update would count once per rank; use R or S(dim)"));
  }
  return RankContext::Current().specs().Intern(mesh, placements, shape_, dtype_).status();
}

void Parameter::Place(const DeviceMesh& mesh, Placements placements) {
  if (mesh.defined()) placements.resize(mesh.ndim());
  const absl::Status fits = CheckPlace(mesh, placements);
  if (!fits.ok()) {
    Throw(Prefixed(absl::StrCat("parameter ", fqn()), fits));
  }
  const SpecRef spec =
      ValueOrThrow(RankContext::Current().specs().Intern(mesh, placements, shape_, dtype_));
  if (tensor_.defined()) {
    NoGrad no_grad;
    DTensor moved;
    if (tensor_.mesh() == mesh) {
      moved = tensor_.Redistribute(spec->placements());
    } else {
      moved = DistributeTensor(tensor_.local(), mesh, spec->placements());
    }
    const bool requires_grad = tensor_.requires_grad();
    tensor_ = moved.Detach();
    tensor_.impl()->owned = true;
    if (requires_grad) BecomeLeaf();
  }
  mesh_ = mesh;
  placements_.assign(spec->placements().begin(), spec->placements().end());
}

void Parameter::Set(const DTensor& values) {
  const DTensor& mine = tensor();
  const std::string misfit = Misfit(values, mine.spec());
  if (!misfit.empty()) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat("the new value of parameter ", fqn(), " ", misfit)));
  }
  ThrowIfError(CheckOwn(values));
  NoGrad no_grad;
  const DTensor placed = values.mesh() == mesh_
                             ? values.Redistribute(mine.placements())
                             : DistributeTensor(values.local(), mesh_, mine.placements());
  if (!mine.local().defined()) return;
  internal::DropMemos(*mine.impl());
  Copy(placed.local(), mine.local());
  mine.local().buffer().BumpVersion();
}

// --- Module -------------------------------------------------------------------------------------

const std::string* Module::TracePath() const {
  RankContext& context = RankContext::Current();
  if (path_context_ != context.id()) {
    path_ = context.trace().PathOf(parent_ == nullptr ? type_name() : fqn());
    path_context_ = context.id();
    auto& planned = context.Slot<internal::PlannedModules>().paths;
    if (warn_implicit_) {
      planned.insert(path_);
    } else {
      planned.erase(path_);
    }
  }
  return path_;
}

void Module::ForgetPath() {
  path_context_ = 0;
  for (const auto& child : children_) child.second->ForgetPath();
}

Values Module::operator()(const Values& inputs) {
  const std::string* path = TracePath();
  const ScopedModule scope(RankContext::Current().trace(), path);
  const Span span(SpanKind::kModule, *path, [&] { return type_name(); });
  const internal::MemoScope memos;
  Values in = inputs;
  for (const PreHook& hook : pre_hooks_) in = hook(*this, in);
  if (in.size() < min_inputs()) {
    Throw(
        absl::InvalidArgumentError(absl::StrCat("[", type_name(), " ", fqn(), "] needs ",
                                                min_inputs(), " or more inputs, got ", in.size())));
  }
  Values out = Forward(in);
  for (const PostHook& hook : post_hooks_) out = hook(*this, in, out);
  return out;
}

DTensor Module::OnlyOutput(Values outputs) const {
  if (outputs.size() != 1) {
    Throw(absl::InvalidArgumentError(absl::StrCat(
        type_name(), " ", fqn(), " gives ", outputs.size(), " values where one was asked for")));
  }
  return std::move(outputs[0]);
}

void Module::WarnOfImplicit(bool warn) {
  for (const NamedModule& m : NamedModules()) m.module->warn_implicit_ = warn;
  ForgetPath();
}

std::string Module::fqn() const {
  return parent_ == nullptr ? name_ : Joined(parent_->fqn(), name_);
}

void Module::Collect(const std::string& prefix, std::vector<NamedParameter>* out) const {
  for (const auto& p : parameters_) out->push_back({Joined(prefix, p->name()), p.get()});
  for (const auto& [name, child] : children_) child->Collect(Joined(prefix, name), out);
}

std::vector<NamedParameter> Module::NamedParameters() const {
  std::vector<NamedParameter> out;
  Collect("", &out);
  return out;
}

std::vector<Parameter*> Module::Parameters() const {
  std::vector<Parameter*> out;
  for (const NamedParameter& p : NamedParameters()) out.push_back(p.parameter);
  return out;
}

void Module::CollectModules(const std::string& prefix, std::vector<NamedModule>* out) {
  out->push_back({prefix, this});
  for (const auto& [name, child] : children_) child->CollectModules(Joined(prefix, name), out);
}

std::vector<NamedModule> Module::NamedModules() {
  std::vector<NamedModule> out;
  CollectModules("", &out);
  return out;
}

Module* Module::FindModule(absl::string_view fqn) {
  Module* at = this;
  if (fqn.empty()) return at;
  for (const absl::string_view atom : absl::StrSplit(fqn, '.')) {
    const auto it = std::find_if(at->children_.begin(), at->children_.end(),
                                 [&](const auto& child) { return child.first == atom; });
    if (it == at->children_.end()) return nullptr;
    at = it->second.get();
  }
  return at;
}

Parameter* Module::FindParameter(absl::string_view fqn) {
  const size_t dot = fqn.rfind('.');
  Module* owner = dot == absl::string_view::npos ? this : FindModule(fqn.substr(0, dot));
  if (owner == nullptr) return nullptr;
  const absl::string_view name = dot == absl::string_view::npos ? fqn : fqn.substr(dot + 1);
  for (const auto& p : owner->parameters_) {
    if (p->name() == name) return p.get();
  }
  return nullptr;
}

void Module::ZeroGrad() {
  for (Parameter* p : Parameters()) {
    if (p->materialized()) DTensor(p->tensor()).ZeroGrad();
  }
}

void Module::Train(bool mode) {
  training_ = mode;
  for (const auto& child : children_) child.second->Train(mode);
}

int64_t Module::NumElements() const {
  int64_t total = 0;
  for (const Parameter* p : Parameters()) total += p->numel();
  return total;
}

StateDict Module::GetStateDict() const {
  StateDict state;
  for (const NamedParameter& p : NamedParameters()) {
    state.emplace_back(p.fqn, p.parameter->tensor().Detach());
  }
  return state;
}

void Module::LoadStateDict(const StateDict& state) {
  const std::vector<NamedParameter> mine = NamedParameters();
  std::vector<std::string> names, problems;
  for (const NamedParameter& p : mine) names.push_back(p.fqn);
  std::vector<const DTensor*> found(mine.size(), nullptr);
  for (const auto& [name, value] : state) {
    const size_t i = std::find(names.begin(), names.end(), name) - names.begin();
    if (i == names.size()) {
      problems.push_back(absl::StrCat("unexpected ", name, " (nearest: ",
                                      absl::StrJoin(NearestNames(name, names, 1), ", "), ")"));
      continue;
    }
    if (found[i] != nullptr) problems.push_back(absl::StrCat(name, " is there twice"));
    found[i] = &value;
    const std::string misfit = Misfit(value, mine[i].parameter->tensor().spec());
    if (!misfit.empty()) problems.push_back(absl::StrCat(name, " ", misfit));
  }
  for (size_t i = 0; i < mine.size(); ++i) {
    if (found[i] == nullptr) problems.push_back(absl::StrCat("missing ", names[i]));
  }
  if (!problems.empty()) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat("[load_state_dict] nothing was loaded: ", absl::StrJoin(problems, "; "))));
  }
  for (size_t i = 0; i < mine.size(); ++i) mine[i].parameter->Set(*found[i]);
}

DTensor Module::Cached(const std::string& key, absl::FunctionRef<DTensor()> make) {
  const auto known = cached_.find(key);
  if (known != cached_.end()) return known->second;
  if (Rehearsal* rehearsal = Rehearsal::Current()) return rehearsal->Cached(this, key, make);
  return cached_[key] = make();
}

void Module::CheckName(const std::string& name) const {
  std::string why;
  if (name.empty() || name.find('.') != std::string::npos) why = "must be non-empty, without dots";
  for (const auto& p : parameters_) {
    if (p->name() == name) why = "is a parameter already";
  }
  for (const auto& child : children_) {
    if (child.first == name) why = "is a child already";
  }
  if (why.empty()) return;
  Throw(absl::InvalidArgumentError(
      absl::StrCat("[", type_name(), "] the name \"", name, "\" ", why)));
}

Parameter& Module::AddParameter(std::string name, Shape shape, Init init, DType dtype) {
  CheckName(name);
  absl::StatusOr<int64_t> numel = CheckedNumel(shape);
  if (!numel.ok()) {
    Throw(absl::Status(numel.status().code(),
                       absl::StrCat("parameter ", name, ": ", numel.status().message())));
  }
  parameters_.push_back(
      std::make_unique<Parameter>(std::move(name), std::move(shape), init, dtype));
  parameters_.back()->owner_ = this;
  return *parameters_.back();
}

void Module::Adopt(std::string name, std::unique_ptr<Module> child) {
  CheckName(name);
  child->parent_ = this;
  child->name_ = name;
  child->ForgetPath();
  children_.emplace_back(std::move(name), std::move(child));
}

Values Sequential::Forward(const Values& inputs) {
  Values values = inputs;
  for (const auto& child : children()) values = (*child.second)(values);
  return values;
}

void Materialize(Module& module) {
  for (Parameter* p : module.Parameters()) p->Materialize();
}

void Materialize(Module& module, const std::function<bool(const std::string& fqn)>& wanted) {
  for (const NamedParameter& p : module.NamedParameters()) {
    if (wanted(p.fqn)) {
      p.parameter->Materialize();
    } else {
      p.parameter->SkipMaterialize();
    }
  }
}

void SetDType(Module& module, DType dtype) {
  if (!IsFloating(dtype)) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat("[set_dtype] parameters are floating, got ", std::string(Name(dtype)))));
  }
  for (Parameter* p : module.Parameters()) {
    if (p->materialized()) {
      Throw(absl::FailedPreconditionError(
          absl::StrCat("[set_dtype] parameter ", p->fqn(), " has values already")));
    }
    if (IsFloating(p->dtype())) p->dtype_ = dtype;
  }
}

}  // namespace dtensor

#include "dtensor/parallel/module/module.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "dtensor/autograd.h"
#include "dtensor/implicit_warning.h"
#include "dtensor/memo.h"
#include "dtensor/rehearsal.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/trace.h"

namespace dtensor {
namespace {

std::string Joined(absl::string_view prefix, absl::string_view name) {
  return prefix.empty() ? std::string(name) : absl::StrCat(prefix, ".", name);
}

// Type and name; a root has none.
std::string Shown(const Module& module) {
  const std::string fqn = module.fqn();
  return fqn.empty() ? module.type_name() : absl::StrCat(module.type_name(), " ", fqn);
}

}  // namespace

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
  auto pre = pre_hooks_.begin();
  for (size_t left = pre_hooks_.size(); left > 0; --left, ++pre) in = (*pre)(*this, in);
  if (in.size() < min_inputs()) {
    Throw(absl::InvalidArgumentError(absl::StrCat("[", Shown(*this), "] needs ", min_inputs(),
                                                  " or more inputs, got ", in.size())));
  }
  const auto forward = [this](const Values& values) { return Forward(values); };
  Values out = recompute_ && GradEnabled() ? RunTwice(forward, in) : Forward(in);
  auto post = post_hooks_.begin();
  for (size_t left = post_hooks_.size(); left > 0; --left, ++post) out = (*post)(*this, in, out);
  return out;
}

Values Module::Recomputed(const Values& inputs) {
  return RunTwice([this](const Values& values) { return (*this)(values); }, inputs);
}

Values Module::RunTwice(std::function<Values(const Values&)> run, const Values& inputs) {
  if (!alive_) alive_ = std::make_shared<bool>(true);
  const auto checked = [run = std::move(run), alive = std::weak_ptr<bool>(alive_),
                        name = Shown(*this)](const Values& values) {
    if (alive.expired()) {
      Throw(absl::FailedPreconditionError(
          absl::StrCat("[", name,
                       "] was destroyed before Backward, which runs it again to recompute what it "
                       "did not keep: keep the module until then")));
    }
    return run(values);
  };
  return dtensor::Recompute(checked, inputs);
}

DTensor Module::OnlyOutput(Values outputs) const {
  if (outputs.size() != 1) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat(Shown(*this), " gives ", outputs.size(), " values where one was asked for")));
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

std::vector<NamedParameter> Module::NamedTensors() const {
  std::vector<NamedParameter> all;
  Collect("", &all);
  return Distinct(all);
}

namespace {
std::vector<NamedParameter> OfKind(std::vector<NamedParameter> all, bool buffers) {
  const auto other = [&](const NamedParameter& p) { return p.parameter->is_buffer() != buffers; };
  all.erase(std::remove_if(all.begin(), all.end(), other), all.end());
  return all;
}
}  // namespace

std::vector<NamedParameter> Module::NamedParameters() const {
  return OfKind(NamedTensors(), false);
}
std::vector<NamedParameter> Module::NamedBuffers() const { return OfKind(NamedTensors(), true); }

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

void Module::RequiresGrad(bool value) {
  for (Parameter* p : Parameters()) p->RequiresGrad(value);
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
    if (p->name() == name) why = p->is_buffer() ? "is a buffer already" : "is a parameter already";
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
  return Add(
      std::make_unique<Parameter>(std::move(name), std::move(shape), std::move(init), dtype));
}

Parameter& Module::AddBuffer(std::string name, Shape shape, Init init, DType dtype,
                             bool persistent) {
  CheckName(name);
  const auto role = persistent ? Parameter::Role::kBuffer : Parameter::Role::kTransientBuffer;
  return Add(
      std::make_unique<Parameter>(std::move(name), std::move(shape), std::move(init), dtype, role));
}

Parameter& Module::AddBuffer(std::string name, const DTensor& values, bool persistent) {
  if (!values.defined() || !values.mesh().is_self()) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat("buffer ", name, ": values must be a tensor on Self")));
  }
  return AddBuffer(std::move(name), values.shape(), Init::Copy(values), values.dtype(), persistent);
}

Parameter& Module::Add(std::unique_ptr<Parameter> parameter) {
  parameter->owner_ = this;
  parameters_.push_back(std::move(parameter));
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

}  // namespace dtensor

#include "dtensor/parallel/module/materialize.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// Of the calling rank.
struct Scopes {
  int deferred = 0;
  std::optional<DType> dtype;
  std::optional<DeviceType> device;
};
Scopes& Open() { return RankContext::Current().Slot<Scopes>(); }

void Check(DType dtype) {
  if (IsFloating(dtype)) return;
  Throw(absl::InvalidArgumentError(
      absl::StrCat("[set_dtype] parameters are floating, got ", std::string(Name(dtype)))));
}

}  // namespace

// One walk over a tree. A tied tensor is met several times, and made or passed over once.
class Materializer {
 public:
  using Wanted = std::function<bool(const std::string& fqn)>;
  Materializer(Module& root, const Wanted& wanted) : root_(root), wanted_(wanted) { Learn(); }

  void Build(Module& module) {
    const bool first = !std::exchange(module.built_, true);
    if (first) Run(module.build_hooks_, module);
    Fill(module);
    if (first && Run(module.built_hooks_, module)) Fill(module);
  }

 private:
  // Which of the tensors that there are now are made.
  void Learn() {
    for (const NamedParameter& p : root_.NamedTensors()) {
      if (!known_.insert(p.parameter->identity()).second) continue;
      const bool takes = wanted_ == nullptr || wanted_(p.fqn) ||
                         std::any_of(p.aliases.begin(), p.aliases.end(), wanted_);
      (takes ? made_ : passed_).insert(p.parameter->identity());
    }
  }
  static size_t TensorsBelow(const Module& module) {
    size_t count = module.own_parameters().size();
    for (const auto& child : module.children()) count += TensorsBelow(*child.second);
    return count;
  }
  // Whether they added tensors to the module. A hook may add others, too.
  bool Run(const std::vector<Module::BuildHook>& hooks, Module& module) {
    if (hooks.empty()) return false;
    const size_t before = TensorsBelow(module);
    for (size_t i = 0; i < hooks.size(); ++i) {
      const Module::BuildHook hook = hooks[i];
      hook(module);
    }
    if (TensorsBelow(module) == before) return false;
    Learn();
    return true;
  }
  void Fill(Module& module) {
    for (const auto& p : module.own_parameters()) Make(p.get());
    for (size_t i = 0; i < module.children().size(); ++i) Build(*module.children()[i].second);
  }
  void Make(Parameter* p) {
    if (made_.contains(p->identity())) return p->Materialize();
    if (passed_.erase(p->identity()) > 0) p->SkipMaterialize();
  }

  Module& root_;
  const Wanted& wanted_;
  absl::flat_hash_set<const void*> known_, made_, passed_;  // by Parameter::identity
};

void Materialize(Module& module) { Materialize(module, nullptr); }

void Materialize(Module& module, const std::function<bool(const std::string& fqn)>& wanted) {
  if (Open().deferred == 0) Materializer(module, wanted).Build(module);
}

void SetDType(Module& module, DType dtype) {
  Check(dtype);
  for (Parameter* p : module.Parameters()) {
    if (IsFloating(p->dtype()) || p->materialized()) p->SetDType(dtype);
  }
}

DeferredInit::DeferredInit() { ++Open().deferred; }
DeferredInit::~DeferredInit() { --Open().deferred; }

MaterializeAs::MaterializeAs(std::optional<DType> dtype, std::optional<DeviceType> device)
    : dtype_(Open().dtype), device_(Open().device) {
  if (dtype) Check(*dtype);
  if (dtype) Open().dtype = dtype;
  if (device) Open().device = device;
}
MaterializeAs::~MaterializeAs() {
  Open().dtype = dtype_;
  Open().device = device_;
}

namespace internal {

DType MaterializedDType(const Parameter& recipe) {
  const Scopes& open = Open();
  const bool changes = open.dtype && !recipe.is_buffer() && IsFloating(recipe.dtype());
  return changes ? *open.dtype : recipe.dtype();
}

void ApplyMaterializeAs(Parameter* recipe) {
  const Scopes& open = Open();
  recipe->SetDType(MaterializedDType(*recipe));
  if (open.device && recipe->mesh().is_self() && recipe->mesh().device() != *open.device) {
    recipe->Place(DeviceMesh::Self(*open.device), {});
  }
}

}  // namespace internal
}  // namespace dtensor

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
  Materializer(Module& root, const Wanted& wanted) {
    for (const NamedParameter& p : root.NamedTensors()) {
      const bool takes = wanted == nullptr || wanted(p.fqn) ||
                         std::any_of(p.aliases.begin(), p.aliases.end(), wanted);
      (takes ? made_ : passed_).insert(p.parameter->identity());
    }
  }

  void Build(Module& module) {
    const bool first = !std::exchange(module.built_, true);
    for (size_t i = 0; first && i < module.build_hooks_.size(); ++i) module.build_hooks_[i](module);
    for (const auto& p : module.own_parameters()) Make(p.get());
    for (const auto& child : module.children()) Build(*child.second);
    for (size_t i = 0; first && i < module.built_hooks_.size(); ++i) module.built_hooks_[i](module);
  }

 private:
  void Make(Parameter* p) {
    if (made_.contains(p->identity())) return p->Materialize();
    if (passed_.erase(p->identity()) > 0) p->SkipMaterialize();
  }

  absl::flat_hash_set<const void*> made_, passed_;  // by Parameter::identity
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

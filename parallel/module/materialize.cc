#include "dtensor/parallel/module/materialize.h"

#include <algorithm>
#include <utility>
#include <vector>

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
  Materializer(Module& root, const Wanted& wanted) : tensors_(root.NamedTensors()) {
    for (const NamedParameter& p : tensors_) {
      const bool takes = wanted == nullptr || wanted(p.fqn) ||
                         std::any_of(p.aliases.begin(), p.aliases.end(), wanted);
      (takes ? made_ : passed_).push_back(p.parameter);
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
    const auto tied = [p](const Parameter* o) { return o->IsTiedTo(*p); };
    if (std::any_of(made_.begin(), made_.end(), tied)) return p->Materialize();
    const auto passed = std::find_if(passed_.begin(), passed_.end(), tied);
    if (passed == passed_.end()) return;
    p->SkipMaterialize();
    passed_.erase(passed);
  }

  const std::vector<NamedParameter> tensors_;
  std::vector<Parameter*> made_, passed_;
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

void ApplyMaterializeAs(Parameter* recipe) {
  const Scopes& open = Open();
  if (open.dtype && !recipe->is_buffer() && IsFloating(recipe->dtype())) {
    recipe->SetDType(*open.dtype);
  }
  if (open.device && recipe->mesh().is_self() && recipe->mesh().device() != *open.device) {
    recipe->Place(DeviceMesh::Self(*open.device), {});
  }
}

}  // namespace internal
}  // namespace dtensor

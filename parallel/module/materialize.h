// Materialize: recipes become tensors. Scopes say when, where and in which dtype.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "dtensor/parallel/module/module.h"

namespace dtensor {

// Draws all parameters and buffers in construction order. Random numbers are those of one device
// under any placement, so every mesh gives the same bits; the generator advances on every rank.
// Build hooks run before a module's, post hooks after those of all below it.
void Materialize(Module& module);
// Only those of which `wanted` takes a name; the generator moves past the others, so those made
// hold what one device would have drawn for the whole model.
void Materialize(Module& module, const std::function<bool(const std::string& fqn)>& wanted);
// Another dtype for all floating parameters (buffers keep theirs): of the recipes, so before
// Materialize. Errors: FailedPrecondition afterwards, InvalidArgument for an integer dtype.
void SetDType(Module& module, DType dtype);

// While it is open, Materialize(module) does nothing: for models whose constructors call it.
class DeferredInit {
 public:
  DeferredInit();
  ~DeferredInit();
  DeferredInit(const DeferredInit&) = delete;
};

// While it is open, what is materialised is made in this dtype (floating parameters; buffers keep
// theirs) and, if it has no mesh yet, on this device: on kMeta everything but values is there.
// Scopes nest; an inner one says what it says and leaves the rest.
class MaterializeAs {
 public:
  explicit MaterializeAs(std::optional<DType> dtype, std::optional<DeviceType> device = {});
  ~MaterializeAs();
  MaterializeAs(const MaterializeAs&) = delete;

 private:
  const std::optional<DType> dtype_;
  const std::optional<DeviceType> device_;
};

namespace internal {
void ApplyMaterializeAs(Parameter* recipe);        // what the open scopes say
DType MaterializedDType(const Parameter& recipe);  // the dtype that it gets in them
}  // namespace internal
}  // namespace dtensor

// Parameter: a named tensor of a module, a recipe (shape, dtype, initial values, mesh, placements)
// until Materialize. Belongs to one rank; functions throw Error.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "dtensor/distribute.h"
#include "dtensor/distributed_tensor.h"

namespace dtensor {

class Module;
struct NamedParameter;

// How a parameter's first values are made.
struct Init {
  enum class Kind { kZeros, kOnes, kNormal, kUniform, kFunction };
  Kind kind = Kind::kZeros;
  double a = 0, b = 0;  // mean and std, or from and to
  std::function<void(const DTensor&)> function = {};
  static Init Zeros() { return {}; }
  static Init Ones() { return {Kind::kOnes, 0, 0}; }
  static Init Normal(double mean, double std) { return {Kind::kNormal, mean, std}; }
  static Init Uniform(double from, double to) { return {Kind::kUniform, from, to}; }
  // Fills an empty tensor in place (parallel/module/init.h); its draws must not depend on its
  // device.
  static Init Call(std::function<void(const DTensor&)> function) {
    return {Kind::kFunction, 0, 0, std::move(function)};
  }
  // The values of a tensor on Self.
  static Init Copy(const DTensor& values);
};

// A logical tensor of a model under one of its names: a recipe without storage, then (Materialize)
// a leaf that needs grad; a buffer is the same without a gradient. Tie gives it more names.
class Parameter {
 public:
  enum class Role : uint8_t {
    kParameter,
    kBuffer,
    kTransientBuffer
  };  // the last: in no state dict
  Parameter(std::string name, Shape shape, Init init, DType dtype, Role role = Role::kParameter);
  Parameter(const Parameter&) = delete;
  ~Parameter();

  const std::string& name() const { return name_; }  // within its module
  std::string fqn() const;
  const Shape& shape() const { return it_->shape; }
  DType dtype() const { return it_->dtype; }
  const Init& init() const { return it_->init; }
  const DeviceMesh& mesh() const { return it_->mesh; }
  const Placements& placements() const { return it_->placements; }
  bool is_buffer() const { return it_->role != Role::kParameter; }
  bool persistent() const { return it_->role != Role::kTransientBuffer; }
  bool materialized() const { return it_->tensor.defined(); }
  // Whether backward makes a gradient of it; false for buffers and integers.
  bool requires_grad() const { return BecomesLeaf(); }
  // Errors: FailedPrecondition before Materialize.
  const DTensor& tensor() const;
  // NOLINTNEXTLINE: a parameter stands for its tensor in expressions.
  operator const DTensor&() const { return tensor(); }
  // The number of elements of the whole parameter.
  int64_t numel() const;
  // Whether the other is the same logical tensor under another name.
  bool IsTiedTo(const Parameter& other) const { return it_ == other.it_; }
  // What those that are tied have in common and no others, for looking them up.
  const void* identity() const { return it_.get(); }

  // Draws the initial values directly in the parameter's placements. Nothing if done already.
  void Materialize();
  // Moves the generator as Materialize would, and makes nothing.
  void SkipMaterialize() const;
  // Another mesh or other placements (no Partial): changes the recipe or, once materialised, the
  // tensor (a new leaf with the same values; a gradient is dropped). From Self it gets the values
  // of the mesh's rank `source` (-1: each its own, which are the same): all ranks of the mesh call
  // it. Errors: InvalidArgument for placements that do not fit, and for a materialised parameter on
  // a mesh other than Self or `mesh`.
  void Place(const DeviceMesh& mesh, Placements placements, int64_t source = 0);
  // Whether Place would take them: InvalidArgument where not, and for a parameter on another mesh;
  // FailedPrecondition for one that was materialised on meta, and a mesh that is not.
  absl::Status CheckPlace(const DeviceMesh& mesh, absl::Span<const Placement> placements) const;
  // False freezes it, recipe or values: no gradient is made or kept, and optimizers leave it as it
  // is. Errors: InvalidArgument for true of a buffer or an integer parameter.
  void RequiresGrad(bool value = true);
  // Another dtype of a recipe. Errors: FailedPrecondition once it has values.
  void SetDType(DType dtype);
  // Other values: same shape and dtype, redistributed to this parameter's placements.
  void Set(const DTensor& values);
  // Becomes this tensor, whose shape, dtype, mesh and placements it must have, without a copy: a
  // recipe is materialised by it, a gradient is dropped. Errors: InvalidArgument for another one.
  void Take(DTensor values);

 private:
  friend class Module;
  friend class Optimizer;
  friend class RehearsedParameters;  // Explain
  friend void Tie(Parameter& a, Parameter& b);
  friend std::vector<NamedParameter> Distinct(const std::vector<NamedParameter>& parameters);
  struct Listed;  // among what reports of memory name
  // What all names of it share.
  struct Logical {
    Shape shape;
    Init init;
    DType dtype;
    Role role;
    DeviceMesh mesh = DeviceMesh::Self();
    Placements placements = {};
    DTensor tensor = {};
    std::vector<Parameter*> names = {};  // in the order of the ties
    bool frozen = false;
    SpecRef grad_layout = {};  // null: as the tensor
    std::shared_ptr<Listed> listed = {};
  };
  void MakeMeta();  // in a rehearsal: a tensor without values
  void Own(DTensor tensor, bool leaf);
  void BecomeLeaf();
  // DTensor::SetGradLayout, also of every leaf that it becomes later: by other values, another
  // placement (of another mesh the dtype alone), or when it is not frozen any more. Null: as the
  // tensor from now on, where this has said otherwise before.
  void KeepGradients(SpecRef layout);
  bool MayRequireGrad() const { return !is_buffer() && IsFloating(dtype()); }
  bool BecomesLeaf() const { return MayRequireGrad() && !it_->frozen; }
  DTensor Draw(DType dtype, const DeviceMesh& mesh, const Placements& placements) const;
  const Module* owner_ = nullptr;
  std::string name_;
  std::shared_ptr<Logical> it_;
};

// Makes b another name of a: one logical tensor, with the recipe or values of a. What reads either
// reads it, so its gradient is the sum of all uses; models list it once, under its first name in
// construction order.
//   Errors: InvalidArgument naming both if they differ in shape, dtype or kind, or are placed
//   differently; FailedPrecondition if one of them has values and the other not.
void Tie(Parameter& a, Parameter& b);

struct NamedParameter {
  std::string fqn;
  Parameter* parameter;
  std::vector<std::string> aliases = {};  // its other names
};
// Each logical tensor once, with what it is called later in the list among its aliases.
std::vector<NamedParameter> Distinct(const std::vector<NamedParameter>& parameters);

}  // namespace dtensor

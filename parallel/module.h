// Module: a tree of parameters and children with names (FQNs), written as if for one device.
//
// Parameters are recipes (shape, dtype, initial values, mesh, placements) until Materialize. Plans
// distribute a module through hooks and the parameters' placements only. Everything here belongs to
// one rank; functions throw Error.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "dtensor/dispatch.h"
#include "dtensor/distribute.h"
#include "dtensor/dtensor.h"

namespace dtensor {

class Module;

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
  // Fills an empty tensor in place (parallel/init.h); its draws must not depend on its device.
  static Init Call(std::function<void(const DTensor&)> function) {
    return {Kind::kFunction, 0, 0, std::move(function)};
  }
};

// A named tensor of a module: a recipe without storage, then (Materialize) a leaf that needs grad.
class Parameter {
 public:
  Parameter(std::string name, Shape shape, Init init, DType dtype)
      : name_(std::move(name)), shape_(std::move(shape)), init_(init), dtype_(dtype) {}
  Parameter(const Parameter&) = delete;

  const std::string& name() const { return name_; }  // within its module
  std::string fqn() const;
  const Shape& shape() const { return shape_; }
  DType dtype() const { return dtype_; }
  const Init& init() const { return init_; }
  const DeviceMesh& mesh() const { return mesh_; }
  const Placements& placements() const { return placements_; }
  bool materialized() const { return tensor_.defined(); }
  // Errors: FailedPrecondition before Materialize.
  const DTensor& tensor() const;
  // NOLINTNEXTLINE: a parameter stands for its tensor in expressions.
  operator const DTensor&() const { return tensor(); }
  // The number of elements of the whole parameter.
  int64_t numel() const;

  // Draws the initial values directly in the parameter's placements. Nothing if done already.
  void Materialize();
  // Moves the generator as Materialize would, and makes nothing.
  void SkipMaterialize() const;
  // Another mesh or other placements (no Partial): changes the recipe or, once materialised, the
  // tensor (a new leaf with the same values; a gradient is dropped). Errors: InvalidArgument for
  // placements that do not fit, and for a materialised parameter on a mesh other than Self or
  // `mesh`.
  void Place(const DeviceMesh& mesh, Placements placements);
  // Whether Place would take them: InvalidArgument where not, and for a parameter on another mesh.
  absl::Status CheckPlace(const DeviceMesh& mesh, absl::Span<const Placement> placements) const;
  // Other values: same shape and dtype, redistributed to this parameter's placements.
  void Set(const DTensor& values);

 private:
  friend class Module;
  friend class RehearsedParameters;  // Explain
  void MakeMeta();                   // in a rehearsal: a tensor without values
  void BecomeLeaf();  // the tensor, with a gradient that traces name after this module
  DTensor Draw(const DeviceMesh& mesh, const Placements& placements) const;
  friend void SetDType(Module& module, DType dtype);
  const Module* owner_ = nullptr;
  std::string name_;
  Shape shape_;
  Init init_;
  DType dtype_;
  DeviceMesh mesh_ = DeviceMesh::Self();
  Placements placements_;
  DTensor tensor_;
};

struct NamedParameter {
  std::string fqn;
  Parameter* parameter;
};
struct NamedModule {
  std::string fqn;  // "" for the root
  Module* module;
};
using StateDict = std::vector<std::pair<std::string, DTensor>>;  // ordered by construction

class Module {
 public:
  // May replace what goes into Forward, or what comes out.
  using PreHook = std::function<Values(Module&, const Values& inputs)>;
  using PostHook = std::function<Values(Module&, const Values& inputs, const Values& outputs)>;

  Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;
  virtual ~Module() = default;

  // Pre-hooks in order, Forward, post-hooks in order: module(values), or module({x, y})[0].
  Values operator()(const Values& inputs);
  Values operator()(std::initializer_list<DTensor> inputs) { return (*this)(Values(inputs)); }
  // For modules of one output: module(x), module(q, k, v).
  template <class... T>
  DTensor operator()(const DTensor& first, const T&... rest) {
    return OnlyOutput((*this)(Values{first, rest...}));
  }

  virtual std::string type_name() const { return "Module"; }
  // Dotted path from the root ("" for the root itself).
  std::string fqn() const;
  // Own parameters first, then those of children, in construction order.
  std::vector<NamedParameter> NamedParameters() const;
  std::vector<Parameter*> Parameters() const;
  // This module, then all below it, depth first in construction order.
  std::vector<NamedModule> NamedModules();
  const std::vector<std::unique_ptr<Parameter>>& own_parameters() const { return parameters_; }
  const std::vector<std::pair<std::string, std::unique_ptr<Module>>>& children() const {
    return children_;
  }
  // By dotted name; null if there is none.
  Module* FindModule(absl::string_view fqn);
  Parameter* FindParameter(absl::string_view fqn);

  void AddPreHook(PreHook hook) { pre_hooks_.push_back(std::move(hook)); }
  void AddPostHook(PostHook hook) { post_hooks_.push_back(std::move(hook)); }
  void ZeroGrad();
  // Whether redistributions that ops of this module and those below insert are told, once each:
  // what ParallelizeModule sets (parallel/plan.h).
  void WarnOfImplicit(bool warn);
  // Training (the default) or evaluation, of this module and all below: what Dropout looks at.
  void Train(bool mode = true);
  bool training() const { return training_; }
  int64_t NumElements() const;  // of all parameters, each logical element once

  // FQN -> tensor, in construction order. Errors: FailedPrecondition before Materialize.
  StateDict GetStateDict() const;
  // Values by name, on Self or on the parameter's mesh. Errors: InvalidArgument listing every name
  // that is missing, unexpected, or of another shape, dtype or mesh; nothing is loaded then.
  void LoadStateDict(const StateDict& state);

 protected:
  virtual Values Forward(const Values& inputs) = 0;
  // A tensor that is made at the first call and kept: tables, masks. `key` names it among those of
  // this module and says all that it depends on ("cos 2048"). What Explain rehearses keeps nothing.
  // Belongs to the rank that made it; recorded by autograd only if `make` is, so make it under
  // NoGrad if parameters are read.
  DTensor Cached(const std::string& key, absl::FunctionRef<DTensor()> make);
  // Calls with fewer inputs are refused before Forward.
  virtual size_t min_inputs() const { return 1; }
  // Errors: InvalidArgument for an empty or repeated name, or one with a dot.
  Parameter& AddParameter(std::string name, Shape shape, Init init, DType dtype = DType::kF32);
  template <class M, class... A>
  M& AddChild(std::string name, A&&... args) {
    auto child = std::make_unique<M>(std::forward<A>(args)...);
    M& ref = *child;
    Adopt(std::move(name), std::move(child));
    return ref;
  }

 private:
  friend class Parameter;
  // Errors: InvalidArgument for another number of outputs.
  DTensor OnlyOutput(Values outputs) const;
  // The path by which traces name this module: its FQN, or its type for a root.
  const std::string* TracePath() const;
  void ForgetPath();
  void Adopt(std::string name, std::unique_ptr<Module> child);
  void CheckName(const std::string& name) const;
  void Collect(const std::string& prefix, std::vector<NamedParameter>* out) const;
  void CollectModules(const std::string& prefix, std::vector<NamedModule>* out);

  const Module* parent_ = nullptr;
  mutable const std::string* path_ = nullptr;  // of the rank whose context has this id
  mutable uint64_t path_context_ = 0;
  bool training_ = true, warn_implicit_ = false;
  std::string name_;
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::vector<std::pair<std::string, std::unique_ptr<Module>>> children_;
  std::vector<PreHook> pre_hooks_;
  std::vector<PostHook> post_hooks_;
  std::map<std::string, DTensor> cached_;
};

// A list of modules named "0", "1", ...; calling it runs them one after the other.
class Sequential : public Module {
 public:
  template <class M, class... A>
  M& Append(A&&... args) {
    return AddChild<M>(std::to_string(children().size()), std::forward<A>(args)...);
  }
  std::string type_name() const override { return "Sequential"; }

 protected:
  Values Forward(const Values& inputs) override;
};

// Draws all parameters in construction order. Random numbers are those of one device under any
// placement, so every mesh gives the same bits; the generator advances on every rank.
void Materialize(Module& module);
// Only the parameters that `wanted` names; the generator moves past the others, so those made hold
// what one device would have drawn for the whole model.
void Materialize(Module& module, const std::function<bool(const std::string& fqn)>& wanted);
// Another dtype for all floating parameters: of the recipes, so before Materialize. Errors:
// FailedPrecondition afterwards, InvalidArgument for an integer dtype.
void SetDType(Module& module, DType dtype);

}  // namespace dtensor

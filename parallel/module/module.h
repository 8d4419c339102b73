// Module: a tree of parameters and children with names (FQNs), written as if for one device.
//
// Plans distribute a module through hooks, traits and the parameters' placements only. Everything
// here belongs to one rank; functions throw Error.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "dtensor/dispatch.h"
#include "dtensor/distribute.h"
#include "dtensor/distributed_tensor.h"
#include "dtensor/parallel/module/parameter.h"

namespace dtensor {

class Module;
struct NamedModule {
  std::string fqn;  // "" for the root
  Module* module;
};
using StateDict = std::vector<std::pair<std::string, DTensor>>;  // ordered by construction

// What styles (parallel/plan/plan.h) know of a module: its output features are sums over its input
// features, weighted by `weight`.
struct ModuleTraits {
  Parameter* weight = nullptr;
  Parameter* bias = nullptr;    // one element per output feature; null: none
  int out_dim = 0, in_dim = 1;  // of the weight
  // Features that may not be parted come in so many equal units (heads); 0: any may.
  int64_t out_units = 0, in_units = 0;
  bool looks_up = false;  // inputs are indices of input features, as an embedding's
};

class Module {
 public:
  // May replace what goes into Forward, or what comes out. One that is added while they run is run
  // from the next call on.
  using PreHook = std::function<Values(Module&, const Values& inputs)>;
  using PostHook = std::function<Values(Module&, const Values& inputs, const Values& outputs)>;
  using BuildHook = std::function<void(Module&)>;

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

  // The same, hooks included, without keeping the values in between (dtensor/autograd.h:
  // Recompute). The module must live until Backward.
  Values Recomputed(const Values& inputs);

  virtual std::string type_name() const { return "Module"; }
  // Dotted path from the root ("" for the root itself).
  std::string fqn() const;
  // What a style may rely on; nothing: it serves no style that asks.
  virtual std::optional<ModuleTraits> traits() { return std::nullopt; }
  // Own parameters first, then those of children, in construction order; tied ones once.
  std::vector<NamedParameter> NamedParameters() const;
  std::vector<Parameter*> Parameters() const;
  // Buffers alone, and both.
  std::vector<NamedParameter> NamedBuffers() const;
  std::vector<NamedParameter> NamedTensors() const;
  // This module, then all below it, depth first in construction order.
  std::vector<NamedModule> NamedModules();
  // Parameters and buffers of this module itself.
  const std::vector<std::unique_ptr<Parameter>>& own_parameters() const { return parameters_; }
  const std::vector<std::pair<std::string, std::unique_ptr<Module>>>& children() const {
    return children_;
  }
  // By dotted name; null if there is none.
  Module* FindModule(absl::string_view fqn);
  Parameter* FindParameter(absl::string_view fqn);  // or buffer

  void AddPreHook(PreHook hook) { pre_hooks_.push_back(std::move(hook)); }
  void AddPostHook(PostHook hook) { post_hooks_.push_back(std::move(hook)); }
  // Once, when the module is materialised: before its own tensors are made (recipes may still be
  // placed and changed), and when it and all below it are there. What a hook adds to the module is
  // materialised, too.
  void AddBuildHook(BuildHook hook) { build_hooks_.push_back(std::move(hook)); }
  void AddBuiltHook(BuildHook hook) { built_hooks_.push_back(std::move(hook)); }
  void ZeroGrad();
  // Parameter::RequiresGrad of all parameters of this module and those below.
  void RequiresGrad(bool value = true);
  // Whether redistributions that ops of this module and those below insert are told, once each:
  // what ParallelizeModule sets (parallel/plan/plan.h).
  void WarnOfImplicit(bool warn);
  // Training (the default) or evaluation, of this module and all below: what Dropout looks at.
  void Train(bool mode = true);
  bool training() const { return training_; }
  // Whether what records a gradient keeps no values of Forward, which runs again in backward
  // (dtensor/autograd.h: Recompute). The module must live until then.
  void SetRecompute(bool again) { recompute_ = again; }
  int64_t NumElements() const;  // of all parameters, each logical element once

  // FQN -> tensor of parameters and persistent buffers, in construction order; tied ones under
  // every name. Errors: FailedPrecondition before Materialize.
  StateDict GetStateDict() const;
  // Values by name, on Self or on the parameter's mesh; of tied ones one name is enough. Errors:
  // InvalidArgument listing every name that is missing, unexpected, or of another shape, dtype or
  // mesh, and names of one parameter with different values; nothing is loaded then.
  //   Comm: one number where a tied parameter comes under several names.
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
  // A tensor that is placed, materialised and moved as parameters are, but has no gradient and is
  // no optimizer's. Plans replicate it unless a style names it. `persistent`: is in state dicts.
  // Errors: as AddParameter.
  Parameter& AddBuffer(std::string name, Shape shape, Init init, DType dtype = DType::kF32,
                       bool persistent = true);
  // With the values and dtype of a tensor on Self.
  Parameter& AddBuffer(std::string name, const DTensor& values, bool persistent = true);
  template <class M, class... A>
  M& AddChild(std::string name, A&&... args) {
    auto child = std::make_unique<M>(std::forward<A>(args)...);
    M& ref = *child;
    Adopt(std::move(name), std::move(child));
    return ref;
  }

 private:
  friend class Parameter;
  friend class Materializer;
  // Errors: InvalidArgument for another number of outputs.
  DTensor OnlyOutput(Values outputs) const;
  // Recompute of `run`, which is of this module.
  Values RunTwice(std::function<Values(const Values&)> run, const Values& inputs);
  // The path by which traces name this module: its FQN, or its type for a root.
  const std::string* TracePath() const;
  void ForgetPath();
  void Adopt(std::string name, std::unique_ptr<Module> child);
  void CheckName(const std::string& name) const;
  Parameter& Add(std::unique_ptr<Parameter> parameter);
  void Collect(const std::string& prefix, std::vector<NamedParameter>* out) const;
  void CollectModules(const std::string& prefix, std::vector<NamedModule>* out);

  const Module* parent_ = nullptr;
  mutable const std::string* path_ = nullptr;  // of the rank whose context has this id
  mutable uint64_t path_context_ = 0;
  bool training_ = true, warn_implicit_ = false, built_ = false, recompute_ = false;
  std::string name_;
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::vector<std::pair<std::string, std::unique_ptr<Module>>> children_;
  std::list<PreHook> pre_hooks_;  // lists: a hook may add others
  std::list<PostHook> post_hooks_;
  std::vector<BuildHook> build_hooks_, built_hooks_;
  std::map<std::string, DTensor> cached_;
  std::shared_ptr<bool> alive_;  // ends with this; by which a second Forward knows
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

}  // namespace dtensor

#include "dtensor/parallel/module/materialize.h"

// Optimizers and gradient clipping. State has a layout of its own: a step brings the gradient
// there, updates there (ops/optim/optim.h), and brings the new value to the parameter. In the
// default layout, the parameter's, nothing is communicated: what had to be was done by Backward.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "dtensor/ops/optim/optim.h"
#include "dtensor/parallel/module/module.h"

namespace dtensor {

// Where the state of one parameter is kept and its update computed.
struct StateLayout {
  // Another dtype than the parameter's: the state holds its value in that too ("master"), and the
  // parameter a rounding of it.
  DType dtype;
  DeviceMesh mesh;  // of the parameter's world
  Placements placements;
  // In what gradients are added up, over microbatches and ranks. Default: `dtype`.
  std::optional<DType> reduce_dtype = {};
};
using StateLayoutFn = std::function<StateLayout(const Parameter&)>;
// As the parameter: the default. This and FlatState can be asked before the parameter has values.
StateLayout LikeParameter(const Parameter& parameter);
// Cut over a mesh dim in flat pieces, of lengths that differ by one at most, what the parameter
// repeats there; gradients are reduce-scattered to them, and new values gathered (ZeRO-2; of
// parameters that are cut over `mesh_dim` themselves the state is too: ZeRO-3). Parameters without
// that mesh dim, and those whose parts on the other mesh dims differ in size, keep theirs as they
// are themselves, in `dtype`. Default: float32, or the parameter's where that has more bits.
StateLayoutFn FlatState(std::string mesh_dim = "dp", std::optional<DType> dtype = {});

// What some parameters have of their own; the rest is the optimizer's. Of groups that have the same
// parameter the first counts.
//   Source: the parameter groups of torch.optim
struct ParameterGroup {
  std::function<bool(const NamedParameter&)> has;  // the same answers on every rank
  std::optional<double> weight_decay = {};
  double lr_scale = 1;  // times lr(), also where a schedule sets that
};
// Parameters of fewer than two dims, which are biases and norms, do not decay.
ParameterGroup VectorsDoNotDecay();

// Belongs to one rank; every rank of the mesh steps alike. A logical parameter that is named more
// than once (Tie) has one state and is updated once; one of integers has none and is left alone.
// Gradients are added up in the state's layout, whichever leaf the parameter becomes after the
// optimizer was made (LoadPretrained, Place, RequiresGrad), until another optimizer is made of it.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Updates every parameter that has a gradient and is not frozen. All ranks of the mesh must call
  // it.
  //   Comm:   where a state's layout is not the parameter's, what brings new values back.
  //   Errors: FailedPrecondition naming two parameters that were tied after it was made, and one
  //           that was brought from Self to a mesh.
  void Step();
  void ZeroGrad();
  double lr() const { return lr_; }
  void set_lr(double lr);  // Errors: InvalidArgument unless it is 0 or more

  // How many updates each parameter has had. Those of a launch of a graph (GraphedStep) are noted
  // after it.
  std::vector<int64_t> StepCounts() const;
  void SetStepCounts(absl::Span<const int64_t> counts);  // DT_CHECK: one for each parameter
  // The tensors that a step writes: parameters, and those of their states that there are.
  std::vector<DTensor> Written() const;

  // "<fqn>/<name>" -> tensor in the state's layout, and "<fqn>/step" (0-d float64); of parameters
  // that were updated at least once. A state with a master is what the next step goes on from:
  // who loads other values into a model loads the optimizer's state, too.
  StateDict GetStateDict() const;
  // The same keys on every rank of the world, also where parameters are on several meshes and each
  // rank has updated its own: absent tensors for what other ranks have. Every rank must call it.
  //   Comm:   one exchange of how often each was updated.
  //   Errors: FailedPrecondition, alike on all ranks, naming a parameter that ranks which have it
  //           updated differently often, and one that some ranks do not name.
  absl::StatusOr<StateDict> GetStateDictOfAll() const;
  // What GetStateDict gives once all parameters were updated, as keys and specs.
  std::vector<std::pair<std::string, SpecRef>> StateSpecs() const;
  // By any name of a parameter. Errors: InvalidArgument naming what is unexpected, misshapen, given
  // twice or incomplete, and a step that is no number of updates; nothing is loaded.
  void LoadStateDict(const StateDict& state);

 protected:
  // What one step updates, of one group: lists of one length, each index in the layout of its
  // state.
  struct Batch {
    std::vector<DTensor> values, grads;
    std::vector<std::vector<DTensor>> states;  // per state name
    std::vector<int64_t> steps;                // the number of this update, from 1 on
    double lr = 0;                             // of the group
    std::optional<double> weight_decay = {};   // where the group has its own
    // The options with which the group is updated.
    template <class Options>
    Options With(Options options) const {
      options.lr = lr;
      options.weight_decay = weight_decay.value_or(options.weight_decay);
      return options;
    }
  };
  // Errors: FailedPrecondition for a parameter that was not materialised; InvalidArgument for a
  // layout that does not fit it, for two parameters of one name, and for a group without `has` or
  // with a negative number.
  Optimizer(const std::vector<NamedParameter>& parameters, double lr,
            std::vector<std::string> state_names, const StateLayoutFn& layout,
            std::vector<ParameterGroup> groups = {});
  // Updates values and states in place.
  virtual void Update(const Batch& batch) = 0;
  // What a state begins as, by its number among the names.
  virtual double InitialState(size_t) const { return 0; }

 private:
  struct Slot {
    NamedParameter parameter;
    const void* identity;  // its, when the optimizer was made
    SpecRef spec;          // of the state
    size_t group = 0;      // among groups_; their number: none
    int64_t step = 0;
    std::vector<DTensor> state = {};  // per name of it, null before the first update
  };
  void CheckParameters() const;
  void StepGroup(size_t group);
  void RehearseGroup(size_t group) const;
  bool HasMaster(const Slot& slot) const;
  // The optimizer's, and "master" where there is one.
  std::vector<std::string> StateNames(const Slot& slot) const;
  void AddTo(StateDict* all, const Slot& slot) const;
  void Begin(Slot* slot) const;
  DTensor ValueInState(const Slot& slot) const;
  // Which slot and state each key of a state dict names; a slot's step is its last state.
  using Keys = absl::flat_hash_map<std::string, std::pair<size_t, size_t>>;
  Keys KeysOfStates() const;

  double lr_;
  std::vector<std::string> state_names_;
  std::vector<ParameterGroup> groups_;
  std::vector<Slot> slots_;
};

// Source: torch.optim.SGD. Errors: InvalidArgument for negative and infinite numbers, and nesterov
// without momentum or with dampening.
class SGD : public Optimizer {
 public:
  explicit SGD(const std::vector<NamedParameter>& parameters, const SGDOptions& options = {},
               const StateLayoutFn& layout = LikeParameter,
               std::vector<ParameterGroup> groups = {});

 protected:
  void Update(const Batch& batch) override;

 private:
  SGDOptions options_;
};

// Decoupled weight decay. Source: torch.optim.AdamW. Errors: InvalidArgument for negative and
// infinite numbers and betas outside of [0, 1).
class AdamW : public Optimizer {
 public:
  explicit AdamW(const std::vector<NamedParameter>& parameters, const AdamWOptions& options = {},
                 const StateLayoutFn& layout = LikeParameter,
                 std::vector<ParameterGroup> groups = {});

 protected:
  void Update(const Batch& batch) override;

 private:
  AdamWOptions options_;
};

// Source: torch.optim.Adam. Errors: as AdamW.
class Adam : public Optimizer {
 public:
  explicit Adam(const std::vector<NamedParameter>& parameters, const AdamOptions& options = {},
                const StateLayoutFn& layout = LikeParameter,
                std::vector<ParameterGroup> groups = {});

 protected:
  void Update(const Batch& batch) override;

 private:
  AdamOptions options_;
};

// Source: torch.optim.Adagrad. Errors: InvalidArgument for negative and infinite numbers.
class Adagrad : public Optimizer {
 public:
  explicit Adagrad(const std::vector<NamedParameter>& parameters,
                   const AdagradOptions& options = {}, const StateLayoutFn& layout = LikeParameter,
                   std::vector<ParameterGroup> groups = {});

 protected:
  void Update(const Batch& batch) override;
  double InitialState(size_t) const override { return options_.initial_accumulator_value; }

 private:
  AdagradOptions options_;
};

// Source: torch.optim.RMSprop. Errors: InvalidArgument for negative and infinite numbers.
class RMSprop : public Optimizer {
 public:
  explicit RMSprop(const std::vector<NamedParameter>& parameters,
                   const RMSpropOptions& options = {}, const StateLayoutFn& layout = LikeParameter,
                   std::vector<ParameterGroup> groups = {});

 protected:
  void Update(const Batch& batch) override;

 private:
  RMSpropOptions options_;
};

// Multiplies all gradients by min(1, max_norm / (norm + 1e-6)) and gives their norm, a float64
// tensor without dims: the `norm_type` norm (> 0 or infinity) over all elements together, each
// logical element counted once, summed in float64. The host waits for nothing. Parameters may be on
// several meshes: then all ranks of the world call it with the same parameters, whether or not they
// are in a mesh and have its gradients, the host waits, and the norm is on Self. A parameter that
// is on another mesh on other ranks (each on mesh["tp"], that of its own row) counts once for each
// of these meshes then: whether they have copies of it is not known.
//   Comm:   one all-reduce of one number over the whole mesh; of several meshes on each, and one
//           number of every rank of the world.
//   Errors: InvalidArgument for a bad max_norm or norm_type, and for gradients on Self beside
//           others.
//   Source: torch.nn.utils.clip_grad_norm_
DTensor ClipGradients(const std::vector<NamedParameter>& parameters, double max_norm,
                      double norm_type = 2);
// The same, and waits for the norm; 0 on ranks outside of the mesh.
double ClipGradNorm(const std::vector<NamedParameter>& parameters, double max_norm,
                    double norm_type = 2);
// Brings every element of every gradient into [-clip_value, clip_value]. Errors: InvalidArgument
// for a clip_value that is negative or NaN.
//   Source: torch.nn.utils.clip_grad_value_
void ClipGradValues(const std::vector<NamedParameter>& parameters, double clip_value);

}  // namespace dtensor

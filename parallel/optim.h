// Optimizers and gradient clipping. State lives in the placement of its parameter and updates are
// local: what has to be communicated was done by Backward.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "parallel/module.h"

namespace dtensor {

// Belongs to one rank; every rank of the mesh steps alike.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Updates every parameter that has a gradient. All ranks of the mesh must call it.
  void Step();
  void ZeroGrad();
  double lr() const { return lr_; }
  void set_lr(double lr) { lr_ = lr; }

  // "<fqn>/<name>" -> tensor in the parameter's placement, and "<fqn>/step" (0-d float64); of
  // parameters that were updated at least once.
  StateDict GetStateDict() const;
  // Errors: InvalidArgument naming what is unexpected, misshapen or incomplete; nothing is loaded.
  void LoadStateDict(const StateDict& state);

 protected:
  struct Slot {
    NamedParameter parameter;
    int64_t step = 0;
    std::vector<DTensor> state;  // one per state name, null before the first update
  };
  // Errors: FailedPrecondition for a parameter that was not materialised.
  Optimizer(std::vector<NamedParameter> parameters, double lr,
            std::vector<std::string> state_names);
  // Updates `p` from `g`, one-dimensional arrays of one dtype (float32 or float64). `slot.step`
  // counts this update; `state` are this slot's tensors as arrays like p.
  virtual void Update(const Slot& slot, const Tensor& p, const Tensor& g,
                      absl::Span<const Tensor> state) = 0;

 private:
  void StepOne(Slot& slot, const DTensor& grad);
  double lr_;
  std::vector<std::string> state_names_;
  std::vector<Slot> slots_;
};

struct SGDOptions {
  double lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false;
};
// Source: torch.optim.SGD. Errors: InvalidArgument for negative numbers, and nesterov without
// momentum or with dampening.
class SGD : public Optimizer {
 public:
  explicit SGD(std::vector<NamedParameter> parameters, const SGDOptions& options = {});

 protected:
  void Update(const Slot& slot, const Tensor& p, const Tensor& g,
              absl::Span<const Tensor> state) override;

 private:
  SGDOptions options_;
};

struct AdamWOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 1e-2;
  bool amsgrad = false, maximize = false;
};
// Decoupled weight decay. Source: torch.optim.AdamW. Errors: InvalidArgument for negative numbers
// and betas outside of [0, 1).
class AdamW : public Optimizer {
 public:
  explicit AdamW(std::vector<NamedParameter> parameters, const AdamWOptions& options = {});

 protected:
  void Update(const Slot& slot, const Tensor& p, const Tensor& g,
              absl::Span<const Tensor> state) override;

 private:
  AdamWOptions options_;
};

// Scales all gradients by min(1, max_norm / (norm + 1e-6)) and returns their norm: the `norm_type`
// norm (> 0 or infinity) over all elements together, each logical element counted once, summed in
// float64.
//   Comm:   one all-reduce of one number over the whole mesh. 0 on ranks outside of it.
//   Errors: InvalidArgument for a bad max_norm or norm_type, or parameters on different meshes.
//   Source: torch.nn.utils.clip_grad_norm_
double ClipGradNorm(const std::vector<NamedParameter>& parameters, double max_norm,
                    double norm_type = 2);

}  // namespace dtensor

#include "parallel/optim.h"

#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/memo.h"
#include "ops/ops.h"
#include "parallel/optim_kernels.h"
#include "tensor/level.h"
#include "tensor/status.h"

namespace dtensor {
namespace {

void Require(bool ok, absl::string_view who, absl::string_view what, double got) {
  if (ok) return;
  Throw(absl::InvalidArgumentError(absl::StrCat("[", who, "] ", what, ", got ", got)));
}

const OptimKernels& Kernels() {
  static const OptimKernels kernels = [] {
    switch (ActiveCpuLevel()) {
      case CpuLevel::kV4:
        return cpu_v4::GetOptimKernels();
      case CpuLevel::kV3:
        return cpu_v3::GetOptimKernels();
      case CpuLevel::kBaseline:
        break;
    }
    return cpu_baseline::GetOptimKernels();
  }();
  return kernels;
}

// Calls fn(T(), loops of T) for the dtype of a tensor, float32 or float64.
template <class Fn>
void ForType(const Tensor& t, const Fn& fn) {
  if (t.dtype() == DType::kF64) {
    fn(double(), Kernels().f64);
  } else {
    fn(float(), Kernels().f32);
  }
}

// One-dimensional, contiguous, float32 or float64: the tensor itself where it is that already.
Tensor Flat(const Tensor& t) {
  const bool narrow = t.dtype() != DType::kF32 && t.dtype() != DType::kF64;
  if (!narrow && t.is_contiguous()) return t;
  Tensor flat = ValueOrThrow(Tensor::Empty(t.shape(), narrow ? DType::kF32 : t.dtype()));
  Copy(t, flat);
  return flat;
}

void PutBack(const Tensor& flat, const Tensor& t) {
  if (!flat.buffer().SharesWith(t.buffer())) Copy(flat, t);
  t.buffer().BumpVersion();
}

}  // namespace

Optimizer::Optimizer(std::vector<NamedParameter> parameters, double lr,
                     std::vector<std::string> state_names)
    : lr_(lr), state_names_(std::move(state_names)) {
  for (NamedParameter& p : parameters) {
    p.parameter->tensor();  // refuses recipes
    slots_.push_back({std::move(p), 0, std::vector<DTensor>(state_names_.size())});
  }
}

void Optimizer::Step() {
  ScopedPhase phase(CommPhase::kOptimizer);
  NoGrad no_grad;
  std::vector<DTensor> leaves;
  for (const Slot& slot : slots_) leaves.push_back(slot.parameter.parameter->tensor());
  SyncGradients(leaves);
  for (Slot& slot : slots_) {
    const DTensor grad = slot.parameter.parameter->tensor().grad();
    // A rehearsal has no numbers: it leaves parameters and states alone.
    if (grad.defined() && !RankContext::Current().rehearses()) StepOne(slot, grad);
  }
}

void Optimizer::StepOne(Slot& slot, const DTensor& grad) {
  const DTensor& parameter = slot.parameter.parameter->tensor();
  const TensorOptions like = {
      .dtype = parameter.dtype(),
      .mesh = parameter.mesh(),
      .placements = Placements(parameter.placements().begin(), parameter.placements().end())};
  for (DTensor& s : slot.state) {
    if (!s.defined()) s = zeros(parameter.shape(), like);
  }
  ++slot.step;
  const Tensor& local = parameter.local();
  if (!local.defined() || local.numel() == 0) return;
  const Tensor p = Flat(local), g = Flat(grad.local());
  std::vector<Tensor> state;
  for (const DTensor& s : slot.state) state.push_back(Flat(s.local()));
  Update(slot, p, g, state);
  internal::DropMemos(*parameter.impl());
  PutBack(p, local);
  for (size_t i = 0; i < state.size(); ++i) PutBack(state[i], slot.state[i].local());
}

void Optimizer::ZeroGrad() {
  for (Slot& slot : slots_) DTensor(slot.parameter.parameter->tensor()).ZeroGrad();
}

StateDict Optimizer::GetStateDict() const {
  StateDict all;
  for (const Slot& slot : slots_) {
    if (slot.step == 0) continue;
    for (size_t i = 0; i < state_names_.size(); ++i) {
      all.emplace_back(absl::StrCat(slot.parameter.fqn, "/", state_names_[i]), slot.state[i]);
    }
    all.emplace_back(absl::StrCat(slot.parameter.fqn, "/step"),
                     full({}, static_cast<double>(slot.step), {.dtype = DType::kF64}));
  }
  return all;
}

void Optimizer::LoadStateDict(const StateDict& state) {
  std::vector<Slot> loaded = slots_;
  std::vector<std::string> problems;
  for (Slot& slot : loaded) {
    slot.step = 0;
    slot.state.assign(state_names_.size(), DTensor());
  }
  for (const auto& [key, value] : state) {
    bool known = false;
    for (Slot& slot : loaded) {
      const DTensor& parameter = slot.parameter.parameter->tensor();
      if (key == absl::StrCat(slot.parameter.fqn, "/step")) {
        slot.step = static_cast<int64_t>(value.Item());
        known = true;
      }
      for (size_t i = 0; i < state_names_.size(); ++i) {
        if (key != absl::StrCat(slot.parameter.fqn, "/", state_names_[i])) continue;
        known = true;
        const std::string misfit = Misfit(value, parameter.spec());
        if (!misfit.empty()) {
          problems.push_back(absl::StrCat(key, " ", misfit));
          continue;
        }
        NoGrad no_grad;
        // A copy: steps change it in place.
        slot.state[i] =
            value.mesh() == parameter.mesh()
                ? clone(value.Redistribute(parameter.placements()))
                : DistributeTensor(value.local(), parameter.mesh(), parameter.placements());
      }
    }
    if (!known) problems.push_back(absl::StrCat("unexpected ", key));
  }
  for (const Slot& slot : loaded) {
    for (size_t i = 0; i < state_names_.size(); ++i) {
      if (slot.state[i].defined() == (slot.step > 0)) continue;
      problems.push_back(
          absl::StrCat(slot.parameter.fqn, " needs both step and ", state_names_[i]));
    }
  }
  if (!problems.empty()) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat("[optimizer state] nothing was loaded: ", absl::StrJoin(problems, "; "))));
  }
  slots_ = std::move(loaded);
}

SGD::SGD(std::vector<NamedParameter> parameters, const SGDOptions& options)
    : Optimizer(std::move(parameters), options.lr,
                options.momentum != 0 ? std::vector<std::string>{"momentum_buffer"}
                                      : std::vector<std::string>{}),
      options_(options) {
  Require(options.lr >= 0, "SGD", "lr must not be negative", options.lr);
  Require(options.momentum >= 0, "SGD", "momentum must not be negative", options.momentum);
  Require(options.weight_decay >= 0, "SGD", "weight_decay must not be negative",
          options.weight_decay);
  Require(!options.nesterov || (options.momentum > 0 && options.dampening == 0), "SGD",
          "nesterov needs a momentum and no dampening", options.momentum);
}

void SGD::Update(const Slot& slot, const Tensor& p, const Tensor& g,
                 absl::Span<const Tensor> state) {
  const SgdStep step = {lr(),
                        options_.momentum,
                        options_.dampening,
                        options_.weight_decay,
                        options_.nesterov,
                        options_.maximize,
                        slot.step == 1};
  ForType(p, [&](auto type, const auto& loops) {
    using T = decltype(type);
    loops.sgd(p.data_as<T>(), state.empty() ? nullptr : state[0].data_as<T>(), g.data_as<T>(),
              p.numel(), step);
  });
}

AdamW::AdamW(std::vector<NamedParameter> parameters, const AdamWOptions& options)
    : Optimizer(std::move(parameters), options.lr,
                options.amsgrad
                    ? std::vector<std::string>{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
                    : std::vector<std::string>{"exp_avg", "exp_avg_sq"}),
      options_(options) {
  Require(options.lr >= 0, "AdamW", "lr must not be negative", options.lr);
  Require(options.eps >= 0, "AdamW", "eps must not be negative", options.eps);
  Require(options.weight_decay >= 0, "AdamW", "weight_decay must not be negative",
          options.weight_decay);
  Require(options.beta1 >= 0 && options.beta1 < 1, "AdamW", "beta1 must be in [0, 1)",
          options.beta1);
  Require(options.beta2 >= 0 && options.beta2 < 1, "AdamW", "beta2 must be in [0, 1)",
          options.beta2);
}

void AdamW::Update(const Slot& slot, const Tensor& p, const Tensor& g,
                   absl::Span<const Tensor> state) {
  const double t = static_cast<double>(slot.step);
  const AdamwStep step = {lr(),
                          options_.beta1,
                          options_.beta2,
                          options_.eps,
                          options_.weight_decay,
                          1 - std::pow(options_.beta1, t),
                          std::sqrt(1 - std::pow(options_.beta2, t)),
                          options_.maximize};
  ForType(p, [&](auto type, const auto& loops) {
    using T = decltype(type);
    loops.adamw(p.data_as<T>(), state[0].data_as<T>(), state[1].data_as<T>(),
                options_.amsgrad ? state[2].data_as<T>() : nullptr, g.data_as<T>(), p.numel(),
                step);
  });
}

namespace {

// Whether this rank counts its part of a tensor: of copies, the one at coordinate 0 does.
bool Counts(const Spec& spec) {
  if (!spec.in_mesh()) return false;
  for (int m = 0; m < spec.mesh().ndim(); ++m) {
    if (spec.placement(m).is_replicate() && spec.coordinate()[m] != 0) return false;
  }
  return true;
}

// Sum (or largest) of `mine` over all ranks of the mesh; 0 on ranks outside.
double Reduce(const DeviceMesh& mesh, double mine, ReduceOp op) {
  if (mesh.is_self() || mesh.size() == 1) return mine;
  if (!mesh.Contains(RankContext::Current().rank())) return 0;
  std::vector<int> dims(mesh.ndim());
  std::iota(dims.begin(), dims.end(), 0);
  Comm* comm = ValueOrThrow(RankContext::Current().CommFor(mesh, dims));
  const Tensor number =
      ValueOrThrow(Tensor::FromVector(std::vector<double>{mine}, {1}, DType::kF64));
  ThrowIfError(comm->AllReduce(number, number, op).Wait());
  return number.data_as<double>()[0];
}

}  // namespace

double ClipGradNorm(const std::vector<NamedParameter>& parameters, double max_norm,
                    double norm_type) {
  Require(max_norm >= 0, "clip_grad_norm", "max_norm must not be negative", max_norm);
  Require(norm_type > 0, "clip_grad_norm", "norm_type must be positive or infinity", norm_type);
  ScopedPhase phase(CommPhase::kOptimizer);
  const bool largest = std::isinf(norm_type);
  std::vector<DTensor> grads, leaves;
  for (const NamedParameter& p : parameters) leaves.push_back(p.parameter->tensor());
  SyncGradients(leaves);
  double mine = 0;
  for (const NamedParameter& p : parameters) {
    DTensor grad = p.parameter->tensor().grad();
    if (!grad.defined()) continue;
    if (!grads.empty() && !(grads[0].mesh() == grad.mesh())) {
      Throw(absl::InvalidArgumentError(absl::StrCat("[clip_grad_norm] ", p.fqn, " is on mesh ",
                                                    grad.mesh().ToString(), ", others are on ",
                                                    grads[0].mesh().ToString())));
    }
    grads.push_back(grad);
    if (!Counts(grad.spec())) continue;
    const Tensor flat = Flat(grad.local());
    ForType(flat, [&](auto type, const auto& loops) {
      const double part = loops.norm(flat.data_as<decltype(type)>(), flat.numel(), norm_type);
      if (!largest) {
        mine += part;
      } else if (!(mine >= part)) {
        mine = mine != mine ? mine : part;  // NaN stays
      }
    });
  }
  if (grads.empty()) return 0;
  const double total = Reduce(grads[0].mesh(), mine, largest ? ReduceOp::kMax : ReduceOp::kSum);
  const double norm = largest ? total : std::pow(total, 1 / norm_type);
  const double scale = max_norm / (norm + 1e-6);
  if (scale >= 1) return norm;
  for (const DTensor& grad : grads) {
    const Tensor& local = grad.local();
    if (!local.defined() || local.numel() == 0) continue;
    const Tensor flat = Flat(local);
    ForType(flat, [&](auto type, const auto& loops) {
      loops.scale(flat.data_as<decltype(type)>(), flat.numel(), scale);
    });
    PutBack(flat, local);
  }
  return norm;
}

}  // namespace dtensor

// Layers: modules that models are made of. Written as if for one device.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "dtensor/ops/matmul/activation.h"
#include "dtensor/parallel/module/module.h"

namespace dtensor {

// y = x w^T + b, or activation(x w^T + b) by one op (linear_activation).
//   Parameters: weight [out, in], bias [out]. Both U(-1/sqrt(in), 1/sqrt(in)) unless `weight` is
//   given: then that, and a zero bias.
//   Shapes: x [..., in] -> [..., out]
//   Source: torch.nn.Linear
class Linear : public Module {
 public:
  Linear(int64_t in, int64_t out, bool bias = true, std::optional<Init> weight = {},
         std::optional<Activation> activation = {});
  Parameter& weight() { return weight_; }
  Parameter* bias() { return bias_; }  // null without one
  std::string type_name() const override { return "Linear"; }
  std::optional<ModuleTraits> traits() override { return ModuleTraits{&weight_, bias_}; }

 protected:
  Values Forward(const Values& in) override;

 private:
  Parameter& weight_;
  Parameter* bias_ = nullptr;
  const std::optional<Activation> activation_;
};

// Rows of a table. Looking up the row `padding` gives it no gradient; -1: no such row.
//   Parameters: weight [count, size], N(0, 1) unless given.
//   Shapes: ids [...] int64 -> [..., size]
class Embedding : public Module {
 public:
  Embedding(int64_t count, int64_t size, Init weight = Init::Normal(0, 1), int64_t padding = -1);
  Parameter& weight() { return weight_; }
  std::string type_name() const override { return "Embedding"; }
  std::optional<ModuleTraits> traits() override {
    return ModuleTraits{.weight = &weight_, .out_dim = 1, .in_dim = 0, .looks_up = true};
  }

 protected:
  Values Forward(const Values& in) override;

 private:
  Parameter& weight_;
  const int64_t padding_;
};

// Over the last dim. Parameters: weight [size] ones, bias [size] zeros. Shapes: kept.
class LayerNorm : public Module {
 public:
  explicit LayerNorm(int64_t size, double eps = 1e-5);
  std::string type_name() const override { return "LayerNorm"; }

 protected:
  Values Forward(const Values& in) override;

 private:
  Parameter &weight_, &bias_;
  double eps_;
};

// Over the last dim. Parameters: weight [size] ones. Shapes: kept. eps < 0: as rms_norm's default.
class RMSNorm : public Module {
 public:
  explicit RMSNorm(int64_t size, double eps = -1);
  std::string type_name() const override { return "RMSNorm"; }

 protected:
  Values Forward(const Values& in) override;

 private:
  Parameter& weight_;
  double eps_;
};

// Zeroes elements with probability p while training. Shapes: kept.
class Dropout : public Module {
 public:
  explicit Dropout(double p) : p_(p) {}
  double p() const { return p_; }
  // Keeps the mask of the last call, for looking at it.
  void KeepMask(bool keep) { keep_mask_ = keep; }
  const DTensor& last_mask() const { return last_mask_; }
  std::string type_name() const override { return "Dropout"; }

 protected:
  Values Forward(const Values& in) override;

 private:
  double p_;
  bool keep_mask_ = false;
  DTensor last_mask_;
};

// down(up(x)). Children: up, a Linear with gelu, and down.
//   Shapes: x [..., size] -> [..., size]
class MLP : public Module {
 public:
  MLP(int64_t size, int64_t inner, std::optional<Init> up = {}, std::optional<Init> down = {});
  std::string type_name() const override { return "MLP"; }

 protected:
  Values Forward(const Values& in) override;

 private:
  Linear &up_, &down_;
};

// Multi-head attention in which position i sees positions <= i. Children: wq, wk, wv, wo.
//   Shapes: x [batch, seq, size] -> [batch, seq, size]
//   Errors: InvalidArgument unless `heads` divides `size`.
class CausalSelfAttention : public Module {
 public:
  // `dropout` is the probability with which attention weights are dropped while training.
  CausalSelfAttention(int64_t size, int64_t heads, std::optional<Init> in = {},
                      std::optional<Init> out = {}, double dropout = 0);
  std::string type_name() const override { return "CausalSelfAttention"; }

 protected:
  Values Forward(const Values& in) override;

 private:
  DTensor Heads(Linear& projection, const DTensor& x) const;
  int64_t head_size_;
  double dropout_;
  Linear &wq_, &wk_, &wv_, &wo_;
};

}  // namespace dtensor

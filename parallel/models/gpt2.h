// GPT-2: the decoder of Hugging Face's GPT2LMHeadModel, with its module names, as one device would
// run it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dtensor/parallel/models/causal_lm.h"
#include "dtensor/parallel/module/layers.h"

namespace dtensor {

struct GPT2Config {
  int64_t vocab = 50257, hidden = 768, inner = 3072, layers = 12, heads = 12;
  int64_t max_positions = 1024;
  double norm_eps = 1e-5;
  std::string activation = "gelu_new";  // one of GPT2Activations()
  bool tied = true;
  bool scale_by_head = true;    // scores are divided by sqrt(head_size)
  bool scale_by_layer = false;  // and by the number of the layer, from 1
  double embedding_dropout = 0, attention_dropout = 0, residual_dropout = 0;
  double init_std = 0.02;
  bool recompute = false;  // blocks run again in backward instead of keeping their values
  int64_t head_size() const { return hidden / heads; }
};
// Errors: InvalidArgument naming the field.
absl::Status CheckConfig(const GPT2Config& config);
const std::vector<std::string>& GPT2Activations();

// y = x w + b: a Linear, perhaps with an activation, whose weight lies the other way round.
//   Parameters: weight [in, out], bias [out].
//   Shapes: x [..., in] -> [..., out]
//   Source: transformers, pytorch_utils.Conv1D
class Conv1D : public Module {
 public:
  Conv1D(int64_t in, int64_t out, Init weight, std::optional<Activation> activation = {});
  std::string type_name() const override { return "Conv1D"; }
  std::optional<ModuleTraits> traits() override {
    return ModuleTraits{.weight = &weight_, .bias = &bias_, .out_dim = 1, .in_dim = 0};
  }

 protected:
  Values Forward(const Values& in) override;

 private:
  Parameter &weight_, &bias_;
  const std::optional<Activation> activation_;
};

// One projection makes q, k and v side by side. Children: c_attn, c_proj, resid_dropout.
class GPT2Attention : public Module {
 public:
  GPT2Attention(const GPT2Config& config, const CausalLM& model, int64_t layer);
  std::string type_name() const override { return "GPT2Attention"; }

 protected:
  Values Forward(const Values& in) override;  // x; mask

 private:
  const int64_t hidden_, head_size_;
  const double dropout_, scale_;
  Conv1D &in_, &out_;
  Dropout& drop_;
  const CausalAttention attend_;
};

// dropout(c_proj(c_fc(x))); the activation is c_fc's own.
class GPT2MLP : public Module {
 public:
  explicit GPT2MLP(const GPT2Config& config);
  std::string type_name() const override { return "GPT2MLP"; }

 protected:
  Values Forward(const Values& in) override;

 private:
  Conv1D &up_, &down_;
  Dropout& drop_;
};

// x + attn(ln_1(x)), then x + mlp(ln_2(x)).
class GPT2Block : public Module {
 public:
  GPT2Block(const GPT2Config& config, const CausalLM& model, int64_t layer);
  std::string type_name() const override { return "GPT2Block"; }

 protected:
  Values Forward(const Values& in) override;  // x; mask

 private:
  LayerNorm& norm1_;
  GPT2Attention& attention_;
  LayerNorm& norm2_;
  GPT2MLP& mlp_;
};

// Children: transformer (wte, wpe, drop, h, ln_f) and lm_head, which may share its table with wte.
//   Initial values: N(0, init_std), projections back into the residual stream N(0, init_std /
//   sqrt(2 layers)), norms 1 and 0, biases 0.
//   Errors: CheckConfig's, thrown; InvalidArgument for more tokens than positions.
//   Source: transformers, models/gpt2.
class GPT2 : public CausalLM {
 public:
  explicit GPT2(const GPT2Config& config);
  const GPT2Config& config() const { return config_; }
  std::string type_name() const override { return "GPT2"; }
  int64_t vocab() const override { return config_.vocab; }
  int64_t layers() const override { return config_.layers; }
  int64_t kv_heads() const override { return config_.heads; }
  int64_t head_size() const override { return config_.head_size(); }
  int64_t max_positions() const override { return config_.max_positions; }
  std::string file_prefix() const override { return "transformer."; }
  bool IgnoresTensor(absl::string_view name) const override;

 protected:
  Values Forward(const Values& in) override;

 private:
  // The decoder without its head: a module of its own, because the files' names have it.
  struct Body : Module {
    Body(const GPT2Config& config, const CausalLM& lm);
    std::string type_name() const override { return "GPT2Model"; }
    Values Forward(const Values& in) override;  // ids, positions; mask
    const bool recompute;
    Embedding &tokens, &positions;
    Dropout& drop;
    Sequential& blocks;
    LayerNorm& norm;
  };
  const GPT2Config config_;
  Body& body_;
  Linear& head_;
};

}  // namespace dtensor

// GPT: a decoder-only language model, as one device would run it.
#pragma once

#include <cstdint>
#include <string>

#include "dtensor/parallel/module/layers.h"

namespace dtensor {

struct GPTConfig {
  int64_t vocab = 256, seq = 128, layers = 2, hidden = 128, heads = 4;
  double dropout = 0;  // of embeddings, attention weights, and what goes into the residual stream
  bool recompute = false;  // blocks run again in backward instead of keeping their values
};

// x + drop1(attn(norm1(x))), then x + drop2(mlp(norm2(x))). Children: norm1, attn, drop1, norm2,
// mlp, drop2.
class GPTBlock : public Module {
 public:
  explicit GPTBlock(const GPTConfig& config);
  std::string type_name() const override { return "GPTBlock"; }

 protected:
  Values Forward(const Values& in) override;

 private:
  LayerNorm& norm1_;
  CausalSelfAttention& attn_;
  Dropout& drop1_;
  LayerNorm& norm2_;
  MLP& mlp_;
  Dropout& drop2_;
};

// Token and position embeddings, blocks, a last norm, and a head without bias, not tied.
//   Shapes: ids [batch, seq <= config.seq] int64 -> logits [batch, seq, vocab]
//   Initial values: N(0, 0.02); projections back into the residual stream N(0, 0.02 / sqrt(2
//   layers)). Source: GPT-2 (Radford et al. 2019); layer names are our own.
class GPT : public Module {
 public:
  explicit GPT(const GPTConfig& config);
  const GPTConfig& config() const { return config_; }
  std::string type_name() const override { return "GPT"; }

 protected:
  Values Forward(const Values& in) override;

 private:
  GPTConfig config_;
  Embedding& tokens_;
  Parameter& positions_;
  Dropout& drop_;
  Sequential& blocks_;
  LayerNorm& norm_;
  Linear& head_;
};

}  // namespace dtensor

// GPT: a decoder-only language model, as one device would run it.
#pragma once

#include <cstdint>
#include <string>

#include "parallel/layers.h"

namespace dtensor {

struct GPTConfig {
  int64_t vocab = 256, seq = 128, layers = 2, hidden = 128, heads = 4;
};

// x + attn(norm1(x)), then x + mlp(norm2(x)). Children: norm1, attn, norm2, mlp.
class GPTBlock : public Module {
 public:
  explicit GPTBlock(const GPTConfig& config);
  std::string type_name() const override { return "GPTBlock"; }

 protected:
  Values Forward(const Values& in) override;

 private:
  LayerNorm& norm1_;
  CausalSelfAttention& attn_;
  LayerNorm& norm2_;
  MLP& mlp_;
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
  Sequential& blocks_;
  LayerNorm& norm_;
  Linear& head_;
};

}  // namespace dtensor

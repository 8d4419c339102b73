// Llama: the decoder of Hugging Face's LlamaForCausalLM, with its module names, as one device would
// run it.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "dtensor/parallel/models/causal_lm.h"
#include "dtensor/parallel/models/rope.h"
#include "dtensor/parallel/module/layers.h"

namespace dtensor {

inline constexpr int64_t kMostHeadSize = 1 << 16;  // of a head that rotates

struct LlamaConfig {
  int64_t vocab = 256, hidden = 64, inner = 176, layers = 2, heads = 8, kv_heads = 4;
  int64_t head_size = 8, max_positions = 128;
  double norm_eps = 1e-5;
  RopeConfig rope = {};
  bool tied = false, attention_bias = false, mlp_bias = false;
  double attention_dropout = 0;
  double init_std = 0.02;
  int64_t padding = -1;    // token that gets no gradient where it is looked up; -1: none
  bool recompute = false;  // blocks run again in backward instead of keeping their values
};
// Errors: InvalidArgument naming the field: sizes that are not positive, kv_heads that do not
// divide heads, an odd head_size, numbers that are not finite.
absl::Status CheckConfig(const LlamaConfig& config);

// Heads of queries in groups that share keys and values; positions by rotation. Children: q_proj,
// k_proj, v_proj, o_proj.
class LlamaAttention : public Module {
 public:
  LlamaAttention(const LlamaConfig& config, const CausalLM& model, int64_t layer);
  std::string type_name() const override { return "LlamaAttention"; }

 protected:
  Values Forward(const Values& in) override;  // x, cos, sin; mask

 private:
  const int64_t head_size_;
  const double dropout_;
  Linear &q_, &k_, &v_, &o_;
  const CausalAttention attend_;
};

// down_proj(gate_proj(x) * up_proj(x)); silu is gate_proj's own.
class LlamaMLP : public Module {
 public:
  explicit LlamaMLP(const LlamaConfig& config);
  std::string type_name() const override { return "LlamaMLP"; }

 protected:
  Values Forward(const Values& in) override;

 private:
  Linear &gate_, &up_, &down_;
};

// x + self_attn(input_layernorm(x)), then x + mlp(post_attention_layernorm(x)).
class LlamaBlock : public Module {
 public:
  LlamaBlock(const LlamaConfig& config, const CausalLM& model, int64_t layer);
  std::string type_name() const override { return "LlamaBlock"; }

 protected:
  Values Forward(const Values& in) override;  // as LlamaAttention's

 private:
  LlamaAttention& attention_;
  LlamaMLP& mlp_;
  RMSNorm &norm1_, &norm2_;
};

// Children: model (embed_tokens, layers, norm) and lm_head, which may share its table with
// embed_tokens.
//   Initial values: N(0, init_std), norms 1, biases 0.
//   Comm:   with rotary positions of type "dynamic" or "longrope", the largest position that a call
//           gives; the host waits for it.
//   Errors: CheckConfig's, thrown.
//   Source: transformers, models/llama.
class Llama : public CausalLM {
 public:
  explicit Llama(const LlamaConfig& config);
  const LlamaConfig& config() const { return config_; }
  std::string type_name() const override { return "Llama"; }
  int64_t vocab() const override { return config_.vocab; }
  int64_t layers() const override { return config_.layers; }
  int64_t kv_heads() const override { return config_.kv_heads; }
  int64_t head_size() const override { return config_.head_size; }
  int64_t max_positions() const override { return config_.max_positions; }
  // Rotary positions of type "dynamic" are made for texts beyond max_positions.
  int64_t max_tokens() const override {
    return config_.rope.type == "dynamic" ? std::numeric_limits<int64_t>::max()
                                          : config_.max_positions;
  }
  std::string file_prefix() const override { return "model."; }
  bool IgnoresTensor(absl::string_view name) const override;

 protected:
  Values Forward(const Values& in) override;

 private:
  // The decoder without its head: a module of its own, because the files' names have it.
  struct Body : Module {
    Body(const LlamaConfig& config, const CausalLM& lm);
    std::string type_name() const override { return "LlamaModel"; }
    Values Forward(const Values& in) override;  // ids, cos, sin; mask
    const bool recompute;
    Embedding& tokens;
    Sequential& blocks;
    RMSNorm& norm;
  };
  // Positions that are given say it for the rotations that look at it: padding makes rows wider,
  // and is no token.
  int64_t TokensUpToTheLast(const Sight& sight) const;

  const LlamaConfig config_;
  Body& body_;
  Linear& head_;
};

}  // namespace dtensor

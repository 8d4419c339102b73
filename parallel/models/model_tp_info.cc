#include "dtensor/parallel/models/model_tp_info.h"

namespace dtensor {

TPInfo LlamaTPInfo(const LlamaConfig& c) {
  const int64_t d = c.head_size, group = c.heads / c.kv_heads * d;
  return TPInfo()
      .ShardVocab("embed_tokens")
      .Whole("norm")
      .ShardCol("q_proj", {.unit = group})
      .ShardCol("k_proj", {.unit = d})
      .ShardCol("v_proj", {.unit = d})
      .ShardRow("o_proj", {.unit = group})
      .ShardCol("gate_proj")
      .ShardCol("up_proj")
      .ShardRow("down_proj")
      .ShardCol("lm_head");
}

TPInfo GPT2TPInfo(const GPT2Config& c) {
  const int64_t d = c.head_size();
  return TPInfo()
      .ShardVocab("wte")
      .Whole("wpe")
      .Whole("ln_1")
      .Whole("ln_2")
      .Whole("ln_f")
      .ShardCol("attn.c_attn", {.stride = 3, .unit = d})
      .ShardRow("attn.c_proj", {.unit = d})
      .ShardCol("mlp.c_fc")
      .ShardRow("mlp.c_proj")
      .ShardCol("lm_head")
      .ReplicDrop("resid_dropout")
      .ReplicDrop("mlp.dropout")
      .ReplicDrop("drop");
}

}  // namespace dtensor

// A config.json of the fields of a model that was made here.
#include <variant>

#include "dtensor/names.h"
#include "dtensor/parallel/models/config_fields.h"
#include "dtensor/parallel/models/pretrained.h"

namespace dtensor {
namespace {

using internal::kGPT2;
using internal::kLlama;

Json RopeJson(const RopeConfig& rope) {
  Json r = {{"rope_type", rope.type}, {"rope_theta", rope.theta}};
  if (rope.type == "default") return r;
  r["factor"] = rope.factor;
  if (rope.original_positions > 0) r["original_max_position_embeddings"] = rope.original_positions;
  if (rope.type == "llama3") {
    r["low_freq_factor"] = rope.low_freq_factor;
    r["high_freq_factor"] = rope.high_freq_factor;
  } else if (rope.type == "yarn") {
    r["beta_fast"] = rope.beta_fast;
    r["beta_slow"] = rope.beta_slow;
    r["mscale"] = rope.mscale;
    r["mscale_all_dim"] = rope.mscale_all_dim;
    r["truncate"] = rope.truncate;
  } else if (rope.type == "longrope") {
    r["short_factor"] = rope.short_factor;
    r["long_factor"] = rope.long_factor;
  }
  if (rope.type == "yarn" || rope.type == "longrope") {
    if (rope.attention_factor) r["attention_factor"] = *rope.attention_factor;
  }
  return r;
}

Json FieldsOf(const LlamaConfig& c) {
  Json fields = {{"architectures", Json::array({"LlamaForCausalLM"})},
                 {"model_type", kLlama},
                 {"vocab_size", c.vocab},
                 {"hidden_size", c.hidden},
                 {"intermediate_size", c.inner},
                 {"num_hidden_layers", c.layers},
                 {"num_attention_heads", c.heads},
                 {"num_key_value_heads", c.kv_heads},
                 {"head_dim", c.head_size},
                 {"hidden_act", "silu"},
                 {"max_position_embeddings", c.max_positions},
                 {"rms_norm_eps", c.norm_eps},
                 {"rope_parameters", RopeJson(c.rope)},
                 {"tie_word_embeddings", c.tied},
                 {"attention_bias", c.attention_bias},
                 {"mlp_bias", c.mlp_bias},
                 {"attention_dropout", c.attention_dropout},
                 {"initializer_range", c.init_std}};
  if (c.padding >= 0) fields["pad_token_id"] = c.padding;
  return fields;
}

Json FieldsOf(const GPT2Config& c) {
  return {{"architectures", Json::array({"GPT2LMHeadModel"})},
          {"model_type", kGPT2},
          {"vocab_size", c.vocab},
          {"n_embd", c.hidden},
          {"n_inner", c.inner},
          {"n_layer", c.layers},
          {"n_head", c.heads},
          {"n_positions", c.max_positions},
          {"layer_norm_epsilon", c.norm_eps},
          {"activation_function", c.activation},
          {"tie_word_embeddings", c.tied},
          {"scale_attn_weights", c.scale_by_head},
          {"scale_attn_by_inverse_layer_idx", c.scale_by_layer},
          {"embd_pdrop", c.embedding_dropout},
          {"attn_pdrop", c.attention_dropout},
          {"resid_pdrop", c.residual_dropout},
          {"initializer_range", c.init_std}};
}

}  // namespace

std::string ModelConfigJson(const ModelConfig& config) {
  Json fields = std::visit([](const auto& model) { return FieldsOf(model); }, config.model);
  fields["dtype"] = Name(config.dtype);
  if (!config.eos.empty()) fields["eos_token_id"] = config.eos;
  if (config.bos) fields["bos_token_id"] = *config.bos;
  if (config.pad) fields["pad_token_id"] = *config.pad;
  return fields.dump(2) + "\n";
}

}  // namespace dtensor

#include "dtensor/parallel/models/config_fields.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_join.h"
#include "dtensor/parallel/io/json.h"

namespace dtensor::internal {

int64_t ConfigFields::Size(const std::string& name, std::optional<int64_t> otherwise) {
  const int64_t v = Int(name, otherwise);
  if (v <= 0) Wrong(name, "must be positive, is ", v);
  return v;
}

int64_t ConfigFields::Layers(const std::string& name) {
  constexpr int64_t kMost = 10'000;
  const int64_t v = Size(name);
  if (v > kMost) Wrong(name, "must be at most ", kMost, ", is ", v);
  return v;
}

double ConfigFields::Positive(const std::string& name, std::optional<double> otherwise) {
  const double v = Number(name, otherwise);
  if (!(v > 0)) Wrong(name, "must be positive, is ", v);
  return v;
}

void ConfigFields::OnlyBool(const std::string& name, bool value) {
  if (Bool(name, value) != value) {
    Unsupported(name, "is ", value ? "false" : "true", ", which is not supported");
  }
}

void ConfigFields::OnlyNumber(const std::string& name, double value) {
  const double v = Number(name, value);
  if (v != value) Unsupported(name, "is ", v, ", only ", value, " is supported");
}

void ConfigFields::Absent(const std::string& name) {
  if (Has(name)) Unsupported(name, "changes numbers and is not supported");
}

namespace {

std::vector<double> PositiveNumbers(ConfigFields& r, const std::string& name) {
  std::vector<double> numbers;
  const absl::StatusOr<const Json*> list = r.fields().Array(name);
  if (!list.ok()) {
    r.Fail(list.status());
    return numbers;
  }
  for (const Json& item : **list) {
    numbers.push_back(item.is_number() ? item.get<double>() : 0);
    if (numbers.back() > 0) continue;
    r.Wrong(name, "must have positive numbers, has ", DescribeJson(item));
    break;
  }
  return numbers;
}

// What the type of a scaling needs; the original positions may stand beside `r` in `f`, which goes
// first then.
void ReadScaling(ConfigFields& f, ConfigFields& r, int64_t max_positions, RopeConfig* rope) {
  constexpr char kOriginal[] = "original_max_position_embeddings";
  r.OnlyNumber("partial_rotary_factor", 1);
  if (rope->type == "default") return;
  const bool by_original =
      rope->type == "llama3" || rope->type == "yarn" || rope->type == "longrope";
  if (by_original && f.Has(kOriginal)) {
    rope->original_positions = f.Size(kOriginal);
  } else if (r.Has(kOriginal)) {
    rope->original_positions = r.Size(kOriginal);
  }
  if (r.Has("factor") || (rope->type != "yarn" && rope->type != "longrope")) {
    rope->factor = r.Positive("factor");
  } else if (rope->original_positions > 0) {
    rope->factor =
        static_cast<double>(max_positions) / static_cast<double>(rope->original_positions);
  }
  if (rope->type == "llama3") {
    rope->low_freq_factor = r.Positive("low_freq_factor");
    rope->high_freq_factor = r.Positive("high_freq_factor");
    if (rope->high_freq_factor <= rope->low_freq_factor) {
      r.Wrong("high_freq_factor", "must be above low_freq_factor, are ", rope->high_freq_factor,
              " and ", rope->low_freq_factor);
    }
    return;
  }
  if (rope->type == "yarn") {
    rope->beta_fast = r.Positive("beta_fast", 32.0);
    rope->beta_slow = r.Positive("beta_slow", 1.0);
    rope->mscale = r.Number("mscale", 0.0);
    rope->mscale_all_dim = r.Number("mscale_all_dim", 0.0);
    rope->truncate = r.Bool("truncate", true);
  } else if (rope->type == "longrope") {
    rope->short_factor = PositiveNumbers(r, "short_factor");
    rope->long_factor = PositiveNumbers(r, "long_factor");
  } else {
    return;
  }
  if (r.Has("attention_factor")) rope->attention_factor = r.Positive("attention_factor");
}

// rope_scaling, or else rope_parameters, with rope_theta in it or beside it: as transformers takes
// them where a config has both.
RopeConfig ReadRope(ConfigFields& f, int64_t max_positions) {
  RopeConfig rope;
  rope.theta = f.Positive("rope_theta", 10000.0);
  f.OnlyNumber("partial_rotary_factor", 1);
  const bool older = f.Has("rope_scaling") && f["rope_scaling"] != Json::object();
  const std::string name = older ? "rope_scaling" : "rope_parameters";
  if (!f.Has(name)) return rope;
  absl::StatusOr<JsonFields> inner = f.fields().Object(name);
  if (!inner.ok()) {
    f.Fail(inner.status());
    return rope;
  }
  ConfigFields r(*std::move(inner));
  rope.theta = r.Positive("rope_theta", rope.theta);
  rope.type = r.String("rope_type", r.String("type", "default"));
  const auto& types = RopeTypes();
  if (std::find(types.begin(), types.end(), rope.type) == types.end()) {
    r.Unsupported("rope_type", "\"", absl::CHexEscape(rope.type.substr(0, 80)),
                  "\" is not supported; there are ", absl::StrJoin(types, ", "));
  } else {
    ReadScaling(f, r, max_positions, &rope);
  }
  f.Fail(r.status());
  return rope;
}

}  // namespace

LlamaConfig ReadLlamaConfig(ConfigFields& f) {
  LlamaConfig c;
  c.vocab = f.Size("vocab_size");
  c.hidden = f.Size("hidden_size");
  c.inner = f.Size("intermediate_size");
  c.layers = f.Layers("num_hidden_layers");
  c.heads = f.Size("num_attention_heads");
  c.kv_heads = f.Size("num_key_value_heads", c.heads);
  c.max_positions = f.Size("max_position_embeddings", 2048);
  c.norm_eps = f.Positive("rms_norm_eps", 1e-6);
  c.tied = f.Bool("tie_word_embeddings", false);
  c.attention_bias = f.Bool("attention_bias", false);
  c.mlp_bias = f.Bool("mlp_bias", false);
  c.attention_dropout = f.Number("attention_dropout", 0.0);
  c.init_std = f.Number("initializer_range", 0.02);
  if (!f.status().ok()) return c;
  if (f.Has("pad_token_id")) {
    c.padding = f.Int("pad_token_id");
    if (c.padding < -c.vocab || c.padding >= c.vocab) {
      f.Wrong("pad_token_id", "must be a token of ", c.vocab, ", is ", c.padding);
    } else if (c.padding < 0) {
      c.padding += c.vocab;  // from the end, as transformers takes it
    }
  }
  if (!f.Has("head_dim") && c.hidden % c.heads != 0) {
    f.Wrong("num_attention_heads", "must divide hidden_size, are ", c.heads, " and ", c.hidden);
    return c;
  }
  c.head_size = f.Size("head_dim", c.hidden / c.heads);
  if (c.heads % c.kv_heads != 0) {
    f.Wrong("num_key_value_heads", "must divide num_attention_heads, are ", c.kv_heads, " and ",
            c.heads);
  }
  if (c.head_size % 2 != 0) f.Wrong("head_dim", "must be even, is ", c.head_size);
  if (c.head_size > kMostHeadSize) {
    f.Wrong(f.Has("head_dim") ? "head_dim" : "hidden_size", "makes heads of ", c.head_size,
            ", which may be of at most ", kMostHeadSize);
    return c;
  }
  c.rope = ReadRope(f, c.max_positions);
  const std::string act = f.String("hidden_act", "silu");
  if (act != "silu" && act != "swish") {
    f.Unsupported("hidden_act", "\"", absl::CHexEscape(act.substr(0, 80)),
                  "\" is not supported; there is silu");
  }
  return c;
}

namespace {

// By which of its names a config has a field of GPT-2: its own, or that of other models, which
// transformers takes as well. Both must say the same.
std::string NameIn(ConfigFields& f, const std::string& own, const std::string& other) {
  if (!f.Has(other)) return own;
  if (!f.Has(own)) return other;
  if (f[own] != f[other]) {
    f.Wrong(other, "is another name of ", own, ", and they are ", DescribeJson(f[other]), " and ",
            DescribeJson(f[own]));
  }
  return own;
}

}  // namespace

GPT2Config ReadGPT2Config(ConfigFields& f) {
  GPT2Config c;
  const std::string hidden = NameIn(f, "n_embd", "hidden_size"),
                    heads = NameIn(f, "n_head", "num_attention_heads");
  c.vocab = f.Size("vocab_size");
  c.hidden = f.Size(hidden);
  c.layers = f.Layers(NameIn(f, "n_layer", "num_hidden_layers"));
  c.heads = f.Size(heads);
  c.max_positions = f.Size(NameIn(f, "n_positions", "max_position_embeddings"), 1024);
  if (!f.status().ok()) return c;
  int64_t inner;
  if (__builtin_mul_overflow(c.hidden, 4, &inner)) f.Wrong(hidden, "is too large: ", c.hidden);
  c.inner = f.Size("n_inner", inner);
  if (c.hidden % c.heads != 0) {
    f.Wrong(heads, "must divide ", hidden, ", are ", c.heads, " and ", c.hidden);
  }
  c.norm_eps = f.Positive("layer_norm_epsilon", 1e-5);
  c.activation = f.String("activation_function", "gelu_new");
  const auto& known = GPT2Activations();
  if (std::find(known.begin(), known.end(), c.activation) == known.end()) {
    f.Unsupported("activation_function", "\"", absl::CHexEscape(c.activation.substr(0, 80)),
                  "\" is not supported; there are ", absl::StrJoin(known, ", "));
  }
  c.tied = f.Bool("tie_word_embeddings", true);
  c.scale_by_head = f.Bool("scale_attn_weights", true);
  c.scale_by_layer = f.Bool("scale_attn_by_inverse_layer_idx", false);
  c.embedding_dropout = f.Number("embd_pdrop", 0.1);
  c.attention_dropout = f.Number("attn_pdrop", 0.1);
  c.residual_dropout = f.Number("resid_pdrop", 0.1);
  c.init_std = f.Number("initializer_range", 0.02);
  f.OnlyBool("reorder_and_upcast_attn", false);
  f.OnlyBool("add_cross_attention", false);
  return c;
}

}  // namespace dtensor::internal

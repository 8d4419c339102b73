// config.json and generation_config.json of Hugging Face's folders, read and written.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/names.h"
#include "dtensor/parallel/io/json.h"
#include "dtensor/parallel/models/pretrained.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Fields of one object, read by name; the first problem is kept and all later reads give defaults.
class Fields {
 public:
  Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {}
  const absl::Status& status() const { return status_; }
  void Fail(absl::Status why) {
    if (status_.ok()) status_ = Prefixed(where_, why);
  }
  void Wrong(const std::string& name, const auto&... what) {
    Fail(absl::InvalidArgumentError(absl::StrCat("\"", name, "\" ", what...)));
  }
  // Those of an object in this one, which say where themselves.
  void Take(const Fields& inner) { status_.Update(inner.status_); }
  // Of a field that would change numbers.
  void Unsupported(const std::string& name, const auto&... what) {
    Fail(absl::UnimplementedError(absl::StrCat("\"", name, "\" ", what...)));
  }

  bool Has(const std::string& name) const {
    return object_.contains(name) && !object_[name].is_null();
  }
  const json& operator[](const std::string& name) const { return object_[name]; }

  // Without `otherwise` the field must be there.
  int64_t Int(const std::string& name, std::optional<int64_t> otherwise = {}) {
    if (!Has(name)) return Missing(name, otherwise);
    const json& v = object_[name];
    const bool fits = v.is_number_integer() &&
                      (!v.is_number_unsigned() || v.get<uint64_t>() <= uint64_t{INT64_MAX});
    if (fits) return v.get<int64_t>();
    Wrong(name, "is ", DescribeJson(v), ", not a whole number below 2^63");
    return 0;
  }
  int64_t Size(const std::string& name, std::optional<int64_t> otherwise = {}) {
    const int64_t v = Int(name, otherwise);
    if (v <= 0) Wrong(name, "must be positive, is ", v);
    return v;
  }
  // Every layer takes memory before a file can say that it is not there.
  int64_t Layers(const std::string& name) {
    constexpr int64_t kMost = 10'000;
    const int64_t v = Size(name);
    if (v > kMost) Wrong(name, "must be at most ", kMost, ", is ", v);
    return v;
  }
  double Number(const std::string& name, std::optional<double> otherwise = {}) {
    if (!Has(name)) return Missing(name, otherwise);
    const json& v = object_[name];
    if (v.is_number() && std::isfinite(v.get<double>())) return v.get<double>();
    Wrong(name, "is ", DescribeJson(v), ", not a number");
    return 0;
  }
  double Positive(const std::string& name, std::optional<double> otherwise = {}) {
    const double v = Number(name, otherwise);
    if (!(v > 0)) Wrong(name, "must be positive, is ", v);
    return v;
  }
  bool Bool(const std::string& name, bool otherwise) {
    if (!Has(name)) return otherwise;
    if (object_[name].is_boolean()) return object_[name].get<bool>();
    Wrong(name, "is ", DescribeJson(object_[name]), ", not true or false");
    return otherwise;
  }
  std::string String(const std::string& name, std::optional<std::string> otherwise = {}) {
    if (!Has(name)) return Missing(name, otherwise);
    if (object_[name].is_string()) return object_[name].get<std::string>();
    Wrong(name, "is ", DescribeJson(object_[name]), ", not a string");
    return "";
  }

 private:
  template <class T>
  T Missing(const std::string& name, const std::optional<T>& otherwise) {
    if (otherwise) return *otherwise;
    if (object_.contains(name)) {
      Wrong(name, "is null");
    } else {
      Wrong(name, "is missing");
    }
    return T();
  }

  const json& object_;
  const std::string where_;
  absl::Status status_;
};

// Refuses another value of a field than the one that the model computes with.
void OnlyBool(Fields& f, const std::string& name, bool value) {
  if (f.Bool(name, value) != value) {
    f.Unsupported(name, "is ", value ? "false" : "true", ", which is not supported");
  }
}
void OnlyNumber(Fields& f, const std::string& name, double value) {
  if (f.Number(name, value) != value) {
    f.Unsupported(name, "is ", f.Number(name, value), ", only ", value, " is supported");
  }
}
void Absent(Fields& f, const std::string& name) {
  if (f.Has(name)) f.Unsupported(name, "changes numbers and is not supported");
}

// What the type of a scaling needs.
void ReadScaling(Fields& r, RopeConfig* rope) {
  OnlyNumber(r, "partial_rotary_factor", 1);
  if (rope->type == "default") return;
  if (rope->type != "yarn" || r.Has("factor")) rope->factor = r.Positive("factor");
  if (r.Has("original_max_position_embeddings")) {
    rope->original_positions = r.Size("original_max_position_embeddings");
  }
  if (rope->type == "llama3") {
    r.Size("original_max_position_embeddings");
    rope->low_freq_factor = r.Positive("low_freq_factor");
    rope->high_freq_factor = r.Positive("high_freq_factor");
    if (rope->high_freq_factor <= rope->low_freq_factor) {
      r.Wrong("high_freq_factor", "must be above low_freq_factor, are ", rope->high_freq_factor,
              " and ", rope->low_freq_factor);
    }
  } else if (rope->type == "yarn") {
    rope->beta_fast = r.Positive("beta_fast", 32.0);
    rope->beta_slow = r.Positive("beta_slow", 1.0);
    rope->mscale = r.Number("mscale", 0.0);
    rope->mscale_all_dim = r.Number("mscale_all_dim", 0.0);
    rope->truncate = r.Bool("truncate", true);
    if (r.Has("attention_factor")) rope->attention_factor = r.Positive("attention_factor");
  }
}

// rope_parameters, or rope_theta with rope_scaling.
RopeConfig ReadRope(Fields& f, const std::string& where, int64_t max_positions) {
  RopeConfig rope;
  rope.theta = f.Positive("rope_theta", 10000.0);
  OnlyNumber(f, "partial_rotary_factor", 1);
  const std::string name = f.Has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  if (!f.Has(name)) return rope;
  if (!f[name].is_object()) {
    f.Wrong(name, "is ", DescribeJson(f[name]), ", not an object");
    return rope;
  }
  Fields r(f[name], absl::StrCat(where, ": \"", name, "\""));
  rope.theta = r.Positive("rope_theta", rope.theta);
  rope.type = r.String("rope_type", r.String("type", "default"));
  const auto& types = RopeTypes();
  if (std::find(types.begin(), types.end(), rope.type) == types.end()) {
    r.Unsupported("rope_type", "\"", absl::CHexEscape(rope.type.substr(0, 80)),
                  "\" is not supported; there are ", absl::StrJoin(types, ", "));
  } else {
    ReadScaling(r, &rope);
  }
  if (rope.type == "yarn" && !r.Has("factor") && rope.original_positions > 0) {
    rope.factor = static_cast<double>(max_positions) / static_cast<double>(rope.original_positions);
  }
  f.Take(r);
  return rope;
}

LlamaConfig ReadLlama(Fields& f, const std::string& where) {
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
  c.rope = ReadRope(f, where, c.max_positions);
  const std::string act = f.String("hidden_act", "silu");
  if (act != "silu" && act != "swish") {
    f.Unsupported("hidden_act", "\"", absl::CHexEscape(act.substr(0, 80)),
                  "\" is not supported; there is silu");
  }
  return c;
}

GPT2Config ReadGPT2(Fields& f) {
  GPT2Config c;
  c.vocab = f.Size("vocab_size");
  c.hidden = f.Size("n_embd");
  c.layers = f.Layers("n_layer");
  c.heads = f.Size("n_head");
  c.max_positions = f.Size("n_positions", 1024);
  if (!f.status().ok()) return c;
  int64_t inner;
  if (__builtin_mul_overflow(c.hidden, 4, &inner)) f.Wrong("n_embd", "is too large: ", c.hidden);
  c.inner = f.Size("n_inner", inner);
  if (c.hidden % c.heads != 0) {
    f.Wrong("n_head", "must divide n_embd, are ", c.heads, " and ", c.hidden);
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
  OnlyBool(f, "reorder_and_upcast_attn", false);
  OnlyBool(f, "add_cross_attention", false);
  return c;
}

void ReadDType(Fields& f, DType* dtype) {
  const std::string name = f.Has("dtype") ? "dtype" : "torch_dtype";
  if (!f.Has(name)) return;
  const std::string text = f.String(name);
  for (const DType known : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    if (Name(known) == text) {
      *dtype = known;
      return;
    }
  }
  f.Unsupported(name, "\"", absl::CHexEscape(text.substr(0, 80)),
                "\" is not supported; there are float64, float32, bfloat16, float16");
}

// A number, a list of numbers or null.
void ReadTokens(Fields& f, const std::string& name, std::vector<int64_t>* out) {
  if (!f.Has(name)) return;
  const json& v = f[name];
  out->clear();
  for (const json& id : v.is_array() ? v : json::array({v})) {
    if (!id.is_number_integer()) {
      return f.Wrong(name, "is ", DescribeJson(id), ", not the id of a token");
    }
    out->push_back(id.get<int64_t>());
  }
}
void ReadSpecial(Fields& f, ModelConfig* config) {
  ReadTokens(f, "eos_token_id", &config->eos);
  for (const auto& [name, to] :
       {std::pair("bos_token_id", &config->bos), std::pair("pad_token_id", &config->pad)}) {
    if (f.Has(name)) *to = f.Int(name);
  }
}

constexpr const char* kLlama = "llama";
constexpr const char* kGPT2 = "gpt2";

// Which of the models it is, by model_type; architectures must say the same.
void CheckModelType(Fields& f, const std::string& type) {
  const std::vector<std::string> types = {kLlama, kGPT2};
  if (!f.status().ok()) return;
  if (type != kLlama && type != kGPT2) {
    return f.Unsupported("model_type", "\"", absl::CHexEscape(type.substr(0, 80)),
                         "\" is not supported; the nearest is ", NearestNames(type, types, 1)[0],
                         " of ", absl::StrJoin(types, ", "));
  }
  const std::string wanted = type == kLlama ? "LlamaForCausalLM" : "GPT2LMHeadModel";
  if (!f.Has("architectures")) return;
  const json& list = f["architectures"];
  if (!list.is_array()) return f.Wrong("architectures", "is ", DescribeJson(list), ", not a list");
  for (const json& name : list) {
    if (name != wanted) {
      return f.Unsupported("architectures", "has ", DescribeJson(name), ", only ", wanted,
                           " is supported for model_type ", type);
    }
  }
}

json RopeJson(const RopeConfig& rope) {
  json r = {{"rope_type", rope.type}, {"rope_theta", rope.theta}};
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
    if (rope.attention_factor) r["attention_factor"] = *rope.attention_factor;
  }
  return r;
}

json FieldsOf(const LlamaConfig& c) {
  json fields = {{"architectures", json::array({"LlamaForCausalLM"})},
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

json FieldsOf(const GPT2Config& c) {
  return {{"architectures", json::array({"GPT2LMHeadModel"})},
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
  json fields = std::visit([](const auto& model) { return FieldsOf(model); }, config.model);
  fields["dtype"] = Name(config.dtype);
  if (!config.eos.empty()) fields["eos_token_id"] = config.eos;
  if (config.bos) fields["bos_token_id"] = *config.bos;
  if (config.pad) fields["pad_token_id"] = *config.pad;
  return fields.dump(2) + "\n";
}

absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& text, const std::string& where) {
  DT_ASSIGN_OR_RETURN(const json object, ParseJsonObject(text, where));
  Fields f(object, where);
  ModelConfig config;
  const std::string type = f.String("model_type");
  CheckModelType(f, type);
  Absent(f, "quantization_config");
  ReadDType(f, &config.dtype);
  ReadSpecial(f, &config);
  if (!f.status().ok()) return f.status();
  absl::Status fits;
  if (type == kLlama) {
    const LlamaConfig c = ReadLlama(f, where);
    Absent(f, "sliding_window");
    if (f.status().ok()) fits = CheckConfig(c);
    config.model = c;
  } else {
    const GPT2Config c = ReadGPT2(f);
    if (f.status().ok()) fits = CheckConfig(c);
    config.model = c;
  }
  if (!f.status().ok()) return f.status();
  if (!fits.ok()) return Prefixed(where, fits);
  return config;
}

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& folder) {
  constexpr int64_t kMost = int64_t{1} << 24;
  const std::string path = (fs::path(folder) / "config.json").string();
  DT_ASSIGN_OR_RETURN(std::string text, ReadFile(path, kMost));
  DT_ASSIGN_OR_RETURN(ModelConfig config, ParseModelConfig(text, path));
  config.files.emplace_back("config.json", std::move(text));
  constexpr const char* kTokenizerFiles[] = {"tokenizer.json",
                                             "tokenizer_config.json",
                                             "special_tokens_map.json",
                                             "chat_template.jinja",
                                             "vocab.json",
                                             "merges.txt"};
  std::error_code error;
  for (const char* const name : kTokenizerFiles) {
    const std::string beside = (fs::path(folder) / name).string();
    if (!fs::exists(beside, error)) continue;
    DT_ASSIGN_OR_RETURN(text, ReadFile(beside, int64_t{1} << 28));
    config.files.emplace_back(name, std::move(text));
  }
  const std::string generation = (fs::path(folder) / "generation_config.json").string();
  if (!fs::exists(generation, error)) return config;
  DT_ASSIGN_OR_RETURN(text, ReadFile(generation, kMost));
  DT_ASSIGN_OR_RETURN(const json object, ParseJsonObject(text, generation));
  Fields f(object, generation);
  ReadSpecial(f, &config);
  if (!f.status().ok()) return f.status();
  config.files.emplace_back("generation_config.json", std::move(text));
  return config;
}

}  // namespace dtensor

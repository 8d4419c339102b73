// config.json and generation_config.json of Hugging Face's folders, read.
#include <filesystem>
#include <limits>
#include <optional>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/names.h"
#include "dtensor/parallel/io/json.h"
#include "dtensor/parallel/io/safetensors.h"
#include "dtensor/parallel/io/tensor_folder.h"
#include "dtensor/parallel/models/config_fields.h"
#include "dtensor/parallel/models/pretrained.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

namespace fs = std::filesystem;
using internal::ConfigFields;
using internal::kGPT2;
using internal::kLlama;

// Of the first tensor of floats, where a config names none; float32 where there is none.
DType DTypeOfFiles(const std::string& folder) {
  const absl::StatusOr<TensorFolder> files = TensorFolder::Open(folder);
  if (!files.ok()) return DType::kF32;  // who loads it is told
  for (const auto& [name, place] : files->tensors()) {
    const std::optional<DType> dtype = FromSafetensorsName(place.entry->dtype);
    if (dtype && IsFloating(*dtype)) return *dtype;
  }
  return DType::kF32;
}

void ReadDType(ConfigFields& f, DType* dtype) {
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
void ReadTokens(ConfigFields& f, const std::string& name, std::vector<int64_t>* out) {
  if (!f.Has(name)) return;
  const Json& v = f[name];
  out->clear();
  for (const Json& id : v.is_array() ? v : Json::array({v})) {
    if (!id.is_number_integer()) {
      return f.Wrong(name, "is ", DescribeJson(id), ", not the id of a token");
    }
    out->push_back(id.get<int64_t>());
  }
}
void ReadSpecial(ConfigFields& f, ModelConfig* config) {
  ReadTokens(f, "eos_token_id", &config->eos);
  for (const auto& [name, to] :
       {std::pair("bos_token_id", &config->bos), std::pair("pad_token_id", &config->pad)}) {
    if (f.Has(name)) *to = f.Int(name);
  }
}

// What Generate does as transformers would, and the first field by which it would not: such a field
// has another value than the one that does nothing.
void ReadGeneration(ConfigFields& f, ModelConfig* config) {
  constexpr double kNone = 0;  // also of lists and objects, which are to be empty
  constexpr double kAny = std::numeric_limits<double>::quiet_NaN();  // number does something
  constexpr std::pair<const char*, double> kNeutral[] = {
      {"bad_words_ids", kNone},
      {"begin_suppress_tokens", kNone},
      {"constraints", kNone},
      {"diversity_penalty", kNone},
      {"dola_layers", kNone},
      {"encoder_no_repeat_ngram_size", kNone},
      {"encoder_repetition_penalty", 1},
      {"exponential_decay_length_penalty", kNone},
      {"force_words_ids", kNone},
      {"forced_bos_token_id", kAny},
      {"forced_decoder_ids", kNone},
      {"forced_eos_token_id", kAny},
      {"guidance_scale", 1},
      {"min_length", kNone},
      {"min_new_tokens", kNone},
      {"no_repeat_ngram_size", kNone},
      {"num_beam_groups", 1},
      {"num_beams", 1},
      {"penalty_alpha", kNone},
      {"sequence_bias", kNone},
      {"stop_strings", kNone},
      {"suppress_tokens", kNone},
      {"token_healing", kNone},
      {"watermarking_config", kNone}};
  config->repetition_penalty = f.Positive("repetition_penalty", 1.0);
  for (const auto& [name, neutral] : kNeutral) {
    if (!f.Has(name)) continue;
    const Json& v = f[name];
    const bool nothing = v.is_number()    ? v.get<double>() == neutral
                         : v.is_boolean() ? !v.get<bool>()
                                          : v.is_structured() && v.empty();
    if (nothing) continue;
    config->generates = absl::UnimplementedError(
        absl::StrCat(f.fields().PathOf(name), " is ", DescribeJson(v),
                     ", which changes what is generated and is not supported; take it out of the "
                     "file to generate without it"));
    return;
  }
}

// Which of the models it is, by model_type; architectures must say the same.
void CheckModelType(ConfigFields& f, const std::string& type) {
  const std::vector<std::string> types = {kLlama, kGPT2};
  if (!f.status().ok()) return;
  if (type != kLlama && type != kGPT2) {
    return f.Unsupported("model_type", "\"", absl::CHexEscape(type.substr(0, 80)),
                         "\" is not supported; the nearest is ", NearestNames(type, types, 1)[0],
                         " of ", absl::StrJoin(types, ", "));
  }
  const std::string wanted = type == kLlama ? "LlamaForCausalLM" : "GPT2LMHeadModel";
  if (!f.Has("architectures")) return;
  const Json& list = f["architectures"];
  if (!list.is_array()) return f.Wrong("architectures", "is ", DescribeJson(list), ", not a list");
  for (const Json& name : list) {
    if (name != wanted) {
      return f.Unsupported("architectures", "has ", DescribeJson(name), ", only ", wanted,
                           " is supported for model_type ", type);
    }
  }
}

absl::StatusOr<ModelConfig> ConfigOf(const Json& object) {
  DT_ASSIGN_OR_RETURN(JsonFields fields, JsonFields::Of(object, ""));
  ConfigFields f(std::move(fields));
  ModelConfig config;
  const std::string type = f.String("model_type");
  CheckModelType(f, type);
  f.Absent("quantization_config");
  f.Absent("per_layer_config");
  // Anything that Python takes for false, null among it, lets tokens see those that follow.
  if (const auto causal = object.find("is_causal"); causal != object.end() && *causal != true) {
    f.Unsupported("is_causal", "is ", DescribeJson(*causal), "; only true is supported");
  }
  ReadDType(f, &config.dtype);
  ReadSpecial(f, &config);
  if (!f.status().ok()) return f.status();
  absl::Status fits;
  if (type == kLlama) {
    const LlamaConfig c = internal::ReadLlamaConfig(f);
    f.Absent("sliding_window");
    if (f.status().ok()) fits = CheckConfig(c);
    config.model = c;
  } else {
    const GPT2Config c = internal::ReadGPT2Config(f);
    if (f.status().ok()) fits = CheckConfig(c);
    config.model = c;
  }
  if (!f.status().ok()) return f.status();
  if (!fits.ok()) return fits;
  return config;
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& text, const std::string& where) {
  DT_ASSIGN_OR_RETURN(const Json object, ParseJsonObject(text, where));
  absl::StatusOr<ModelConfig> config = ConfigOf(object);
  if (!config.ok()) return Prefixed(where, config.status());
  return config;
}

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& folder) {
  constexpr int64_t kMost = int64_t{1} << 24;
  // Files that go along with a copy of the model must be the folder's own.
  const auto read = [&](const char* name, int64_t most) -> absl::StatusOr<std::string> {
    const absl::StatusOr<std::string> path = PathInside(folder, name);
    if (!path.ok()) return Prefixed(folder, path.status());
    return ReadFile(*path, most);
  };
  const auto there = [&](const char* name) {
    std::error_code error;
    return fs::exists(fs::path(folder) / name, error);
  };
  DT_ASSIGN_OR_RETURN(std::string text, read("config.json", kMost));
  DT_ASSIGN_OR_RETURN(ModelConfig config,
                      ParseModelConfig(text, (fs::path(folder) / "config.json").string()));
  DT_ASSIGN_OR_RETURN(const Json own, ParseJsonObject(text, "config.json"));
  const auto names = [&](const char* name) { return own.contains(name) && !own[name].is_null(); };
  if (!names("dtype") && !names("torch_dtype")) config.dtype = DTypeOfFiles(folder);
  config.files.emplace_back("config.json", std::move(text));
  for (const char* const name : internal::kTokenizerFiles) {
    if (!there(name)) continue;
    DT_ASSIGN_OR_RETURN(text, read(name, int64_t{1} << 28));
    config.files.emplace_back(name, std::move(text));
  }
  // Older folders, and those without the file, have its fields in config.json.
  const bool apart = there(internal::kGenerationFile);
  const std::string file = apart ? internal::kGenerationFile : "config.json";
  const std::string generation = (fs::path(folder) / file).string();
  DT_ASSIGN_OR_RETURN(text, read(file.c_str(), kMost));
  DT_ASSIGN_OR_RETURN(const Json object, ParseJsonObject(text, generation));
  DT_ASSIGN_OR_RETURN(JsonFields fields, JsonFields::Of(object, ""));
  ConfigFields f(std::move(fields));
  // Also of the ids of tokens, of which that file may have none.
  config.eos.clear();
  config.bos.reset();
  config.pad.reset();
  ReadSpecial(f, &config);
  ReadGeneration(f, &config);
  if (!f.status().ok()) return Prefixed(generation, f.status());
  if (!config.generates.ok()) config.generates = Prefixed(generation, config.generates);
  if (apart) config.files.emplace_back(file, std::move(text));
  return config;
}

}  // namespace dtensor

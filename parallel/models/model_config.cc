// config.json and generation_config.json of Hugging Face's folders, read.
#include <filesystem>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/names.h"
#include "dtensor/parallel/io/json.h"
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
  config.files.emplace_back("config.json", std::move(text));
  for (const char* const name :
       {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
        "vocab.json", "merges.txt"}) {
    if (!there(name)) continue;
    DT_ASSIGN_OR_RETURN(text, read(name, int64_t{1} << 28));
    config.files.emplace_back(name, std::move(text));
  }
  constexpr char kGeneration[] = "generation_config.json";
  if (!there(kGeneration)) return config;
  DT_ASSIGN_OR_RETURN(text, read(kGeneration, kMost));
  const std::string generation = (fs::path(folder) / kGeneration).string();
  DT_ASSIGN_OR_RETURN(const Json object, ParseJsonObject(text, generation));
  DT_ASSIGN_OR_RETURN(JsonFields fields, JsonFields::Of(object, ""));
  ConfigFields f(std::move(fields));
  ReadSpecial(f, &config);
  if (!f.status().ok()) return Prefixed(generation, f.status());
  config.files.emplace_back(kGeneration, std::move(text));
  return config;
}

}  // namespace dtensor

// Fields of a config.json: those of a model, and what reads them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "dtensor/parallel/io/json_fields.h"
#include "dtensor/parallel/models/gpt2.h"
#include "dtensor/parallel/models/llama.h"
#include "dtensor/tensor/status.h"

namespace dtensor::internal {

// Values of model_type.
inline constexpr char kLlama[] = "llama", kGPT2[] = "gpt2";

// What a folder has beside config.json and the weights.
inline constexpr char kGenerationFile[] = "generation_config.json";
inline constexpr const char* kTokenizerFiles[] = {"tokenizer.json",
                                                  "tokenizer_config.json",
                                                  "special_tokens_map.json",
                                                  "chat_template.jinja",
                                                  "vocab.json",
                                                  "merges.txt"};

// Fields of one object, read one after the other: the first problem is kept, and what cannot be
// read is 0, false or "". Without `otherwise` a field must be there.
class ConfigFields {
 public:
  explicit ConfigFields(JsonFields fields) : fields_(std::move(fields)) {}
  const absl::Status& status() const { return status_; }
  void Fail(const absl::Status& why) { status_.Update(why); }
  void Wrong(const std::string& name, const auto&... what) {
    Fail(fields_.Bad(name, absl::StrCat(what...)));
  }
  // Of a field that would change numbers.
  void Unsupported(const std::string& name, const auto&... what) {
    Fail(absl::UnimplementedError(absl::StrCat(fields_.PathOf(name), " ", what...)));
  }

  bool Has(const std::string& name) const { return fields_.Find(name) != nullptr; }
  const Json& operator[](const std::string& name) const { return *fields_.Find(name); }
  const JsonFields& fields() const { return fields_; }

  int64_t Int(const std::string& name, std::optional<int64_t> otherwise = {}) {
    return Keep(fields_.Int(name, otherwise));
  }
  double Number(const std::string& name, std::optional<double> otherwise = {}) {
    return Keep(fields_.Number(name, otherwise));
  }
  bool Bool(const std::string& name, bool otherwise) { return Keep(fields_.Bool(name, otherwise)); }
  std::string String(const std::string& name, std::optional<std::string> otherwise = {}) {
    return Keep(fields_.String(name, std::move(otherwise)));
  }
  int64_t Size(const std::string& name, std::optional<int64_t> otherwise = {});
  // Every layer takes memory before a file can say that it is not there.
  int64_t Layers(const std::string& name);
  double Positive(const std::string& name, std::optional<double> otherwise = {});
  // Refuse another value of a field than the one that the model computes with.
  void OnlyBool(const std::string& name, bool value);
  void OnlyNumber(const std::string& name, double value);
  void Absent(const std::string& name);

 private:
  template <class T>
  T Keep(absl::StatusOr<T> value) {
    if (value.ok()) return *std::move(value);
    Fail(value.status());
    return T();
  }

  const JsonFields fields_;
  absl::Status status_;
};

LlamaConfig ReadLlamaConfig(ConfigFields& f);
GPT2Config ReadGPT2Config(ConfigFields& f);

}  // namespace dtensor::internal

#include "dtensor/parallel/text/tokenizer_config.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "dtensor/parallel/io/json.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor::text {

absl::StatusOr<Json> ObjectIn(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(path, int64_t{16} << 20);
  if (absl::IsNotFound(text.status())) return Json::object();
  DT_RETURN_IF_ERROR(text.status());
  return ParseJsonObject(*text, path);
}

absl::StatusOr<std::string> TokenizerClass(const std::string& folder, const JsonFields& config) {
  const std::string path = absl::StrCat(folder, "/config.json");
  DT_ASSIGN_OR_RETURN(const Json json, ObjectIn(path));
  DT_ASSIGN_OR_RETURN(const JsonFields model, JsonFields::Of(json, path));
  DT_ASSIGN_OR_RETURN(const std::string type, model.String("model_type", ""));
  DT_ASSIGN_OR_RETURN(std::string name,
                      model.String("tokenizer_class", type == "gpt2" ? "GPT2Tokenizer" : ""));
  DT_ASSIGN_OR_RETURN(name, config.String("tokenizer_class", name));
  return std::string(absl::StripSuffix(name, "Fast"));
}

}  // namespace dtensor::text

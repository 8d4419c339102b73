// What a Hugging Face folder says of its tokenizer beside tokenizer.json.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "dtensor/parallel/io/json_fields.h"

namespace dtensor::text {

// The object in a file; an empty one where there is no file. Errors: those of ReadFile and
// ParseJsonObject.
absl::StatusOr<Json> ObjectIn(const std::string& path);

// The class that transformers takes, without "Fast" at its end: that of `config`, which is
// tokenizer_config.json, or else of the folder's config.json. Empty where neither says one.
//   Errors: InvalidArgument naming file and field.
absl::StatusOr<std::string> TokenizerClass(const std::string& folder, const JsonFields& config);

}  // namespace dtensor::text

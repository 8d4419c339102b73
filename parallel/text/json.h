// Fields of JSON files (parallel/io/json.h parses them), with errors that name the field.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace dtensor::text {

using Json = nlohmann::json;

// An object whose fields are asked for by name; `path` is what errors call it ("model").
class Fields {
 public:
  static absl::StatusOr<Fields> Of(const Json& json, std::string path);
  const std::string& path() const { return path_; }
  // "model.merges"
  std::string PathOf(absl::string_view name) const;
  // Null where it is absent or null.
  const Json* Find(absl::string_view name) const;
  // Errors of these: InvalidArgument naming the field, where it is absent without a default or of
  // another type.
  absl::StatusOr<std::string> String(absl::string_view name) const;
  absl::StatusOr<std::string> String(absl::string_view name, std::string otherwise) const;
  absl::StatusOr<bool> Bool(absl::string_view name, bool otherwise) const;
  absl::StatusOr<const Json*> Array(absl::string_view name) const;
  absl::StatusOr<Fields> Object(absl::string_view name) const;
  // The error of a field whose value is not understood.
  absl::Status Bad(absl::string_view name, absl::string_view why) const;

 private:
  Fields(const Json& json, std::string path) : json_(&json), path_(std::move(path)) {}
  const Json* json_;
  std::string path_;
};

// A whole number from 0 to `most`. Errors: InvalidArgument naming `path`.
absl::StatusOr<int64_t> Index(const Json& json, int64_t most, absl::string_view path);

}  // namespace dtensor::text

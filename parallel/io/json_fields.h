// Fields of JSON files (parallel/io/json.h parses them), with errors that name the field.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dtensor {

using Json = nlohmann::json;

// An object whose fields are asked for by name; `path` is what errors call it ("model"). The object
// outlives this.
class JsonFields {
 public:
  static absl::StatusOr<JsonFields> Of(const Json& json, std::string path);
  const std::string& path() const { return path_; }
  // "model.merges"
  std::string PathOf(absl::string_view name) const;
  // Null where it is absent or null.
  const Json* Find(absl::string_view name) const;
  // Errors of these: InvalidArgument naming the field and what it is, where it is absent without a
  // default or of another type.
  absl::StatusOr<std::string> String(absl::string_view name,
                                     std::optional<std::string> otherwise = {}) const;
  absl::StatusOr<bool> Bool(absl::string_view name, std::optional<bool> otherwise = {}) const;
  absl::StatusOr<int64_t> Int(absl::string_view name, std::optional<int64_t> otherwise = {}) const;
  // Finite.
  absl::StatusOr<double> Number(absl::string_view name, std::optional<double> otherwise = {}) const;
  absl::StatusOr<const Json*> Array(absl::string_view name) const;
  absl::StatusOr<JsonFields> Object(absl::string_view name) const;
  // The error of a field whose value is not understood: "<path> <why>".
  absl::Status Bad(absl::string_view name, absl::string_view why) const;

 private:
  JsonFields(const Json& json, std::string path) : json_(&json), path_(std::move(path)) {}
  template <class T>
  absl::StatusOr<T> Missing(absl::string_view name, const std::optional<T>& otherwise) const;
  absl::Status NotA(absl::string_view name, absl::string_view wanted, const Json& value) const;

  const Json* json_;
  std::string path_;
};

// A whole number from 0 to `most`. Errors: InvalidArgument naming `path`.
absl::StatusOr<int64_t> JsonIndex(const Json& json, int64_t most, absl::string_view path);

}  // namespace dtensor

#include "dtensor/parallel/io/json_fields.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/parallel/io/json.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

absl::StatusOr<JsonFields> JsonFields::Of(const Json& json, std::string path) {
  if (json.is_object()) return JsonFields(json, std::move(path));
  return absl::InvalidArgumentError(absl::StrCat(path.empty() ? "the file" : path,
                                                 " must be an object, is ", DescribeJson(json)));
}

std::string JsonFields::PathOf(absl::string_view name) const {
  return path_.empty() ? std::string(name) : absl::StrCat(path_, ".", name);
}

absl::Status JsonFields::Bad(absl::string_view name, absl::string_view why) const {
  return absl::InvalidArgumentError(absl::StrCat(PathOf(name), " ", why));
}

const Json* JsonFields::Find(absl::string_view name) const {
  const auto it = json_->find(std::string(name));
  return it == json_->end() || it->is_null() ? nullptr : &*it;
}

template <class T>
absl::StatusOr<T> JsonFields::Missing(absl::string_view name,
                                      const std::optional<T>& otherwise) const {
  if (otherwise) return *otherwise;
  return Bad(name, json_->contains(std::string(name)) ? "is null" : "is missing");
}

absl::Status JsonFields::NotA(absl::string_view name, absl::string_view wanted,
                              const Json& value) const {
  return Bad(name, absl::StrCat("must be ", wanted, ", is ", DescribeJson(value)));
}

absl::StatusOr<std::string> JsonFields::String(absl::string_view name,
                                               std::optional<std::string> otherwise) const {
  const Json* value = Find(name);
  if (value == nullptr) return Missing(name, otherwise);
  if (!value->is_string()) return NotA(name, "a string", *value);
  return value->get<std::string>();
}

absl::StatusOr<bool> JsonFields::Bool(absl::string_view name, std::optional<bool> otherwise) const {
  const Json* value = Find(name);
  if (value == nullptr) return Missing(name, otherwise);
  if (!value->is_boolean()) return NotA(name, "true or false", *value);
  return value->get<bool>();
}

absl::StatusOr<int64_t> JsonFields::Int(absl::string_view name,
                                        std::optional<int64_t> otherwise) const {
  const Json* value = Find(name);
  if (value == nullptr) return Missing(name, otherwise);
  const bool fits = value->is_number_integer() &&
                    (!value->is_number_unsigned() || value->get<uint64_t>() <= uint64_t{INT64_MAX});
  if (!fits) return NotA(name, "a whole number below 2^63", *value);
  return value->get<int64_t>();
}

absl::StatusOr<double> JsonFields::Number(absl::string_view name,
                                          std::optional<double> otherwise) const {
  const Json* value = Find(name);
  if (value == nullptr) return Missing(name, otherwise);
  if (!value->is_number() || !std::isfinite(value->get<double>())) {
    return NotA(name, "a number", *value);
  }
  return value->get<double>();
}

absl::StatusOr<const Json*> JsonFields::Array(absl::string_view name) const {
  const Json* value = Find(name);
  if (value == nullptr) return Missing<const Json*>(name, {});
  if (!value->is_array()) return NotA(name, "an array", *value);
  return value;
}

absl::StatusOr<JsonFields> JsonFields::Object(absl::string_view name) const {
  const Json* value = Find(name);
  if (value == nullptr) return Missing<JsonFields>(name, {});
  return Of(*value, PathOf(name));
}

absl::StatusOr<int64_t> JsonIndex(const Json& json, int64_t most, absl::string_view path) {
  if (!json.is_number_integer()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " must be a whole number, is ", DescribeJson(json)));
  }
  const bool fits = json.is_number_unsigned()
                        ? json.get<uint64_t>() <= static_cast<uint64_t>(most)
                        : json.get<int64_t>() >= 0 && json.get<int64_t>() <= most;
  if (!fits) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " must be from 0 to ", most, ", is ", json.dump()));
  }
  return json.get<int64_t>();
}

}  // namespace dtensor

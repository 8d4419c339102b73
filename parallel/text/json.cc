#include "dtensor/parallel/text/json.h"

#include "absl/strings/str_cat.h"
#include "dtensor/tensor/status.h"

namespace dtensor::text {
absl::StatusOr<Fields> Fields::Of(const Json& json, std::string path) {
  if (!json.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(path.empty() ? "the file" : path,
                                                   " must be an object, is ", json.type_name()));
  }
  return Fields(json, std::move(path));
}

std::string Fields::PathOf(absl::string_view name) const {
  return path_.empty() ? std::string(name) : absl::StrCat(path_, ".", name);
}

absl::Status Fields::Bad(absl::string_view name, absl::string_view why) const {
  return absl::InvalidArgumentError(absl::StrCat(PathOf(name), " ", why));
}

const Json* Fields::Find(absl::string_view name) const {
  const auto it = json_->find(std::string(name));
  return it == json_->end() || it->is_null() ? nullptr : &*it;
}

absl::StatusOr<std::string> Fields::String(absl::string_view name) const {
  const Json* value = Find(name);
  if (value == nullptr) return Bad(name, "is missing");
  if (!value->is_string()) {
    return Bad(name, absl::StrCat("must be a string, is ", value->type_name()));
  }
  return value->get<std::string>();
}

absl::StatusOr<std::string> Fields::String(absl::string_view name, std::string otherwise) const {
  if (Find(name) == nullptr) return otherwise;
  return String(name);
}

absl::StatusOr<bool> Fields::Bool(absl::string_view name, bool otherwise) const {
  const Json* value = Find(name);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) {
    return Bad(name, absl::StrCat("must be true or false, is ", value->type_name()));
  }
  return value->get<bool>();
}

absl::StatusOr<const Json*> Fields::Array(absl::string_view name) const {
  const Json* value = Find(name);
  if (value == nullptr) return Bad(name, "is missing");
  if (!value->is_array()) {
    return Bad(name, absl::StrCat("must be an array, is ", value->type_name()));
  }
  return value;
}

absl::StatusOr<Fields> Fields::Object(absl::string_view name) const {
  const Json* value = Find(name);
  if (value == nullptr) return Bad(name, "is missing");
  return Of(*value, PathOf(name));
}

absl::StatusOr<int64_t> Index(const Json& json, int64_t most, absl::string_view path) {
  if (!json.is_number_integer()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " must be a whole number, is ", json.type_name()));
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

}  // namespace dtensor::text

// Strict JSON of files that strangers wrote, as a tree (parallel/io/json_reader.h reads large files
// without one). For .cc files: the library that parses is not part of the interface.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace dtensor {

// Errors: InvalidArgument, "where: reason", for what is not one JSON object in UTF-8 that begins
// with '{': also for a key that is there twice (named), more than `most_depth` levels, more than
// 2^24 values, numbers too large for a double, NaN, and NUL bytes. Memory is taken only
// when all this was looked at; a value takes 16 bytes, and what its text has.
absl::StatusOr<nlohmann::json> ParseJsonObject(absl::string_view text, const std::string& where,
                                               int most_depth = 32);

// The name of a JSON type for messages, with its value where that is short: "the string \"8\"".
std::string DescribeJson(const nlohmann::json& value);

// The error of a file that says what it must not.
inline absl::Status Wrong(const auto&... what) {
  return absl::InvalidArgumentError(absl::StrCat(what...));
}

}  // namespace dtensor

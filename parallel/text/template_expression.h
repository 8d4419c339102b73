// Expressions of templates: tokens and their value.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/parallel/text/json.h"

namespace dtensor::text {

struct ExpressionToken {
  enum class Kind { kName, kString, kNumber, kSign, kEnd };
  Kind kind = Kind::kEnd;
  std::string text;
};

// Errors: InvalidArgument for a string that does not end and for signs that are none.
absl::StatusOr<std::vector<ExpressionToken>> Tokens(absl::string_view source);

// The value, with names from `context`. What is not there is Json::value_t::discarded, which is
// false and prints nothing.
//   Errors: as Template::Render.
absl::StatusOr<Json> Evaluate(absl::Span<const ExpressionToken> tokens, const Json& context);
bool IsTrue(const Json& value);
std::string Printed(const Json& value);

}  // namespace dtensor::text

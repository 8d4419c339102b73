// Expressions of templates: from text to tokens to a tree.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "dtensor/parallel/io/json_fields.h"

namespace dtensor::text {

struct ExpressionToken {
  enum class Kind { kName, kString, kNumber, kSign, kEnd };
  Kind kind = Kind::kEnd;
  std::string text;
};

// Errors: InvalidArgument for a string that does not end; Unimplemented for signs that are none.
absl::StatusOr<std::vector<ExpressionToken>> Tokens(absl::string_view source);

// Operators of one level stand in a row in one node, so a tree is as deep as its text is nested.
struct Expression {
  enum class Type {
    kLiteral,    // value
    kName,       // name
    kList,       // parts
    kChoice,     // parts: value, condition, other value (may be missing)
    kOr,         // parts
    kAnd,        // parts
    kNot,        // parts[0]
    kCompare,    // parts, with signs between: "==", "<", "in", "not in", ...
    kSum,        // parts, with "+" and "-" between
    kJoin,       // parts, with "~" between
    kRemainder,  // parts, with "%" between
    kMinus,      // parts[0]
    kSteps,      // parts[0], and what is done to it, one after the other:
    kMember,     //   .name
    kMethod,     //   .name(parts)
    kFilter,     //   | name(parts)
    kTest,       //   is name; value true: is not
    kIndex,      //   [parts[0]]
    kSlice,      //   [parts[0]:parts[1]], kLiteral null where there is none
    kCall        // name(parts)
  };
  Type type = Type::kLiteral;
  std::string name = {};
  Json value = {};
  std::vector<Expression> parts = {};
  std::vector<std::string> signs = {};
};

// Errors: InvalidArgument for what ends too early or lacks a sign; Unimplemented for what is not
// served; ResourceExhausted for what is nested too deep. What only a value can tell (the names of
// functions, filters, methods, tests) is for the evaluation.
absl::StatusOr<Expression> ParseExpression(absl::Span<const ExpressionToken> tokens);
// The same for the "LIST if CONDITION" of a loop: what stands before the "if", and after it; a
// literal true where there is none.
struct LoopExpression {
  Expression list = {}, condition = {};
};
absl::StatusOr<LoopExpression> ParseLoop(absl::Span<const ExpressionToken> tokens);

absl::Status NotServed(absl::string_view what);

}  // namespace dtensor::text

// Values of templates, as Python has them, and what expressions make of them.
//
// What is not there (Jinja's Undefined) is Json::value_t::discarded: false, of length 0, printed as
// nothing, and an error where a value is needed.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/parallel/io/json_fields.h"
#include "dtensor/parallel/text/template_expression.h"

namespace dtensor::text {

// One that belongs to somebody else (a message, a variable, a literal), or an own one. No copy is
// made of a list to take an element.
class Value {
 public:
  Value() : own_(Json::value_t::discarded) {}  // not there
  explicit Value(Json own) : own_(std::move(own)) {}
  static Value Of(const Json& other) {
    Value value;
    value.other_ = &other;
    return value;
  }
  const Json& operator*() const { return other_ != nullptr ? *other_ : own_; }
  const Json* operator->() const { return &**this; }
  // A part of this one: of somebody else's no copy is made.
  Value Part(const Json& part) const { return other_ != nullptr ? Of(part) : Value(part); }
  Json Take() && { return other_ != nullptr ? *other_ : std::move(own_); }

 private:
  const Json* other_ = nullptr;
  Json own_;
};

bool IsTrue(const Json& value);
// What `{{ }}` writes. Errors: Unimplemented for lists and objects, which Python writes its own
// way.
absl::StatusOr<std::string> Printed(const Json& value);

// How far loops have come, for the names of `loop`.
struct Loop {
  size_t index = 0;
  std::vector<const Json*> items = {};
};

// Names by scope, the innermost last.
struct Scope {
  std::map<std::string, Value> names = {};
  std::optional<Loop> loop = {};
};

// Computes within a bound of steps and of bytes that are looked at and made, over its whole life.
class Evaluator {
 public:
  // The names of `context` are those of the outermost scope.
  explicit Evaluator(const Json& context);

  //   Errors: as Template::Render.
  absl::StatusOr<Value> Evaluate(const Expression& expression);
  // Counts work. Errors: ResourceExhausted.
  absl::Status Spend(size_t bytes);

  // The innermost is the last; there always is one. Addresses of values stay.
  std::deque<Scope>& scopes() { return scopes_; }

 private:
  absl::StatusOr<Value> Row(const Expression& e);
  absl::StatusOr<Value> Compared(const Expression& e);
  absl::StatusOr<bool> Holds(const Json& a, const std::string& sign, const Json& b);
  absl::StatusOr<bool> Contains(const Json& in, const Json& value);
  absl::StatusOr<Value> Steps(const Expression& e);
  absl::StatusOr<Value> Step(const Expression& step, Value value);
  absl::StatusOr<Value> Member(const Value& value, const std::string& name);
  absl::StatusOr<Value> List(const Expression& e);
  absl::StatusOr<Value> OfLoop(const std::string& name);
  absl::StatusOr<Value> Filter(const std::string& name, const Json& value);
  absl::StatusOr<Value> Method(const Expression& step, const Value& value);
  absl::StatusOr<Value> Item(const Expression& step, const Value& value);
  absl::StatusOr<Value> Slice(const Expression& step, const Value& value);
  absl::StatusOr<Value> Call(const Expression& e);
  absl::StatusOr<Json> Plus(Json a, const Json& b, char sign);
  const Value* Find(const std::string& name) const;

  std::deque<Scope> scopes_;
  int64_t steps_ = 0, bytes_ = 0;
};

}  // namespace dtensor::text

#include "dtensor/parallel/text/template_value.h"

#include <algorithm>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "dtensor/parallel/text/utf8.h"
#include "dtensor/tensor/status.h"

namespace dtensor::text {
namespace {

using Type = Expression::Type;
constexpr int64_t kMostSteps = 2'000'000, kMostBytes = int64_t{1} << 28;

std::string KindOf(const Json& value) {
  return value.is_discarded() ? "what is not there" : value.type_name();
}
absl::Status NoValue(const auto&... what) {
  return absl::InvalidArgumentError(absl::StrCat("the chat template asks for ", what...));
}

const std::string& TextOf(const Json& value) { return value.get_ref<const std::string&>(); }

bool IsNumber(const Json& value) { return value.is_number_integer() || value.is_boolean(); }
int64_t NumberOf(const Json& value) {
  return value.is_boolean() ? value.get<bool>() : value.get<int64_t>();
}

std::string Stripped(absl::string_view text, bool left, bool right) {
  if (left) text.remove_prefix(LeadingSpace(text));
  if (right) text.remove_suffix(TrailingSpace(text));
  return std::string(text);
}

int64_t Characters(absl::string_view text) {
  return absl::c_count_if(text, [](char c) { return (static_cast<uint8_t>(c) & 0xC0) != 0x80; });
}

// What transformers and Jinja give every template to call.
bool IsFunction(absl::string_view name) {
  constexpr absl::string_view kAll[] = {"raise_exception", "strftime_now", "range",
                                        "namespace",       "dict",         "cycler",
                                        "joiner",          "lipsum"};
  return absl::c_linear_search(kAll, name);
}

// Names that Python's own objects of that kind have: Jinja takes them before a key that is called
// so, and they are there, whatever a template then does with one that it does not call.
bool IsPythons(const Json& value, absl::string_view name) {
  constexpr absl::string_view kOfText =
      " capitalize casefold center count encode endswith expandtabs find format format_map index "
      "isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable "
      "isspace istitle isupper join ljust lower lstrip maketrans partition removeprefix "
      "removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines "
      "startswith strip swapcase title translate upper zfill ";
  constexpr absl::string_view kOfList =
      " append clear copy count extend index insert pop remove reverse sort ";
  constexpr absl::string_view kOfDict =
      " clear copy fromkeys get items keys pop popitem setdefault update values ";
  constexpr absl::string_view kOfNumber =
      " as_integer_ratio bit_count bit_length conjugate denominator from_bytes imag numerator real "
      "to_bytes ";
  const absl::string_view names = value.is_string()   ? kOfText
                                  : value.is_array()  ? kOfList
                                  : value.is_object() ? kOfDict
                                  : IsNumber(value)   ? kOfNumber
                                                      : "";
  return absl::StartsWith(name, "__") || absl::StrContains(names, absl::StrCat(" ", name, " "));
}

// As Python: numbers and truth values are one kind.
bool Equal(const Json& a, const Json& b) {
  if (a.is_discarded() || b.is_discarded()) return a.is_discarded() && b.is_discarded();
  if (IsNumber(a) && IsNumber(b)) return NumberOf(a) == NumberOf(b);
  return a == b;
}

// About what it takes in memory.
size_t BytesOf(const Json& value) {
  if (value.is_string()) return 48 + TextOf(value).size();
  if (!value.is_structured()) return 16;
  size_t bytes = 64;
  for (const Json& part : value) bytes += (value.is_object() ? 80 : 0) + BytesOf(part);
  return bytes;
}

}  // namespace

bool IsTrue(const Json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value.get<double>() != 0;
  if (value.is_string()) return !TextOf(value).empty();
  return !value.is_discarded() && !value.is_null() && !value.empty();
}

absl::StatusOr<std::string> Printed(const Json& value) {
  if (value.is_discarded()) return "";
  if (value.is_null()) return "None";
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  if (value.is_string()) return TextOf(value);
  if (value.is_number_integer()) return value.dump();
  return NotServed(absl::StrCat("text made of ", value.type_name()));
}

Evaluator::Evaluator(const Json& context) : scopes_(1) {
  for (const auto& [name, value] : context.items()) scopes_[0].names[name] = Value::Of(value);
}

absl::Status Evaluator::Spend(size_t bytes) {
  bytes_ += static_cast<int64_t>(bytes);
  if (++steps_ <= kMostSteps && bytes_ <= kMostBytes) return absl::OkStatus();
  return absl::ResourceExhaustedError("the chat template does too much");
}

const Value* Evaluator::Find(const std::string& name) const {
  for (size_t i = scopes_.size(); i-- > 0;) {
    const auto found = scopes_[i].names.find(name);
    if (found != scopes_[i].names.end()) return &found->second;
    if (name == "loop" && scopes_[i].loop) return nullptr;
  }
  return nullptr;
}

absl::StatusOr<Value> Evaluator::Evaluate(const Expression& e) {
  DT_RETURN_IF_ERROR(Spend(0));
  switch (e.type) {
    case Type::kLiteral:
      return Value::Of(e.value);
    case Type::kName: {
      const Value* found = Find(e.name);
      if (found != nullptr) return Value::Of(**found);
      if (e.name == "loop") return NotServed("\"loop\" as a value");
      if (IsFunction(e.name))
        return NotServed(absl::StrCat("the function \"", e.name, "\" as a value"));
      return Value();
    }
    case Type::kList:
      return List(e);
    case Type::kChoice: {
      DT_ASSIGN_OR_RETURN(const Value condition, Evaluate(e.parts[1]));
      if (IsTrue(*condition)) return Evaluate(e.parts[0]);
      return e.parts.size() > 2 ? Evaluate(e.parts[2]) : Value();
    }
    case Type::kOr:
    case Type::kAnd:
    case Type::kSum:
    case Type::kJoin:
    case Type::kRemainder:
      return Row(e);
    case Type::kNot: {
      DT_ASSIGN_OR_RETURN(const Value value, Evaluate(e.parts[0]));
      return Value(!IsTrue(*value));
    }
    case Type::kMinus: {
      DT_ASSIGN_OR_RETURN(const Value value, Evaluate(e.parts[0]));
      DT_ASSIGN_OR_RETURN(Json negative, Plus(0, *value, '-'));
      return Value(std::move(negative));
    }
    case Type::kCompare:
      return Compared(e);
    case Type::kSteps:
      return Steps(e);
    case Type::kCall:
      return Call(e);
    default:
      return absl::InternalError("a step of an expression stands alone");
  }
}

// Not of lists: so no value is nested deeper than what the program gave.
absl::StatusOr<Value> Evaluator::List(const Expression& e) {
  Json list = Json::array();
  for (const Expression& part : e.parts) {
    DT_ASSIGN_OR_RETURN(Value value, Evaluate(part));
    if (value->is_array()) return NotServed("lists in lists");
    DT_RETURN_IF_ERROR(Spend(BytesOf(*value)));
    list.push_back(std::move(value).Take());
  }
  return Value(std::move(list));
}

absl::StatusOr<Value> Evaluator::Row(const Expression& e) {
  DT_ASSIGN_OR_RETURN(Value value, Evaluate(e.parts[0]));
  for (size_t i = 1; i < e.parts.size(); ++i) {
    // What decides a truth value is the last that is looked at.
    if (e.type == Type::kOr && IsTrue(*value)) return value;
    if (e.type == Type::kAnd && !IsTrue(*value)) return value;
    DT_ASSIGN_OR_RETURN(Value other, Evaluate(e.parts[i]));
    if (e.type == Type::kOr || e.type == Type::kAnd) {
      value = std::move(other);
      continue;
    }
    const char sign = e.signs[i - 1][0];
    if (sign == '~') {
      DT_ASSIGN_OR_RETURN(std::string text, Printed(*value));
      DT_ASSIGN_OR_RETURN(const std::string more, Printed(*other));
      DT_RETURN_IF_ERROR(Spend(text.size() + more.size()));
      value = Value(text + more);
    } else if (sign == '%') {
      if (!IsNumber(*value) || !IsNumber(*other) || NumberOf(*other) <= 0) {
        return absl::InvalidArgumentError("% needs whole numbers, the second one positive");
      }
      const int64_t rest = NumberOf(*value) % NumberOf(*other);
      value = Value(rest < 0 ? rest + NumberOf(*other) : rest);
    } else {
      DT_ASSIGN_OR_RETURN(Json sum, Plus(std::move(value).Take(), *other, sign));
      value = Value(std::move(sum));
    }
  }
  return value;
}

absl::StatusOr<Json> Evaluator::Plus(Json a, const Json& b, char sign) {
  if (IsNumber(a) && IsNumber(b)) {
    const int64_t x = NumberOf(a), y = NumberOf(b);
    int64_t sum = 0;
    if (sign == '+' ? __builtin_add_overflow(x, y, &sum) : __builtin_sub_overflow(x, y, &sum)) {
      return absl::InvalidArgumentError("a number is too large");
    }
    return Json(sum);
  }
  if (sign == '+' && a.is_string() && b.is_string()) {
    DT_RETURN_IF_ERROR(Spend(TextOf(a).size() + TextOf(b).size()));
    a.get_ref<std::string&>() += TextOf(b);
    return a;
  }
  if (sign == '+' && a.is_array() && b.is_array()) {
    DT_RETURN_IF_ERROR(Spend(BytesOf(a) + BytesOf(b)));
    for (const Json& value : b) a.push_back(value);
    return a;
  }
  return absl::InvalidArgumentError(
      absl::StrCat(KindOf(a), " ", std::string(1, sign), " ", KindOf(b), " has no value"));
}

// a < b < c is (a < b) and (b < c).
absl::StatusOr<Value> Evaluator::Compared(const Expression& e) {
  DT_ASSIGN_OR_RETURN(Value left, Evaluate(e.parts[0]));
  for (size_t i = 1; i < e.parts.size(); ++i) {
    DT_ASSIGN_OR_RETURN(Value right, Evaluate(e.parts[i]));
    DT_ASSIGN_OR_RETURN(const bool holds, Holds(*left, e.signs[i - 1], *right));
    if (!holds) return Value(false);
    left = std::move(right);
  }
  return Value(true);
}

absl::StatusOr<bool> Evaluator::Holds(const Json& a, const std::string& sign, const Json& b) {
  if (sign == "in" || sign == "not in") {
    DT_ASSIGN_OR_RETURN(const bool contains, Contains(b, a));
    return contains == (sign == "in");
  }
  DT_RETURN_IF_ERROR(Spend(std::min(BytesOf(a), BytesOf(b))));
  if (sign == "==" || sign == "!=") return Equal(a, b) == (sign == "==");
  int order = 0;
  if (IsNumber(a) && IsNumber(b)) {
    const int64_t x = NumberOf(a), y = NumberOf(b);
    order = x < y ? -1 : x > y;
  } else if (a.is_string() && b.is_string()) {
    order = TextOf(a).compare(TextOf(b));  // of UTF-8 as of its characters
  } else {
    return NoValue("the order of ", KindOf(a), " and ", KindOf(b));
  }
  return sign == "<" ? order < 0 : sign == ">" ? order > 0 : sign == "<=" ? order <= 0 : order >= 0;
}

absl::StatusOr<bool> Evaluator::Contains(const Json& in, const Json& value) {
  DT_RETURN_IF_ERROR(Spend(BytesOf(in)));
  if (in.is_discarded()) return false;
  if (in.is_string() && value.is_string()) return absl::StrContains(TextOf(in), TextOf(value));
  if (in.is_object() && value.is_string()) return in.contains(TextOf(value));
  if (in.is_array()) {
    return absl::c_any_of(in, [&](const Json& each) { return Equal(each, value); });
  }
  return NoValue("what is in ", KindOf(in), ", here ", KindOf(value));
}

absl::StatusOr<Value> Evaluator::Steps(const Expression& e) {
  const Expression& first = e.parts[0];
  const Expression& second = e.parts[1];
  size_t next = 1;
  Value value;
  if (first.type == Type::kName && first.name == "loop" && Find("loop") == nullptr &&
      (second.type == Type::kMember || second.type == Type::kMethod)) {
    if (second.type == Type::kMethod) return NotServed(absl::StrCat("loop.", second.name, "()"));
    DT_ASSIGN_OR_RETURN(value, OfLoop(second.name));
    next = 2;
  } else if (first.type == Type::kName && IsFunction(first.name) && Find(first.name) == nullptr &&
             second.type == Type::kTest && absl::EndsWith(second.name, "defined")) {
    value = Value(true);  // there is one, whatever it is
  } else {
    DT_ASSIGN_OR_RETURN(value, Evaluate(first));
  }
  for (; next < e.parts.size(); ++next) {
    DT_RETURN_IF_ERROR(Spend(0));
    DT_ASSIGN_OR_RETURN(Value after, Step(e.parts[next], std::move(value)));
    value = std::move(after);
  }
  return value;
}

absl::StatusOr<Value> Evaluator::Step(const Expression& step, Value value) {
  switch (step.type) {
    case Type::kMember:
      if (IsPythons(*value, step.name)) {
        return NotServed(absl::StrCat("\"", step.name, "\" of ", KindOf(*value)));
      }
      return Member(value, step.name);
    case Type::kMethod:
      return Method(step, value);
    case Type::kFilter:
      if (!step.parts.empty())
        return NotServed(absl::StrCat("the filter \"", step.name, "(...)\""));
      return Filter(step.name, *value);
    case Type::kIndex:
      return Item(step, value);
    case Type::kSlice:
      return Slice(step, value);
    default:
      break;
  }
  const Json& v = *value;
  const std::pair<absl::string_view, bool> tests[] = {
      {"defined", !v.is_discarded()},
      {"undefined", v.is_discarded()},
      {"none", v.is_null()},
      {"string", v.is_string()},
      {"mapping", v.is_object()},
      {"boolean", v.is_boolean()},
      {"true", v == true},
      {"false", v == false},
      // What is not there can be gone over in Jinja, and is empty.
      {"iterable", v.is_discarded() || v.is_structured() || v.is_string()},
      {"sequence", v.is_discarded() || v.is_structured() || v.is_string()}};
  for (const auto& [name, holds] : tests) {
    if (name == step.name && step.parts.empty()) return Value(holds != step.value.get<bool>());
  }
  return NotServed(absl::StrCat("the test \"", step.name, "\""));
}

absl::StatusOr<Value> Evaluator::Member(const Value& value, const std::string& name) {
  if (value->is_discarded()) return NoValue("\"", name, "\" of what is not there");
  if (!value->is_object()) return Value();
  const auto found = value->find(name);
  return found == value->end() ? Value() : value.Part(*found);
}

absl::StatusOr<Value> Evaluator::OfLoop(const std::string& name) {
  const auto inner = std::find_if(scopes_.rbegin(), scopes_.rend(),
                                  [](const Scope& s) { return s.loop.has_value(); });
  if (inner == scopes_.rend()) return NoValue("\"", name, "\" of what is not there");
  const auto& [index, items] = *inner->loop;
  const auto n = static_cast<int64_t>(items.size()), i = static_cast<int64_t>(index);
  const std::pair<absl::string_view, int64_t> numbers[] = {{"index", i + 1},
                                                           {"index0", i},
                                                           {"revindex", n - i},
                                                           {"revindex0", n - i - 1},
                                                           {"length", n}};
  for (const auto& [known, number] : numbers) {
    if (known == name) return Value(number);
  }
  if (name == "first") return Value(i == 0);
  if (name == "last") return Value(i + 1 == n);
  if (name == "previtem") return i == 0 ? Value() : Value::Of(*items[index - 1]);
  if (name == "nextitem") return i + 1 == n ? Value() : Value::Of(*items[index + 1]);
  return NotServed(absl::StrCat("\"loop.", name, "\""));
}

// What filters and methods share, by name; of a text.
absl::StatusOr<Value> OfText(const std::string& name, const std::string& text) {
  if (name == "trim" || name == "strip") return Value(Stripped(text, true, true));
  if (name == "lstrip") return Value(Stripped(text, true, false));
  if (name == "rstrip") return Value(Stripped(text, false, true));
  if (name == "upper" || name == "lower") {
    if (absl::c_any_of(text, [](char c) { return (c & 0x80) != 0; })) {
      return NotServed(absl::StrCat("\"", name, "\" of letters beyond ASCII"));
    }
    return Value(name == "upper" ? absl::AsciiStrToUpper(text) : absl::AsciiStrToLower(text));
  }
  return NotServed(absl::StrCat("\"", name, "\""));
}

absl::StatusOr<Value> Evaluator::Filter(const std::string& name, const Json& value) {
  DT_RETURN_IF_ERROR(Spend(BytesOf(value)));
  if (name == "length" || name == "count") {
    if (value.is_discarded()) return Value(0);
    if (value.is_string()) return Value(Characters(TextOf(value)));
    if (value.is_structured()) return Value(value.size());
    return NoValue("the length of ", KindOf(value));
  }
  if (name != "trim" && name != "upper" && name != "lower" && name != "string") {
    return NotServed(absl::StrCat("the filter \"", name, "\""));
  }
  DT_ASSIGN_OR_RETURN(std::string text, Printed(value));
  return name == "string" ? Value(std::move(text)) : OfText(name, text);
}

absl::StatusOr<Value> Evaluator::Method(const Expression& step, const Value& value) {
  if (value->is_discarded()) return NoValue("\"", step.name, "()\" of what is not there");
  DT_RETURN_IF_ERROR(Spend(BytesOf(*value)));
  if (step.parts.empty() && value->is_string() && step.name != "trim") {
    return OfText(step.name, TextOf(*value));
  }
  if (step.parts.size() == 1) {
    DT_ASSIGN_OR_RETURN(const Value argument, Evaluate(step.parts[0]));
    if (step.name == "get" && value->is_object() && argument->is_string()) {
      DT_ASSIGN_OR_RETURN(Value found, Member(value, TextOf(*argument)));
      return found->is_discarded() ? Value(Json(nullptr)) : std::move(found);
    }
    const bool starts = step.name == "startswith";
    if ((starts || step.name == "endswith") && value->is_string() && argument->is_string()) {
      return Value(starts ? absl::StartsWith(TextOf(*value), TextOf(*argument))
                          : absl::EndsWith(TextOf(*value), TextOf(*argument)));
    }
  }
  return NotServed(absl::StrCat("\"", step.name, "(...)\" of ", KindOf(*value)));
}

// x[i], x["a"]
absl::StatusOr<Value> Evaluator::Item(const Expression& step, const Value& value) {
  DT_ASSIGN_OR_RETURN(const Value index, Evaluate(step.parts[0]));
  if (value->is_discarded()) return NoValue("an item of what is not there");
  if (index->is_string()) return Member(value, TextOf(*index));
  if (!IsNumber(*index)) return NoValue("an index that is ", KindOf(*index));
  if (value->is_string()) return NotServed("a character of a text");
  if (!value->is_array()) return Value();
  const auto n = static_cast<int64_t>(value->size());
  const int64_t i = NumberOf(*index), place = i < 0 ? i + n : i;
  return place < 0 || place >= n ? Value() : value.Part((*value)[static_cast<size_t>(place)]);
}

// x[i:j]
absl::StatusOr<Value> Evaluator::Slice(const Expression& step, const Value& value) {
  DT_ASSIGN_OR_RETURN(const Value from, Evaluate(step.parts[0]));
  DT_ASSIGN_OR_RETURN(const Value to, Evaluate(step.parts[1]));
  if (!value->is_array()) return NotServed(absl::StrCat("slices of ", KindOf(*value)));
  const auto n = static_cast<int64_t>(value->size());
  const auto place = [&](const Json& index, int64_t otherwise) -> absl::StatusOr<int64_t> {
    if (index.is_null()) return otherwise;
    if (!IsNumber(index)) return NoValue("an index that is ", KindOf(index));
    const int64_t i = NumberOf(index);
    return std::clamp<int64_t>(i < 0 ? i + n : i, 0, n);
  };
  DT_ASSIGN_OR_RETURN(const int64_t begin, place(*from, 0));
  DT_ASSIGN_OR_RETURN(const int64_t end, place(*to, n));
  Json part = Json::array();
  for (int64_t i = begin; i < end; ++i) {
    DT_RETURN_IF_ERROR(Spend(BytesOf((*value)[static_cast<size_t>(i)])));
    part.push_back((*value)[static_cast<size_t>(i)]);
  }
  return Value(std::move(part));
}

absl::StatusOr<Value> Evaluator::Call(const Expression& e) {
  const bool now = e.name == "strftime_now";
  if ((e.name != "raise_exception" && !now) || e.parts.size() != 1) {
    return NotServed(absl::StrCat("the function \"", e.name, "\""));
  }
  DT_ASSIGN_OR_RETURN(const Value given, Evaluate(e.parts[0]));
  if (now) {
    if (!given->is_string()) return NoValue("a format of time that is ", KindOf(*given));
    return Value(absl::FormatTime(TextOf(*given), absl::Now(), absl::LocalTimeZone()));
  }
  DT_ASSIGN_OR_RETURN(const std::string text, Printed(*given));
  return absl::InvalidArgumentError(absl::StrCat("the chat template says: ", text));
}

}  // namespace dtensor::text

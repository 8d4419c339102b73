#include "dtensor/parallel/text/template_expression.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "dtensor/tensor/status.h"

namespace dtensor::text {
namespace {

using Kind = ExpressionToken::Kind;
constexpr int kMostDepth = 50;

Json Undefined() { return Json(Json::value_t::discarded); }

absl::Status NotServed(absl::string_view what) {
  return absl::UnimplementedError(absl::StrCat("chat templates with ", what, " are not served"));
}

absl::StatusOr<Json> Add(const Json& a, const Json& b, char sign) {
  if (sign == '~') return Json(Printed(a) + Printed(b));
  if (a.is_number_integer() && b.is_number_integer()) {
    const int64_t x = a.get<int64_t>(), y = b.get<int64_t>();
    int64_t sum = 0;
    if (sign == '+' ? __builtin_add_overflow(x, y, &sum) : __builtin_sub_overflow(x, y, &sum)) {
      return absl::InvalidArgumentError("a number is too large");
    }
    return Json(sum);
  }
  if (sign == '+' && a.is_string() && b.is_string()) {
    return Json(a.get_ref<const std::string&>() + b.get_ref<const std::string&>());
  }
  if (sign == '+' && a.is_array() && b.is_array()) {
    Json joined = a;
    for (const Json& value : b) joined.push_back(value);
    return joined;
  }
  return absl::InvalidArgumentError(
      absl::StrCat(a.type_name(), " ", std::string(1, sign), " ", b.type_name(), " has no value"));
}

absl::StatusOr<bool> Contains(const Json& in, const Json& value) {
  if (in.is_string() && value.is_string()) {
    return absl::StrContains(in.get_ref<const std::string&>(), value.get_ref<const std::string&>());
  }
  if (in.is_object() && value.is_string()) return in.contains(value.get_ref<const std::string&>());
  if (in.is_array()) return absl::c_linear_search(in, value);
  return absl::InvalidArgumentError(absl::StrCat("nothing is in ", in.type_name()));
}

// What filters and methods share, by name.
absl::StatusOr<Json> Apply(const std::string& name, const Json& value) {
  if (name == "length" || name == "count") {
    if (value.is_string()) return Json(value.get_ref<const std::string&>().size());
    return Json(value.size());
  }
  if (name == "string") return Json(Printed(value));
  if (!value.is_string()) {
    return absl::InvalidArgumentError(absl::StrCat(name, " of ", value.type_name()));
  }
  const std::string& text = value.get_ref<const std::string&>();
  if (name == "trim" || name == "strip") return Json(std::string(absl::StripAsciiWhitespace(text)));
  if (name == "lstrip") return Json(std::string(absl::StripLeadingAsciiWhitespace(text)));
  if (name == "rstrip") return Json(std::string(absl::StripTrailingAsciiWhitespace(text)));
  if (name == "upper") return Json(absl::AsciiStrToUpper(text));
  if (name == "lower") return Json(absl::AsciiStrToLower(text));
  return NotServed(absl::StrCat("\"", name, "\""));
}

// Recursive descent over the tokens, computing as it goes.
class Evaluator {
 public:
  Evaluator(absl::Span<const ExpressionToken> tokens, const Json& context)
      : tokens_(tokens), context_(context) {}

  absl::StatusOr<Json> Whole() {
    DT_ASSIGN_OR_RETURN(Json value, Choice());
    if (Now().kind != Kind::kEnd) return NotServed(absl::StrCat("\"", Now().text, "\" there"));
    return value;
  }

 private:
  const ExpressionToken& Now() const { return tokens_[std::min(at_, tokens_.size() - 1)]; }
  bool Is(absl::string_view text, Kind kind = Kind::kSign) const {
    return Now().kind == kind && Now().text == text;
  }
  bool Take(absl::string_view text, Kind kind = Kind::kSign) {
    if (!Is(text, kind)) return false;
    ++at_;
    return true;
  }
  bool Word(absl::string_view text) { return Take(text, Kind::kName); }
  absl::Status Expect(absl::string_view sign) {
    if (Take(sign)) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("\"", sign, "\" is missing before \"", Now().text, "\""));
  }

  absl::StatusOr<Json> Choice() {
    if (++depth_ > kMostDepth) {
      return absl::ResourceExhaustedError("an expression is nested too deep");
    }
    DT_ASSIGN_OR_RETURN(Json value, Or());
    if (Word("if")) {
      DT_ASSIGN_OR_RETURN(const Json condition, Or());
      Json otherwise = Undefined();
      if (Word("else")) {
        DT_ASSIGN_OR_RETURN(otherwise, Choice());
      }
      if (!IsTrue(condition)) value = std::move(otherwise);
    }
    --depth_;
    return value;
  }
  absl::StatusOr<Json> Or() {
    DT_ASSIGN_OR_RETURN(Json value, And());
    while (Word("or")) {
      DT_ASSIGN_OR_RETURN(Json other, And());
      if (!IsTrue(value)) value = std::move(other);
    }
    return value;
  }
  absl::StatusOr<Json> And() {
    DT_ASSIGN_OR_RETURN(Json value, Not());
    while (Word("and")) {
      DT_ASSIGN_OR_RETURN(Json other, Not());
      if (IsTrue(value)) value = std::move(other);
    }
    return value;
  }
  absl::StatusOr<Json> Not() {
    bool negate = false;
    while (Word("not")) negate = !negate;
    DT_ASSIGN_OR_RETURN(Json value, Comparison());
    return negate ? Json(!IsTrue(value)) : value;
  }
  absl::StatusOr<Json> Comparison() {
    DT_ASSIGN_OR_RETURN(Json value, Sum());
    while (true) {
      if (Word("is")) {
        DT_ASSIGN_OR_RETURN(value, Test(value));
        continue;
      }
      const size_t start = at_;
      const bool negate = Word("not");
      if (Word("in")) {
        DT_ASSIGN_OR_RETURN(const Json in, Sum());
        DT_ASSIGN_OR_RETURN(const bool contains, Contains(in, value));
        value = contains != negate;
        continue;
      }
      at_ = start;
      const std::string sign = Now().kind == Kind::kSign ? Now().text : "";
      if (sign != "==" && sign != "!=" && sign != "<" && sign != ">" && sign != "<=" &&
          sign != ">=") {
        return value;
      }
      ++at_;
      DT_ASSIGN_OR_RETURN(const Json other, Sum());
      // What is not there equals nothing else that is not there alone.
      const bool equal = value.is_discarded() || other.is_discarded()
                             ? value.is_discarded() == other.is_discarded()
                             : value == other;
      const bool less = !equal && !value.is_discarded() && !other.is_discarded() && value < other;
      value = sign == "=="   ? equal
              : sign == "!=" ? !equal
              : sign == "<"  ? less
              : sign == ">"  ? !less && !equal
              : sign == "<=" ? less || equal
                             : !less;
    }
  }
  absl::StatusOr<Json> Test(const Json& value) {
    const bool negate = Word("not");
    const std::string name = Now().text;
    if (Now().kind != Kind::kName) return NotServed(absl::StrCat("\"is ", name, "\""));
    ++at_;
    bool holds = false;
    if (name == "defined") {
      holds = !value.is_discarded();
    } else if (name == "undefined") {
      holds = value.is_discarded();
    } else if (name == "none") {
      holds = value.is_null();
    } else if (name == "string") {
      holds = value.is_string();
    } else if (name == "mapping") {
      holds = value.is_object();
    } else if (name == "iterable" || name == "sequence") {
      holds = value.is_array() || value.is_string() || value.is_object();
    } else {
      return NotServed(absl::StrCat("the test \"", name, "\""));
    }
    return Json(holds != negate);
  }
  absl::StatusOr<Json> Sum() {
    DT_ASSIGN_OR_RETURN(Json value, Remainder());
    while (Is("+") || Is("-") || Is("~")) {
      const char sign = tokens_[at_++].text[0];
      DT_ASSIGN_OR_RETURN(const Json other, Remainder());
      DT_ASSIGN_OR_RETURN(value, Add(value, other, sign));
    }
    return value;
  }
  absl::StatusOr<Json> Remainder() {
    DT_ASSIGN_OR_RETURN(Json value, Postfix());
    while (Take("%")) {
      DT_ASSIGN_OR_RETURN(const Json other, Postfix());
      if (!value.is_number_integer() || !other.is_number_integer() || other.get<int64_t>() <= 0) {
        return absl::InvalidArgumentError("% needs whole numbers, the second one positive");
      }
      const int64_t n = other.get<int64_t>();
      value = (value.get<int64_t>() % n + n) % n;
    }
    return value;
  }
  absl::StatusOr<Json> Postfix() {
    DT_ASSIGN_OR_RETURN(Json value, Primary());
    while (true) {
      if (Take("|") || Take(".")) {
        const bool filter = tokens_[at_ - 1].text == "|";
        const std::string name = Now().text;
        if (Now().kind != Kind::kName) {
          return absl::InvalidArgumentError(absl::StrCat("no name before \"", name, "\""));
        }
        ++at_;
        if (!filter && !Is("(")) {
          value = Member(value, name);
          continue;
        }
        if (Take("(") && !Take(")")) {
          DT_ASSIGN_OR_RETURN(value, WithArgument(name, value));
          continue;
        }
        DT_ASSIGN_OR_RETURN(value, Apply(name, value));
      } else if (Take("[")) {
        DT_ASSIGN_OR_RETURN(value, Subscript(value));
      } else {
        return value;
      }
    }
  }
  absl::StatusOr<Json> WithArgument(const std::string& name, const Json& value) {
    DT_ASSIGN_OR_RETURN(const Json argument, Choice());
    DT_RETURN_IF_ERROR(Expect(")"));
    if (name == "get" && value.is_object() && argument.is_string()) {
      const Json found = Member(value, argument.get<std::string>());
      return found.is_discarded() ? Json(nullptr) : found;
    }
    if ((name == "startswith" || name == "endswith") && value.is_string() && argument.is_string()) {
      const std::string &text = value.get_ref<const std::string&>(),
                        &part = argument.get_ref<const std::string&>();
      return Json(name == "startswith" ? absl::StartsWith(text, part) : absl::EndsWith(text, part));
    }
    return NotServed(absl::StrCat("\"", name, "(...)\" of ", value.type_name()));
  }
  static Json Member(const Json& value, const std::string& name) {
    if (!value.is_object()) return Undefined();
    const auto it = value.find(name);
    return it == value.end() ? Undefined() : *it;
  }
  // x[i], x["a"], x[i:j]
  absl::StatusOr<Json> Subscript(const Json& value) {
    Json from = 0, to = Undefined();
    bool slice = false;
    if (!Is(":")) {
      DT_ASSIGN_OR_RETURN(from, Choice());
    }
    if (Take(":")) {
      slice = true;
      if (!Is("]")) {
        DT_ASSIGN_OR_RETURN(to, Choice());
      }
    }
    DT_RETURN_IF_ERROR(Expect("]"));
    if (!slice && from.is_string()) return Member(value, from.get<std::string>());
    if (!from.is_number_integer() || !(to.is_discarded() || to.is_number_integer())) {
      return absl::InvalidArgumentError(absl::StrCat("an index is ", from.type_name()));
    }
    if (!value.is_array()) {
      if (slice) return NotServed(absl::StrCat("slices of ", value.type_name()));
      return Undefined();
    }
    const int64_t n = static_cast<int64_t>(value.size());
    const auto place = [&](const Json& index) {
      const int64_t i = index.get<int64_t>();
      return i < 0 ? i + n : i;
    };
    if (!slice) {
      const int64_t i = place(from);
      return i < 0 || i >= n ? Undefined() : value[static_cast<size_t>(i)];
    }
    Json part = Json::array();
    const int64_t end = to.is_discarded() ? n : std::clamp<int64_t>(place(to), 0, n);
    for (int64_t i = std::clamp<int64_t>(place(from), 0, n); i < end; ++i) {
      part.push_back(value[static_cast<size_t>(i)]);
    }
    return part;
  }
  absl::StatusOr<Json> Primary() {
    const ExpressionToken token = Now();
    if (Take("-")) {
      DT_ASSIGN_OR_RETURN(const Json value, Primary());
      return Add(Json(0), value, '-');
    }
    if (Take("(")) {
      DT_ASSIGN_OR_RETURN(Json value, Choice());
      DT_RETURN_IF_ERROR(Expect(")"));
      return value;
    }
    if (Take("[")) {
      Json list = Json::array();
      while (!Take("]")) {
        DT_ASSIGN_OR_RETURN(Json value, Choice());
        list.push_back(std::move(value));
        if (!Is("]")) DT_RETURN_IF_ERROR(Expect(","));
      }
      return list;
    }
    ++at_;
    if (token.kind == Kind::kString) return Json(token.text);
    if (token.kind == Kind::kNumber) {
      int64_t number = 0;
      if (!absl::SimpleAtoi(token.text, &number))
        return NotServed(absl::StrCat("the number ", token.text));
      return Json(number);
    }
    if (token.kind == Kind::kName) return Name(token.text);
    return token.kind == Kind::kEnd
               ? absl::Status(absl::InvalidArgumentError("an expression ends too early"))
               : NotServed(absl::StrCat("\"", token.text, "\" there"));
  }
  absl::StatusOr<Json> Name(const std::string& name) {
    if (name == "true" || name == "True") return Json(true);
    if (name == "false" || name == "False") return Json(false);
    if (name == "none" || name == "None") return Json(nullptr);
    if (!Is("(")) return Member(context_, name);
    if (name != "raise_exception") return NotServed(absl::StrCat("the function \"", name, "\""));
    ++at_;
    DT_ASSIGN_OR_RETURN(const Json message, Choice());
    return absl::InvalidArgumentError(absl::StrCat("the chat template says: ", Printed(message)));
  }

  absl::Span<const ExpressionToken> tokens_;
  const Json& context_;
  size_t at_ = 0;
  int depth_ = 0;
};

// Of a string literal that begins at `*at`.
absl::StatusOr<std::string> Literal(absl::string_view source, size_t* at) {
  const char quote = source[(*at)++];
  std::string text;
  for (; *at < source.size() && source[*at] != quote; ++*at) {
    char c = source[*at];
    if (c == '\\' && *at + 1 < source.size()) {
      c = source[++*at];
      constexpr absl::string_view from = "ntr", to = "\n\t\r";
      const size_t known = from.find(c);
      if (known != absl::string_view::npos) {
        c = to[known];
      } else if (c != '\\' && c != '\'' && c != '"') {
        return NotServed(absl::StrCat("\"\\", std::string(1, c), "\""));
      }
    }
    text.push_back(c);
  }
  if (*at == source.size()) return absl::InvalidArgumentError("a string does not end");
  ++*at;
  return text;
}

}  // namespace

absl::StatusOr<std::vector<ExpressionToken>> Tokens(absl::string_view source) {
  std::vector<ExpressionToken> tokens;
  const auto run = [&](size_t at, auto&& is) {
    size_t end = at;
    while (end < source.size() && is(source[end])) ++end;
    return std::string(source.substr(at, end - at));
  };
  const auto word = [](char c) { return absl::ascii_isalnum(static_cast<uint8_t>(c)) || c == '_'; };
  for (size_t at = 0; at < source.size();) {
    const char c = source[at];
    if (absl::ascii_isspace(static_cast<uint8_t>(c))) {
      ++at;
    } else if (c == '\'' || c == '"') {
      DT_ASSIGN_OR_RETURN(std::string text, Literal(source, &at));
      tokens.push_back({Kind::kString, std::move(text)});
    } else if (word(c)) {
      const bool number = absl::ascii_isdigit(static_cast<uint8_t>(c));
      tokens.push_back({number ? Kind::kNumber : Kind::kName, run(at, word)});
      at += tokens.back().text.size();
    } else {
      const absl::string_view two = source.substr(at, 2);
      const bool pair = two == "==" || two == "!=" || two == "<=" || two == ">=";
      if (!pair && !absl::StrContains("+-~%|.,:()[]<>=", std::string(1, c))) {
        return NotServed(absl::StrCat("\"", std::string(1, c), "\""));
      }
      tokens.push_back({Kind::kSign, std::string(pair ? two : two.substr(0, 1))});
      at += tokens.back().text.size();
    }
  }
  tokens.push_back({Kind::kEnd, "the end"});
  return tokens;
}

absl::StatusOr<Json> Evaluate(absl::Span<const ExpressionToken> tokens, const Json& context) {
  return Evaluator(tokens, context).Whole();
}

bool IsTrue(const Json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value.get<double>() != 0;
  if (value.is_string()) return !value.get_ref<const std::string&>().empty();
  return !value.is_discarded() && !value.is_null() && !value.empty();
}

std::string Printed(const Json& value) {
  if (value.is_discarded()) return "";
  if (value.is_null()) return "None";
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  if (value.is_string()) return value.get<std::string>();
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace dtensor::text

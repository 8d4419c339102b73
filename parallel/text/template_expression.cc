#include "dtensor/parallel/text/template_expression.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "dtensor/parallel/text/utf8.h"
#include "dtensor/tensor/status.h"

namespace dtensor::text {
namespace {

using Kind = ExpressionToken::Kind;
using Type = Expression::Type;
constexpr int kMostDepth = 50;

Expression Make(Type type, Expression first) {
  Expression made = {.type = type};
  made.parts.push_back(std::move(first));
  return made;
}

// Recursive descent, with the levels and the binding of Jinja's own parser.
class Parser {
 public:
  explicit Parser(absl::Span<const ExpressionToken> tokens) : tokens_(tokens) {}

  absl::StatusOr<Expression> Whole() {
    DT_ASSIGN_OR_RETURN(Expression made, Choice());
    DT_RETURN_IF_ERROR(AtEnd());
    return made;
  }
  absl::StatusOr<LoopExpression> Loop() {
    LoopExpression made = {.condition = {.value = true}};
    DT_ASSIGN_OR_RETURN(made.list, Or());
    if (Word("if")) {
      DT_ASSIGN_OR_RETURN(made.condition, Choice());
    }
    DT_RETURN_IF_ERROR(AtEnd());
    return made;
  }

 private:
  using Level = absl::StatusOr<Expression> (Parser::*)();

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
    if (Is("=")) return NotServed("arguments by name");
    return absl::InvalidArgumentError(
        absl::StrCat("\"", sign, "\" is missing before \"", Now().text, "\""));
  }
  absl::Status AtEnd() const {
    if (Now().kind == Kind::kEnd) return absl::OkStatus();
    return NotServed(absl::StrCat("\"", Now().text, "\" there"));
  }

  // Operands of the next level with `takes` between them, in one node; a single one is itself.
  template <class Takes>
  absl::StatusOr<Expression> Row(Type type, Level next, const Takes& takes) {
    DT_ASSIGN_OR_RETURN(Expression first, (this->*next)());
    std::string sign = takes();
    if (sign.empty()) return first;
    Expression row = Make(type, std::move(first));
    for (; !sign.empty(); sign = takes()) {
      row.signs.push_back(std::move(sign));
      DT_ASSIGN_OR_RETURN(Expression part, (this->*next)());
      row.parts.push_back(std::move(part));
    }
    return row;
  }
  // The sign or word that is there, if it is one of these.
  std::string TakeOneOf(absl::Span<const absl::string_view> signs, Kind kind) {
    for (const absl::string_view sign : signs) {
      if (Take(sign, kind)) return std::string(sign);
    }
    return "";
  }

  absl::StatusOr<Expression> Choice() {
    if (++depth_ > kMostDepth) {
      return absl::ResourceExhaustedError("an expression is nested too deep");
    }
    DT_ASSIGN_OR_RETURN(Expression made, Or());
    if (Word("if")) {
      made = Make(Type::kChoice, std::move(made));
      DT_ASSIGN_OR_RETURN(Expression condition, Or());
      made.parts.push_back(std::move(condition));
      if (Word("else")) {
        DT_ASSIGN_OR_RETURN(Expression other, Choice());
        made.parts.push_back(std::move(other));
      }
    }
    --depth_;
    return made;
  }
  absl::StatusOr<Expression> Or() {
    return Row(Type::kOr, &Parser::And, [&] { return TakeOneOf({"or"}, Kind::kName); });
  }
  absl::StatusOr<Expression> And() {
    return Row(Type::kAnd, &Parser::Not, [&] { return TakeOneOf({"and"}, Kind::kName); });
  }
  absl::StatusOr<Expression> Not() {
    bool any = false, negate = false;
    for (; Word("not"); any = true) negate = !negate;
    DT_ASSIGN_OR_RETURN(Expression made, Compare());
    if (!any) return made;
    made = Make(Type::kNot, std::move(made));  // twice gives a truth value, too
    return negate ? made : Make(Type::kNot, std::move(made));
  }
  absl::StatusOr<Expression> Compare() {
    return Row(Type::kCompare, &Parser::Sum, [&]() -> std::string {
      const size_t start = at_;
      const bool negate = Word("not");
      if (Word("in")) return negate ? "not in" : "in";
      at_ = start;
      return TakeOneOf({"==", "!=", "<", ">", "<=", ">="}, Kind::kSign);
    });
  }
  absl::StatusOr<Expression> Sum() {
    return Row(Type::kSum, &Parser::Join, [&] { return TakeOneOf({"+", "-"}, Kind::kSign); });
  }
  absl::StatusOr<Expression> Join() {
    return Row(Type::kJoin, &Parser::Remainder, [&] { return TakeOneOf({"~"}, Kind::kSign); });
  }
  absl::StatusOr<Expression> Remainder() {
    return Row(Type::kRemainder, &Parser::Unary, [&] { return TakeOneOf({"%"}, Kind::kSign); });
  }
  // Filters and tests are done to the negative number, members are of the positive one.
  absl::StatusOr<Expression> Unary() {
    int minus = 0;
    while (Take("-")) ++minus;
    DT_ASSIGN_OR_RETURN(Expression made, Primary());
    made = Make(Type::kSteps, std::move(made));
    DT_RETURN_IF_ERROR(Members(&made));
    if (minus > 0) {
      made = Make(Type::kMinus, std::move(made));
      if (minus % 2 == 0) made = Make(Type::kMinus, std::move(made));
      made = Make(Type::kSteps, std::move(made));
    }
    DT_RETURN_IF_ERROR(Filters(&made));
    if (made.parts.size() > 1) return made;
    Expression alone = std::move(made.parts[0]);
    return alone;
  }

  absl::Status Members(Expression* steps) {
    while (Is(".") || Is("[")) {
      DT_ASSIGN_OR_RETURN(Expression step, Take(".") ? Named(Type::kMember) : Subscript());
      steps->parts.push_back(std::move(step));
    }
    return absl::OkStatus();
  }
  absl::Status Filters(Expression* steps) {
    while (true) {
      Expression step;
      if (Take("|")) {
        DT_ASSIGN_OR_RETURN(step, Named(Type::kFilter));
      } else if (Word("is")) {
        const bool negate = Word("not");
        DT_ASSIGN_OR_RETURN(step, Named(Type::kTest));
        step.value = negate;
      } else {
        return absl::OkStatus();
      }
      steps->parts.push_back(std::move(step));
    }
  }

  // A name, with arguments in parentheses if there are any.
  absl::StatusOr<Expression> Named(Type type) {
    if (Now().kind != Kind::kName) {
      return absl::InvalidArgumentError(absl::StrCat("no name before \"", Now().text, "\""));
    }
    Expression made = {.type = type, .name = Now().text};
    ++at_;
    if (!Take("(")) return made;
    if (type == Type::kMember) made.type = Type::kMethod;
    DT_RETURN_IF_ERROR(Parts(")", &made.parts));
    if (type == Type::kTest) made.parts.push_back({});  // no test here takes any
    return made;
  }
  // Until `end`, with commas between.
  absl::Status Parts(absl::string_view end, std::vector<Expression>* parts) {
    while (!Take(end)) {
      DT_ASSIGN_OR_RETURN(Expression part, Choice());
      parts->push_back(std::move(part));
      if (Is(end)) continue;
      if (!Take(",")) return Expect(end);
    }
    return absl::OkStatus();
  }
  absl::StatusOr<Expression> Subscript() {
    DT_RETURN_IF_ERROR(Expect("["));
    Expression from, to;
    if (!Is(":")) {
      DT_ASSIGN_OR_RETURN(from, Choice());
    }
    const bool slice = Take(":");
    if (slice && !Is("]")) {
      DT_ASSIGN_OR_RETURN(to, Choice());
    }
    if (Is(":") || Is(",")) return NotServed(absl::StrCat("\"", Now().text, "\" in an index"));
    DT_RETURN_IF_ERROR(Expect("]"));
    Expression made = Make(slice ? Type::kSlice : Type::kIndex, std::move(from));
    if (slice) made.parts.push_back(std::move(to));
    return made;
  }

  absl::StatusOr<Expression> Primary() {
    const ExpressionToken token = Now();
    if (Take("(")) {
      DT_ASSIGN_OR_RETURN(Expression made, Choice());
      DT_RETURN_IF_ERROR(Expect(")"));
      return made;
    }
    if (Take("[")) {
      Expression list = {.type = Type::kList};
      DT_RETURN_IF_ERROR(Parts("]", &list.parts));
      return list;
    }
    ++at_;
    switch (token.kind) {
      case Kind::kString:
        return Expression{.value = token.text};
      case Kind::kNumber: {
        int64_t number = 0;
        if (!absl::SimpleAtoi(token.text, &number)) {
          return NotServed(absl::StrCat("the number ", token.text));
        }
        return Expression{.value = number};
      }
      case Kind::kName:
        return Name(token.text);
      case Kind::kEnd:
        return absl::InvalidArgumentError("an expression ends too early");
      default:
        return NotServed(absl::StrCat("\"", token.text, "\" there"));
    }
  }
  absl::StatusOr<Expression> Name(const std::string& name) {
    if (name == "true" || name == "True") return Expression{.value = true};
    if (name == "false" || name == "False") return Expression{.value = false};
    if (name == "none" || name == "None") return Expression{};
    Expression made = {.type = Type::kName, .name = name};
    if (!Take("(")) return made;
    made.type = Type::kCall;
    DT_RETURN_IF_ERROR(Parts(")", &made.parts));
    return made;
  }

  absl::Span<const ExpressionToken> tokens_;
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

absl::Status NotServed(absl::string_view what) {
  return absl::UnimplementedError(absl::StrCat("chat templates with ", what, " are not served"));
}

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
    if (const size_t spaces = LeadingSpace(source.substr(at)); spaces > 0) {
      at += spaces;
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

absl::StatusOr<Expression> ParseExpression(absl::Span<const ExpressionToken> tokens) {
  return Parser(tokens).Whole();
}

absl::StatusOr<LoopExpression> ParseLoop(absl::Span<const ExpressionToken> tokens) {
  return Parser(tokens).Loop();
}

}  // namespace dtensor::text

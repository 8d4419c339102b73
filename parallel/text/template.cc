#include "dtensor/parallel/text/template.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "dtensor/parallel/text/template_expression.h"
#include "dtensor/parallel/text/template_value.h"
#include "dtensor/parallel/text/utf8.h"
#include "dtensor/tensor/status.h"

namespace dtensor::text {

using Kind = ExpressionToken::Kind;

struct Template::Node {
  enum class Type { kList, kText, kPrint, kIf, kFor, kSet, kRefused };
  Type type = Type::kList;
  std::string name = {};  // kText: the text; kFor, kSet: the variable; kRefused: what it is
  // kPrint, kSet; kIf: the condition; kFor: the list and its condition. What is wrong with it is
  // said where it is come to.
  absl::StatusOr<LoopExpression> expression = LoopExpression();
  std::vector<Node> children = {};   // kIf, kFor: what is done; kList
  std::vector<Node> otherwise = {};  // kIf, kFor
};

namespace {

using Node = Template::Node;
constexpr int kMostNesting = 50;

// A piece of the source: text, {{ }} or {% %}.
struct TemplatePart {
  char type = 't';  // '{', '%'
  std::string text;
};

// Where a part begins: the first "{{", "{%" or "{#"; the end where there is none.
size_t Opening(absl::string_view source) {
  size_t open = 0;
  while (open < source.size() && !(source[open] == '{' && open + 1 < source.size() &&
                                   absl::StrContains("{%#", source.substr(open + 1, 1)))) {
    ++open;
  }
  return open;
}

// Where the part at the start of `source` closes; the end must not be one inside a string.
absl::StatusOr<size_t> Closing(absl::string_view source) {
  const char type = source[1];
  const absl::string_view close = type == '{' ? "}}" : type == '%' ? "%}" : "#}";
  char quote = 0;
  for (size_t end = 2; end + 1 < source.size(); ++end) {
    const char c = source[end];
    if (quote != 0) {
      if (c == '\\') {
        ++end;
      } else if (c == quote) {
        quote = 0;
      }
    } else if (type != '#' && (c == '\'' || c == '"')) {
      quote = c;
    } else if (source.substr(end, 2) == close) {
      return end;
    }
  }
  return absl::InvalidArgumentError(absl::StrCat("\"{", std::string(1, type), "\" is not closed"));
}

// Blanks at the end of a text, if they are all of its last line.
void EraseBlanks(bool line_start, std::string* text) {
  const size_t line = text->rfind('\n') + 1;  // 0 where there is none
  if (line == 0 && !line_start) return;
  if (LeadingSpace(absl::string_view(*text).substr(line)) == text->size() - line) text->erase(line);
}

// Cuts the source; comments vanish. Blocks and comments take along the blanks before them on their
// line and the line break behind them; a minus takes all white space on its side, a plus nothing.
absl::StatusOr<std::vector<TemplatePart>> SplitSource(absl::string_view source) {
  std::vector<TemplatePart> parts;
  absl::ConsumeSuffix(&source, "\n");
  bool strip = false, eat_newline = false;
  while (!source.empty()) {
    const size_t open = Opening(source);
    std::string text(source.substr(0, open));
    if (strip) text.erase(0, LeadingSpace(text));
    bool line_start = parts.empty();
    if (!strip && eat_newline && absl::StartsWith(text, "\n")) {
      text.erase(0, 1);
      line_start = true;
    }
    source.remove_prefix(open);
    if (source.empty()) {
      parts.push_back({'t', text});
      break;
    }
    const char type = source[1];
    DT_ASSIGN_OR_RETURN(const size_t end, Closing(source));
    absl::string_view inner = source.substr(2, end - 2);
    source.remove_prefix(end + 2);
    const bool strip_before = absl::ConsumePrefix(&inner, "-");
    const bool keep_before = !strip_before && absl::ConsumePrefix(&inner, "+");
    strip = absl::ConsumeSuffix(&inner, "-");
    // Of {{ }} it is an operator without an operand.
    eat_newline = type != '{' && !absl::ConsumeSuffix(&inner, "+");
    if (strip_before) {
      text.erase(text.size() - TrailingSpace(text));
    } else if (type != '{' && !keep_before) {
      EraseBlanks(line_start, &text);
    }
    parts.push_back({'t', text});
    if (type != '#') parts.push_back({type, std::string(inner)});
  }
  return parts;
}

// The first words of a block.
std::string Text(const std::vector<ExpressionToken>& tokens) {
  std::string text = tokens[0].text;
  for (size_t i = 1; i + 1 < std::min<size_t>(tokens.size(), 6); ++i) {
    absl::StrAppend(&text, " ", tokens[i].text);
  }
  return text;
}
absl::Status Refused(const std::string& block) {
  return absl::UnimplementedError(
      absl::StrCat("chat templates with {% ", block, " %} are not served"));
}

class TemplateParser {
 public:
  explicit TemplateParser(std::vector<TemplatePart> parts) : parts_(std::move(parts)) {}

  // Until a block whose first word is one of `ends`; which one, and the rest of it, are left in
  // `end`. No ends: until the end of the source.
  absl::Status List(const std::vector<std::string>& ends, std::vector<ExpressionToken>* end,
                    std::vector<Node>* list) {
    if (++depth_ > kMostNesting) {
      return absl::ResourceExhaustedError("the chat template is nested too deep");
    }
    while (at_ < parts_.size()) {
      const TemplatePart& part = parts_[at_++];
      if (part.type == 't') {
        if (!part.text.empty()) list->push_back({Node::Type::kText, part.text});
        continue;
      }
      absl::StatusOr<std::vector<ExpressionToken>> read = Tokens(part.text);
      if (part.type == '{') {
        list->push_back({Node::Type::kPrint, "", read.ok() ? One(*read) : read.status()});
        continue;
      }
      DT_RETURN_IF_ERROR(read.status());
      std::vector<ExpressionToken> tokens = *std::move(read);
      if (std::find(ends.begin(), ends.end(), tokens[0].text) != ends.end()) {
        *end = std::move(tokens);
        --depth_;
        return CheckAlone(*end);
      }
      DT_RETURN_IF_ERROR(Block(std::move(tokens), list));
    }
    --depth_;
    if (ends.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("\"", ends.back(), "\" is missing"));
  }

 private:
  static absl::Span<const ExpressionToken> From(const std::vector<ExpressionToken>& tokens,
                                                size_t at) {
    return absl::MakeConstSpan(tokens).subspan(std::min(at, tokens.size() - 1));
  }
  static absl::StatusOr<LoopExpression> One(absl::Span<const ExpressionToken> tokens) {
    DT_ASSIGN_OR_RETURN(Expression made, ParseExpression(tokens));
    return LoopExpression{.list = std::move(made)};
  }

  // Only elif has something behind it; Jinja lets a colon pass after else.
  static absl::Status CheckAlone(const std::vector<ExpressionToken>& tokens) {
    const std::string& word = tokens[0].text;
    const size_t words = word == "else" && tokens[1].text == ":" ? 2 : 1;
    if (word == "elif" || tokens.size() == words + 1) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("\"", word, "\" is followed by \"", tokens[words].text, "\""));
  }

  absl::Status Block(const std::vector<ExpressionToken>& tokens, std::vector<Node>* list) {
    const std::string word = tokens[0].text;
    std::vector<ExpressionToken> end;
    if (word == "if") {
      DT_ASSIGN_OR_RETURN(Node node, If(From(tokens, 1)));
      list->push_back(std::move(node));
      return absl::OkStatus();
    }
    const bool names = tokens.size() > 4 && tokens[1].kind == Kind::kName;
    if (word == "for") {
      const bool one = names && tokens[2].text == "in";
      // Over pairs: an error where it is come to.
      Node node = one ? Node{Node::Type::kFor, tokens[1].text, ParseLoop(From(tokens, 3))}
                      : Node{Node::Type::kRefused, Text(tokens)};
      DT_RETURN_IF_ERROR(List({"else", "endfor"}, &end, &node.children));
      if (end[0].text == "else") DT_RETURN_IF_ERROR(List({"endfor"}, &end, &node.otherwise));
      list->push_back(std::move(node));
      return absl::OkStatus();
    }
    if (word == "set" && names && tokens[2].text == "=" && tokens[1].text != "loop") {
      list->push_back({Node::Type::kSet, tokens[1].text, One(From(tokens, 3))});
      return absl::OkStatus();
    }
    // Marks what is trained on; says nothing here.
    if (word == "generation") return List({"endgeneration"}, &end, list);
    return Refused(Text(tokens));
  }

  absl::StatusOr<Node> If(absl::Span<const ExpressionToken> condition) {
    Node node{Node::Type::kIf, "", One(condition)};
    std::vector<ExpressionToken> end;
    DT_RETURN_IF_ERROR(List({"elif", "else", "endif"}, &end, &node.children));
    if (end[0].text == "elif") {
      if (++depth_ > kMostNesting) {
        return absl::ResourceExhaustedError("the chat template is nested too deep");
      }
      DT_ASSIGN_OR_RETURN(Node other, If(From(end, 1)));
      --depth_;
      node.otherwise.push_back(std::move(other));
    } else if (end[0].text == "else") {
      DT_RETURN_IF_ERROR(List({"endif"}, &end, &node.otherwise));
    }
    return node;
  }

  std::vector<TemplatePart> parts_;
  size_t at_ = 0;
  int depth_ = 0;
};

class Renderer {
 public:
  explicit Renderer(const Json& context) : evaluator_(context) {}
  std::string Take() && { return std::move(out_); }

  absl::Status Run(const std::vector<Node>& nodes) {
    for (const Node& node : nodes) DT_RETURN_IF_ERROR(RunOne(node));
    return absl::OkStatus();
  }

 private:
  absl::Status Print(const std::string& text) {
    out_ += text;
    return evaluator_.Spend(text.size());
  }

  absl::Status RunOne(const Node& node) {
    if (node.type == Node::Type::kText) return Print(node.name);
    if (node.type == Node::Type::kRefused) return Refused(node.name);
    DT_RETURN_IF_ERROR(node.expression.status());
    DT_ASSIGN_OR_RETURN(Value value, evaluator_.Evaluate(node.expression->list));
    switch (node.type) {
      case Node::Type::kPrint: {
        DT_ASSIGN_OR_RETURN(const std::string text, Printed(*value));
        return Print(text);
      }
      case Node::Type::kSet:
        // An own value: what it was taken from may end or change before it does.
        evaluator_.scopes().back().names[node.name] = Value(std::move(value).Take());
        return absl::OkStatus();
      case Node::Type::kIf:
        return Run(IsTrue(*value) ? node.children : node.otherwise);
      default:
        return For(node, *value);
    }
  }

  // Which items a loop goes over: those for which its condition holds.
  absl::StatusOr<std::vector<const Json*>> ItemsOf(const Node& node, const Json& list) {
    std::vector<const Json*> items;
    if (list.is_discarded()) return items;
    if (!list.is_array()) {
      // Python goes over the characters of a text, and over the keys of a mapping in their order.
      if (list.is_string() || list.is_object()) {
        return NotServed(
            absl::StrCat("\"for ", node.name, "\" over a ", list.is_string() ? "text" : "mapping"));
      }
      return absl::InvalidArgumentError(
          absl::StrCat("\"for ", node.name, "\" goes over ", list.type_name(), ", not a list"));
    }
    DT_RETURN_IF_ERROR(evaluator_.Spend(list.size() * sizeof(&list)));
    const Expression& condition = node.expression->condition;
    const bool all = condition.type == Expression::Type::kLiteral && IsTrue(condition.value);
    for (const Json& item : list) {
      if (all) {
        items.push_back(&item);
        continue;
      }
      evaluator_.scopes().emplace_back().names[node.name] = Value::Of(item);
      const absl::StatusOr<Value> taken = evaluator_.Evaluate(condition);
      evaluator_.scopes().pop_back();
      DT_RETURN_IF_ERROR(taken.status());
      if (IsTrue(**taken)) items.push_back(&item);
    }
    return items;
  }

  // Names that are set inside end with each turn, and with "else".
  absl::Status For(const Node& node, const Json& list) {
    DT_ASSIGN_OR_RETURN(std::vector<const Json*> items, ItemsOf(node, list));
    const size_t count = items.size();
    Scope& scope = evaluator_.scopes().emplace_back();
    absl::Status status;
    if (count == 0) {
      status = Run(node.otherwise);
    } else {
      scope.loop = Loop{.items = std::move(items)};
    }
    for (size_t i = 0; i < count && status.ok(); ++i) {
      scope.names.clear();
      scope.loop->index = i;
      scope.names[node.name] = Value::Of(*scope.loop->items[i]);
      status = evaluator_.Spend(0);
      if (status.ok()) status = Run(node.children);
    }
    evaluator_.scopes().pop_back();
    return status;
  }

  Evaluator evaluator_;
  std::string out_;
};

}  // namespace

absl::StatusOr<Template> Template::Parse(absl::string_view source) {
  // Jinja knows one kind of line break.
  const std::string lines = absl::StrReplaceAll(source, {{"\r\n", "\n"}, {"\r", "\n"}});
  DT_ASSIGN_OR_RETURN(std::vector<TemplatePart> parts, SplitSource(lines));
  auto root = std::make_shared<Node>();
  std::vector<ExpressionToken> end;
  DT_RETURN_IF_ERROR(TemplateParser(std::move(parts)).List({}, &end, &root->children));
  Template made;
  made.root_ = std::move(root);
  return made;
}

absl::StatusOr<std::string> Template::Render(const Json& context) const {
  Renderer renderer(context);
  DT_RETURN_IF_ERROR(renderer.Run(root_->children));
  return std::move(renderer).Take();
}

}  // namespace dtensor::text

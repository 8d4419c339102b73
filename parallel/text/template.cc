#include "dtensor/parallel/text/template.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "dtensor/parallel/text/template_expression.h"
#include "dtensor/tensor/status.h"

namespace dtensor::text {

using Kind = ExpressionToken::Kind;

struct Template::Node {
  enum class Type { kList, kText, kPrint, kIf, kFor, kSet, kRefused };
  Type type = Type::kList;
  std::string name;  // kText: the text; kFor, kSet: the variable; kRefused: what it is
  std::vector<ExpressionToken> expression;  // kPrint, kFor, kSet; kIf: the condition
  std::vector<Node> children;               // kIf, kFor: what is done; kList
  std::vector<Node> otherwise;              // kIf
};

namespace {

using Node = Template::Node;
constexpr int64_t kMostSteps = 1'000'000, kMostBytes = int64_t{1} << 26;
constexpr int kMostDepth = 50;

// A piece of the source: text, {{ }} or {% %}.
struct Part {
  char type = 't';  // '{', '%'
  std::string text;
};

// Cuts the source; comments vanish. Blocks and comments take along the blanks before them on their
// line and the line break behind them; a minus takes all white space on its side.
absl::StatusOr<std::vector<Part>> Cut(absl::string_view source) {
  std::vector<Part> parts;
  absl::ConsumeSuffix(&source, "\n");
  bool strip = false, eat_newline = false;
  while (!source.empty()) {
    size_t open = 0;
    while (open < source.size() && !(source[open] == '{' && open + 1 < source.size() &&
                                     absl::StrContains("{%#", source.substr(open + 1, 1)))) {
      ++open;
    }
    std::string text(source.substr(0, open));
    if (strip) text = std::string(absl::StripLeadingAsciiWhitespace(text));
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
    const std::string close = type == '{' ? "}}" : type == '%' ? "%}" : "#}";
    // The end must not be one inside a string.
    size_t end = 2;
    char quote = 0;
    for (; end + 1 < source.size(); ++end) {
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
        break;
      }
    }
    if (end + 1 >= source.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"{", std::string(1, type), "\" is not closed"));
    }
    absl::string_view inner = source.substr(2, end - 2);
    source.remove_prefix(end + 2);
    const bool strip_before = absl::ConsumePrefix(&inner, "-");
    const bool keep_before = !strip_before && absl::ConsumePrefix(&inner, "+");
    strip = absl::ConsumeSuffix(&inner, "-");
    eat_newline = type != '{';
    if (strip_before) {
      text = std::string(absl::StripTrailingAsciiWhitespace(text));
    } else if (type != '{' && !keep_before) {
      size_t blanks = text.size();
      while (blanks > 0 && (text[blanks - 1] == ' ' || text[blanks - 1] == '\t')) --blanks;
      if (blanks == 0 ? line_start : text[blanks - 1] == '\n') text.erase(blanks);
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

class Parser {
 public:
  explicit Parser(std::vector<Part> parts) : parts_(std::move(parts)) {}

  // Until a block whose first word is one of `ends`; which one, and the rest of it, are left in
  // `end`. No ends: until the end of the source.
  absl::Status List(const std::vector<std::string>& ends, std::vector<ExpressionToken>* end,
                    std::vector<Node>* list) {
    if (++depth_ > kMostDepth) {
      return absl::ResourceExhaustedError("the chat template is nested too deep");
    }
    while (at_ < parts_.size()) {
      const Part& part = parts_[at_++];
      if (part.type == 't') {
        if (!part.text.empty()) list->push_back({Node::Type::kText, part.text, {}, {}, {}});
        continue;
      }
      DT_ASSIGN_OR_RETURN(std::vector<ExpressionToken> tokens, Tokens(part.text));
      if (part.type == '{') {
        list->push_back({Node::Type::kPrint, "", std::move(tokens), {}, {}});
        continue;
      }
      if (std::find(ends.begin(), ends.end(), tokens[0].text) != ends.end()) {
        *end = std::move(tokens);
        --depth_;
        return absl::OkStatus();
      }
      DT_RETURN_IF_ERROR(Block(std::move(tokens), list));
    }
    --depth_;
    if (ends.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("\"", ends.back(), "\" is missing"));
  }

 private:
  static std::vector<ExpressionToken> From(const std::vector<ExpressionToken>& tokens, size_t at) {
    return {tokens.begin() + static_cast<int64_t>(std::min(at, tokens.size() - 1)), tokens.end()};
  }

  absl::Status Block(std::vector<ExpressionToken> tokens, std::vector<Node>* list) {
    const std::string word = tokens[0].text;
    std::vector<ExpressionToken> end;
    if (word == "if") {
      DT_ASSIGN_OR_RETURN(Node node, If(From(tokens, 1)));
      list->push_back(std::move(node));
      return absl::OkStatus();
    }
    if (word == "for" && tokens.size() > 4 && tokens[1].kind == Kind::kName &&
        tokens[2].text == "in") {
      Node node{Node::Type::kFor, tokens[1].text, From(tokens, 3), {}, {}};
      DT_RETURN_IF_ERROR(List({"endfor"}, &end, &node.children));
      list->push_back(std::move(node));
      return absl::OkStatus();
    }
    if (word == "set" && tokens.size() > 4 && tokens[1].kind == Kind::kName &&
        tokens[2].text == "=") {
      list->push_back({Node::Type::kSet, tokens[1].text, From(tokens, 3), {}, {}});
      return absl::OkStatus();
    }
    if (word == "for") {  // over pairs: an error where it is come to
      std::vector<Node> inside;
      DT_RETURN_IF_ERROR(List({"endfor"}, &end, &inside));
      list->push_back({Node::Type::kRefused, Text(tokens), {}, {}, {}});
      return absl::OkStatus();
    }
    // Marks what is trained on; says nothing here.
    if (word == "generation") return List({"endgeneration"}, &end, list);
    return Refused(Text(tokens));
  }

  absl::StatusOr<Node> If(std::vector<ExpressionToken> condition) {
    Node node{Node::Type::kIf, "", std::move(condition), {}, {}};
    std::vector<ExpressionToken> end;
    DT_RETURN_IF_ERROR(List({"elif", "else", "endif"}, &end, &node.children));
    if (end[0].text == "elif") {
      if (++depth_ > kMostDepth) {
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

  std::vector<Part> parts_;
  size_t at_ = 0;
  int depth_ = 0;
};

struct Renderer {
  std::string out;
  int64_t steps = 0;

  absl::Status Run(const std::vector<Node>& nodes, Json& context) {
    for (const Node& node : nodes) {
      if (++steps > kMostSteps || static_cast<int64_t>(out.size()) > kMostBytes) {
        return absl::ResourceExhaustedError("the chat template does too much");
      }
      DT_RETURN_IF_ERROR(RunOne(node, context));
    }
    return absl::OkStatus();
  }

  absl::Status RunOne(const Node& node, Json& context) {
    if (node.type == Node::Type::kText) {
      out += node.name;
      return absl::OkStatus();
    }
    if (node.type == Node::Type::kRefused) return Refused(node.name);
    DT_ASSIGN_OR_RETURN(Json value, Evaluate(node.expression, context));
    switch (node.type) {
      case Node::Type::kPrint:
        out += Printed(value);
        return absl::OkStatus();
      case Node::Type::kSet:
        context[node.name] = std::move(value);
        return absl::OkStatus();
      case Node::Type::kIf:
        return Run(IsTrue(value) ? node.children : node.otherwise, context);
      default:
        return For(node, value, context);
    }
  }

  // Names that are set inside end with each turn.
  absl::Status For(const Node& node, const Json& list, const Json& context) {
    if (!list.is_array()) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"for ", node.name, "\" goes over ", list.type_name(), ", not a list"));
    }
    const size_t n = list.size();
    for (size_t i = 0; i < n; ++i) {
      Json inner = context;
      inner[node.name] = list[i];
      inner["loop"] = {
          {"first", i == 0}, {"last", i + 1 == n}, {"index", i + 1}, {"index0", i}, {"length", n}};
      DT_RETURN_IF_ERROR(Run(node.children, inner));
    }
    return absl::OkStatus();
  }
};

}  // namespace

absl::StatusOr<Template> Template::Parse(absl::string_view source) {
  DT_ASSIGN_OR_RETURN(std::vector<Part> parts, Cut(source));
  auto root = std::make_shared<Node>();
  std::vector<ExpressionToken> end;
  DT_RETURN_IF_ERROR(Parser(std::move(parts)).List({}, &end, &root->children));
  Template made;
  made.root_ = std::move(root);
  return made;
}

absl::StatusOr<std::string> Template::Render(const Json& context) const {
  Renderer renderer;
  Json own = context;
  DT_RETURN_IF_ERROR(renderer.Run(root_->children, own));
  return std::move(renderer.out);
}

}  // namespace dtensor::text

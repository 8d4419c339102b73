// Test support: the functions that headers of this project declare and that take tensors, read from
// their text. It knows what our headers are written with, no more of C++.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "tests/common/pattern.h"

namespace dtensor::testing {

inline bool IsWord(char c) { return absl::ascii_isalnum(c) || c == '_'; }

// The words of `code`, as they stand between other characters.
inline std::vector<std::string> Words(const std::string& code) {
  std::vector<std::string> words;
  bool in_word = false;
  for (const char c : code) {
    if (!IsWord(c) || !in_word) words.emplace_back();
    words.back() += c;
    in_word = IsWord(c);
  }
  return words;
}

// The text of a header as a compiler sees it, that of the headers that it includes before it: each
// once, the project's alone. Macros are expanded, so functions that they declare are there. String
// literals and comments are empty.
class Preprocessor {
 public:
  explicit Preprocessor(std::string root) : root_(std::move(root)) {}
  std::string text;
  std::set<std::string> headers;  // the paths of those read

  // "dtensor/ops/ops.h" is ops/ops.h, "dtensor/op.h" the engine's.
  std::string PathOf(const std::string& included) const {
    const std::string of_folder = root_ + included.substr(std::string("dtensor/").size());
    return std::filesystem::exists(of_folder) ? of_folder : root_ + included;
  }

  void Include(const std::string& path) {
    const bool once = absl::EndsWith(path, ".h");
    if (once && !headers.insert(path).second) return;
    std::ifstream file(path);
    ASSERT_TRUE(file) << path;
    std::string line, chunk, next;
    while (std::getline(file, line)) {
      while (absl::EndsWith(line, "\\") && std::getline(file, next)) {
        line.pop_back();
        absl::StrAppend(&line, " ", next);
      }
      absl::StripLeadingAsciiWhitespace(&line);
      if (!absl::StartsWith(line, "#")) {
        if (Taken()) absl::StrAppend(&chunk, Bare(line), "\n");
        continue;
      }
      text += Expand(chunk);
      chunk.clear();
      Directive(line);
    }
    text += Expand(chunk);
  }

 private:
  struct Macro {
    bool takes;  // arguments
    std::vector<std::string> parameters;
    std::string body;
  };
  const std::string root_;
  std::map<std::string, Macro> macros_;
  struct Branch {
    bool known, taken;
  };
  std::vector<Branch> branches_;
  bool Taken() const {
    return std::all_of(branches_.begin(), branches_.end(), [](Branch b) { return b.taken; });
  }

  static std::string Bare(const std::string& line) {
    std::string out;
    char quote = 0;
    for (size_t i = 0; i < line.size(); ++i) {
      if (quote != 0) {
        i += line[i] == '\\';
        if (i < line.size() && line[i] == quote) out += std::exchange(quote, 0);
      } else if (line.compare(i, 2, "//") == 0) {
        break;
      } else {
        // 1'000 is a number.
        const bool digits = line[i] == '\'' && i > 0 && absl::ascii_isxdigit(line[i - 1]);
        if (line[i] == '"' || (line[i] == '\'' && !digits)) quote = line[i];
        out += line[i];
      }
    }
    return out;
  }

  void Directive(const std::string& line) {
    // A branch for what is (not) defined here; of other conditions all branches.
    if (const auto m = FirstMatch(line, "^#\\s*if(n?)(def (\\w+))?"); !m.empty()) {
      const bool known = !m[3].empty();
      branches_.push_back({known, !known || macros_.contains(m[3]) == m[1].empty()});
    } else if (FirstMatch(line, "^#\\s*endif\\b").size() == 1) {
      branches_.pop_back();
    } else if (FirstMatch(line, "^#\\s*else\\b").size() == 1) {
      branches_.back().taken = !branches_.back().known || !branches_.back().taken;
    }
    if (!Taken()) return;
    if (const auto m = FirstMatch(line, "^#include \"(dtensor/[^\"]+)\""); !m.empty()) {
      Include(PathOf(m[1]));
    }
    if (const auto m = FirstMatch(line, "^#\\s*undef (\\w+)"); !m.empty()) macros_.erase(m[1]);
    const auto m = FirstMatch(line, "^#\\s*define (\\w+)(\\(([^)]*)\\))?(.*)$");
    if (m.empty()) return;
    std::vector<std::string> parameters = absl::StrSplit(m[3], ',', absl::SkipWhitespace());
    for (std::string& parameter : parameters) absl::StripAsciiWhitespace(&parameter);
    macros_[m[1]] = {!m[2].empty(), std::move(parameters), Bare(m[4])};
  }

  static std::string Filled(const Macro& macro, const std::vector<std::string>& arguments) {
    std::map<std::string, std::string> of;
    for (size_t i = 0; i < macro.parameters.size(); ++i) {
      const bool rest = macro.parameters[i] == "...";
      of[rest ? "__VA_ARGS__" : macro.parameters[i]] =
          rest ? absl::StrJoin(arguments.begin() + std::min(i, arguments.size()), arguments.end(),
                               ",")
          : i < arguments.size() ? arguments[i]
                                 : "";
    }
    std::string out;
    for (const std::string& word : Words(macro.body)) {
      const auto at = of.find(word);
      out += at == of.end() ? word : at->second;
    }
    return Replaced(out, "\\s*##\\s*", "");
  }

  std::string Expand(const std::string& code, int depth = 0) {
    EXPECT_LT(depth, 20) << code;
    const std::vector<std::string> words = Words(code);
    std::string out;
    for (size_t i = 0; i < words.size(); ++i) {
      const auto at = macros_.find(words[i]);
      const size_t open = i + 1;
      const bool called = open < words.size() && words[open] == "(";
      if (at == macros_.end() || (at->second.takes && !called)) {
        out += words[i];
        continue;
      }
      std::vector<std::string> arguments;
      if (at->second.takes) {
        int depth_of = 0;
        for (i = open; i < words.size(); ++i) {
          depth_of += words[i] == "(";
          depth_of -= words[i] == ")";
          if (depth_of == 0) break;
          if (arguments.empty() || (depth_of == 1 && words[i] == ",")) {
            arguments.emplace_back();
          } else {
            arguments.back() += words[i];
          }
        }
      }
      out += Expand(Filled(at->second, arguments), depth + 1);
    }
    return out;
  }
};

// Split at commas outside of brackets.
inline std::vector<std::string> Split(const std::string& list) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (const char c : list) {
    depth += std::string("(<[{").find(c) != std::string::npos;
    depth -= std::string(")>]}").find(c) != std::string::npos;
    if (c == ',' && depth == 0) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

// Parameters without names and defaults.
inline std::vector<std::string> Types(const std::string& parameters) {
  std::vector<std::string> types = Split(parameters);
  for (std::string& type : types) {
    type = Replaced(type, "\\s*=.*$", "");
    absl::StripAsciiWhitespace(&type);
    if (type.find(' ') != type.rfind(' ') || !absl::StartsWith(type, "const ")) {
      type = Replaced(type, "([\\w>&*])\\s+\\w+$", "$1");
    }
  }
  return types;
}

// "public: DTensor add(...)" -> "DTensor add(...)"; the label says whether it can be called.
inline void TakeAccess(std::string* text, bool* is_public) {
  constexpr const char* kLabel = "^(public|private|protected)\\s*:\\s*";
  for (auto m = FirstMatch(*text, kLabel); !m.empty(); m = FirstMatch(*text, kLabel)) {
    *is_public = m[1] == "public";
    text->erase(0, m[0].size());
  }
}

struct Function {
  std::string name;  // "sum", "DTensor::local"
  std::vector<std::string> types;
  bool returns_status;  // or a StatusOr
  std::string Signature() const { return absl::StrCat(name, "(", absl::StrJoin(types, ", "), ")"); }
};
struct Declarations {
  std::vector<Function> functions;
  // What the name of an alias, or of a type with public fields, stands for.
  std::multimap<std::string, std::string> holds;
};

// A scanner that knows braces, classes and access labels: enough for our headers.
class Scanner {
 public:
  Declarations found;

  void Scan(const std::string& code) {
    std::string text;
    int parens = 0;
    for (const char c : code) {
      parens += c == '(';
      parens -= c == ')';
      if (parens != 0 || (c != '{' && c != ';' && c != '}')) {
        text += c;
        continue;
      }
      Piece(Compact(text), c);
      text.clear();
    }
    EXPECT_TRUE(scopes_.empty() && parens == 0) << "braces that do not match";
  }

 private:
  struct Scope {
    std::string owner;
    bool callable;
    bool hidden;  // in what nobody can call, whatever its labels say
    bool body;
  };
  std::vector<Scope> scopes_;

  static std::string Compact(const std::string& text) {
    return absl::StrJoin(absl::StrSplit(text, absl::ByAnyChar(" \n\t"), absl::SkipEmpty()), " ");
  }

  // Text up to a brace or a semicolon.
  void Piece(std::string text, char end) {
    constexpr const char* kType =
        "^(template\\s*<[^>]*>\\s*)?(class|struct)\\s+(\\[\\[\\w+\\]\\]\\s*)?(\\w+)([^(]*)$";
    const bool inside = !scopes_.empty() && scopes_.back().body;
    if (inside) {  // of a function: nobody calls what is there
      if (end == '{') scopes_.push_back(scopes_.back());
      if (end == '}') scopes_.pop_back();
      return;
    }
    bool callable = scopes_.empty() || scopes_.back().callable;
    TakeAccess(&text, &callable);
    if (!scopes_.empty()) callable = scopes_.back().callable = callable && !scopes_.back().hidden;
    const std::string owner = scopes_.empty() ? "" : scopes_.back().owner;
    const std::vector<std::string> m = FirstMatch(text, kType);
    const bool defines = !m.empty();
    if (callable && !defines) Declaration(owner, text);
    if (callable && defines) found.holds.emplace(m[4], m[5]);
    if (end == '{') {
      const bool space = !FirstMatch(text, "^(inline )?namespace").empty();
      const bool hidden = !callable || (space && absl::StrContains(text, "internal"));
      scopes_.push_back({defines ? m[4] : owner, !hidden && (!defines || m[2] == "struct"), hidden,
                         !space && !defines});
    }
    if (end == '}' && !scopes_.empty()) scopes_.pop_back();
  }

  void Declaration(const std::string& owner, const std::string& text) {
    constexpr const char* kFunction =
        "(operator\\s*(?:\\(\\)|[^\\s(]+)|[~\\w]+)\\s*\\((.*)\\)[^)]*$";
    constexpr const char* kInitializers = "\\)( noexcept)? : .*$";
    constexpr const char* kAlias = "^(?:template\\s*<[^>]*>\\s*)?using (\\w+) = (.*)$";
    if (const auto alias = FirstMatch(text, kAlias); !alias.empty()) {
      found.holds.emplace(alias[1], WithoutCallbacks(alias[2]));
      return;
    }
    if (absl::StartsWith(text, "using ") || absl::StartsWith(text, "friend class")) return;
    const bool field = absl::EndsWith(text, "=") || WithoutCallbacks(text).find('(') == text.npos;
    if (field && !owner.empty()) found.holds.emplace(owner, WithoutCallbacks(text));
    if (field) return;
    const std::string plain = Replaced(text, kInitializers, ")");
    const std::vector<std::string> m = FirstMatch(plain, kFunction);
    if (m.empty()) return;
    const std::string before = plain.substr(0, plain.size() - m[0].size());
    found.functions.push_back({absl::StrCat(owner, owner.empty() ? "" : "::", m[1]), Types(m[2]),
                               absl::StrContains(before, "absl::Status")});
  }

 public:
  // A function that is given holds no tensors: what it is called with is checked where it comes
  // from.
  static std::string WithoutCallbacks(const std::string& type) {
    std::string out = type;
    for (const char* of : {"std::function<", "absl::FunctionRef<"}) {
      for (size_t at; (at = out.find(of)) != std::string::npos;) {
        size_t end = out.find('<', at);
        int depth = 0;
        for (; end < out.size(); ++end) {
          depth += out[end] == '<';
          depth -= out[end] == '>';
          if (depth == 0) break;
        }
        out.replace(at, std::min(end + 1, out.size()) - at, "callback");
      }
    }
    return Replaced(out, "\\w+ \\(\\*\\)\\([^)]*\\)", "callback");  // a pointer to one
  }
};

// Of the project in `root_folder` ("/...", with a slash at its end): what a user's program can
// include, the umbrella and what examples include besides (models, Generate, the judge of ops).
inline Declarations PublicDeclarations(const std::string& root_folder) {
  std::set<std::string> roots = {"dtensor/dtensor.h"};
  for (const auto& entry : std::filesystem::directory_iterator(root_folder + "examples")) {
    if (entry.path().extension() != ".cc") continue;
    std::ifstream file(entry.path());
    for (std::string line; std::getline(file, line);) {
      const auto m = FirstMatch(line, "^#include [\"<](dtensor/[^\">]+)[\">]");
      if (!m.empty()) roots.insert(m[1]);
    }
  }
  Preprocessor text(root_folder);
  for (const std::string& root : roots) text.Include(text.PathOf(root));
  EXPECT_GT(text.headers.size(), 120u);  // those that they include were read
  Scanner scanner;
  scanner.Scan(text.text);
  return scanner.found;
}

inline bool Mentions(const std::string& type, const std::set<std::string>& names) {
  const std::vector<std::string> words = Words(type);
  return std::any_of(words.begin(), words.end(),
                     [&](const std::string& word) { return names.contains(word); });
}

// Types that a tensor comes in: DTensor, aliases and types with public fields, or bases, of such.
inline std::set<std::string> TensorTypes(const Declarations& all) {
  std::set<std::string> types = {"DTensor"};
  for (size_t before = 0; before != types.size();) {
    before = types.size();
    for (const auto& [name, held] : all.holds) {
      if (Mentions(held, types)) types.insert(name);
    }
  }
  return types;
}

// The functions that take a tensor or belong to one, by signature; of each how many parameters
// bring one.
struct TensorFunction {
  std::string name;
  int64_t tensors = 0;
  bool returns_status = false;
};
inline std::map<std::string, TensorFunction> TensorFunctions(const Declarations& all) {
  const std::set<std::string> types = TensorTypes(all);
  std::map<std::string, TensorFunction> found;
  for (const Function& function : all.functions) {
    const int64_t tensors = std::count_if(
        function.types.begin(), function.types.end(),
        [&](const std::string& type) { return Mentions(Scanner::WithoutCallbacks(type), types); });
    const size_t of = function.name.find("::");
    const std::string owner = of == std::string::npos ? "" : function.name.substr(0, of);
    const bool makes = function.name == absl::StrCat(owner, "::", owner);
    const bool own = types.contains(owner) && !makes;
    if (tensors == 0 && !own) continue;
    found[function.Signature()] = {function.name, tensors + own, function.returns_status};
  }
  return found;
}

}  // namespace dtensor::testing

#include "dtensor/parallel/text/oniguruma.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "dtensor/parallel/text/utf8.h"
#include "dtensor/tensor/status.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace dtensor::text {
namespace {

constexpr int kMostPatternDepth = 100;

// A set of characters, as what stands between PCRE2's brackets.
struct PatternSet {
  std::string items;
  bool negated = false;
  bool folds = false;  // (?i) may add to it or be added to by it

  std::string Class() const { return absl::StrCat(negated ? "[^" : "[", items, "]"); }
  PatternSet Negated() const { return {items, !negated, folds}; }
};

// PCRE2's \s has U+180E.
constexpr char kSpaces[] =
    R"(\x09-\x0d\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr char kWords[] = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc})";
// Outside of brackets alone, Oniguruma looks Latin-1 up in a table that has superscripts.
constexpr char kLatinWords[] = R"(\x{b2}\x{b3}\x{b9}\x{bc}-\x{be})";
constexpr char kHex[] = "0-9A-Fa-f";

// Sets that have the same name in [[:name:]] and \p{name}.
std::optional<PatternSet> NamedSet(absl::string_view name, bool in_brackets) {
  if (name == "alpha") return PatternSet{"\\p{Alphabetic}", false, true};
  if (name == "digit") return PatternSet{"\\p{Nd}"};
  if (name == "alnum") return PatternSet{"\\p{Alphabetic}\\p{Nd}", false, true};
  if (name == "upper") return PatternSet{"\\p{Uppercase}", false, true};
  if (name == "lower") return PatternSet{"\\p{Lowercase}", false, true};
  if (name == "space") return PatternSet{kSpaces};
  if (name == "blank") return PatternSet{"\\p{Zs}\\t"};
  if (name == "cntrl") return PatternSet{"\\p{Cc}"};
  if (name == "xdigit") return PatternSet{kHex};
  if (name == "ascii") return PatternSet{"\\x00-\\x7f", false, true};
  if (name == "word") {
    return PatternSet{absl::StrCat(kWords, in_brackets ? "" : kLatinWords), false, true};
  }
  return std::nullopt;
}

// Categories and the properties that both libraries have, by name without case and signs.
std::optional<std::string> PropertyOf(absl::string_view name) {
  static constexpr std::pair<absl::string_view, absl::string_view> kNames[] = {
      {"any", "Any"},
      {"lc", "L&"},
      {"letter", "L"},
      {"uppercaseletter", "Lu"},
      {"lowercaseletter", "Ll"},
      {"mark", "M"},
      {"number", "N"},
      {"decimalnumber", "Nd"},
      {"punctuation", "P"},
      {"punct", "P"},
      {"symbol", "S"},
      {"separator", "Z"},
      {"spaceseparator", "Zs"},
      {"other", "C"},
      {"control", "Cc"},
      {"alphabetic", "Alphabetic"},
      {"uppercase", "Uppercase"},
      {"lowercase", "Lowercase"},
      {"emoji", "Emoji"},
      {"extendedpictographic", "Extended_Pictographic"}};
  for (const auto& [from, to] : kNames) {
    if (name == from) return std::string(to);
  }
  static constexpr absl::string_view kCategories =
      " c cc cf cn co cs l ll lm lo lt lu m mc me mn n nd nl no p pc pd pe pf pi po ps s sc sk sm "
      "so z zl zp zs ";
  if (!absl::StrContains(kCategories, absl::StrCat(" ", name, " "))) return std::nullopt;
  std::string category(name);
  category[0] = absl::ascii_toupper(static_cast<uint8_t>(category[0]));
  return category;
}

// Whether the PCRE2 that is installed knows what `\p{}` names.
bool IsProperty(const std::string& pattern) {
  int error = 0;
  PCRE2_SIZE at = 0;
  pcre2_code* const code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()),
                                         pattern.size(), PCRE2_UTF, &error, &at, nullptr);
  pcre2_code_free(code);
  return code != nullptr;
}

std::string LiteralOf(char32_t c) {
  if (c < 0x80 && absl::ascii_isalnum(static_cast<uint8_t>(c))) return std::string(1, char(c));
  return absl::StrCat("\\x{", absl::Hex(static_cast<uint32_t>(c)), "}");
}

// Which block without upper and lower case a character is in; 0: it may have another case.
int CaselessBlock(char32_t c) {
  if (c >= 0x2000 && c <= 0x206F) return 1;
  if (c >= 0x2E80 && c <= 0x9FFF) return 2;
  if (c >= 0xAC00 && c <= 0xD7FF) return 3;
  return c < 0x80 ? 4 : 0;
}

class OnigurumaParser {
 public:
  explicit OnigurumaParser(absl::string_view pattern) : source_(pattern) {}

  absl::StatusOr<std::string> Whole() {
    std::string out;
    DT_RETURN_IF_ERROR(Alternatives(false, &out));
    if (at_ < source_.size()) return Wrong("unmatched )");
    if (named_ && references_) return NotServed("both groups with names and numbers of groups");
    return out;
  }

 private:
  struct Atom {
    std::string text;
    bool repeats = true;  // a quantifier may follow
  };
  // What a backslash begins: one of the three.
  struct Escaped {
    std::optional<char32_t> literal = std::nullopt;
    std::optional<PatternSet> set = std::nullopt;
    Atom other = {};
  };

  absl::Status Wrong(absl::string_view what) const {
    return absl::InvalidArgumentError(
        absl::StrCat("the pattern is not understood at byte ", at_, ": ", what));
  }
  absl::Status NotServed(absl::string_view what) const {
    return absl::UnimplementedError(absl::StrCat("patterns with ", what, " are not served"));
  }
  absl::string_view Rest() const { return source_.substr(at_); }
  bool Sees(absl::string_view text) const { return absl::StartsWith(Rest(), text); }
  bool Take(absl::string_view text) {
    if (!Sees(text)) return false;
    at_ += text.size();
    return true;
  }
  char32_t Next() {
    const char32_t c = Utf8Decode(Rest());
    at_ += static_cast<size_t>(Utf8Length(Rest()));
    return c;
  }
  std::string TakeDigits(size_t most, bool (*is)(char)) {
    std::string digits;
    while (at_ < source_.size() && digits.size() < most && is(source_[at_])) {
      digits.push_back(source_[at_++]);
    }
    return digits;
  }
  static bool IsDecimal(char c) { return c >= '0' && c <= '9'; }
  static bool IsOctal(char c) { return c >= '0' && c <= '7'; }
  static bool IsHex(char c) { return absl::ascii_isxdigit(static_cast<uint8_t>(c)); }

  // Until the end of the group, which stays.
  absl::Status Alternatives(bool caseless, std::string* out) {
    if (++depth_ > kMostPatternDepth) return Wrong("nested too deep");
    while (at_ < source_.size() && !Sees(")")) {
      if (Take("|")) {
        last_ = 0;
        out->push_back('|');
        continue;
      }
      std::optional<std::pair<bool, bool>> options;  // for the rest of the group: caseless, any
      DT_ASSIGN_OR_RETURN(Atom atom, One(caseless, &options));
      if (options) {
        // Oniguruma takes in all alternatives that follow, PCRE2 this one and what it is told.
        absl::StrAppend(out, OptionsText(*options));
        DT_RETURN_IF_ERROR(Alternatives(options->first, out));
        out->push_back(')');
        break;
      }
      DT_RETURN_IF_ERROR(Quantified(&atom));
      absl::StrAppend(out, atom.text);
    }
    --depth_;
    return absl::OkStatus();
  }

  std::string OptionsText(const std::pair<bool, bool>& options) const {
    return absl::StrCat(options.first ? "(?i" : "(?", options.second ? "s" : "",
                        options.first && options.second ? "" : "-", options.first ? "" : "i",
                        options.second ? "" : "s", ":");
  }

  absl::StatusOr<Atom> One(bool caseless, std::optional<std::pair<bool, bool>>* options) {
    if (Sees("(")) return Group(caseless, options);
    if (Take("[")) {
      last_ = 0;
      DT_ASSIGN_OR_RETURN(std::string text, Brackets(caseless));
      return Atom{std::move(text)};
    }
    bool fixed = false;
    if (Sees("*") || Sees("+") || Sees("?") || !Interval(&fixed).empty()) {
      return Wrong("nothing to repeat");
    }
    if (Take(".")) {
      last_ = 0;
      return Atom{"."};
    }
    if (Take("^")) return Atom{"^", false};
    if (Take("$")) return Atom{"$", false};
    if (Take("\\")) {
      DT_ASSIGN_OR_RETURN(Escaped escaped, Escape(false, caseless));
      if (escaped.literal) return Literal(*escaped.literal, caseless);
      last_ = 0;
      if (!escaped.set) return std::move(escaped.other);
      // Newer versions of PCRE2 let (?i) change \p{Lu}; Oniguruma does outside of brackets not.
      const std::string text = escaped.set->Class();
      return Atom{caseless ? absl::StrCat("(?-i:", text, ")") : text};
    }
    return Literal(Next(), caseless);
  }

  absl::StatusOr<Atom> Literal(char32_t c, bool caseless) {
    if (caseless) {
      DT_RETURN_IF_ERROR(CheckCaseless(c));
      // Oniguruma lets two of these be one letter, like sharp s.
      const char now = c < 0x80 ? absl::ascii_tolower(static_cast<uint8_t>(c)) : '\0';
      const std::string pair = {last_, now};
      if (pair == "ss" || pair == "ff" || pair == "fi" || pair == "fl" || pair == "st") {
        return NotServed(absl::StrCat("\"", pair, "\" in any case"));
      }
      last_ = now;
    } else {
      last_ = 0;
    }
    return Atom{LiteralOf(c)};
  }
  absl::Status CheckCaseless(char32_t c) const {
    if (CaselessBlock(c) != 0) return absl::OkStatus();
    std::string text;
    Utf8Append(c, &text);
    return NotServed(absl::StrCat("\"", text, "\" in any case"));
  }

  absl::StatusOr<Atom> Group(bool caseless, std::optional<std::pair<bool, bool>>* options) {
    Atom atom;
    if (Sees("(*")) return NotServed("\"(*\"");
    const bool outer = dot_is_all_;
    if (!Take("(?")) {
      Take("(");
      ++groups_;
      atom.text = "(";
    } else {
      for (const absl::string_view kind : {":", ">", "=", "!", "<=", "<!"}) {
        if (!Take(kind)) continue;
        atom.text = absl::StrCat("(?", kind);
        atom.repeats = kind == ":" || kind == ">";
        break;
      }
      if (atom.text.empty() && (Take("<") || Take("'"))) {
        const char close = source_[at_ - 1] == '<' ? '>' : '\'';
        const std::string name = TakeDigits(
            64, [](char c) { return absl::ascii_isalnum(static_cast<uint8_t>(c)) || c == '_'; });
        if (name.empty() || IsDecimal(name[0]) || !Take(std::string(1, close))) {
          return Wrong("the name of a group");
        }
        named_ = true;
        atom.text = "(?:";
      }
      if (atom.text.empty()) {
        std::pair<bool, bool> set = {caseless, dot_is_all_};
        DT_RETURN_IF_ERROR(Options(&set));
        dot_is_all_ = set.second;
        caseless = set.first;
        if (Take(")")) {
          *options = set;
          return atom;
        }
        Take(":");
        atom.text = OptionsText(set);
      }
    }
    DT_RETURN_IF_ERROR(Alternatives(caseless, &atom.text));
    if (!Take(")")) return Wrong("missing )");
    dot_is_all_ = outer;
    atom.text.push_back(')');
    return atom;
  }

  // "im-im", before ":" or ")". Oniguruma's m lets a dot be any character.
  absl::Status Options(std::pair<bool, bool>* set) {
    bool on = true;
    for (; at_ < source_.size() && !Sees(":") && !Sees(")"); ++at_) {
      const char c = source_[at_];
      if (c == '-') {
        on = false;
      } else if (c == 'i') {
        set->first = on;
      } else if (c == 'm') {
        set->second = on;
      } else {
        return NotServed(absl::StrCat("\"(?", Rest().substr(0, Utf8Size()), "\""));
      }
    }
    return at_ < source_.size() ? absl::OkStatus() : Wrong("missing )");
  }
  size_t Utf8Size() const { return static_cast<size_t>(Utf8Length(Rest())); }

  // An interval that is one, as PCRE2 writes it; empty, with nothing taken, where there is none.
  std::string Interval(bool* fixed) {
    const size_t start = at_;
    if (!Take("{")) return "";
    const std::string from = TakeDigits(9, &IsDecimal);
    const bool comma = Take(",");
    const std::string to = comma ? TakeDigits(9, &IsDecimal) : "";
    if ((from.empty() && to.empty()) || !Take("}")) {
      at_ = start;
      return "";
    }
    *fixed = !comma;
    return absl::StrCat("{", from.empty() ? "0" : from, comma ? "," : "", to, "}");
  }

  absl::Status Quantified(Atom* atom) {
    bool fixed = false;
    std::string interval = Interval(&fixed);
    if (interval.empty() && !Sees("*") && !Sees("+") && !Sees("?")) return absl::OkStatus();
    last_ = 0;
    if (!atom->repeats || atom->text.empty()) return Wrong("nothing to repeat");
    if (!interval.empty()) {
      absl::StrAppend(&atom->text, interval);
      // "{n}?" is no lazy repetition to Oniguruma, and "{n,m}+" no possessive one.
      if (fixed && Sees("?")) return NotServed("\"{n}?\"");
      const bool again = Sees("+") || Sees("*");
      if (!again) {
        if (Take("?")) atom->text.push_back('?');
        return OneQuantifier();
      }
      atom->text = absl::StrCat("(?:", atom->text, ")");
    }
    atom->text.push_back(source_[at_++]);
    if (Sees("?") || Sees("+")) atom->text.push_back(source_[at_++]);
    return OneQuantifier();
  }
  absl::Status OneQuantifier() {
    bool fixed = false;
    if (Sees("*") || Sees("+") || Sees("?") || !Interval(&fixed).empty()) {
      return NotServed("a quantifier of a quantifier");
    }
    return absl::OkStatus();
  }

  // Behind a backslash.
  absl::StatusOr<Escaped> Escape(bool in_brackets, bool caseless) {
    if (at_ == source_.size()) return Wrong("\\ at the end");
    const char c = source_[at_];
    if (!absl::ascii_isalnum(static_cast<uint8_t>(c))) return Escaped{.literal = Next()};
    constexpr absl::string_view controls = "tnrfvae", meant = "\t\n\r\f\v\a\x1b";
    if (const size_t known = controls.find(c); known != absl::string_view::npos) {
      ++at_;
      return Escaped{.literal = static_cast<char32_t>(meant[known])};
    }
    if (absl::StrContains("xu0", std::string(1, c))) {
      DT_ASSIGN_OR_RETURN(const char32_t literal, Number());
      return Escaped{.literal = literal};
    }
    if (c == 'p' || c == 'P') {
      ++at_;
      DT_ASSIGN_OR_RETURN(PatternSet set, Property(in_brackets));
      return Escaped{.set = c == 'P' ? set.Negated() : set};
    }
    constexpr absl::string_view sets = "dwsh";
    const char lower = absl::ascii_tolower(static_cast<uint8_t>(c));
    if (const size_t known = sets.find(lower); known != absl::string_view::npos) {
      ++at_;
      constexpr const char* names[] = {"digit", "word", "space", "xdigit"};
      const PatternSet set = *NamedSet(names[known], in_brackets);
      return Escaped{.set = c == lower ? set : set.Negated()};
    }
    if (in_brackets && c == 'b') {
      ++at_;
      return Escaped{.literal = 8};
    }
    if (!in_brackets) {
      DT_ASSIGN_OR_RETURN(Atom other, Special(caseless));
      if (!other.text.empty()) return Escaped{.other = std::move(other)};
    }
    return NotServed(absl::StrCat("\"\\", std::string(1, c), "\""));
  }

  // Of \x{41}, \x41, \u0041, \041.
  absl::StatusOr<char32_t> Number() {
    const char kind = source_[at_++];
    const bool braces = kind == 'x' && Take("{");
    const size_t most = kind == 'u' ? 4 : kind == '0' ? 2 : braces ? 8 : 2;
    const std::string digits = TakeDigits(most, kind == '0' ? &IsOctal : &IsHex);
    uint64_t value = 0;
    for (const char c : digits) {
      value = value * (kind == '0' ? 8 : 16) +
              static_cast<uint64_t>(IsDecimal(c) ? c - '0' : (c | 32) - 'a' + 10);
    }
    if ((braces && !Take("}")) || (kind == 'u' && digits.size() != 4) ||
        (kind == 'x' && digits.empty()) || value > 0x10FFFF || (value >> 11) == 0x1B) {
      return Wrong("the number of a character");
    }
    // Two digits are a byte, which above 7F is a part of a character.
    if (kind == 'x' && !braces && value >= 0x80) return NotServed("\"\\x\" and a byte");
    return static_cast<char32_t>(value);
  }

  // What is no character: anchors, line ends, references. Empty: none of these.
  absl::StatusOr<Atom> Special(bool caseless) {
    const char c = source_[at_];
    ++at_;
    if (c == 'A' || c == 'Z' || c == 'z') return Atom{absl::StrCat("\\", std::string(1, c)), false};
    if (c == 'b' || c == 'B') {
      const std::string word = NamedSet("word", false)->Class();
      const char *one = c == 'b' ? "(?!" : "(?=", *other = c == 'b' ? "(?=" : "(?!";
      return Atom{absl::StrCat(caseless ? "(?-i:" : "(?:", "(?<=", word, ")", one, word, ")|(?<!",
                               word, ")", other, word, "))"),
                  false};
    }
    if (c == 'R') return Atom{R"((?>\r\n|[\n-\r\x{85}\x{2028}\x{2029}]))"};
    if (c == 'N') return Atom{"[^\\n]"};
    if (c >= '1' && c <= '9') {
      if (caseless) return NotServed("a number of a group in any case");
      if ((at_ < source_.size() && IsDecimal(source_[at_])) || c - '0' > groups_) {
        return NotServed(absl::StrCat("\"\\", std::string(1, c), "\" there"));
      }
      references_ = true;
      return Atom{absl::StrCat("(?:\\", std::string(1, c), ")")};
    }
    --at_;
    return Atom{};
  }

  // Behind \p: {Name}, {^Name}.
  absl::StatusOr<PatternSet> Property(bool in_brackets) {
    const size_t close = Rest().find('}');
    if (!Sees("{")) return NotServed("\"\\p\" without \"{\"");
    if (close == absl::string_view::npos) return Wrong("missing }");
    absl::string_view name = Rest().substr(1, close - 1);
    const std::string said(name);
    const bool negated = absl::ConsumePrefix(&name, "^");
    std::string plain;
    for (const char c : name) {
      if (c == ' ' || c == '-' || c == '_') continue;
      if (!absl::ascii_isalnum(static_cast<uint8_t>(c))) {
        return NotServed(absl::StrCat("\"\\p{", said, "}\""));
      }
      plain.push_back(absl::ascii_tolower(static_cast<uint8_t>(c)));
    }
    at_ += close + 1;
    if (plain == "whitespace") plain = "space";
    std::optional<PatternSet> set = NamedSet(plain, in_brackets);
    if (!set) {
      // Of a script itself; PCRE2 would add what is used with it, too.
      const std::optional<std::string> known = PropertyOf(plain);
      set = PatternSet{absl::StrCat("\\p{", known ? *known : absl::StrCat("sc:", plain), "}"),
                       false, true};
      if (!IsProperty(set->items)) return NotServed(absl::StrCat("\"\\p{", said, "}\""));
    }
    return negated ? set->Negated() : *set;
  }

  // What stands between brackets, without && : a set, and what no set of PCRE2 can say.
  struct Union {
    std::string items;
    std::vector<std::string> others;
    bool empty() const { return items.empty() && others.empty(); }
    // One character of it.
    std::string Text() const {
      if (others.empty()) return absl::StrCat("[", items, "]");
      std::string text = items.empty() ? "(?:" : absl::StrCat("(?:[", items, "]|");
      for (size_t i = 0; i < others.size(); ++i)
        absl::StrAppend(&text, i > 0 ? "|" : "", others[i]);
      return absl::StrCat(text, ")");
    }
    void Add(const PatternSet& set) {
      if (!set.negated) {
        absl::StrAppend(&items, set.items);
      } else {
        others.push_back(set.Class());
      }
    }
  };

  // Behind "[", to the "]" that belongs to it.
  absl::StatusOr<std::string> Brackets(bool caseless) {
    if (++depth_ > kMostPatternDepth) return Wrong("nested too deep");
    const bool negated = Take("^");
    if (Sees("]")) return NotServed("\"]\" at the start of brackets");
    std::vector<Union> all(1);
    while (!Take("]")) {
      if (at_ == source_.size()) return Wrong("missing ]");
      if (Take("&&")) {
        if (all.back().empty()) return NotServed("nothing before \"&&\"");
        all.emplace_back();
        continue;
      }
      DT_RETURN_IF_ERROR(Item(caseless, &all.back()));
    }
    --depth_;
    if (all.back().empty()) return NotServed("nothing behind \"&&\"");
    if (all.size() == 1 && all[0].others.empty()) {
      return absl::StrCat(negated ? "[^" : "[", all[0].items, "]");
    }
    std::string text;
    for (size_t i = 0; i + 1 < all.size(); ++i) absl::StrAppend(&text, "(?=", all[i].Text(), ")");
    absl::StrAppend(&text, all.back().Text());
    return negated ? absl::StrCat("(?:(?!", text, ")(?s:.))") : absl::StrCat("(?:", text, ")");
  }

  absl::Status Item(bool caseless, Union* to) {
    if (Sees("[:")) {
      const size_t close = Rest().find(":]");
      absl::string_view name = Rest().substr(2, close == absl::string_view::npos ? 20 : close - 2);
      const std::string said(name);
      const bool negated = absl::ConsumePrefix(&name, "^");
      std::optional<PatternSet> set = NamedSet(name, true);
      if (name == "punct") set = PatternSet{"\\p{P}\\p{S}", false, true};
      if (close == absl::string_view::npos || !set) {
        return NotServed(absl::StrCat("\"[:", said, "\" in brackets"));
      }
      at_ += close + 2;
      return AddSet(negated ? set->Negated() : *set, caseless, to);
    }
    if (Take("[")) {
      DT_ASSIGN_OR_RETURN(std::string nested, Brackets(caseless));
      to->others.push_back(std::move(nested));
      return NoRange();
    }
    if (Sees("-") && !to->empty() && !Sees("-]")) return NotServed("\"-\" there in brackets");
    DT_ASSIGN_OR_RETURN(const Escaped from, BracketsEscape(caseless));
    if (from.set) return AddSet(*from.set, caseless, to);
    DT_RETURN_IF_ERROR(caseless ? CheckCaseless(*from.literal) : absl::OkStatus());
    absl::StrAppend(&to->items, LiteralOf(*from.literal));
    if (!Sees("-") || Sees("-]")) return absl::OkStatus();
    Take("-");
    if (Sees("-") || Sees("[") || Sees("&&")) return NotServed("\"-\" there in brackets");
    DT_ASSIGN_OR_RETURN(const Escaped until, BracketsEscape(caseless));
    if (until.set) return Wrong("a range to a set");
    if (caseless && CaselessBlock(*from.literal) != CaselessBlock(*until.literal)) {
      return NotServed("a range like that in any case");
    }
    absl::StrAppend(&to->items, "-", LiteralOf(*until.literal));
    return absl::OkStatus();
  }
  absl::StatusOr<Escaped> BracketsEscape(bool caseless) {
    if (Take("\\")) return Escape(true, caseless);
    if (at_ == source_.size()) return Wrong("missing ]");
    return Escaped{.literal = Next()};
  }
  absl::Status AddSet(const PatternSet& set, bool caseless, Union* to) {
    if (caseless && set.folds) return NotServed("letters by kind, in brackets and in any case");
    to->Add(set);
    return NoRange();
  }
  absl::Status NoRange() const {
    return Sees("-") && !Sees("-]") ? NotServed("\"-\" there in brackets") : absl::OkStatus();
  }

  const absl::string_view source_;
  size_t at_ = 0;
  int depth_ = 0, groups_ = 0;
  bool named_ = false, references_ = false, dot_is_all_ = false;
  char last_ = 0;  // the letter before, where case does not count
};

}  // namespace

absl::StatusOr<std::string> OnigurumaToPcre2(absl::string_view pattern) {
  return OnigurumaParser(pattern).Whole();
}

}  // namespace dtensor::text

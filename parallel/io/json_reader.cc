#include "dtensor/parallel/io/json_reader.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "dtensor/parallel/io/json.h"
#include "dtensor/parallel/text/utf8.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

constexpr int64_t kMostSkipped = 100'000;
constexpr size_t kShown = 80;  // bytes of a value in a message

bool IsBlank(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }
bool StandsForItself(char c) {
  return absl::ascii_isascii(static_cast<unsigned char>(c)) && c >= ' ' && c != '"' && c != '\\';
}
bool IsOfWord(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '+' || c == '.';
}
bool IsHigh(int unit) { return unit >= 0xD800 && unit < 0xDC00; }
bool IsLow(int unit) { return unit >= 0xDC00 && unit < 0xE000; }

}  // namespace

char JsonReader::Peek() {
  while (at_ < text_.size() && IsBlank(text_[at_])) ++at_;
  return at_ < text_.size() ? text_[at_] : '\0';
}

bool JsonReader::Take(char c) {
  if (Peek() != c) return false;
  ++at_;
  return true;
}

// A number, true, false or null, or what stands in its place.
absl::string_view JsonReader::Word() const {
  size_t end = at_;
  while (end < text_.size() && IsOfWord(text_[end])) ++end;
  return text_.substr(at_, end - at_);
}

absl::Status JsonReader::Bad(absl::string_view expected) const {
  const std::string found = at_ >= text_.size()
                                ? "the end"
                                : absl::StrCat("'", absl::CHexEscape(text_.substr(at_, 1)), "'");
  return Wrong("not JSON at byte ", at_, ": ", found, " instead of ", expected);
}

absl::Status JsonReader::Not(absl::string_view wanted) {
  switch (Peek()) {
    case '{':
      return Wrong("there is an object, not ", wanted);
    case '[':
      return Wrong("there is an array, not ", wanted);
    case '"': {
      const absl::string_view rest = text_.substr(at_ + 1, kShown);
      return Wrong("there is the string \"", absl::CHexEscape(rest.substr(0, rest.find('"'))),
                   "\", not ", wanted);
    }
  }
  const absl::string_view word = Word();
  if (word.empty()) return Bad(wanted);
  const bool number = absl::ascii_isdigit(static_cast<unsigned char>(word[0])) || word[0] == '-';
  return Wrong("there is ", number ? "the number " : "", absl::CHexEscape(word.substr(0, kShown)),
               ", not ", wanted);
}

absl::Status JsonReader::Twice(absl::string_view name) {
  return Wrong("the key \"", absl::CHexEscape(name.substr(0, 200)), "\" is there twice");
}

absl::Status JsonReader::Object(absl::FunctionRef<absl::Status(const std::string& name)> field) {
  if (!Take('{')) return Not("an object");
  if (Take('}')) return absl::OkStatus();
  do {
    if (Peek() != '"') return Bad("a name in quotes");
    DT_ASSIGN_OR_RETURN(const std::string name, String(kMostName));
    if (!Take(':')) return Bad("':'");
    DT_RETURN_IF_ERROR(field(name));
  } while (Take(','));
  return Take('}') ? absl::OkStatus() : Bad("',' or '}'");
}

absl::Status JsonReader::List(absl::FunctionRef<absl::Status()> item) {
  if (!Take('[')) return Not("a list");
  if (Take(']')) return absl::OkStatus();
  do {
    DT_RETURN_IF_ERROR(item());
  } while (Take(','));
  return Take(']') ? absl::OkStatus() : Bad("',' or ']'");
}

absl::StatusOr<std::string> JsonReader::String(int64_t most_bytes) {
  if (!Take('"')) return Not("a string");
  const size_t most = static_cast<size_t>(most_bytes);
  std::string out;
  while (out.size() <= most) {
    const size_t stop = std::min(text_.size(), at_ + most - out.size() + 1);  // a byte too many
    const size_t begin = at_;
    while (at_ < stop && StandsForItself(text_[at_])) ++at_;
    out.append(text_.data() + begin, at_ - begin);
    if (out.size() > most) break;
    if (at_ == text_.size()) return Bad("'\"'");
    if (text_[at_] == '"') {
      ++at_;
      return out;
    }
    if (text_[at_] == '\\') {
      DT_RETURN_IF_ERROR(Escape(&out));
      continue;
    }
    const int length = Utf8Length(text_.substr(at_));
    if (length < 2) return Bad("a character that may be in a string");
    out.append(text_.data() + at_, static_cast<size_t>(length));
    at_ += static_cast<size_t>(length);
  }
  return Wrong("the string before byte ", at_, " has more than ", most, " bytes");
}

// Four hexadecimal digits; -1 where there are none.
int JsonReader::Hex4() {
  int unit = 0;
  for (int i = 0; i < 4; ++i, ++at_) {
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    if (!absl::ascii_isxdigit(static_cast<unsigned char>(c))) return -1;
    unit = unit * 16 + (c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
  }
  return unit;
}

absl::Status JsonReader::Escape(std::string* out) {
  constexpr absl::string_view kLetters = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
  ++at_;  // the backslash
  const size_t known = at_ < text_.size() ? kLetters.find(text_[at_]) : absl::string_view::npos;
  if (known != absl::string_view::npos) {
    out->push_back(kMeant[known]);
    ++at_;
    return absl::OkStatus();
  }
  if (at_ >= text_.size() || text_[at_] != 'u') return Bad("an escape of JSON");
  ++at_;
  int c = Hex4();
  if (IsHigh(c) && text_.substr(at_, 2) == "\\u") {
    at_ += 2;
    const int low = Hex4();
    c = IsLow(low) ? 0x10000 + (c - 0xD800) * 0x400 + (low - 0xDC00) : -1;
  }
  if (c < 0 || IsHigh(c) || IsLow(c)) return Bad("\\u with the four digits of a character");
  Utf8Append(static_cast<char32_t>(c), out);
  return absl::OkStatus();
}

absl::StatusOr<int64_t> JsonReader::WholeNumber() {
  Peek();
  int64_t value = 0;
  size_t end = at_;
  bool fits = true;
  for (; fits && end < text_.size() && absl::ascii_isdigit(static_cast<unsigned char>(text_[end]));
       ++end) {
    fits = !__builtin_mul_overflow(value, 10, &value) &&
           !__builtin_add_overflow(value, text_[end] - '0', &value);
  }
  // Not the front of another word, and no digits behind a 0.
  const char next = end < text_.size() ? text_[end] : '\0';
  fits = fits && end > at_ && (IsBlank(next) || next == ',' || next == ']' || next == '}') &&
         (end == at_ + 1 || text_[at_] != '0');
  if (!fits) return Not("a whole number below 2^63");
  at_ = end;
  return value;
}

absl::StatusOr<absl::string_view> JsonReader::Skip(int most_levels) {
  const char first = Peek();
  const size_t begin = at_;
  if (++skipped_ > kMostSkipped) return Wrong("more than ", kMostSkipped, " values of no use");
  const auto inner = [&]() -> absl::Status {
    if (most_levels <= 1) return Wrong("more levels of JSON at byte ", at_, " than are of use");
    return Skip(most_levels - 1).status();
  };
  if (first == '{') {
    absl::flat_hash_set<std::string> names;
    DT_RETURN_IF_ERROR(Object([&](const std::string& name) {
      return names.insert(name).second ? inner() : Twice(name);
    }));
  } else if (first == '[') {
    DT_RETURN_IF_ERROR(List(inner));
  } else if (first == '"') {
    DT_RETURN_IF_ERROR(String(static_cast<int64_t>(text_.size())).status());
  } else {
    const absl::string_view word = Word();
    if (!nlohmann::json::accept(word.begin(), word.end())) return Bad("a value");
    at_ += word.size();
  }
  return text_.substr(begin, at_ - begin);
}

absl::Status JsonReader::End() {
  Peek();
  return at_ == text_.size() ? absl::OkStatus() : Bad("the end");
}

}  // namespace dtensor

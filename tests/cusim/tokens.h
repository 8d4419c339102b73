// The words of a PTX text.
#pragma once

#include <algorithm>
#include <cctype>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace cusim {

class Tokens {
 public:
  // A part of a text: what it says, and the line where it starts.
  struct Part {
    std::string_view text;
    int line = 1;
  };
  enum Blocks { kRead, kWhole };

  // `kWhole`: what is in braces is one word, unless it is what a variable starts with ("= {1, 2}").
  explicit Tokens(const Part& part, Blocks blocks = kRead) : text_(part.text) {
    const std::string_view text = text_;
    size_t i = 0;
    int line = part.line;
    while (i < text.size()) {
      const char c = text[i];
      if (c == '\n') ++line;
      if (std::isspace(static_cast<unsigned char>(c)) || c == '\0') {
        ++i;
        continue;
      }
      if (text.substr(i, 2) == "//") {
        i = std::min(text.find('\n', i), text.size());
        continue;
      }
      if (text.substr(i, 2) == "/*") {
        const size_t end = std::min(text.find("*/", i), text.size() - 2) + 2;
        for (; i < end; ++i) line += text[i] == '\n';
        continue;
      }
      const bool whole =
          blocks == kWhole && c == '{' && (words_.empty() || words_.back().text != "=");
      const size_t end = whole ? EndOfBlock(i) : EndOf(i);
      words_.push_back({text.substr(i, end - i), line});
      if (whole) line += static_cast<int>(std::count(&text[i], &text[i] + (end - i), '\n'));
      i = end;
    }
  }

  bool AtEnd() const { return at_ == words_.size(); }
  std::string_view Peek() const { return PeekAt(0); }
  std::string_view PeekAt(size_t n) const {
    if (at_ + n >= words_.size()) {
      if (n > 0) return "";
      Fail("the text ends too early");
    }
    return words_[at_ + n].text;
  }
  std::string_view Next() {
    const std::string_view word = Peek();
    ++at_;
    return word;
  }
  bool Take(std::string_view word) {
    if (AtEnd() || Peek() != word) return false;
    ++at_;
    return true;
  }
  void Expect(std::string_view word) {
    if (!Take(word)) Fail("expected " + std::string(word));
  }
  // The words up to the end of this line.
  std::vector<std::string_view> TakeLine() {
    std::vector<std::string_view> words;
    const int line = words_[at_].line;
    while (!AtEnd() && words_[at_].line == line) words.push_back(Next());
    return words;
  }
  void SkipLine() { TakeLine(); }
  void SkipPast(std::string_view word) {
    while (Next() != word) {
    }
  }
  void SkipBlock() {  // to behind the one that comes next, of those that are one word
    while (Next()[0] != '{') {
    }
  }
  size_t position() const { return at_; }
  void Seek(size_t position) { at_ = position; }
  Part From(size_t begin) const { return {Between(begin, at_), words_[begin].line}; }
  std::string_view Between(size_t from, size_t to) const {
    const char* const begin = words_[from].text.data();
    return {begin, static_cast<size_t>(words_[to - 1].text.end() - begin)};
  }
  [[noreturn]] void Fail(const std::string& why) const {
    const bool end = at_ >= words_.size();
    throw std::runtime_error("PTX line " + std::to_string(end ? 0 : words_[at_].line) + " at '" +
                             std::string(end ? "the end" : words_[at_].text) + "': " + why);
  }

 private:
  struct Word {
    std::string_view text;
    int line;
  };
  static bool InWord(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' ||
           c == '.';
  }
  size_t EndOf(size_t i) const {
    if (text_[i] == '"') return std::min(text_.find('"', i + 1), text_.size() - 1) + 1;
    if (!InWord(text_[i])) return i + 1;
    while (i < text_.size()) {
      if (InWord(text_[i])) {
        ++i;
      } else if (text_.substr(i, 2) == "::") {  // L2::128B
        i += 2;
      } else {
        break;
      }
    }
    return i;
  }
  // Behind the brace that closes the one at `i`. Neither strings nor comments have braces: nvcc
  // writes names of files outside of blocks, and what was inlined where in comments.
  size_t EndOfBlock(size_t i) const {
    for (int depth = 0; i < text_.size();) {
      depth += text_[i] == '{' ? 1 : -1;
      ++i;
      if (depth == 0) return i;
      i = text_.find_first_of("{}", i);
    }
    return text_.size();
  }

  std::string_view text_;
  std::vector<Word> words_;
  size_t at_ = 0;
};

}  // namespace cusim

#include "dtensor/parallel/text/utf8.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace dtensor {
namespace {

// What a first byte says: bytes in all, and the range of the second one, which excludes overlong
// forms, surrogates and what is too large.
struct Lead {
  int length;
  uint8_t low, high;
};

Lead LeadOf(uint8_t byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte < 0xC2) return {0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte < 0xF0) {
    return {3, static_cast<uint8_t>(byte == 0xE0 ? 0xA0 : 0x80),
            static_cast<uint8_t>(byte == 0xED ? 0x9F : 0xBF)};
  }
  if (byte < 0xF5) {
    return {4, static_cast<uint8_t>(byte == 0xF0 ? 0x90 : 0x80),
            static_cast<uint8_t>(byte == 0xF4 ? 0x8F : 0xBF)};
  }
  return {0, 0, 0};
}

// How many bytes at the start are, or could become, one character; `whole`: whether it is there.
size_t Prefix(absl::string_view text, bool* whole) {
  *whole = false;
  if (text.empty()) return 0;
  const Lead lead = LeadOf(static_cast<uint8_t>(text[0]));
  if (lead.length == 0) return 0;
  const size_t length = static_cast<size_t>(lead.length);
  size_t have = 1;
  for (; have < std::min(length, text.size()); ++have) {
    const uint8_t byte = static_cast<uint8_t>(text[have]);
    const uint8_t low = have == 1 ? lead.low : 0x80, high = have == 1 ? lead.high : 0xBF;
    if (byte < low || byte > high) return have;
  }
  *whole = have == length;
  return have;
}

bool IsPythonSpace(char32_t c) {
  return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

}  // namespace

int Utf8Length(absl::string_view text) {
  bool whole = false;
  const size_t length = Prefix(text, &whole);
  return whole ? static_cast<int>(length) : 0;
}

char32_t Utf8Decode(absl::string_view text) {
  const auto byte = [&](int i) { return static_cast<char32_t>(static_cast<uint8_t>(text[i])); };
  const int length = Utf8Length(text);
  if (length <= 1) return byte(0);
  char32_t c = byte(0) & (0x7Fu >> length);
  for (int i = 1; i < length; ++i) c = c << 6 | (byte(i) & 0x3F);
  return c;
}

void Utf8Append(char32_t c, std::string* out) {
  const auto tail = [&](int shift) {
    out->push_back(static_cast<char>(0x80 | (c >> shift & 0x3F)));
  };
  if (c < 0x80) {
    out->push_back(static_cast<char>(c));
  } else if (c < 0x800) {
    out->push_back(static_cast<char>(0xC0 | c >> 6));
    tail(0);
  } else if (c < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | c >> 12));
    tail(6);
    tail(0);
  } else {
    out->push_back(static_cast<char>(0xF0 | c >> 18));
    tail(12);
    tail(6);
    tail(0);
  }
}

// A byte that begins no character is no space.
size_t LeadingSpace(absl::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const int length = Utf8Length(text.substr(at));
    if (length == 0 || !IsPythonSpace(Utf8Decode(text.substr(at)))) break;
    at += static_cast<size_t>(length);
  }
  return at;
}

size_t TrailingSpace(absl::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    size_t start = end - 1;
    while (start > 0 && (static_cast<uint8_t>(text[start]) & 0xC0) == 0x80) --start;
    const absl::string_view last = text.substr(start, end - start);
    if (Utf8Length(last) != static_cast<int>(last.size()) || !IsPythonSpace(Utf8Decode(last)))
      break;
    end = start;
  }
  return text.size() - end;
}

size_t FirstBadUtf8(absl::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const int length = Utf8Length(text.substr(at));
    if (length == 0) return at;
    at += static_cast<size_t>(length);
  }
  return absl::string_view::npos;
}

size_t UnfinishedUtf8(absl::string_view text) {
  for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
    const absl::string_view end = text.substr(text.size() - back);
    bool whole = false;
    if (Prefix(end, &whole) == back && !whole) return back;
  }
  return 0;
}

std::string Utf8Lossy(absl::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    bool whole = false;
    const size_t length = Prefix(text.substr(at), &whole);
    if (whole) {
      absl::StrAppend(&out, text.substr(at, length));
    } else {
      out.append("\xEF\xBF\xBD");
    }
    at += std::max<size_t>(length, 1);
  }
  return out;
}

}  // namespace dtensor

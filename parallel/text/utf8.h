// UTF-8: what is well-formed, and where a text that arrives in pieces may be cut.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace dtensor {

// Bytes of the well-formed character at the start of `text`; 0 where there is none (also for
// surrogates, overlong forms and what is above U+10FFFF), and for an empty text.
int Utf8Length(absl::string_view text);
// The character there, whose length Utf8Length says. Undefined where that is 0.
char32_t Utf8Decode(absl::string_view text);
void Utf8Append(char32_t c, std::string* out);
// Bytes of white space, as Python's str.strip and \s know it, at the start and at the end.
size_t LeadingSpace(absl::string_view text);
size_t TrailingSpace(absl::string_view text);
// The offset of the first byte that belongs to no well-formed character; npos if there is none.
size_t FirstBadUtf8(absl::string_view text);
// Whether more bytes could make the end of `text` a character: how many bytes at the end are the
// beginning of one.
size_t UnfinishedUtf8(absl::string_view text);
// The text with U+FFFD for every longest run of bytes that begins a character and does not end it,
// and for every other bad byte, as Unicode recommends.
std::string Utf8Lossy(absl::string_view text);

}  // namespace dtensor

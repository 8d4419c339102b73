// JoinSome: lists in messages, cut where nobody reads on. View: for Abseil's functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

namespace dtensor {

inline constexpr size_t kNamedInMessages = 8;

// "a, b, c and 250 more": at most `most` items, each as `format(std::string*, item)` writes it.
template <class List, class Format>
std::string JoinSome(const List& list, Format format, size_t most = kNamedInMessages) {
  const size_t size = std::size(list), named = std::min(size, most);
  std::string text = absl::StrJoin(std::begin(list), std::begin(list) + named, ", ", format);
  if (named < size) absl::StrAppend(&text, " and ", size - named, " more");
  return text;
}
template <class List>
std::string JoinSome(const List& list) {
  return JoinSome(list, absl::AlphaNumFormatter());
}

// Debian's Abseil has a string_view of its own, which is not made of the standard's.
inline absl::string_view View(std::string_view s) { return {s.data(), s.size()}; }

}  // namespace dtensor

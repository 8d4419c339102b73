#include "dtensor/mesh/call_difference.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/tensor/text.h"

namespace dtensor {

std::string CallDifference(absl::Span<const IssuedCall> calls, absl::Span<const int64_t> ranks,
                           absl::string_view others) {
  const auto alike = [&](auto member) {
    return std::all_of(calls.begin(), calls.end(),
                       [&](const IssuedCall& c) { return c.*member == calls[0].*member; });
  };
  const bool one_label = alike(&IssuedCall::label), one_before = alike(&IssuedCall::before);
  std::vector<std::pair<const IssuedCall*, std::vector<int64_t>>> variants;
  for (size_t r = 0; r < calls.size(); ++r) {
    const auto same = [&](const auto& v) { return v.first->fingerprint == calls[r].fingerprint; };
    auto it = std::find_if(variants.begin(), variants.end(), same);
    if (it == variants.end()) it = variants.insert(it, {&calls[r], {}});
    it->second.push_back(ranks[r]);
  }
  const size_t named = std::min(variants.size(), kNamedInMessages);
  const auto some = absl::MakeConstSpan(variants).first(named);
  std::string all = absl::StrJoin(some, "; ", [&](std::string* out, const auto& v) {
    absl::StrAppend(
        out, RankNames(v.second), " issued ", v.first->text,
        one_label ? "" : " over " + v.first->label,
        one_before ? "" : absl::StrCat(" after ", v.first->before, " ", others, " calls"));
  });
  if (named < variants.size()) {
    absl::StrAppend(&all, "; and ", variants.size() - named, " more kinds of calls");
  }
  if (!alike(&IssuedCall::text) || !one_label) return all;
  return absl::StrCat(all, " (with other attributes), or a mesh of other ranks");
}

}  // namespace dtensor

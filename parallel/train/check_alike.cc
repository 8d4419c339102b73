#include "dtensor/parallel/train/check_alike.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/parallel/io/checkpoint_parts.h"
#include "dtensor/tensor/status.h"
#include "nlohmann/json.hpp"

namespace dtensor::internal {
namespace {

constexpr size_t kMostTold = 4;  // differences

std::string TextOf(const std::map<std::string, std::string>& all, const std::string& name) {
  const auto at = all.find(name);
  return at == all.end() ? "none" : at->second;
}

}  // namespace

absl::Status CheckAlike(absl::string_view who, const std::map<std::string, std::string>& mine) {
  // Settings are the user's text, which need not be UTF-8.
  using nlohmann::json;
  const std::string text = json(mine).dump(-1, ' ', false, json::error_handler_t::replace);
  DT_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                      AgreeAll(absl::StrCat(who, ": settings"), absl::OkStatus(), text));
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    const auto first = json::parse(all[0]).get<std::map<std::string, std::string>>();
    auto names = json::parse(all[r]).get<std::map<std::string, std::string>>();
    const auto theirs = names;
    names.insert(first.begin(), first.end());  // those of either
    std::vector<std::string> told;
    for (const auto& [name, value] : names) {
      const std::string here = TextOf(theirs, name), there = TextOf(first, name);
      if (here == there || told.size() == kMostTold) continue;
      told.push_back(absl::StrCat("rank ", r, " has ", name, " ", here, ", rank 0 has ", there));
    }
    return WithCulprit(
        absl::FailedPreconditionError(absl::StrCat("[", who, "] ", absl::StrJoin(told, "; "),
                                                   ": all ranks have to be started alike")),
        static_cast<int64_t>(r));
  }
  return absl::OkStatus();
}

}  // namespace dtensor::internal

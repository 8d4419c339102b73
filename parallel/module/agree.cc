#include "dtensor/parallel/module/agree.h"

#include <cstdint>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "dtensor/mesh/hash.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"

namespace dtensor::internal {
namespace {

// "rank 0 has a, rank 1 has b"
std::string FirstDifference(const std::vector<std::string>& first, size_t rank,
                            const std::vector<std::string>& other) {
  size_t i = 0;
  while (i < first.size() && i < other.size() && first[i] == other[i]) ++i;
  const auto at = [i](const std::vector<std::string>& names) {
    return i < names.size() ? names[i] : std::string("no more");
  };
  return absl::StrCat("rank 0 has ", at(first), ", rank ", rank, " has ", at(other));
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ExchangeListed(absl::string_view who,
                                                        const std::vector<std::string>& names,
                                                        const std::string& mine) {
  RankContext& rank = RankContext::Current();
  const DeviceMesh world({rank.world_size()}, {"world"});
  uint64_t hash = names.size();
  for (const std::string& name : names) hash = HashRange(hash, name);
  std::string said(sizeof(hash), 0);
  std::memcpy(said.data(), &hash, sizeof(hash));
  said += mine;
  DT_ASSIGN_OR_RETURN(std::vector<std::string> all, rank.Exchange(world, {0}, who, said));
  bool alike = true;
  for (std::string& theirs : all) {
    alike = alike && theirs.compare(0, sizeof(hash), all[0], 0, sizeof(hash)) == 0;
  }
  if (alike) {
    for (std::string& theirs : all) theirs.erase(0, sizeof(hash));
    return all;
  }
  // One name a line.
  DT_ASSIGN_OR_RETURN(const std::vector<std::string> lists,
                      rank.Exchange(world, {0}, who, absl::StrJoin(names, "\n")));
  const std::vector<std::string> first = absl::StrSplit(lists[0], '\n', absl::SkipEmpty());
  for (size_t r = 1; r < lists.size(); ++r) {
    if (lists[r] == lists[0]) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("[", who, "] ranks have different tensors: ",
                     FirstDifference(first, r, absl::StrSplit(lists[r], '\n', absl::SkipEmpty())),
                     "; all need the same model"));
  }
  return absl::InternalError(absl::StrCat("[", who, "] lists of one text had two hashes"));
}

}  // namespace dtensor::internal

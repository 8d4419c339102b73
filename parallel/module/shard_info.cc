#include "dtensor/parallel/module/shard_info.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// Of the ranks that differ from this one on the mesh dims that `wanted` names.
absl::StatusOr<std::vector<int64_t>> RanksOver(const DeviceMesh& mesh,
                                               absl::Span<const Placement> placements,
                                               bool (Placement::*wanted)() const) {
  const int64_t rank = RankContext::Current().rank();
  if (!mesh.Contains(rank)) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " is not in mesh ", mesh.ToString()));
  }
  std::vector<int> dims;
  for (int m = 0; m < mesh.ndim(); ++m) {
    if ((placements[m].*wanted)()) dims.push_back(m);
  }
  if (dims.empty()) return std::vector<int64_t>{rank};
  DT_ASSIGN_OR_RETURN(const DeviceMesh holders, mesh.SubMeshByDims(dims, rank));
  return holders.Ranks();
}

std::string Text(const std::vector<Interval>& box) {
  return absl::StrJoin(box, "|", [](std::string* out, const Interval& i) {
    absl::StrAppend(out, i.start, ",", i.end, ",1");
  });
}

absl::StatusOr<std::vector<Interval>> ParseBox(absl::string_view text) {
  std::vector<Interval> box;
  if (text.empty()) return box;  // of a tensor without dims
  for (const absl::string_view dim : absl::StrSplit(text, '|')) {
    const std::vector<absl::string_view> numbers = absl::StrSplit(dim, ',');
    Interval interval;
    int64_t step = 0;
    if (numbers.size() != 3 || !absl::SimpleAtoi(numbers[0], &interval.start) ||
        !absl::SimpleAtoi(numbers[1], &interval.end) || !absl::SimpleAtoi(numbers[2], &step) ||
        step != 1 || interval.start < 0 || interval.end < interval.start) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", dim, "\" is no slice; it is start,end,1"));
    }
    box.push_back(interval);
  }
  return box;
}

// Every box that takes one interval of each dim, the last dim fastest.
void AddBoxes(const std::vector<std::vector<Interval>>& held, SlicesPair so_far,
              std::vector<SlicesPair>* out) {
  const size_t d = so_far.global.size();
  if (d == held.size()) {
    out->push_back(std::move(so_far));
    return;
  }
  int64_t at = 0;
  for (const Interval& interval : held[d]) {
    SlicesPair next = so_far;
    next.global.push_back(interval);
    next.local.push_back({at, at + interval.length()});
    at += interval.length();
    AddBoxes(held, std::move(next), out);
  }
}

}  // namespace

std::string ShardedInfo::ToText() const {
  return absl::StrJoin(local_global_slices, ";", [](std::string* out, const SlicesPair& pair) {
    absl::StrAppend(out, Text(pair.local), "#", Text(pair.global));
  });
}

absl::StatusOr<ShardedInfo> ShardedInfoOf(const Spec& spec) {
  for (const Placement& p : spec.placements()) {
    if (p.is_flat()) {
      return absl::UnimplementedError(
          absl::StrCat(spec.ToString(), ": flat pieces are no boxes of the tensor"));
    }
  }
  ShardedInfo info;
  info.unsharded_shape = spec.shape();
  DT_ASSIGN_OR_RETURN(info.global_ranks,
                      RanksOver(spec.mesh(), spec.placements(), &Placement::cuts));
  AddBoxes(LocalIndex(spec, spec.coordinate()), {}, &info.local_global_slices);
  return info;
}

absl::StatusOr<std::vector<SlicesPair>> ParseSlicesPairs(absl::string_view text) {
  std::vector<SlicesPair> pairs;
  if (text.empty()) return pairs;
  for (const absl::string_view pair : absl::StrSplit(text, ';')) {
    const std::vector<absl::string_view> sides = absl::StrSplit(pair, '#');
    if (sides.size() != 2) {
      return absl::InvalidArgumentError(absl::StrCat("\"", pair, "\" is not local#global"));
    }
    SlicesPair parsed;
    DT_ASSIGN_OR_RETURN(parsed.local, ParseBox(sides[0]));
    DT_ASSIGN_OR_RETURN(parsed.global, ParseBox(sides[1]));
    if (parsed.local.size() != parsed.global.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", pair, "\": local and global have other numbers of dims"));
    }
    pairs.push_back(std::move(parsed));
  }
  return pairs;
}

absl::StatusOr<TiedInfo> TiedInfoOf(const NamedParameter& parameter) {
  TiedInfo info = {parameter.fqn, {parameter.fqn}, {}};
  info.names.insert(info.names.end(), parameter.aliases.begin(), parameter.aliases.end());
  DT_ASSIGN_OR_RETURN(info.global_ranks,
                      RanksOver(parameter.parameter->mesh(), parameter.parameter->placements(),
                                &Placement::is_replicate));
  return info;
}

}  // namespace dtensor

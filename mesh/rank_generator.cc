#include "dtensor/mesh/rank_generator.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "dtensor/tensor/shape.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

std::string NamesOf(const AxisSizes& axes) {
  return absl::StrJoin(axes, ", ",
                       [](std::string* out, const auto& a) { absl::StrAppend(out, a.first); });
}

int IndexOf(const AxisSizes& axes, absl::string_view name) {
  const auto it =
      std::find_if(axes.begin(), axes.end(), [&](const auto& a) { return a.first == name; });
  return it == axes.end() ? -1 : static_cast<int>(it - axes.begin());
}

absl::Status Bad(absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("rank layout: ", why));
}

absl::Status CheckSizes(const AxisSizes& sizes) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i].second < 1) {
      return Bad(absl::StrCat("axis ", sizes[i].first, " has size ", sizes[i].second));
    }
    if (IndexOf(sizes, sizes[i].first) != static_cast<int>(i)) {
      return Bad(absl::StrCat("axis ", sizes[i].first, " is named twice"));
    }
  }
  const int ep = IndexOf(sizes, "ep"), cp = IndexOf(sizes, "cp");
  if (ep >= 0 && cp >= 0 && sizes[ep].second > 1 && sizes[cp].second > 1) {
    return Bad("ep and cp are both larger than 1: give experts a layout of their own, with cp=1");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RankGenerator> RankGenerator::FromList(const AxisSizes& sizes, int64_t offset) {
  DT_RETURN_IF_ERROR(CheckSizes(sizes));
  RankGenerator g;
  g.axes_ = sizes;
  g.offset_ = offset;
  Dims extents;
  for (const auto& [name, size] : sizes) {
    g.strides_.push_back(g.world_);
    extents.push_back(size);
    DT_ASSIGN_OR_RETURN(g.world_, CheckedNumel(extents));
  }
  return g;
}

absl::StatusOr<RankGenerator> RankGenerator::Create(const AxisSizes& sizes, absl::string_view order,
                                                    int64_t offset) {
  DT_RETURN_IF_ERROR(CheckSizes(sizes));
  AxisSizes ordered;
  const std::string lower = absl::AsciiStrToLower(order);
  for (const absl::string_view name : absl::StrSplit(lower, '-')) {
    const int at = IndexOf(sizes, name);
    if (at < 0) {
      return Bad(absl::StrCat("order \"", order, "\" names \"", name, "\"; the axes are ",
                              NamesOf(sizes)));
    }
    if (IndexOf(ordered, name) >= 0) {
      return Bad(absl::StrCat("order \"", order, "\" names ", name, " twice"));
    }
    ordered.push_back(sizes[at]);
  }
  for (const auto& axis : sizes) {
    if (IndexOf(ordered, axis.first) >= 0) continue;
    if (axis.second != 1) {
      return Bad(absl::StrCat("order \"", order, "\" leaves out ", axis.first, ", which has size ",
                              axis.second));
    }
    ordered.push_back(axis);
  }
  return FromList(ordered, offset);
}

absl::StatusOr<std::vector<std::vector<int64_t>>> RankGenerator::Groups(
    absl::string_view token) const {
  std::vector<bool> masked(axes_.size(), false);
  const std::string lower = absl::AsciiStrToLower(token);
  for (const absl::string_view name : absl::StrSplit(lower, '-')) {
    const int at = IndexOf(axes_, name);
    if (at < 0) {
      return Bad(absl::StrCat("group \"", token, "\" names \"", name, "\"; the axes are ",
                              NamesOf(axes_)));
    }
    masked[at] = true;
  }
  // All ranks that some axes span, fastest first.
  const auto span = [&](bool want) {
    std::vector<int64_t> ranks = {0};
    for (size_t a = 0; a < axes_.size(); ++a) {
      if (masked[a] != want) continue;
      const std::vector<int64_t> before = ranks;
      for (int64_t i = 1; i < axes_[a].second; ++i) {
        for (int64_t r : before) ranks.push_back(r + i * strides_[a]);
      }
    }
    return ranks;
  };
  const std::vector<int64_t> members = span(true);
  std::vector<std::vector<int64_t>> groups;
  for (int64_t first : span(false)) {
    groups.emplace_back();
    for (int64_t r : members) groups.back().push_back(offset_ + first + r);
  }
  return groups;
}

absl::StatusOr<std::vector<std::vector<int64_t>>> RankGenerator::EmbeddingGroups() const {
  DT_ASSIGN_OR_RETURN(auto groups, Groups("pp"));
  for (std::vector<int64_t>& g : groups) {
    if (g.size() > 1) g = {g.front(), g.back()};
  }
  return groups;
}

absl::StatusOr<DeviceMesh> RankGenerator::Mesh(std::optional<DeviceType> device) const {
  Dims shape;
  std::vector<std::string> names;
  for (auto it = axes_.rbegin(); it != axes_.rend(); ++it) {
    shape.push_back(it->second);
    names.push_back(it->first);
  }
  if (offset_ == 0) return DeviceMesh::Create(shape, std::move(names), device);
  std::vector<int64_t> ranks(world_);
  for (int64_t r = 0; r < world_; ++r) ranks[r] = offset_ + r;
  return DeviceMesh::FromRanks(shape, std::move(ranks), std::move(names), device);
}

absl::StatusOr<ParallelContext> ParallelContext::Create(const Sizes& s, int64_t world) {
  DT_ASSIGN_OR_RETURN(RankGenerator g,
                      RankGenerator::Create(
                          {{"tp", s.tp}, {"cp", s.cp}, {"dp", s.dp}, {"pp", s.pp}}, "tp-cp-dp-pp"));
  if (g.world() != world) {
    return Bad(absl::StrCat("tp ", s.tp, " x cp ", s.cp, " x dp ", s.dp, " x pp ", s.pp, " = ",
                            g.world(), ", the world has ", world, " ranks"));
  }
  return ParallelContext(std::move(g));
}

absl::StatusOr<std::map<std::string, int64_t>> ParallelContext::LocalRanks(int64_t rank) const {
  if (rank < 0 || rank >= generator_.world()) {
    return absl::OutOfRangeError(
        absl::StrCat("rank ", rank, " is not in [0, ", generator_.world(), ")"));
  }
  std::map<std::string, int64_t> coordinates;
  for (const auto& [name, size] : generator_.axes()) {
    coordinates[name] = rank % size;
    rank /= size;
  }
  return coordinates;
}

absl::StatusOr<int64_t> ParallelContext::GlobalRank(
    const std::map<std::string, int64_t>& coordinates) const {
  int64_t rank = 0, stride = 1;
  size_t found = 0;
  for (const auto& [name, size] : generator_.axes()) {
    const auto it = coordinates.find(name);
    if (it == coordinates.end()) return Bad(absl::StrCat("no coordinate for ", name));
    if (it->second < 0 || it->second >= size) {
      return Bad(absl::StrCat(name, " = ", it->second, " is not in [0, ", size, ")"));
    }
    rank += it->second * stride;
    stride *= size;
    ++found;
  }
  if (found != coordinates.size()) {
    return Bad(absl::StrCat("unknown axis among the coordinates; the axes are ",
                            NamesOf(generator_.axes())));
  }
  return rank;
}

absl::StatusOr<std::vector<int64_t>> ParallelContext::Group(absl::string_view name,
                                                            int64_t rank) const {
  const std::map<std::string, std::string> tokens = {{"tp", "tp"},
                                                     {"cp", "cp"},
                                                     {"dp", "dp"},
                                                     {"pp", "pp"},
                                                     {"mp", "tp-pp"},
                                                     {"dp_cp", "dp-cp"},
                                                     {"world", "tp-cp-dp-pp"}};
  const auto token = tokens.find(std::string(name));
  if (token == tokens.end()) {
    return Bad(absl::StrCat("no group \"", name, "\"; there are tp cp dp pp mp dp_cp world"));
  }
  DT_ASSIGN_OR_RETURN(const auto groups, generator_.Groups(token->second));
  for (const std::vector<int64_t>& g : groups) {
    if (std::find(g.begin(), g.end(), rank) != g.end()) return g;
  }
  return absl::OutOfRangeError(
      absl::StrCat("rank ", rank, " is not in [0, ", generator_.world(), ")"));
}

int64_t ParallelContext::GroupId(std::vector<int64_t> ranks) {
  std::sort(ranks.begin(), ranks.end());
  return ids_.emplace(std::move(ranks), static_cast<int64_t>(ids_.size())).first->second;
}

}  // namespace dtensor

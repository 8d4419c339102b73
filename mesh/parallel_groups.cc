#include "dtensor/mesh/parallel_groups.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// Which dims of which mesh a group extends over.
struct KnownGroup {
  absl::string_view name, axes;
  bool experts;
};
constexpr KnownGroup kGroups[] = {{"tp", "tp", false},
                                  {"cp", "cp", false},
                                  {"dp", "dp", false},
                                  {"pp", "pp", false},
                                  {"dp_cp", "dp cp", false},
                                  {"tp_cp", "tp cp", false},
                                  {"tp_dp", "tp dp", false},
                                  {"tp_dp_cp", "tp dp cp", false},
                                  {"mp", "tp pp", false},
                                  {"world", "tp cp dp pp", false},
                                  {"ep", "ep", true},
                                  {"expert_tp", "tp", true},
                                  {"expert_dp", "dp", true},
                                  {"tp_ep", "tp ep", true},
                                  {"tp_ep_pp", "tp ep pp", true}};

absl::Status BadGroups(absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("parallel groups: ", why));
}

// The rest of the world, once these are taken.
absl::StatusOr<int64_t> Rest(int64_t world, const AxisSizes& sizes) {
  int64_t rest = world;
  for (const auto& [name, size] : sizes) {
    if (size < 1 || rest % size != 0) {
      const auto text = [](std::string* out, const auto& a) {
        absl::StrAppend(out, a.first, " ", a.second);
      };
      return BadGroups(absl::StrCat(absl::StrJoin(sizes, " x ", text),
                                    " does not divide the world of ", world, " ranks"));
    }
    rest /= size;
  }
  return rest;
}

// The order without the axes that are not in `sizes`.
std::string OrderOf(absl::string_view order, const AxisSizes& sizes) {
  std::vector<std::string> names = absl::StrSplit(absl::AsciiStrToLower(order), '-');
  const auto absent = [&](const std::string& name) {
    const bool known = name == "cp" || name == "ep";
    return known && absl::c_none_of(sizes, [&](const auto& axis) { return axis.first == name; });
  };
  names.erase(std::remove_if(names.begin(), names.end(), absent), names.end());
  return absl::StrJoin(names, "-");
}

// The part of `mesh` over `axes` that holds `rank`, slowest axis first, as ranks are numbered.
absl::StatusOr<DeviceMesh> Over(const DeviceMesh& mesh, absl::string_view axes, int64_t rank) {
  const std::vector<absl::string_view> wanted = absl::StrSplit(axes, ' ');
  absl::InlinedVector<int, 4> dims;
  for (int d = 0; d < mesh.ndim(); ++d) {
    if (absl::c_linear_search(wanted, mesh.names()[d])) dims.push_back(d);
  }
  return mesh.SubMeshByDims(dims, rank);
}

}  // namespace

absl::StatusOr<ParallelGroups> ParallelGroups::Create(const Sizes& s, int64_t world,
                                                      std::optional<DeviceType> device) {
  AxisSizes dense = {{"tp", s.tp}, {"cp", s.cp}, {"pp", s.pp}};
  DT_ASSIGN_OR_RETURN(const int64_t dp, Rest(world, dense));
  dense.insert(dense.begin() + 2, {"dp", dp});
  AxisSizes experts = {{"tp", s.expert_tp == 0 ? s.tp : s.expert_tp}, {"ep", s.ep}, {"pp", s.pp}};
  DT_ASSIGN_OR_RETURN(const int64_t expert_dp, Rest(world, experts));
  experts.insert(experts.begin() + 2, {"dp", expert_dp});
  if (s.pipeline_split_rank && (*s.pipeline_split_rank < 1 || *s.pipeline_split_rank >= s.pp)) {
    return BadGroups(absl::StrCat("pipeline_split_rank ", *s.pipeline_split_rank,
                                  " is not a later stage of ", s.pp));
  }
  DT_ASSIGN_OR_RETURN(const RankGenerator ranks,
                      RankGenerator::Create(dense, OrderOf(s.order, dense)));
  DT_ASSIGN_OR_RETURN(const RankGenerator expert_ranks,
                      RankGenerator::Create(experts, OrderOf(s.order, experts)));
  ParallelGroups groups;
  groups.split_ = s.pipeline_split_rank;
  DT_ASSIGN_OR_RETURN(groups.dense_, ranks.Mesh(device));
  DT_ASSIGN_OR_RETURN(groups.experts_, expert_ranks.Mesh(device));
  // A pipeline is a stride and a length: rank 0's says it for all.
  DT_ASSIGN_OR_RETURN(const DeviceMesh pipeline, Over(groups.dense_, "pp", 0));
  DT_ASSIGN_OR_RETURN(const DeviceMesh of_experts, Over(groups.experts_, "pp", 0));
  if (pipeline.Ranks() != of_experts.Ranks()) {
    return BadGroups(
        absl::StrCat("order \"", s.order,
                     "\" gives experts other pipelines than the dense layers: let it end "
                     "in pp, or give both the same dp"));
  }
  return groups;
}

absl::StatusOr<DeviceMesh> ParallelGroups::Group(absl::string_view name, int64_t rank) const {
  if (rank < 0 || rank >= world()) {
    return absl::OutOfRangeError(
        absl::StrCat("parallel groups: rank ", rank, " is not in [0, ", world(), ")"));
  }
  for (const KnownGroup& group : kGroups) {
    if (group.name == name) return Over(group.experts ? experts_ : dense_, group.axes, rank);
  }
  if (name == "embedding") return Embedding(/*position=*/false, rank);
  if (name == "position_embedding") return Embedding(/*position=*/true, rank);
  const auto stored = stored_.find(name);
  if (stored != stored_.end()) return Stored(stored->second, name, rank);
  return Unknown(name);
}

absl::Status ParallelGroups::Unknown(absl::string_view name) const {
  return BadGroups(
      absl::StrCat("no group \"", name, "\"; there are ", absl::StrJoin(names(), " ")));
}

absl::Status ParallelGroups::SetOptions(absl::string_view name, const GroupOptions& options) {
  if (!absl::c_linear_search(names(), name)) return Unknown(name);
  if (options.timeout < absl::ZeroDuration()) {
    return BadGroups(absl::StrCat("the timeout of \"", name, "\" is ",
                                  absl::FormatDuration(options.timeout),
                                  ": give one above 0, or 0 for the world's"));
  }
  options_[std::string(name)] = options;
  return absl::OkStatus();
}

absl::StatusOr<Comm*> ParallelGroups::CommOf(absl::string_view name, RankContext& rank) const {
  DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, Group(name, rank.rank()));
  std::vector<int> dims(static_cast<size_t>(mesh.ndim()));
  std::iota(dims.begin(), dims.end(), 0);
  const auto options = options_.find(name);
  return rank.CommFor(mesh, dims, options == options_.end() ? GroupOptions() : options->second);
}

// The first and the last stage share the embedding, and the decoder's first.
absl::StatusOr<DeviceMesh> ParallelGroups::Embedding(bool position, int64_t rank) const {
  DT_ASSIGN_OR_RETURN(const DeviceMesh pipeline, Over(dense_, "pp", rank));
  std::vector<int64_t> stages = {0};
  if (split_) stages.push_back(*split_);
  if (!position) stages.push_back(pipeline.size() - 1);
  stages.erase(std::unique(stages.begin(), stages.end()), stages.end());
  std::vector<int64_t> ranks;
  for (const int64_t stage : stages) ranks.push_back(pipeline.RankAt({stage}));
  const auto size = static_cast<int64_t>(ranks.size());
  return DeviceMesh::FromRanks({size}, std::move(ranks),
                               {position ? "position_embedding" : "embedding"}, dense_.device());
}

absl::StatusOr<DeviceMesh> ParallelGroups::Stored(const std::vector<std::vector<int64_t>>& sets,
                                                  absl::string_view name, int64_t rank) const {
  for (const std::vector<int64_t>& set : sets) {
    if (!absl::c_binary_search(set, rank)) continue;
    return DeviceMesh::FromRanks({static_cast<int64_t>(set.size())}, set, {std::string(name)},
                                 dense_.device());
  }
  return absl::NotFoundError(
      absl::StrCat("parallel groups: rank ", rank, " is in no group \"", name, "\""));
}

absl::Status ParallelGroups::Store(absl::string_view name, std::vector<std::vector<int64_t>> sets) {
  if (name.empty()) return BadGroups("a group of one's own needs a name");
  if (absl::c_linear_search(names(), name)) {
    return absl::AlreadyExistsError(
        absl::StrCat("parallel groups: there is a group \"", name, "\" already"));
  }
  std::set<int64_t> seen;
  for (std::vector<int64_t>& set : sets) {
    std::sort(set.begin(), set.end());
    for (const int64_t rank : set) {
      if (rank < 0 || rank >= world()) {
        return BadGroups(
            absl::StrCat("rank ", rank, " of \"", name, "\" is not in [0, ", world(), ")"));
      }
      if (!seen.insert(rank).second) {
        return BadGroups(absl::StrCat("rank ", rank, " is in \"", name, "\" twice"));
      }
    }
  }
  stored_.emplace(std::string(name), std::move(sets));
  return absl::OkStatus();
}

std::vector<std::string> ParallelGroups::names() const {
  std::vector<std::string> all;
  for (const KnownGroup& group : kGroups) all.emplace_back(group.name);
  all.insert(all.end(), {"embedding", "position_embedding"});
  for (const auto& [name, sets] : stored_) all.push_back(name);
  return all;
}

}  // namespace dtensor

// ParallelGroups: the groups of a world by the names that Megatron-LM gives them, as meshes.
//
//   DT_ASSIGN_OR_RETURN(const ParallelGroups groups, ParallelGroups::Create({.tp = 2, .pp = 4},
//   16)); DT_ASSIGN_OR_RETURN(const DeviceMesh dp, groups.Group("dp", context.rank()));
//
// Pure arithmetic: a group is a mesh of a few numbers, in whatever world. Its communicator is made
// when its members first use it (RankContext::CommFor), and others never hear of it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/mesh/mesh.h"
#include "dtensor/mesh/rank_generator.h"
#include "dtensor/mesh/world.h"

namespace dtensor {

class Comm;
class RankContext;

class ParallelGroups {
 public:
  struct Sizes {
    int64_t tp = 1, pp = 1, cp = 1;
    // Of experts: how many ranks share them, and how many a single one is cut over (0: tp). Their
    // ranks are laid out by themselves, without cp, in the same pipelines.
    int64_t ep = 1, expert_tp = 0;
    // The first stage of the decoder, which has embeddings of its own.
    std::optional<int64_t> pipeline_split_rank = {};
    std::string order =
        "tp-cp-ep-dp-pp";  // as of RankGenerator; ends in pp where there are experts
  };
  // The rest of the world is data parallel.
  //   Errors: InvalidArgument unless the sizes divide the world, for a split outside of (0, pp),
  //   for experts whose pipelines are others than the dense layers', and those of RankGenerator.
  //   Source: Megatron-LM core/parallel_state.py.
  static absl::StatusOr<ParallelGroups> Create(const Sizes& sizes, int64_t world,
                                               std::optional<DeviceType> device = {});

  int64_t world() const { return dense_.size(); }
  // All ranks by their coordinates, slowest dim first: nanotron's world_rank_matrix. RankAt and
  // Coordinate go either way.
  const DeviceMesh& dense() const { return dense_; }
  const DeviceMesh& experts() const { return experts_; }

  // The group of that name that `rank` is in, members in rank order:
  //   tp cp dp pp, dp_cp, tp_cp, tp_dp, tp_dp_cp, mp (tp and pp), world
  //   ep, expert_tp, expert_dp, tp_ep (expert_tp and ep), tp_ep_pp: of experts
  //   embedding, position_embedding: of the rank's pipeline; not all of its ranks are in them
  //   and those of Store.
  //   Errors: InvalidArgument naming what there is; OutOfRange for a rank outside of the world;
  //   NotFound for a stored group that the rank is not in.
  absl::StatusOr<DeviceMesh> Group(absl::string_view name, int64_t rank) const;
  // Sets of ranks of one's own under a name. One set has one mesh, whatever the order in which its
  // ranks are named.
  //   Errors: AlreadyExists for a name that is taken; InvalidArgument for ranks outside of the
  //   world, and for a rank that is named twice.
  absl::Status Store(absl::string_view name, std::vector<std::vector<int64_t>> sets);
  std::vector<std::string> names() const;

  // What the groups of that name are made with. All ranks give the same, before they use them.
  //   Errors: InvalidArgument naming what there is, and for a timeout below 0.
  //   Source: distributed_timeout_minutes of Megatron-LM's initialize_model_parallel, there of all
  //   groups.
  absl::Status SetOptions(absl::string_view name, const GroupOptions& options);
  // The communicator of the rank's group of that name, over all of its dims. Errors: those of
  // Group and of RankContext::CommFor.
  absl::StatusOr<Comm*> CommOf(absl::string_view name, RankContext& rank) const;

 private:
  ParallelGroups() = default;
  absl::Status Unknown(absl::string_view name) const;
  absl::StatusOr<DeviceMesh> Embedding(bool position, int64_t rank) const;
  absl::StatusOr<DeviceMesh> Stored(const std::vector<std::vector<int64_t>>& sets,
                                    absl::string_view name, int64_t rank) const;

  DeviceMesh dense_, experts_;
  std::optional<int64_t> split_;
  std::map<std::string, std::vector<std::vector<int64_t>>, std::less<>> stored_;
  std::map<std::string, GroupOptions, std::less<>> options_;
};

}  // namespace dtensor

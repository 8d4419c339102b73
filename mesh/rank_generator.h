// RankGenerator: process groups from axis sizes and an order string, as Megatron-LM, nanotron,
// torchtitan and ATorch lay out ranks. Pure functions; no communicator is made.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/mesh/mesh.h"

namespace dtensor {

using AxisSizes = std::vector<std::pair<std::string, int64_t>>;

// An immutable value. Ranks are offset .. offset + world() - 1.
//   Source: Megatron-LM core/parallel_state.py; ATorch's parallel_mode is the order of its own
//   list.
class RankGenerator {
 public:
  // `order` names axes, the leftmost varying fastest: "tp-cp-ep-dp-pp". An axis of size 1 may be
  // left out of the order.
  //   Errors: InvalidArgument for an unknown or repeated axis, an axis of size > 1 that the order
  //   does not name, a size < 1, and ep and cp both > 1 (experts have a generator of their own).
  static absl::StatusOr<RankGenerator> Create(const AxisSizes& sizes, absl::string_view order,
                                              int64_t offset = 0);
  // The order of the list itself (ATorch): the first axis is the innermost.
  static absl::StatusOr<RankGenerator> FromList(const AxisSizes& sizes, int64_t offset = 0);

  int64_t world() const { return world_; }
  const AxisSizes& axes() const { return axes_; }  // fastest first
  // The groups whose members differ in the axes of `token` ("tp-pp") only.
  //   Errors: InvalidArgument naming the axes there are.
  absl::StatusOr<std::vector<std::vector<int64_t>>> Groups(absl::string_view token) const;
  // First and last rank of each pipeline group (one rank where they are the same).
  absl::StatusOr<std::vector<std::vector<int64_t>>> EmbeddingGroups() const;
  // The same layout as a mesh: dims slowest first, so that row-major order is rank order.
  absl::StatusOr<DeviceMesh> Mesh(std::optional<DeviceType> device = {}) const;

 private:
  RankGenerator() = default;
  AxisSizes axes_;
  std::vector<int64_t> strides_;
  int64_t world_ = 1, offset_ = 0;
};

// nanotron's questions about a layout tp-cp-dp-pp.
//   Source: nanotron parallel/context.py
class ParallelContext {
 public:
  struct Sizes {
    int64_t tp = 1, pp = 1, dp = 1, cp = 1;
  };
  // Errors: InvalidArgument unless tp * pp * dp * cp is `world`.
  static absl::StatusOr<ParallelContext> Create(const Sizes& sizes, int64_t world);

  // Coordinates of a rank by axis: "tp", "cp", "dp", "pp".
  //   Errors: OutOfRange for a rank outside of the world.
  absl::StatusOr<std::map<std::string, int64_t>> LocalRanks(int64_t rank) const;
  // The inverse. Errors: InvalidArgument for a missing or unknown axis or a coordinate out of
  // range.
  absl::StatusOr<int64_t> GlobalRank(const std::map<std::string, int64_t>& coordinates) const;
  // The ranks of the group of `name` that `rank` is in: tp cp dp pp mp (tp x pp) dp_cp world.
  absl::StatusOr<std::vector<int64_t>> Group(absl::string_view name, int64_t rank) const;
  // One id for one set of ranks, whatever their order: asking twice gives the same.
  int64_t GroupId(std::vector<int64_t> ranks);

 private:
  explicit ParallelContext(RankGenerator generator) : generator_(std::move(generator)) {}
  RankGenerator generator_;
  std::map<std::vector<int64_t>, int64_t> ids_;
};

}  // namespace dtensor

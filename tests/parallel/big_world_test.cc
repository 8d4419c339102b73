// One rank's view of 16,384: the plan of a transformer block with its collectives, without peers or
// memory.
#include <gtest/gtest.h>

#include "ops/ops.h"
#include "parallel/models/gpt.h"
#include "parallel/models/gpt_plan.h"
#include "tensor/status.h"
#include "tests/parallel/support.h"

namespace dtensor {
namespace {

struct Traffic {
  int64_t tp_forward = 0, tp_backward = 0, dp_backward = 0, others = 0, tp_bytes = 0;
  double modelled_us = 0;
  int64_t peak_bytes = 0;
  friend bool operator==(const Traffic&, const Traffic&) = default;
};

absl::StatusOr<Traffic> BlockTraffic(int64_t rank) {
  Traffic t;
  DT_RETURN_IF_ERROR(
      RunFake({.world = 8 * 128 * 16, .rank = rank}, [&](RankContext& context) -> absl::Status {
        DT_ASSIGN_OR_RETURN(
            const DeviceMesh all,
            DeviceMesh::Create({8, 128, 16}, {"pp", "dp", "tp"}, DeviceType::kMeta));
        const DeviceMesh mesh = all[{"dp", "tp"}];  // of this rank's pipeline stage
        const GPTConfig config = {
            .vocab = 50000, .seq = 2048, .layers = 1, .hidden = 8192, .heads = 64};
        GPTBlock block(config);
        DT_RETURN_IF_ERROR(ParallelizeModule(
            block, mesh,
            {{"attn.w[qkv]", ColwiseParallel({.unit = config.hidden / config.heads})},
             {"attn.wo", RowwiseParallel({.unit = config.hidden / config.heads})},
             {"mlp.up", ColwiseParallel()},
             {"mlp.down", RowwiseParallel()}}));
        Materialize(block);
        DTensor x = empty({256, config.seq, config.hidden},
                          {.mesh = mesh, .placements = {Shard(0), Replicate()}});
        x.RequiresGrad();
        const StrictRedistribute strict;
        CommTrace trace;
        const DTensor y = block(x);
        y.Backward(empty(y.shape(), {.mesh = mesh, .placements = {Shard(0), Replicate()}}));
        for (const CommEvent& e : trace.events()) {
          const bool reduce = e.kind == CollectiveKind::kAllReduce;
          if (reduce && e.mesh_dims == "tp") {
            ++(e.phase == CommPhase::kForward ? t.tp_forward : t.tp_backward);
            t.tp_bytes += e.bytes;
          } else if (reduce && e.mesh_dims == "dp" && e.phase == CommPhase::kBackward) {
            ++t.dp_backward;
          } else {
            ++t.others;
          }
        }
        t.modelled_us = trace.ModelledUs();
        t.peak_bytes = context.allocator()->stats().peak_bytes;
        return absl::OkStatus();
      }));
  return t;
}

TEST(BigWorld, TheBlockOfAnyRank) {
  const Traffic first = ValueOrThrow(BlockTraffic(0));
  EXPECT_EQ(first.tp_forward, 2);
  EXPECT_EQ(first.tp_backward, 2);
  EXPECT_LE(first.dp_backward, 3);  // buckets of the block's 16 parameters
  EXPECT_GE(first.dp_backward, 1);
  EXPECT_EQ(first.others, 0);
  // Four all-reduces of [2, 2048, 8192] float32 over 16 ranks.
  EXPECT_EQ(first.tp_bytes, int64_t{4} * 2 * (2 * 2048 * 8192 * 4) * 15 / 16);
  EXPECT_GT(first.modelled_us, 0);
  EXPECT_EQ(first.peak_bytes, 0);
  for (const int64_t rank : {1, 15, 16, 2047, 2048, 5000, 16383}) {
    Traffic t = ValueOrThrow(BlockTraffic(rank));
    EXPECT_EQ(t, first) << rank;
  }
}

TEST(BigWorld, CommunicatorsOnlyForTheDimsThatAreUsed) {
  const absl::Status status =
      RunFake({.world = 16384, .rank = 9}, [](RankContext& context) -> absl::Status {
        const DeviceMesh mesh({8, 128, 16}, {"pp", "dp", "tp"});
        const DTensor x =
            ones({32, 16}, {.mesh = mesh, .placements = {Replicate(), Replicate(), Shard(1)}});
        CommTrace trace;
        sum(x).Item();
        EXPECT_EQ(trace.TotalCount(), 1);
        EXPECT_EQ(trace.events()[0].mesh_dims, "tp");
        EXPECT_EQ(context.world_size(), 16384);
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor

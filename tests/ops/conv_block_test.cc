// A block of a residual network (convolutions, batch norm with statistics over all of the batch,
// max pool, a residual) sharded by batch, by channel and by rows gives the numbers of one rank,
// forward and backward.
#include <gtest/gtest.h>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "tests/ops/gradcheck.h"
#include "tests/ops/sharded.h"

namespace dtensor::testing::conv_block_test {
namespace {

DTensor BatchNorm(const DTensor& x, const DTensor& g, const DTensor& b) {
  return batch_norm(x, {}, {}, g, b, /*training=*/true);
}

// x, w1, g1, b1, w2, g2, b2
DTensor Block(const std::vector<DTensor>& in) {
  const DTensor x = max_pool2d(in[0], {3}, {2}, {1});
  const DTensor hidden = relu(BatchNorm(conv2d(x, in[1], {}, {1}, 1), in[2], in[3]));
  return relu(BatchNorm(conv2d(hidden, in[4], {}, {1}, 1), in[5], in[6]) + x);
}

constexpr int kOperands = 7;

// How one mesh dim shards the operands of Block.
using Sharding = std::vector<Placement>;
const Sharding kBatch = {Shard(0),    Replicate(), Replicate(), Replicate(),
                         Replicate(), Replicate(), Replicate()};
const Sharding kByRows = {Shard(2),    Replicate(), Replicate(), Replicate(),
                          Replicate(), Replicate(), Replicate()};
const Sharding kByColumns = {Shard(3),    Replicate(), Replicate(), Replicate(),
                             Replicate(), Replicate(), Replicate()};
// The channels between the convolutions.
const Sharding kChannels = {Replicate(), Shard(0),    Shard(0),   Shard(0),
                            Shard(1),    Replicate(), Replicate()};

void CheckBlock(const Dims& mesh_shape, const std::vector<Sharding>& sharding) {
  const std::vector<Operand> operands = {
      Float({4, 3, 10, 9}, 1), Float({6, 3, 3, 3}, 2), Float({6}, 3), Float({6}, 4),
      Float({3, 6, 3, 3}, 5),  Float({3}, 6),          Float({3}, 7)};
  const std::vector<double> value = Block(MakeAll(operands)).ToVector<double>();
  const auto grads = Gradients(Block, MakeAll(operands));
  ThrowIfError(RunSpmd(Numel(mesh_shape), [&](RankContext& context) {
    const DeviceMesh mesh = ValueOrThrow(DeviceMesh::Create(mesh_shape));
    std::vector<DTensor> in;
    for (int i = 0; i < kOperands; ++i) {
      Placements placements;
      for (const Sharding& s : sharding) placements.push_back(s[i]);
      in.push_back(Place(operands[i], mesh, placements, context.rank(), 50));
    }
    EXPECT_EQ(Differs(Block(in).ToVector<double>(), value, 1e-10), "");
    const auto mine = Gradients(Block, in);
    for (int i = 0; i < kOperands; ++i) {
      EXPECT_EQ(Differs(mine[i], grads[i], 1e-10), "") << "gradient " << i;
      EXPECT_EQ(in[i].grad().placements(), in[i].placements());
    }
    return absl::OkStatus();
  }));
}

TEST(ConvBlock, ShardedByBatch) {
  CheckBlock({2}, {kBatch});
  CheckBlock({3}, {kBatch});
}
TEST(ConvBlock, ShardedByChannel) {
  CheckBlock({2}, {kChannels});
  CheckBlock({3}, {kChannels});
}
TEST(ConvBlock, ShardedByRows) {
  CheckBlock({2}, {kByRows});
  CheckBlock({3}, {kByRows});
}
TEST(ConvBlock, ShardedByTwo) {
  CheckBlock({2, 2}, {kBatch, kByRows});
  CheckBlock({2, 2}, {kBatch, kChannels});
  CheckBlock({2, 2}, {kByRows, kChannels});
  CheckBlock({2, 2}, {kByRows, kByColumns});
}

}  // namespace
}  // namespace dtensor::testing::conv_block_test

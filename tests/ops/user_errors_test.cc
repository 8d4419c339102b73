// What a user reads when a program is wrong: every rank ends with the same words, and none hangs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "mesh/launch.h"
#include "ops/ops.h"

namespace dtensor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The message with which a program on `ranks` ranks ends.
std::string Outcome(int64_t ranks, const std::function<void(RankContext&)>& body) {
  const absl::Status status = RunSpmd(ranks,
                                      [&](RankContext& rank) {
                                        body(rank);
                                        return absl::OkStatus();
                                      },
                                      {.timeout = absl::Seconds(20)});
  return std::string(status.message());
}

DTensor Made(Shape shape, const DeviceMesh& mesh, Placements placements) {
  return ones(shape, {.mesh = mesh, .placements = std::move(placements)});
}

TEST(UserErrors, MismatchedShapes) {
  EXPECT_THAT(
      Outcome(4,
              [](RankContext&) {
                const DeviceMesh mesh({2, 2}, {"dp", "tp"});
                matmul(Made({4, 6}, mesh, {Shard(0), Replicate()}),
                       Made({5, 8}, mesh, {Replicate(), Shard(1)}));
              }),
      AllOf(HasSubstr("[matmul]"), HasSubstr("x = float32 [4, 6] on dp=2 tp=2 [S(0), R]"),
            HasSubstr("w = float32 [5, 8]"), HasSubstr("inner sizes differ"), HasSubstr("of 4)")));
  EXPECT_THAT(Outcome(1, [](RankContext&) { ones({2, 3}) + ones({4}); }),
              AllOf(HasSubstr("[add]"), HasSubstr("do not broadcast")));
}

TEST(UserErrors, PlacementDimOutOfRange) {
  EXPECT_THAT(Outcome(2, [](RankContext&) { Made({4, 4}, DeviceMesh({2}, {"tp"}), {Shard(2)}); }),
              AllOf(HasSubstr("[ones]"), HasSubstr("S(2)"), HasSubstr("legal are -2 to 1")));
}

TEST(UserErrors, WrongNumberOfPlacements) {
  EXPECT_THAT(
      Outcome(2, [](RankContext&) { Made({4}, DeviceMesh({2}, {"tp"}), {Shard(0), Replicate()}); }),
      AllOf(HasSubstr("2 placements"), HasSubstr("1 ")));
}

TEST(UserErrors, TwoMeshesInOneOp) {
  EXPECT_THAT(Outcome(4,
                      [](RankContext&) {
                        Made({4}, DeviceMesh({4}, {"tp"}), {Shard(0)}) +
                            Made({4}, DeviceMesh({2, 2}, {"dp", "tp"}), {Shard(0), Replicate()});
                      }),
              AllOf(HasSubstr("[add]"), HasSubstr("tp=4"), HasSubstr("dp=2 tp=2")));
  EXPECT_THAT(
      Outcome(2, [](RankContext&) { Made({4}, DeviceMesh({2}, {"tp"}), {Shard(0)}) + ones({4}); }),
      AllOf(HasSubstr("[add]"), HasSubstr("DistributeTensor")));
}

TEST(UserErrors, MeshThatIsNotTheWorld) {
  EXPECT_THAT(Outcome(2,
                      [](RankContext&) {
                        Made({8}, DeviceMesh({4}, {"tp"}), {Shard(0)}).Redistribute({Replicate()});
                      }),
              AllOf(HasSubstr("tp=4"), HasSubstr("2")));
}

TEST(UserErrors, DuplicateRanksAndUnknownDims) {
  EXPECT_THAT(std::string(DeviceMesh::FromRanks({4}, {0, 1, 2, 1}).status().message()),
              AllOf(HasSubstr("1"), HasSubstr("twice")));
  EXPECT_THAT(Outcome(4, [](RankContext&) { DeviceMesh({2, 2}, {"dp", "tp"})["pp"]; }),
              AllOf(HasSubstr("\"pp\""), HasSubstr("dp"), HasSubstr("tp")));
}

TEST(UserErrors, OverflowInAShape) {
  const int64_t big = int64_t{1} << 40;
  EXPECT_THAT(Outcome(1, [&](RankContext&) { zeros({big, big}); }),
              AllOf(HasSubstr("[zeros]"), HasSubstr("2^63 - 1")));
  EXPECT_THAT(Outcome(1, [&](RankContext&) { expand(ones({1, 1}), {big, big}); }),
              HasSubstr("2^63 - 1"));
}

TEST(UserErrors, Backward) {
  EXPECT_THAT(Outcome(1, [](RankContext&) { (ones({3}).RequiresGrad() * 2).Backward(); }),
              AllOf(HasSubstr("[backward]"), HasSubstr("one element"), HasSubstr("[3]")));
  EXPECT_THAT(Outcome(1, [](RankContext&) { sum(ones({3})).Backward(); }),
              AllOf(HasSubstr("[backward]"), HasSubstr("no gradient history")));
}

TEST(UserErrors, InPlaceOnALeafAndOnASavedTensor) {
  EXPECT_THAT(Outcome(1, [](RankContext&) { add_(ones({3}).RequiresGrad(), 1); }),
              AllOf(HasSubstr("[add_"), HasSubstr("leaf")));
  EXPECT_THAT(Outcome(1,
                      [](RankContext&) {
                        DTensor w = ones({3}).RequiresGrad();
                        DTensor h = w * 2;
                        const DTensor y = sum(h * h);
                        mul_(h, 3);
                        y.Backward();
                      }),
              AllOf(HasSubstr("changed in place"), HasSubstr("clone()")));
}

TEST(UserErrors, StrictModeNamesOpInputAndCollective) {
  EXPECT_THAT(Outcome(2,
                      [](RankContext&) {
                        const DTensor x = Made({4, 4}, DeviceMesh({2}, {"tp"}), {Shard(1)});
                        const StrictRedistribute strict;
                        layer_norm(x, {4});
                      }),
              AllOf(HasSubstr("strict mode"), HasSubstr("over tp"), HasSubstr("[layer_norm]"),
                    HasSubstr("x")));
}

TEST(UserErrors, AThrowingRankEndsAll) {
  EXPECT_THAT(Outcome(4,
                      [](RankContext& rank) {
                        const DeviceMesh mesh({4}, {"tp"});
                        for (int i = 0; i < 5; ++i) {
                          if (rank.rank() == 2 && i == 3) throw std::runtime_error("out of ideas");
                          sum(Made({8}, mesh, {Shard(0)})).Item();
                        }
                      }),
              AllOf(HasSubstr("rank 2"), HasSubstr("out of ideas")));
}

TEST(UserErrors, DifferentCollectivesNameBoth) {
  const std::string message = Outcome(2, [](RankContext& rank) {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = Made({8, 2}, mesh, {Shard(0)});
    if (rank.rank() == 0) {
      x.Redistribute({Replicate()});
    } else {
      sum(x).Redistribute({Replicate()});
    }
  });
  EXPECT_THAT(message, AllOf(HasSubstr("all_gather"), HasSubstr("all_reduce"), HasSubstr("rank")));
}

}  // namespace
}  // namespace dtensor

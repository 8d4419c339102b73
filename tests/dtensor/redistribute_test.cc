#include "dtensor/redistribute.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>

#include "dtensor/distribute.h"
#include "dtensor/memory.h"
#include "dtensor/mesh/limited.h"
#include "dtensor/move_plan.h"
#include "dtensor/rng/generator.h"
#include "test_ops.h"
#include "tests/common/random_layout.h"

namespace dtensor::redistribute_test {
namespace {

using ::testing::HasSubstr;
using testing::Ints;
using testing::MessageOf;

// All placements of one mesh dim for a 2-D tensor.
std::vector<Placement> Kinds() { return {Replicate(), Shard(0), Shard(1), Partial(), Shard(0, 2)}; }

std::vector<Placements> Product(int mesh_ndim) {
  std::vector<Placements> all = {{}};
  for (int m = 0; m < mesh_ndim; ++m) {
    std::vector<Placements> next;
    for (const Placements& p : all) {
      for (const Placement& k : Kinds()) {
        next.push_back(p);
        next.back().push_back(k);
      }
    }
    all = next;
  }
  return all;
}

// Every pair of placements moves the same value; and the local part is what a fresh distribution
// has.
void CheckAllPairs(const DeviceMesh& mesh, IntSpan shape, int stride) {
  const Tensor full = Ints(shape, 3);
  const std::vector<double> expected = full.ToVector<double>();
  const std::vector<Placements> all = Product(mesh.ndim());
  for (size_t i = 0; i < all.size(); i += stride) {
    for (const Placements& to : all) {
      const DTensor x = DistributeTensor(full, mesh, all[i]);
      const DTensor y = x.Redistribute(to);
      ASSERT_EQ(y.ToVector<double>(), expected)
          << ToString(all[i]) << " to " << ToString(to) << " of " << ToString(shape);
      if (!y.spec().has_partial()) {
        ASSERT_EQ(y.local().ToVector<double>(),
                  DistributeTensor(full, mesh, to).local().ToVector<double>())
            << ToString(all[i]) << " to " << ToString(to);
      }
      const bool moved = NeedsCommunication(x.spec(), y.spec());
      if (!moved) continue;
      ASSERT_GT(RedistributeCost(x.spec(), y.spec()) + static_cast<double>(full.numel() == 0), 0)
          << ToString(all[i]) << " to " << ToString(to);
    }
  }
}

TEST(Redistribute, AllPairsOn1D) {
  for (int n : {2, 3, 4}) {
    ASSERT_TRUE(RunSpmd(n, [&](RankContext&) {
                  for (const Shape& shape : {Shape{4, 6}, Shape{5, 7}, Shape{2, 1}, Shape{0, 3}}) {
                    CheckAllPairs(DeviceMesh({n}, {"tp"}), shape, 1);
                  }
                  return absl::OkStatus();
                }).ok());
  }
}

TEST(Redistribute, AllPairsOn2D) {
  ASSERT_TRUE(RunSpmd(4, [&](RankContext&) {
                CheckAllPairs(DeviceMesh({2, 2}, {"dp", "tp"}), {5, 7}, 1);
                return absl::OkStatus();
              }).ok());
  ASSERT_TRUE(RunSpmd(6, [&](RankContext&) {
                CheckAllPairs(DeviceMesh({2, 3}, {"dp", "tp"}), {7, 4}, 2);
                return absl::OkStatus();
              }).ok());
}

TEST(Redistribute, SomePairsOn3D) {
  ASSERT_TRUE(RunSpmd(8, [&](RankContext&) {
                CheckAllPairs(DeviceMesh({2, 2, 2}), {9, 5}, 17);
                return absl::OkStatus();
              }).ok());
}

TEST(Redistribute, PicksTheRightCollective) {
  ASSERT_TRUE(RunSpmd(4, [&](RankContext&) {
                const DeviceMesh mesh({4}, {"tp"});
                const auto count = [&](Placement from, Placement to) {
                  DTensor x = DistributeTensor(Ints({8, 8}, 1), mesh, {from});
                  CommTrace trace;
                  x.Redistribute({to});
                  std::string kinds;
                  for (const CommEvent& e : trace.events())
                    kinds += std::string(Name(e.kind)) + " ";
                  return kinds;
                };
                EXPECT_EQ(count(Shard(0), Replicate()), "all_gather ");
                EXPECT_EQ(count(Partial(), Replicate()), "all_reduce ");
                EXPECT_EQ(count(Partial(), Shard(1)), "reduce_scatter ");
                EXPECT_EQ(count(Shard(0), Shard(1)), "exchange ");
                EXPECT_EQ(count(Replicate(), Shard(1)), "");
                EXPECT_EQ(count(Replicate(), Partial()), "");
                // An unchanged outer cut of the same dim takes no part.
                DTensor x = DistributeTensor(Ints({8, 8}, 1), DeviceMesh({2, 2}, {"dp", "tp"}),
                                             {Shard(0), Shard(0)});
                CommTrace trace;
                x.Redistribute({Shard(0), Replicate()});
                EXPECT_EQ(trace.events().size(), 1);
                EXPECT_EQ(trace.events()[0].kind, CollectiveKind::kAllGather);
                EXPECT_EQ(trace.events()[0].mesh_dims, "tp");
                return absl::OkStatus();
              }).ok());
}

TEST(Redistribute, OtherPartialKinds) {
  ASSERT_TRUE(RunSpmd(3, [&](RankContext& context) {
                const DeviceMesh mesh({3}, {"tp"});
                const double r = static_cast<double>(context.rank());
                DTensor local = FromVector<double>({r, 5 - r}, {2}, {.dtype = DType::kF64});
                DTensor x = FromLocal(local, mesh, {Partial(ReduceOp::kMax)});
                EXPECT_THAT(x.ToVector<double>(), ::testing::ElementsAre(2, 5));
                DTensor avg = FromLocal(local, mesh, {Partial(ReduceOp::kAvg)});
                EXPECT_THAT(avg.ToVector<double>(), ::testing::ElementsAre(1, 4));
                EXPECT_THAT(x.Redistribute({Partial()}).ToVector<double>(),
                            ::testing::ElementsAre(2, 5));
                EXPECT_THAT(MessageOf([&] { x.Redistribute({Shard(1)}); }), HasSubstr("dim"));
                EXPECT_THAT(MessageOf([&] { x.Redistribute({Shard(0), Shard(0)}); }),
                            HasSubstr("[redistribute]"));
                return absl::OkStatus();
              }).ok());
}

TEST(Redistribute, SubMeshesOfOneWorld) {
  ASSERT_TRUE(RunSpmd(4, [&](RankContext& context) {
                const DeviceMesh mesh({2, 2}, {"dp", "tp"});
                const DeviceMesh tp = mesh["tp"];
                DTensor x = DistributeTensor(Ints({4, 4}, context.rank() / 2), tp, {Shard(0)});
                EXPECT_EQ(x.ToVector<double>(),
                          Ints({4, 4}, context.rank() / 2).ToVector<double>());
                return absl::OkStatus();
              }).ok());
}

TEST(Redistribute, RankOutsideTheMeshHoldsNothing) {
  ASSERT_TRUE(RunSpmd(3, [&](RankContext& context) {
                const DeviceMesh mesh({2}, {"tp"});  // ranks 0 and 1
                DTensor x = DistributeTensor(Ints({4}, 0), mesh, {Shard(0)});
                EXPECT_EQ(x.local().defined(), context.rank() < 2);
                DTensor y = x.Redistribute({Replicate()});
                EXPECT_EQ(y.local().defined(), context.rank() < 2);
                return absl::OkStatus();
              }).ok());
}

TEST(Redistribute, ReplicasTakeTurnsInServing) {
  // Rank (i, j) of 4 x 4 holds columns' block j and wants block i: from one of the four that have
  // it.
  const DeviceMesh mesh({4, 4});
  int64_t total = 0;
  for (int64_t rank = 0; rank < 16; ++rank) {
    SpecInterner specs(rank);
    const SpecRef from = *specs.Intern(mesh, {Replicate(), Shard(0)}, {16, 3}, DType::kF32);
    const SpecRef to = *specs.Intern(mesh, {Shard(0), Replicate()}, {16, 3}, DType::kF32);
    int64_t sent = 0;
    for (const auto& piece : internal::PlanMove(*from, *to, rank).sends) {
      sent += piece.box.numel();
    }
    EXPECT_LE(sent, 12) << "rank " << rank;  // one block
    total += sent;
  }
  EXPECT_EQ(total, 12 * 12);  // all but those with i == j lack theirs
}

TEST(Redistribute, PlansForSixteenThousandRanks) {
  const DeviceMesh mesh({8, 128, 16});
  const int64_t rank = 5000;
  SpecInterner specs(rank);
  const auto plan = [&](const Placements& from, const Placements& to) {
    const Shape shape = {4096, 2048};
    const SpecRef a = ValueOrThrow(specs.Intern(mesh, from, shape, DType::kF32)),
                  b = ValueOrThrow(specs.Intern(mesh, to, shape, DType::kF32));
    internal::MovePlan plan = internal::PlanMove(*a, *b, rank);
    internal::AddCounts(*a, *b, rank, /*packed=*/false, &plan);
    return plan;
  };
  const internal::MovePlan moves =
      plan({Shard(0), Shard(1), Replicate()}, {Replicate(), Shard(0), Shard(1)});
  int64_t own = 0;
  for (const BoxPair& pair : moves.own) own += pair.a.numel();
  EXPECT_EQ(moves.received_numel + own, 4096 / 128 * 2048 / 16);
  // Along one mesh dim a rank knows the ranks of that dim, whatever the world.
  const internal::MovePlan scatter =
      plan({Replicate(), Shard(1), Partial()}, {Replicate(), Shard(1), Shard(0)});
  EXPECT_EQ(scatter.share_rows.dim, 0);
  EXPECT_EQ(scatter.share_rows.counts, std::vector<int64_t>(16, 4096 / 16));
  EXPECT_EQ(scatter.share_counts, std::vector<int64_t>(16, 4096 / 16 * 2048 / 128));
  EXPECT_EQ(scatter.received_numel, 15 * scatter.share_counts[0]);
}

// What a plan says that a rank receives: of rows of unequal length, too.
TEST(Redistribute, PlansCountWhatIsReceived) {
  const DeviceMesh mesh({3});
  for (int64_t rank = 0; rank < 3; ++rank) {
    SpecInterner specs(rank);
    const auto spec = [&](Placement p) {
      return ValueOrThrow(specs.Intern(mesh, {p}, {7, 4}, DType::kF32));
    };
    for (const int dim : {0, 1}) {
      const SpecRef from = spec(Shard(dim)), to = spec(Replicate());
      EXPECT_EQ(internal::PlanMove(*from, *to, rank).received_numel,
                28 - Numel(LocalShape(*from, {rank})));
    }
  }
}

TEST(Redistribute, StridedSources) {
  for (const bool packed : {false, true}) {
    SpmdOptions options;
    if (packed) options.wrap = Packed();
    ASSERT_TRUE(RunSpmd(
                    4,
                    [&](RankContext& context) {
                      const DeviceMesh mesh({2, 2}, {"dp", "tp"});
                      const Tensor base = Ints({6, 4}, 1);
                      const int64_t row = context.rank() / 2, column = context.rank() % 2;
                      // Every rank's part is a transposed piece of a larger tensor.
                      const Tensor part =
                          base.Slice(0, 3 * column, 3).Slice(1, 2 * row, 2).Transpose(0, 1);
                      const DTensor x = FromLocal(OnSelf(part), mesh, {Shard(0), Shard(1)});
                      const std::vector<double> expected =
                          ValueOrThrow(base.Transpose(0, 1).Contiguous()).ToVector<double>();
                      for (const Placements& to : Product(2)) {
                        EXPECT_EQ(x.Redistribute(to).ToVector<double>(), expected) << ToString(to);
                      }
                      const DTensor y = FromLocal(OnSelf(part), mesh, {Partial(), Partial()});
                      const std::vector<double> sums = y.ToVector<double>();
                      for (const Placements& to : Product(2)) {
                        EXPECT_EQ(y.Redistribute(to).ToVector<double>(), sums) << ToString(to);
                      }
                      return absl::OkStatus();
                    },
                    options)
                    .ok());
  }
}

// A flat piece may begin in one plane and end in the next, which rows of a strided part do not.
TEST(Redistribute, FlatPiecesOfStridedPartsCrossPlanes) {
  const absl::Status status = RunSpmd(6, [&](RankContext& context) -> absl::Status {
    const DeviceMesh mesh({3, 2}, {"a", "b"});
    const Tensor mine = Ints({6, 2, 6}, context.rank() % 2).Transpose(0, 1);
    const Tensor plain = ValueOrThrow(mine.Contiguous());
    const Placement thirds = FlatShard({24, 24, 24}), halves = FlatShard({12, 12});
    for (const Placements& to : {Placements{thirds, halves}, {thirds, Replicate()}}) {
      const auto moved = [&](const Tensor& part) {
        return FromLocal(OnSelf(part), mesh, {Replicate(), Partial()})
            .Redistribute(to)
            .local()
            .ToVector<double>();
      };
      EXPECT_EQ(moved(mine), moved(plain)) << ToString(to);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Redistribute, BetweenMeshes) {
  ASSERT_TRUE(RunSpmd(4, [&](RankContext&) {
                const DeviceMesh grid({2, 2}, {"dp", "tp"}), row({4}, {"all"});
                const DeviceMesh turned = *DeviceMesh::FromRanks({2, 2}, {3, 1, 2, 0});
                const Tensor full = Ints({5, 7}, 2);
                DTensor x = DistributeTensor(full, grid, {Shard(1), Partial()});
                x.RequiresGrad();
                for (const auto& [mesh, to] : std::vector<std::pair<DeviceMesh, Placements>>{
                         {row, {Shard(0)}},
                         {row, {Partial()}},
                         {turned, {Shard(0), Shard(0)}},
                         {turned, {Replicate(), Shard(1)}}}) {
                  const DTensor y = x.Redistribute(mesh, to);
                  EXPECT_TRUE(y.mesh() == mesh);
                  EXPECT_EQ(y.ToVector<double>(), full.ToVector<double>()) << ToString(to);
                  // The gradient comes home to the source's mesh.
                  x.ZeroGrad();
                  y.Backward(DistributeTensor(Ints({5, 7}, 9), mesh, to));
                  EXPECT_TRUE(x.grad().mesh() == grid);
                  EXPECT_EQ(x.grad().ToVector<double>(), Ints({5, 7}, 9).ToVector<double>());
                }
                // Names alone: nothing moves.
                CommTrace trace;
                x.Detach()
                    .Redistribute({Shard(1), Replicate()})
                    .Redistribute(DeviceMesh({2, 2}, {"a", "b"}), {Shard(1), Replicate()});
                EXPECT_EQ(trace.TotalCount(), 1);
                EXPECT_THAT(MessageOf([&] { x.Redistribute(DeviceMesh::Self(), {}); }),
                            HasSubstr("one is local"));
                return absl::OkStatus();
              }).ok());
}

TEST(FromLocal, FlatAndSegmentedGoThereAndBack) {
  ASSERT_TRUE(RunSpmd(3, [&](RankContext& context) {
                const DeviceMesh mesh({3}, {"dp"});
                const Tensor full = Ints({4, 3}, 1);
                for (const Placement& p : {FlatShard({5, 0, 7}), SegmentedShard(0, {3, 1})}) {
                  DTensor x = DistributeTensor(full, mesh, {p});
                  x.RequiresGrad();
                  const DTensor local = x.ToLocal();
                  EXPECT_EQ(local.shape(), x.spec().local_shape());
                  const DTensor back = FromLocal(local, mesh, {p}, {.shape = {4, 3}});
                  EXPECT_EQ(back.FullTensor().ToVector<double>(), full.ToVector<double>());
                  back.Backward(DistributeTensor(Ints({4, 3}, 5), mesh, {p}));
                  EXPECT_EQ(x.grad().ToVector<double>(), Ints({4, 3}, 5).ToVector<double>());
                }
                EXPECT_THAT(MessageOf([&] {
                              FromLocal(zeros({context.rank() + 1}), mesh, {FlatShard({1, 2, 3})});
                            }),
                            HasSubstr("give options.shape"));
                return absl::OkStatus();
              }).ok());
}

TEST(FromLocal, ChecksShapesAndReplicas) {
  absl::Status status = RunSpmd(2, [&](RankContext& context) {
    const DeviceMesh mesh({2}, {"tp"});
    DTensor local = FromVector<double>({1, 2}, {2}, {.dtype = DType::kF64});
    EXPECT_EQ(FromLocal(local, mesh, {Shard(0)}).shape(), Shape({4}));
    FromLocalOptions options;
    options.run_check = true;
    DTensor mine =
        FromVector<double>({static_cast<double>(context.rank())}, {1}, {.dtype = DType::kF64});
    EXPECT_THAT(MessageOf([&] { FromLocal(mine, mesh, {Replicate()}, options); }),
                HasSubstr("ranks 0 and 1 should hold the same values"));
    DTensor odd = zeros({2 + context.rank()}, {.dtype = DType::kF64});
    EXPECT_THAT(MessageOf([&] { FromLocal(odd, mesh, {Shard(0)}, options); }),
                HasSubstr("describe different tensors"));
    const DTensor shape_only = zeros({2}, {.mesh = DeviceMesh::Self(DeviceType::kMeta)});
    EXPECT_THAT(MessageOf([&] { FromLocal(shape_only, mesh, {Shard(0)}); }),
                HasSubstr("the local tensor is on meta, the mesh is of "));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  // A local shape is this rank's alone: it ends the world, and names the rank.
  status = RunSpmd(2, [&](RankContext&) {
    FromLocalOptions options;
    options.shape = {5};
    FromLocal(zeros({2}), DeviceMesh({2}, {"tp"}), {Shard(0)}, options);
    return absl::OkStatus();
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("is not the [3]"));
  EXPECT_EQ(CulpritOf(status), 0);
}

// Any rank's wrong shape is told to all, the first one's too.
TEST(FromLocal, ACheckTellsEveryRankWhoseShapeIsWrong) {
  for (const int64_t wrong : {0, 1, 2}) {
    const absl::Status status = RunSpmd(3, [&](RankContext& context) {
      FromLocalOptions options;
      options.run_check = true;
      options.shape = {6};
      const DTensor local = zeros({context.rank() == wrong ? 5 : 2});
      const std::string text =
          MessageOf([&] { FromLocal(local, DeviceMesh({3}, {"tp"}), {Shard(0)}, options); });
      EXPECT_THAT(text, HasSubstr(absl::StrCat("the local shape on rank ", wrong)));
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(DistributeTensor, FromOneRank) {
  ASSERT_TRUE(RunSpmd(3, [&](RankContext& context) {
                const DeviceMesh mesh({3}, {"tp"});
                DTensor x = DistributeTensor(Ints({5}, context.rank()), mesh, {Shard(0)}, 1);
                EXPECT_EQ(x.ToVector<double>(), Ints({5}, 1).ToVector<double>());
                EXPECT_THAT(MessageOf([&] { DistributeTensor(Ints({5}, 0), mesh, {Shard(0)}, 7); }),
                            HasSubstr("src_rank 7 is not in mesh"));
                return absl::OkStatus();
              }).ok());
}

TEST(Factories, SameValuesUnderAnyPlacement) {
  const std::vector<double> one_device = [] {
    ManualSeed(5);
    return randn({7, 3}, {.dtype = DType::kF64}).ToVector<double>();
  }();
  ASSERT_TRUE(RunSpmd(4, [&](RankContext&) {
                const DeviceMesh mesh({2, 2}, {"dp", "tp"});
                for (const Placements& p : Product(2)) {
                  ManualSeed(5);
                  const TensorOptions options = {DType::kF64, mesh, p};
                  EXPECT_EQ(randn({7, 3}, options).ToVector<double>(), one_device) << ToString(p);
                  EXPECT_EQ(full({5, 2}, 3, options).ToVector<double>(),
                            std::vector<double>(10, 3.0));
                }
                const TensorOptions sharded = {DType::kI64, mesh, {Shard(0), Shard(0)}};
                EXPECT_EQ(arange(2, 12, 3, sharded).ToVector<int64_t>(),
                          (std::vector<int64_t>{2, 5, 8, 11}));
                for (const Placements& p : {Placements{FlatShard({1, 3}), Replicate()},
                                            Placements{Shard(0), FlatShard({2, 0})}}) {
                  EXPECT_EQ(arange(2, 12, 3, {DType::kI64, mesh, p}).ToVector<int64_t>(),
                            (std::vector<int64_t>{2, 5, 8, 11}))
                      << ToString(p);
                }
                return absl::OkStatus();
              }).ok());
}

// What readers share is kept per layout: asking for another one does not lose it, changing the
// source does.
TEST(Redistribute, SharedResultsAreKeptPerLayout) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const Placements layouts[] = {{Replicate()}, {Shard(1)}};
    const Tensor whole = ValueOrThrow(Tensor::Empty({4, 4}, DType::kF32));
    Fill(whole, 1);
    const DTensor x = DistributeTensor(whole, mesh, {Shard(0)});
    CommTrace trace;
    for (int round = 0; round < 3; ++round) {
      for (const Placements& p : layouts) x.Redistribute(p, {.shared = true});
    }
    EXPECT_EQ(trace.TotalCount(), 2);
    Fill(x.local(), 2);
    EXPECT_EQ(x.Redistribute(layouts[0], {.shared = true}).local().ToVector<float>(),
              std::vector<float>(16, 2));
    EXPECT_EQ(trace.TotalCount(), 3);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A memo and a view of it, which is another: the bytes are those of the memo.
TEST(DescribeMemory, NamesTheTensorAndNotAViewOfIt) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DTensor x = ones({1000}, {.mesh = DeviceMesh({2}, {"tp"}), .placements = {Shard(0)}});
    const DTensor whole = x.Redistribute({Replicate()}, {.shared = true});
    const DTensor part = whole.Redistribute({Shard(0)}, {.shared = true});
    const MemoryReport report = DescribeMemory();
    EXPECT_EQ(report.largest.size(), 1u);
    EXPECT_EQ(report.largest[0].bytes, 4000);
    EXPECT_EQ(report.largest[0].spec, whole.spec().ToString());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Whether a shared result is a view of its source: else a write to the one would reach the other on
// some ranks only. Of all placements, uneven and empty parts among them.
TEST(Redistribute, SharedResultsAreViewsOnAllRanksOrOnNone) {
  int64_t views = 0, copies = 0;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    testing::Dice dice(seed);
    const Dims mesh_shape = testing::RandomMesh(dice, 8);
    const Shape shape = testing::RandomShape(dice, 1);
    const Placements from = dice.Chance(50) ? Placements(mesh_shape.size(), Replicate())
                                            : testing::RandomLayout(dice, shape, mesh_shape);
    const Placements to = testing::RandomLayout(dice, shape, mesh_shape);
    if (!testing::Legal(mesh_shape, from, shape)) continue;
    std::atomic<int64_t> sharing{0};
    const absl::Status status = RunSpmd(Numel(mesh_shape), [&](RankContext& rank) -> absl::Status {
      const DeviceMesh mesh = *DeviceMesh::Create(mesh_shape);
      const DTensor x = DistributeTensor(Ints(shape, 3), mesh, from);
      const DTensor y = x.Redistribute(to, {.shared = true});
      std::vector<int> dims(mesh_shape.size());
      std::iota(dims.begin(), dims.end(), 0);
      const bool shares = y.local().buffer().SharesWith(x.local().buffer());
      DT_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                          rank.Exchange(mesh, dims, "shares", shares ? "y" : "n"));
      sharing = std::count(all.begin(), all.end(), "y");
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status << " of seed " << seed;
    ASSERT_TRUE(sharing == 0 || sharing == Numel(mesh_shape))
        << sharing << " of " << Numel(mesh_shape) << " ranks: " << ToString(from) << " to "
        << ToString(to) << " of " << ToString(shape) << " on " << ToString(mesh_shape);
    ++(sharing > 0 ? views : copies);
  }
  EXPECT_GT(views, 100);
  EXPECT_GT(copies, 100);
}

}  // namespace
}  // namespace dtensor::redistribute_test

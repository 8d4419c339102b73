// Regions, streams and modes: the seeds of RegionSeed's sources, states that come back, and what is
// refused.
#include "dtensor/rng/tracker.h"

#include <map>
#include <random>

#include "dtensor/mesh/launch.h"
#include "dtensor/rng/fill.h"
#include "dtensor/tensor/status.h"
#include "tests/rng/rng_test_util.h"

namespace dtensor::tracker_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<bool> Bits(int code, int n) {
  std::vector<bool> bits;
  for (int i = 0; i < n; ++i) bits.push_back(code >> i & 1);
  return bits;
}

TEST(RegionSeed, TheTableForTwoByTwoByTwo) {
  // Rows: (), (tensor), (data), (tensor, data), (pipeline), ...; columns: ranks, tensor fastest.
  const int64_t table[8][8] = {{0, 1, 2, 3, 4, 5, 6, 7},         {8, 8, 10, 10, 12, 12, 14, 14},
                               {16, 17, 16, 17, 20, 21, 20, 21}, {24, 24, 24, 24, 28, 28, 28, 28},
                               {32, 33, 34, 35, 32, 33, 34, 35}, {40, 40, 42, 42, 40, 40, 42, 42},
                               {48, 49, 48, 49, 48, 49, 48, 49}, {56, 56, 56, 56, 56, 56, 56, 56}};
  for (int code = 0; code < 8; ++code) {
    for (int64_t r = 0; r < 8; ++r) {
      EXPECT_EQ(RegionSeed(0, {2, 2, 2}, {r % 2, r / 2 % 2, r / 4}, Bits(code, 3)), table[code][r]);
    }
  }
}

TEST(RegionSeed, EqualExactlyWhereTheOtherCoordinatesAre) {
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    Dims sizes;
    for (int i = 0; i < 3; ++i) sizes.push_back(1 + random() % 4);
    std::map<int64_t, std::pair<int, std::vector<int64_t>>> seen;  // seed -> region, coordinates
    for (int code = 0; code < 8; ++code) {
      for (int64_t r = 0; r < Numel(sizes); ++r) {
        const Dims c = {r % sizes[0], r / sizes[0] % sizes[1], r / (sizes[0] * sizes[1])};
        std::vector<int64_t> others;
        for (int i = 0; i < 3; ++i) {
          if (!(code >> i & 1)) others.push_back(c[i]);
        }
        const auto key = std::make_pair(code, others);
        const auto [it, fresh] = seen.emplace(RegionSeed(1234, sizes, c, Bits(code, 3)), key);
        EXPECT_EQ(it->second, key);  // no two regions and no two ranks that differ share a seed
      }
    }
  }
}

std::vector<double> Draw(int n = 10) {
  const SpecRef spec =
      *RankContext::Current().specs().Intern(DeviceMesh::Self(), {}, {n}, DType::kF32);
  const Tensor t = OrDie(Tensor::Empty({n}, DType::kF32));
  EXPECT_TRUE(FillRandom(t, *spec, UniformOp()).ok());
  return t.ToVector<double>();
}

TEST(RngTracker, ForksContinueAndTheOuterStreamIsUntouched) {
  ManualSeed(5);
  const std::vector<double> outer1 = Draw(), outer2 = Draw();
  ManualSeed(5);
  RngTracker tracker;
  ASSERT_TRUE(tracker.Add("inner", 100).ok());
  std::vector<double> a, b;
  EXPECT_EQ(Draw(), outer1);
  {
    RngTracker::Fork fork(tracker, "inner");
    a = Draw();
  }
  EXPECT_EQ(Draw(), outer2);
  {
    RngTracker::Fork fork(tracker, "inner");
    b = Draw();
  }
  EXPECT_NE(a, b);  // continued, not repeated
  ManualSeed(100);
  EXPECT_EQ(Draw(), a);
  EXPECT_EQ(Draw(), b);
}

TEST(RngTracker, ExceptionsAndNestedForksRestore) {
  ManualSeed(5);
  RngTracker tracker;
  ASSERT_TRUE(tracker.Add("x", 1).ok());
  ASSERT_TRUE(tracker.Add("y", 2).ok());
  const auto before = DefaultGenerator().State();
  try {
    RngTracker::Fork x(tracker, "x");
    Draw();
    RngTracker::Fork y(tracker, "y");
    Draw();
    throw std::runtime_error("inside");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(DefaultGenerator().State(), before);
  EXPECT_NE(tracker.GetStates()["x"], Generator(1).State());  // it had advanced
}

TEST(RngTracker, StatesComeBackAndMustBeComplete) {
  RngTracker tracker;
  ASSERT_TRUE(tracker.Add("x", 1).ok());
  ASSERT_TRUE(tracker.Add("y", 2).ok());
  const auto draw = [&] {
    RngTracker::Fork fork(tracker, "x");
    return Draw();
  };
  const auto states = tracker.GetStates();
  const std::vector<double> first = draw();
  EXPECT_NE(draw(), first);
  ASSERT_TRUE(tracker.SetStates(states).ok());
  EXPECT_EQ(draw(), first);
  auto fewer = states, more = states;
  fewer.erase("y");
  more["z"] = states.at("x");
  EXPECT_THAT(std::string(tracker.SetStates(fewer).message()), HasSubstr("lack the stream \"y\""));
  EXPECT_THAT(std::string(tracker.SetStates(more).message()),
              AllOf(HasSubstr("\"z\""), HasSubstr("x, y")));
}

TEST(RngTracker, NamesAndSeedsAreUnique) {
  RngTracker tracker;
  ASSERT_TRUE(tracker.Add("model-parallel-rng", TensorParallelSeed(42, 1)).ok());
  EXPECT_EQ(tracker.Add("model-parallel-rng", 1).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(tracker.Add("other", 42 + 2718 + 1).message()),
              HasSubstr("is that of \"model-parallel-rng\""));
  EXPECT_EQ(ExpertParallelSeed(42, 2, 1), 42 + 1024 + 200 + 1);
  try {
    RngTracker::Fork fork(tracker, "modle");
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), AllOf(HasSubstr("\"modle\""), HasSubstr("model-parallel-rng")));
  }
}

TEST(MultiDimRandomizer, RanksAgreeWhereTheyShould) {
  std::vector<std::vector<double>> tensor(8), none(8);
  const absl::Status status = RunSpmd(8, [&](RankContext& context) -> absl::Status {
    const DeviceMesh mesh({2, 2, 2}, {"pipeline", "data", "tensor"});
    DT_ASSIGN_OR_RETURN(MultiDimRandomizer r,
                        MultiDimRandomizer::Create(mesh, {"tensor", "data", "pipeline"}, 0));
    const int64_t rank = context.rank();
    EXPECT_EQ(*r.SeedOf({"tensor", "pipeline"}),
              std::vector<int64_t>({40, 40, 42, 42, 40, 40, 42, 42})[rank]);
    DT_ASSIGN_OR_RETURN(const std::string same, r.Region({"tensor"}));
    DT_ASSIGN_OR_RETURN(const std::string own, r.Region({}));
    {
      RngTracker::Fork fork(r.tracker(), same);
      tensor[rank] = Draw();
    }
    {
      RngTracker::Fork fork(r.tracker(), own);
      none[rank] = Draw();
    }
    EXPECT_THAT(std::string(r.Region({"expert"}).status().message()), HasSubstr("tensor, data"));
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(tensor[0], tensor[1]);
  EXPECT_NE(tensor[0], tensor[2]);
  for (int i = 1; i < 8; ++i) EXPECT_NE(none[0], none[i]);
}

TEST(RandomStates, BranchKeepsItsStateAndKeysAreFixed) {
  RandomStates states({{"tp_synced", Generator(9).State()}});
  ManualSeed(1);
  const auto outer = DefaultGenerator().State();
  std::vector<double> a, b;
  {
    RandomStates::Branch branch(states, "tp_synced");
    a = Draw();
  }
  EXPECT_EQ(DefaultGenerator().State(), outer);
  {
    RandomStates::Branch branch(states, "tp_synced");
    b = Draw();
  }
  EXPECT_NE(a, b);
  {
    RandomStates::Branch branch(states, "tp_synced", /*enabled=*/false);
    Draw();
  }
  EXPECT_NE(DefaultGenerator().State(), outer);
  EXPECT_THAT(std::string(states.Set("new", outer).message()),
              HasSubstr("none can be added later"));
}

TEST(RandomStates, ACopyHasItsOwn) {
  RandomStates states({{"a", Generator(9).State()}}), copy = states;
  ASSERT_TRUE(copy.Set("a", Generator(4).State()).ok());
  EXPECT_EQ(*states.Get("a"), Generator(9).State());
  states = copy;
  EXPECT_EQ(*states.Get("a"), Generator(4).State());
}

TEST(RngSnapshot, BringsBackWhatThereWas) {
  ManualSeed(1);
  RngTracker tracker;
  ASSERT_TRUE(tracker.Add("kept", 5).ok());
  RandomStates states({{"a", Generator(9).State()}});
  const auto kept = tracker.GetStates();
  const auto outer = DefaultGenerator().State();
  RngTracker::Fork around(tracker, "kept");  // holds on to its stream
  const RngSnapshot before = RngSnapshot::Take();
  {
    const ScopedRngMode mode(RngMode::kOffsetBased);
    ASSERT_TRUE(tracker.Add("added", 6).ok());
    RngTracker::Fork fork(tracker, "added");
    Draw();
    RandomStates::Branch branch(states, "a");
    Draw();
  }
  const RngSnapshot after = RngSnapshot::Take();
  before.Restore();
  EXPECT_EQ(tracker.GetStates(), kept);
  EXPECT_EQ(*states.Get("a"), Generator(9).State());
  EXPECT_TRUE(tracker.Add("added", 6).ok());  // neither the name nor the seed is taken
  after.Restore();
  EXPECT_NE(tracker.GetStates().at("added"), Generator(6).State());
  EXPECT_NE(*states.Get("a"), Generator(9).State());
  EXPECT_EQ(CurrentRngMode(), RngMode::kThreadBased);
  const ScopedRngMode mode(RngMode::kTensorParallel);
  const RngSnapshot by_rank = RngSnapshot::Take();
  before.Restore();
  EXPECT_EQ(CurrentRngMode(), RngMode::kThreadBased);
  by_rank.Restore();
  EXPECT_EQ(CurrentRngMode(), RngMode::kTensorParallel);
  EXPECT_NE(DefaultGenerator().State(), outer);
}

// As a backward inside of the Fork does, which recomputes what ran before there was the stream.
TEST(RngSnapshot, TakesAStreamAwayThatAForkHasOpen) {
  ManualSeed(1);
  RngTracker tracker;
  const RngSnapshot before = RngSnapshot::Take();
  ASSERT_TRUE(tracker.Add("added", 6).ok());
  {
    RngTracker::Fork fork(tracker, "added");
    const std::vector<double> first = Draw();
    const RngSnapshot inside = RngSnapshot::Take();
    before.Restore();
    inside.Restore();
    EXPECT_NE(Draw(), first);
  }
  Generator twice(6);
  twice.Reserve(8);
  EXPECT_EQ(tracker.GetStates().at("added"), twice.State());
  {
    RngTracker::Fork fork(tracker, "added");
    Draw();
    before.Restore();
  }
  EXPECT_TRUE(tracker.GetStates().empty());
  EXPECT_EQ(DefaultGenerator().State(), Generator(1).State());
}

TEST(Synced, StatesAndDivergence) {
  const absl::Status status = RunSpmd(3, [](RankContext& context) -> absl::Status {
    const DeviceMesh mesh({3}, {"tp"});
    ManualSeed(static_cast<uint64_t>(context.rank()));
    DT_ASSIGN_OR_RETURN(const GeneratorState synced,
                        SyncedRandomState(DefaultGenerator().State(), mesh, 0));
    EXPECT_EQ(synced, Generator(0).State());
    ManualSeed(context.rank() == 1 ? 7 : 8);
    EXPECT_THAT(std::string(CheckGeneratorsAgree(mesh).message()),
                AllOf(HasSubstr("rank 1 differ from rank 0"), HasSubstr("ManualSeed")));
    ManualSeed(3);
    return CheckGeneratorsAgree(mesh);
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Synced, NullMeshesAreRefused) {
  const DeviceMesh null;
  EXPECT_FALSE(SyncedRandomState({}, null, 0).ok());
  EXPECT_THAT(std::string(CheckGeneratorsAgree(null).message()), HasSubstr("the mesh is null"));
  EXPECT_THAT(std::string(MultiDimRandomizer::Create(null, {"tp"}).status().message()),
              HasSubstr("the mesh is null"));
}

TEST(Modes, OffsetBasedReplicasAgreeAndShardsDiffer) {
  std::vector<std::vector<double>> sharded(4), replicated(4);
  const absl::Status status = RunSpmd(4, [&](RankContext& context) -> absl::Status {
    const ScopedRngMode mode(RngMode::kOffsetBased);
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    ManualSeed(3);
    DT_ASSIGN_OR_RETURN(const SpecRef s, context.specs().Intern(mesh, {Replicate(), Shard(0)},
                                                                {10, 3}, DType::kF32));
    EXPECT_EQ(OffsetBasedShift(*s).before, context.rank() % 2 == 0 ? 0u : 16u);  // 15, up to 16
    EXPECT_EQ(OffsetBasedShift(*s).after, 32u);                                  // 30, up to 32
    DT_ASSIGN_OR_RETURN(Tensor t, Tensor::Empty(s->local_shape(), DType::kF32));
    DT_RETURN_IF_ERROR(FillRandom(t, *s, UniformOp()));
    sharded[context.rank()] = t.ToVector<double>();
    EXPECT_EQ(DefaultGenerator().offset(), 32u);
    return CheckGeneratorsAgree(mesh);
  });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(sharded[0], sharded[2]);
  EXPECT_EQ(sharded[1], sharded[3]);
  EXPECT_NE(sharded[0], sharded[1]);
  ManualSeed(3);
  EXPECT_EQ(Draw(15), sharded[0]);  // the first shard is a local draw at the op's offset
}

// What torch 2.15's OffsetBasedRNGTracker._compute_rng_offsets gives, by rank: shards are counted
// over the tensor's dims, whichever mesh dim cuts which.
TEST(Modes, OffsetsAreThoseOfTorch) {
  struct Case {
    Dims mesh;
    Placements placements;
    Shape shape;
    std::vector<uint64_t> before;
    uint64_t after;
  };
  const std::vector<Case> cases = {
      {{2, 2}, {Shard(1), Shard(0)}, {8, 16}, {0, 64, 32, 96}, 128},
      {{2, 2}, {Shard(0), Shard(1)}, {8, 16}, {0, 32, 64, 96}, 128},
      {{2, 3}, {Shard(1), Shard(0)}, {7, 5}, {0, 20, 36, 12, 28, 48}, 36},
      {{2, 2}, {Shard(0), Shard(0)}, {8, 3}, {0, 12, 24, 36}, 24},
      {{2, 3}, {Shard(0), Shard(0)}, {20, 3}, {0, 24, 44, 64, 84, 108}, 60},
      {{2, 2, 2}, {Shard(1), Replicate(), Shard(0)}, {8, 16}, {0, 64, 0, 64, 32, 96, 32, 96}, 128},
      {{4}, {Shard(1)}, {5, 6}, {0, 12, 20, 32}, 32},
      // Not torch's: units, and flat pieces of unlike lengths.
      {{2}, {Shard(0, 3)}, {9, 2}, {0, 12}, 20},
      {{3}, {FlatShard({0, 5, 3})}, {8}, {0, 8, 12}, 8},
  };
  for (const Case& c : cases) {
    const absl::Status status = RunSpmd(Numel(c.mesh), [&](RankContext& rank) -> absl::Status {
      DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, DeviceMesh::Create(c.mesh));
      DT_ASSIGN_OR_RETURN(const SpecRef spec,
                          rank.specs().Intern(mesh, c.placements, c.shape, DType::kF32));
      EXPECT_EQ(OffsetBasedShift(*spec).before, c.before[rank.rank()]) << spec->ToString();
      EXPECT_EQ(OffsetBasedShift(*spec).after, c.after) << spec->ToString();
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// One rank's numbers are the sum's, in any mode, and flat pieces are not drawn alike.
TEST(Modes, PendingSumsAndFlatPieces) {
  for (const RngMode rng : {RngMode::kOffsetBased, RngMode::kTensorParallel}) {
    std::vector<std::vector<double>> pending(2), flat(2);
    const absl::Status status = RunSpmd(2, [&](RankContext& rank) -> absl::Status {
      const ScopedRngMode mode(rng);
      const bool own = rng == RngMode::kTensorParallel;
      ManualSeed(static_cast<uint64_t>(3 + (own ? rank.rank() : 0)));
      const auto draw = [&](const Placement& p) -> absl::StatusOr<std::vector<double>> {
        DT_ASSIGN_OR_RETURN(const SpecRef s,
                            rank.specs().Intern(DeviceMesh({2}, {"tp"}), {p}, {6}, DType::kF32));
        DT_ASSIGN_OR_RETURN(const Tensor t, Tensor::Empty(s->local_shape(), DType::kF32));
        DT_RETURN_IF_ERROR(FillRandom(t, *s, UniformOp()));
        return t.ToVector<double>();
      };
      DT_ASSIGN_OR_RETURN(pending[rank.rank()], draw(Partial()));
      DT_ASSIGN_OR_RETURN(flat[rank.rank()], draw(FlatShard({3, 3})));
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status;
    ManualSeed(3);
    EXPECT_EQ(pending[0], Draw(6));
    EXPECT_EQ(pending[1], std::vector<double>(6, 0));
    EXPECT_NE(flat[0], flat[1]);
  }
}

TEST(Modes, TensorParallelDrawsFromTheRanksOwnStream) {
  std::vector<std::vector<double>> drawn(2);
  const absl::Status status = RunSpmd(2, [&](RankContext& context) -> absl::Status {
    const ScopedRngMode mode(RngMode::kTensorParallel);
    ManualSeed(static_cast<uint64_t>(TensorParallelSeed(1234, context.rank())));
    DT_ASSIGN_OR_RETURN(const SpecRef s, context.specs().Intern(DeviceMesh({2}, {"tp"}), {Shard(0)},
                                                                {6}, DType::kF32));
    DT_ASSIGN_OR_RETURN(Tensor t, Tensor::Empty(s->local_shape(), DType::kF32));
    DT_RETURN_IF_ERROR(FillRandom(t, *s, UniformOp()));
    drawn[context.rank()] = t.ToVector<double>();
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
  ManualSeed(1234 + 2718 + 1);
  EXPECT_EQ(Draw(3), drawn[1]);
  EXPECT_NE(drawn[0], drawn[1]);
}

}  // namespace
}  // namespace dtensor::tracker_test

// Redistribution between meshes of other ranks: random pairs against values and a bound found
// element by element, gradients that come back, and what goes wrong. DT_MESH_PAIRS runs more pairs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <set>

#include "dtensor/distribute.h"
#include "dtensor/mesh/limited.h"
#include "test_ops.h"
#include "tests/common/layouts.h"

namespace dtensor::between_meshes_test {
namespace {

using testing::Apply;
using testing::CoordinateOf;
using ::testing::HasSubstr;
using testing::Held;
using testing::HeldBy;
using testing::Ints;
using testing::Layout;
using testing::MessageOf;
using testing::NewTerm;
using testing::RandomLayout;
using testing::RandomMesh;
using testing::Reduced;
using testing::ReductionOf;

// A tensor's place: ranks in any order, and how they hold it.
struct Place {
  std::vector<int64_t> ranks;  // row-major
  Layout layout;

  DeviceMesh mesh() const { return *DeviceMesh::FromRanks(layout.mesh, ranks); }
  int64_t IndexOf(int64_t rank) const {
    const auto it = std::find(ranks.begin(), ranks.end(), rank);
    return it == ranks.end() ? -1 : it - ranks.begin();
  }
  Dims Coordinate(int64_t rank) const { return CoordinateOf(layout.mesh, IndexOf(rank)); }
  Held Holds(int64_t rank, const Shape& shape) const {
    if (IndexOf(rank) < 0) return {};
    return HeldBy(layout.mesh, layout.placements, shape, Coordinate(rank));
  }
};

struct Pair {
  int64_t world;
  Shape shape;
  Place from, to, gradient;  // the gradient lies on `to`'s mesh, in placements of its own
  uint64_t seed;
};

Place RandomPlace(int64_t world, const Shape& shape, std::mt19937_64& random) {
  Place place;
  for (int64_t r = 0; r < world; ++r) place.ranks.push_back(r);
  std::shuffle(place.ranks.begin(), place.ranks.end(), random);
  place.ranks.resize(1 + random() % world);
  if (random() % 2 == 0) std::sort(place.ranks.begin(), place.ranks.end());
  const Dims mesh = RandomMesh(static_cast<int64_t>(place.ranks.size()), random);
  place.layout = RandomLayout(mesh, shape, random);
  return place;
}

Pair MakePair(uint64_t seed) {
  std::mt19937_64 random(seed);
  Pair pair;
  pair.seed = seed;
  pair.world = 2 + static_cast<int64_t>(random() % 7);
  constexpr int kDims[] = {0, 1, 1, 2, 2, 2, 2, 3};  // rarely without elements
  for (int d = kDims[random() % 8]; d > 0; --d) {
    pair.shape.push_back(random() % 20 == 0 ? 0 : 1 + static_cast<int64_t>(random() % 9));
  }
  do {
    pair.from = RandomPlace(pair.world, pair.shape, random);
    pair.to = RandomPlace(pair.world, pair.shape, random);
    // A mesh that stays has rules of its own: redistribute_bytes_test.cc.
  } while (pair.from.mesh() == pair.to.mesh());
  pair.gradient = pair.to;
  pair.gradient.layout = RandomLayout(pair.to.layout.mesh, pair.shape, random);
  return pair;
}

// Integers of which sums and, of eight, products are exact in any order.
int64_t Term(uint64_t seed, int64_t id, const Place& place, const Dims& coordinate) {
  auto mix = static_cast<int64_t>(seed) * 7 + id * 37 + 11;
  for (size_t m = 0; m < coordinate.size(); ++m) {
    if (place.layout.placements[m].is_partial()) mix = mix * 31 + (coordinate[m] + 1) * 17;
  }
  return mix % 101 - 50;
}

// What this rank holds of a tensor at `place`: its terms.
DTensor Make(const Pair& pair, const Place& place, int64_t rank, uint64_t seed) {
  const DeviceMesh mesh = place.mesh();
  if (place.IndexOf(rank) < 0) {
    return DTensor::Absent(mesh, place.layout.placements, pair.shape, DType::kF64);
  }
  const Held held = place.Holds(rank, pair.shape);
  std::vector<double> values;
  for (const int64_t id : held.ids) {
    values.push_back(static_cast<double>(Term(seed, id, place, place.Coordinate(rank))));
  }
  const Tensor local = ValueOrThrow(Tensor::FromVector(values, held.shape));
  return FromLocal(OnSelf(local), mesh, place.layout.placements, {.shape = pair.shape});
}

// The value of every element: the reduction of its terms over the coordinates of pending dims.
std::vector<double> Whole(const Pair& pair, const Place& place, uint64_t seed) {
  std::vector<double> whole(Numel(pair.shape), 0);
  const ReduceOp op = ReductionOf(place.layout);
  for (int64_t id = 0; id < Numel(pair.shape); ++id) {
    std::set<Dims> terms;  // coordinates, 0 where a mesh dim is not pending
    for (int64_t i = 0; i < Numel(place.layout.mesh); ++i) {
      Dims at = CoordinateOf(place.layout.mesh, i);
      for (size_t m = 0; m < at.size(); ++m) {
        if (!place.layout.placements[m].is_partial()) at[m] = 0;
      }
      terms.insert(at);
    }
    bool first = true;
    for (const Dims& at : terms) {
      const auto term = static_cast<double>(Term(seed, id, place, at));
      whole[id] = std::exchange(first, false) ? term : Reduced(op, whole[id], term);
    }
  }
  return whole;
}

std::vector<double> Cut(const std::vector<double>& whole, const Held& held) {
  std::vector<double> values;
  for (const int64_t id : held.ids) values.push_back(whole[id]);
  return values;
}

// Elements that all ranks together have to receive: terms - 1 to reduce one, and one for every rank
// that wants it and has it not (if it was reduced: but for one that held a term).
int64_t Bound(const Pair& pair) {
  int64_t terms = 1;
  for (size_t m = 0; m < pair.from.layout.mesh.size(); ++m) {
    if (pair.from.layout.placements[m].is_partial()) terms *= pair.from.layout.mesh[m];
  }
  std::vector<int64_t> wanting(Numel(pair.shape), 0), found(Numel(pair.shape), 0);
  for (int64_t r = 0; r < pair.world; ++r) {
    const std::vector<int64_t> ids = pair.from.Holds(r, pair.shape).ids;
    const std::set<int64_t> has(ids.begin(), ids.end());
    for (const int64_t id : pair.to.Holds(r, pair.shape).ids) {
      ++wanting[id];
      found[id] += static_cast<int64_t>(has.count(id));
    }
  }
  int64_t total = 0;
  for (int64_t id = 0; id < Numel(pair.shape); ++id) {
    total += terms - 1 + wanting[id] - (terms == 1 ? found[id] : std::min<int64_t>(found[id], 1));
  }
  return total;
}

// In a new sum the value lies on coordinate 0 and zeros elsewhere, in a new product ones.
std::vector<double> Arrived(const Pair& pair, const std::vector<double>& whole, int64_t rank) {
  std::vector<double> values = Cut(whole, pair.to.Holds(rank, pair.shape));
  const Dims coordinate = pair.to.Coordinate(rank);
  for (size_t m = 0; m < coordinate.size(); ++m) {
    const std::optional<int64_t> term = NewTerm(pair.to.layout.placements[m]);
    if (term && coordinate[m] != 0) {
      std::fill(values.begin(), values.end(), static_cast<double>(*term));
    }
  }
  return values;
}

std::string Name(const Pair& pair) {
  const auto side = [](const Place& place) {
    return absl::StrCat(ToString(place.layout.placements), " on ", ToString(place.layout.mesh),
                        " of ranks ", ToString(IntSpan(place.ranks)));
  };
  return absl::StrCat("seed ", pair.seed, ": ", ToString(pair.shape), " ", side(pair.from), " to ",
                      side(pair.to), " of ", pair.world);
}

// Bytes that rank received; -1 if something is wrong.
int64_t RunOne(const Pair& pair, int64_t rank, bool async) {
  const bool in_source = pair.from.IndexOf(rank) >= 0, in_target = pair.to.IndexOf(rank) >= 0;
  DTensor x = Make(pair, pair.from, rank, pair.seed);
  x.RequiresGrad();
  DTensor y;
  int64_t bytes = 0;
  {
    CommTrace trace;
    y = async ? x.Redistribute(pair.to.mesh(), pair.to.layout.placements, {.async = true})
              : x.Redistribute(pair.to.mesh(), pair.to.layout.placements);
    bytes = trace.TotalBytes();
  }
  EXPECT_EQ(y.local().defined(), in_target);
  const std::vector<double> whole = Whole(pair, pair.from, pair.seed);
  if (in_target) {
    EXPECT_EQ(y.local().ToVector<double>(), Arrived(pair, whole, rank)) << "on rank " << rank;
  }
  const uint64_t gradient_seed = pair.seed + 1000003;
  y.Backward(Make(pair, pair.gradient, rank, gradient_seed));
  const DTensor gradient = x.grad();
  EXPECT_TRUE(gradient.mesh() == x.mesh());
  if (in_source) {
    const std::vector<double> expected = Whole(pair, pair.gradient, gradient_seed);
    EXPECT_EQ(gradient.local().ToVector<double>(), Cut(expected, pair.from.Holds(rank, pair.shape)))
        << "gradient on rank " << rank;
  }
  return bytes;
}

TEST(BetweenMeshes, RandomPairs) {
  const char* text = std::getenv("DT_MESH_PAIRS");
  const uint64_t pairs = text == nullptr ? 500 : std::strtoull(text, nullptr, 10);
  std::map<std::string, int64_t> seen;
  for (uint64_t seed = 1; seed <= pairs; ++seed) {
    const Pair pair = MakePair(seed);
    SCOPED_TRACE(Name(pair));
    const bool packed = seed % 4 == 0, async = seed % 3 == 0;
    // Of all ranks, as each has heard; -1: one of another process.
    std::vector<int64_t> totals(pair.world, -1);
    SpmdOptions options;
    options.timeout = absl::Seconds(20);
    if (packed) options.wrap = Packed();
    const absl::Status status = RunSpmd(
        pair.world,
        [&](RankContext& context) -> absl::Status {
          const int64_t bytes = RunOne(pair, context.rank(), async);
          DT_ASSIGN_OR_RETURN(Comm * world, context.WorldComm());
          DT_ASSIGN_OR_RETURN(const Tensor all, Tensor::FromVector<int64_t>({bytes}, {1}));
          DT_RETURN_IF_ERROR(world->AllReduce(all, all, ReduceOp::kSum).Wait());
          totals[context.rank()] = all.ToVector<int64_t>()[0];
          return absl::OkStatus();
        },
        options);
    ASSERT_TRUE(status.ok()) << status;
    for (const int64_t total : totals) {
      EXPECT_TRUE(total == 8 * Bound(pair) || total < 0) << total << ", not " << 8 * Bound(pair);
    }
    if (HasFailure()) break;
    int64_t common = 0;
    for (const int64_t r : pair.to.ranks) common += pair.from.IndexOf(r) >= 0 ? 1 : 0;
    const auto a = static_cast<int64_t>(pair.from.ranks.size());
    const auto b = static_cast<int64_t>(pair.to.ranks.size());
    ++seen[common == 0                  ? "disjoint"
           : common == a && common == b ? "same ranks"
           : common == a || common == b ? "nested"
                                        : "overlapping"];
  }
  for (const char* kind : {"disjoint", "same ranks", "nested", "overlapping"}) {
    EXPECT_GT(seen[kind] * 50, static_cast<int64_t>(pairs)) << kind;
  }
}

SpmdOptions Impatient(FlightReport* report = nullptr) {
  SpmdOptions options;
  options.timeout = absl::Seconds(20);
  options.flight_report = report;
  return options;
}

// Two stages of two ranks each: the first knows the loss as an absent handle only.
TEST(BetweenMeshes, GradientsCrossStages) {
  testing::RegisterTestOps();
  const Tensor x = Ints({4, 6}, 1), w = Ints({6, 4}, 2), v = Ints({4, 3}, 5);
  std::vector<double> expected_w, expected_v;
  {  // of one rank, in every process
    const DeviceMesh mesh({1}, {"tp"});
    DTensor weight = DistributeTensor(w, mesh, {Replicate()}).RequiresGrad();
    DTensor value = DistributeTensor(v, mesh, {Replicate()}).RequiresGrad();
    const DTensor h = testing::Matmul(DistributeTensor(x, mesh, {Replicate()}), weight);
    Apply("t_sum", {testing::Matmul(Apply("t_mul", {h, h}), value)}).Backward();
    expected_w = weight.grad().ToVector<double>();
    expected_v = value.grad().ToVector<double>();
  }
  const absl::Status status = RunSpmd(
      4,
      [&](RankContext& context) {
        const DeviceMesh first = *DeviceMesh::FromRanks({2}, {0, 1}, {"tp"});
        const DeviceMesh second = *DeviceMesh::FromRanks({2}, {3, 2}, {"tp"});
        if (context.rank() < 2) {  // sums over the sharded 6 stay pending: reduced on the way
          DTensor weight = DistributeTensor(w, first, {Shard(0)}).RequiresGrad();
          const DTensor h = testing::Matmul(DistributeTensor(x, first, {Shard(1)}), weight);
          EXPECT_EQ(h.placements()[0], Partial());
          const DTensor sent = h.Redistribute(second, {Shard(0)});
          EXPECT_FALSE(sent.local().defined());
          sent.Backward(DTensor::Absent(sent.spec()));
          EXPECT_EQ(weight.grad().ToVector<double>(), expected_w);
        } else {
          const DTensor h =
              DTensor::Absent(first, {Partial()}, {4, 4}, DType::kF64, /*requires_grad=*/true)
                  .Redistribute(second, {Shard(0)});
          DTensor value = DistributeTensor(v, second, {Replicate()}).RequiresGrad();
          Apply("t_sum", {testing::Matmul(Apply("t_mul", {h, h}), value)}).Backward();
          EXPECT_EQ(value.grad().ToVector<double>(), expected_v);
        }
        return absl::OkStatus();
      },
      Impatient());
  EXPECT_TRUE(status.ok()) << status;
}

TEST(BetweenMeshes, RanksInNeitherDoNothing) {
  const absl::Status status = RunSpmd(
      3,
      [&](RankContext& context) {
        const DeviceMesh a = *DeviceMesh::FromRanks({1}, {0}), b = *DeviceMesh::FromRanks({1}, {1});
        if (context.rank() == 2) {
          DTensor x = DTensor::Absent(a, {Replicate()}, {4}, DType::kF64, /*requires_grad=*/true);
          const DTensor y = x.Redistribute(b, {Shard(0)});
          EXPECT_FALSE(y.local().defined());
          y.Backward(DTensor::Absent(y.spec()));
        }
        return absl::OkStatus();
      },
      Impatient());
  EXPECT_TRUE(status.ok()) << status;
}

TEST(BetweenMeshes, DisagreementsNameBothSides) {
  const auto differ = [](std::function<DTensor(const DeviceMesh& from)> source, Placement to) {
    FlightReport report;
    std::string messages[2];
    const absl::Status status = RunSpmd(
        2,
        [&](RankContext& context) {
          const DeviceMesh a = *DeviceMesh::FromRanks({1}, {0}, {"a"});
          const DeviceMesh b = *DeviceMesh::FromRanks({1}, {1}, {"b"});
          messages[context.rank()] = MessageOf([&] {
            if (context.rank() == 0) {
              DTensor x = full({4}, 1, {DType::kF64, a, {Replicate()}});
              x.RequiresGrad();
              x.Redistribute(b, {Shard(0)});
            } else {
              source(a).Redistribute(b, {to});
            }
          });
          return absl::OkStatus();
        },
        Impatient(&report));
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(messages[0], messages[1]);
    EXPECT_FALSE(report.groups.empty());
    return messages[0];
  };
  const std::string gradient = differ(
      [](const DeviceMesh& a) { return DTensor::Absent(a, {Replicate()}, {4}, DType::kF64); },
      Shard(0));
  EXPECT_THAT(gradient, HasSubstr("rank 0 issued exchange(1 sends, 0 receives) for float64 [4] on "
                                  "a=1 [R] to float64 [4] on b=1 [S(0)], its gradient to come "
                                  "back; rank 1 issued exchange(0 sends, 1 receives)"));
  const std::string placement = differ(
      [](const DeviceMesh& a) { return DTensor::Absent(a, {Replicate()}, {4}, DType::kF64, true); },
      Replicate());
  EXPECT_THAT(placement, HasSubstr("on b=1 [S(0)]"));
  EXPECT_THAT(placement, HasSubstr("on b=1 [R]"));
}

// Rows of one mesh read alike: what differs is said, too.
TEST(BetweenMeshes, MeshesOfOtherRanksAreNoOneMesh) {
  const absl::Status status = RunSpmd(4, [&](RankContext&) {
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    const DTensor x = full({3, 4}, 1, {DType::kF64, mesh, {Shard(0), Replicate()}});
    EXPECT_THAT(MessageOf([&] { x.Redistribute(mesh["tp"], {Shard(1)}); }),
                HasSubstr("(with other attributes), or a mesh of other ranks"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(BetweenMeshes, AbsentIsForOthers) {
  const absl::Status status = RunSpmd(2, [&](RankContext& context) {
    const DeviceMesh a = *DeviceMesh::FromRanks({1}, {0}, {"a"});
    const std::string message =
        MessageOf([&] { DTensor::Absent(a, {Replicate()}, {4}, DType::kF64); });
    EXPECT_THAT(message, HasSubstr(context.rank() == 0 ? "rank 0 is in the mesh" : ""));
    EXPECT_EQ(message.empty(), context.rank() == 1);
    const DeviceMesh far = *DeviceMesh::FromRanks({1}, {7});
    EXPECT_THAT(
        MessageOf([&] {
          full({4}, 1, {DType::kF64, DeviceMesh({2}), {Replicate()}}).Redistribute(far, {Shard(0)});
        }),
        HasSubstr("names rank 7, the world has 2 ranks"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::between_meshes_test

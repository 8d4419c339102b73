// Laws over generated inputs (rapidcheck prints the seed of a failure; RC_PARAMS repeats it):
// shards partition, redistribution is lossless, the strategy search is exact, and random programs
// on random meshes are one rank's, bit for bit.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <functional>
#include <map>
#include <mutex>

#include "dtensor/memo.h"
#include "dtensor/memory.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/limited.h"
#include "dtensor/mesh/region.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/sharding.h"
#include "tests/common/index_oracle.h"
#include "tests/common/random_layout.h"
#include "tests/ops/gradcheck.h"

namespace dtensor {
namespace {

using testing::Dice;
using testing::RandomLayout;
using testing::RandomMesh;
using testing::RandomPlacements;
using testing::RandomShape;

// Points of a region: global index, and place in memory.
void VisitRegion(const Region& region,
                 const std::function<void(const std::vector<int64_t>&, int64_t)>& visit) {
  for (const Block& block : region) {
    for (int64_t k = 0; k < block.numel(); ++k) {
      std::vector<int64_t> point(block.shape.size());
      int64_t rest = k, place = block.offset;
      for (int d = static_cast<int>(point.size()) - 1; d >= 0; --d) {
        int64_t at = rest % block.shape[d];
        rest /= block.shape[d];
        place += at * block.strides[d];
        size_t i = 0;
        while (at >= block.index[d][i].length()) at -= block.index[d][i++].length();
        point[d] = block.index[d][i].start + at;
      }
      visit(point, place);
    }
  }
}

RC_GTEST_PROP(Laws, ShardsPartitionTheIndexSet, (uint64_t seed)) {
  Dice dice(seed);
  const Dims mesh_shape = RandomMesh(dice, 12);
  const Shape shape = RandomShape(dice, 1);
  const Placements p = RandomLayout(dice, shape, mesh_shape);
  const absl::Status status = RunFake({.world = Numel(mesh_shape)}, [&](RankContext& context) {
    const DeviceMesh mesh = *DeviceMesh::Create(mesh_shape);
    const SpecRef spec = *context.specs().Intern(mesh, p, shape, DType::kF32);
    int64_t copies = 1;  // how often every element is held
    for (size_t m = 0; m < p.size(); ++m) {
      if (p[m].is_replicate() || p[m].is_partial()) copies *= mesh_shape[m];
    }
    std::map<std::vector<int64_t>, int64_t> seen;
    for (int64_t r = 0; r < mesh.size(); ++r) {
      Dims coordinate;
      mesh.Coordinate(r, &coordinate);
      const int64_t numel = Numel(LocalShape(*spec, coordinate));
      std::vector<int64_t> places(numel, 0);  // the memory is filled, every place once
      VisitRegion(RegionOf(*spec, coordinate), [&](const auto& point, int64_t place) {
        ++seen[point];
        EXPECT_TRUE(place >= 0 && place < numel) << spec->ToString();
        if (place >= 0 && place < numel) ++places[place];
      });
      EXPECT_EQ(places, std::vector<int64_t>(numel, 1)) << spec->ToString();
    }
    EXPECT_EQ(static_cast<int64_t>(seen.size()), Numel(shape)) << spec->ToString();
    for (const auto& [point, count] : seen) EXPECT_EQ(count, copies) << spec->ToString();
    return absl::OkStatus();
  });
  RC_ASSERT(status.ok());
  RC_ASSERT(!::testing::Test::HasFailure());
}

RC_GTEST_PROP(Laws, RedistributeThereAndBackIsTheIdentity, (uint64_t seed)) {
  Dice dice(seed);
  const Dims mesh_shape = RandomMesh(dice, 8);
  const Shape shape = RandomShape(dice);
  const Placements a = RandomLayout(dice, shape, mesh_shape);
  const Placements b = RandomLayout(dice, shape, mesh_shape);
  SpmdOptions spmd;
  if (dice.Chance(40)) {  // some communicator or other
    const bool overlap = dice.Chance(60);
    spmd.wrap = Limited({.peers = true,
                         .strided = dice.Chance(30),
                         .many_pieces = dice.Chance(30),
                         .overlap = overlap,
                         .deferred_pull = overlap,
                         .rank_order = true,
                         .same_bits = dice.Chance(50)});
  }
  const bool async = dice.Chance(50);
  std::vector<double> values = testing::Noise(Numel(shape), seed);
  for (double& v : values) v = std::round(v * 512) / 512;
  const auto run = [&](RankContext& context) {
    const TensorOptions options = {
        .dtype = DType::kF64, .mesh = *DeviceMesh::Create(mesh_shape), .placements = a};
    const DTensor x = FromVector(values, shape, options);
    // Every rank's part, from an oracle that knows no intervals; and all parts are the tensor.
    const testing::Held held =
        testing::HeldBy(mesh_shape, x.placements(), shape, x.spec().coordinate());
    EXPECT_EQ(x.local().shape(), held.shape);
    if (!x.spec().has_partial()) {
      std::vector<double> part;
      for (const int64_t id : held.ids) part.push_back(values[id]);
      EXPECT_EQ(x.local().ToVector<double>(), part) << ToString(a);
    }
    EXPECT_EQ(x.FullTensor().ToVector<double>(), values) << ToString(a);
    const DTensor there = async ? x.Redistribute(b, {.async = true}) : x.Redistribute(b);
    EXPECT_EQ(there.ToVector<double>(), values) << ToString(a) << " to " << ToString(b);
    const DTensor back = there.Redistribute(a);
    EXPECT_EQ(back.ToVector<double>(), values);
    if (!x.spec().has_partial()) {
      EXPECT_EQ(back.local().ToVector<double>(), x.local().ToVector<double>())
          << ToString(a) << " to " << ToString(b) << " and back, rank " << context.rank();
    }
    return absl::OkStatus();
  };
  const absl::Status status = RunSpmd(Numel(mesh_shape), run, spmd);
  RC_ASSERT(status.ok());
  RC_ASSERT(!::testing::Test::HasFailure());
}

// What the search counted is what moving the inputs costs, but for what is rounded.
void ExpectThePriceOfItsMoves(const Strategy& strategy, absl::Span<const Spec* const> inputs) {
  double moved = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    moved += RedistributeCost(inputs[i]->mesh(), inputs[i]->shape(), inputs[i]->dtype(),
                              inputs[i]->placements(), strategy.inputs[i]);
  }
  EXPECT_NEAR(strategy.cost_bytes, moved, inputs.size() / 1024.0);
}

// Ten mesh dims, each with several rows, none of which fits the inputs.
TEST(Search, ABeamTakesOverWhereTheExactSearchWouldTakeTooLong) {
  RegisterOps();
  const absl::Status status = RunFake({.world = 1024}, [](RankContext& context) -> absl::Status {
    const DeviceMesh mesh = *DeviceMesh::Create(Dims(10, 2));
    const Shape shape = {4096, 4096};
    Placements x, w;
    for (int m = 0; m < 10; ++m) {
      x.push_back(m % 3 == 0 ? Shard(0) : m % 3 == 1 ? Shard(1) : Replicate());
      w.push_back(m % 4 == 0 ? Replicate() : m % 4 == 1 ? Shard(1) : Shard(0));
    }
    const SpecRef xs = *context.specs().Intern(mesh, x, shape, DType::kF32);
    const SpecRef ws = *context.specs().Intern(mesh, w, shape, DType::kF32);
    const SpecRef whole = *context.specs().Intern(mesh, Placements(10), shape, DType::kF32);
    DT_ASSIGN_OR_RETURN(const OpPlan plan,
                        PlanOp(OpCall(GetOp("matmul"), {xs.get(), ws.get()}, {}), nullptr));
    EXPECT_TRUE(plan.beam);
    // Gathering both is always legal, and far from the best.
    const double gather = RedistributeCost(*xs, *whole) + RedistributeCost(*ws, *whole);
    EXPECT_LT(plan.strategy.cost_bytes, gather / 1000);
    ExpectThePriceOfItsMoves(plan.strategy, {xs.get(), ws.get()});
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

RC_GTEST_PROP(Laws, TheSearchIsExact, (uint64_t seed)) {
  Dice dice(seed);
  RegisterOps();
  Dims mesh_shape;
  const int64_t sizes[] = {2, 3, 4, 5, 7};
  for (int64_t d = dice.Between(1, 3); d > 0; --d) mesh_shape.push_back(sizes[dice.Below(5)]);
  const int64_t m = dice.Between(1, 9), k = dice.Between(1, 9), n = dice.Between(1, 9);
  struct Case {
    const char* op;
    std::vector<Shape> shapes;
    Attrs attrs;
    DType last = DType::kF32;  // of the last input; the others are float32
  };
  const Case cases[] = {
      {"matmul", {{m, k}, {k, n}}, {}},
      {"bmm", {{2, m, k}, {2, k, n}}, {}},
      {"linear", {{m, k}, {n, k}, {n}}, {}},
      {"add", {{m, n}, {n}}, {IntAttr(1)}},
      {"mul", {{m, n}, {m, 1}}, {}},
      {"gelu", {{m, n}}, {BoolAttr(false)}},
      {"cat", {{m, k}, {n, k}}, {IntAttr(0)}},
      // Heads in groups: how rows cut them depends on what the mesh dims before left.
      {"attention", {{2, 4, m, 2}, {2, 2, k, 2}, {2, 2, k, n}}, {FloatAttr(1), BoolAttr(false)}},
      // One head of k: q's heads by themselves cost what a group's do.
      {"attention", {{1, 4, m, 2}, {1, 1, k, 2}, {1, 1, k, n}}, {FloatAttr(1), BoolAttr(false)}},
      {"attention_backward",
       {{2, 4, m, n}, {2, 4, m, 2}, {2, 2, k, 2}, {2, 2, k, n}, {2, 4, m, n}, {2, 4, m}},
       {FloatAttr(1), BoolAttr(false)},
       DType::kF64}};
  const Case& c = cases[dice.Below(10)];
  const absl::Status status = RunFake({.world = Numel(mesh_shape)}, [&](RankContext& context) {
    const DeviceMesh mesh = *DeviceMesh::Create(mesh_shape);
    std::vector<SpecRef> specs;
    std::vector<const Spec*> inputs;
    for (const Shape& shape : c.shapes) {
      const Placements p = RandomLayout(dice, shape, mesh_shape);
      const DType dtype = &shape == &c.shapes.back() ? c.last : DType::kF32;
      specs.push_back(*context.specs().Intern(mesh, p, shape, dtype));
      inputs.push_back(specs.back().get());
    }
    const OpCall call(GetOp(c.op), inputs, c.attrs);
    const absl::StatusOr<OpPlan> fast = PlanOp(call, nullptr), exact = PlanOpExhaustively(call);
    EXPECT_TRUE(fast.ok() && exact.ok()) << fast.status() << exact.status();
    if (!fast.ok() || !exact.ok()) return absl::OkStatus();
    EXPECT_FALSE(fast->beam) << c.op;
    EXPECT_EQ(fast->strategy.cost_bytes, exact->strategy.cost_bytes) << c.op;
    EXPECT_EQ(fast->strategy.cost_us, exact->strategy.cost_us) << c.op;
    ExpectThePriceOfItsMoves(fast->strategy, inputs);  // the two read one table
    // The same one, too, but where it costs nothing: there one that leaves all inputs alone is
    // taken.
    if (exact->strategy.cost_bytes + exact->strategy.cost_us > 0) {
      EXPECT_EQ(fast->strategy.factor_map, exact->strategy.factor_map) << c.op;
      EXPECT_TRUE(fast->strategy.inputs == exact->strategy.inputs) << c.op;
      EXPECT_TRUE(fast->strategy.outputs == exact->strategy.outputs) << c.op;
    }
    return absl::OkStatus();
  });
  RC_ASSERT(status.ok());
  RC_ASSERT(!::testing::Test::HasFailure());
}

// --- random programs ----------------------------------------------------------------------------

// A program of 5 to 20 ops on whole numbers, drawn from a seed: values and gradients of its leaves.
class Program {
 public:
  Program(uint64_t seed, const DeviceMesh& mesh) : dice_(seed), place_(seed + 7), mesh_(mesh) {}

  std::vector<std::vector<double>> Run() {
    for (int i = 0; i < 3; ++i) Leaf({dice_.Between(1, 5), dice_.Between(1, 5)});
    const int64_t steps = dice_.Between(5, 20);
    for (int64_t i = 0; i < steps; ++i) Step();
    std::vector<std::vector<double>> results;
    DTensor total;
    for (const DTensor& t : values_) {
      results.push_back(t.ToVector<double>());
      const DTensor part = sum(t);
      total = total.defined() ? total + part : part;
    }
    if (dice_.Chance(50)) {
      total.Backward();
    } else {  // gradients wait over some mesh dim or all, and are reduced when they are read
      const bool all = dice_.Chance(50);
      const NoGradSync hold(all ? std::vector<std::string>{} : std::vector<std::string>{"a"});
      total.Backward();
    }
    for (const DTensor& leaf : leaves_) {
      const DTensor g = leaf.grad();
      results.push_back(g.defined() ? g.ToVector<double>() : std::vector<double>());
    }
    return results;
  }

  // The end of a step: values are gone, leaves were written to by an optimizer.
  void Drop() {
    values_.clear();
    for (const DTensor& leaf : leaves_) internal::DropMemos(*leaf.impl());
  }
  const std::vector<DTensor>& leaves() const { return leaves_; }

 private:
  // From dice of their own, so that programs stay alike whatever the mesh.
  Placements Draw(const Shape& shape) {
    const IntSpan mesh = mesh_.shape();
    return RandomLayout(place_, shape, Dims(mesh.begin(), mesh.end()));
  }
  void Leaf(const Shape& shape) {
    std::vector<double> v;
    for (int64_t i = 0; i < Numel(shape); ++i) v.push_back(static_cast<double>(dice_.Below(5) - 2));
    DTensor t =
        FromVector(v, shape, {.dtype = DType::kF64, .mesh = mesh_, .placements = Draw(shape)});
    t.RequiresGrad();
    t.impl()->owned = true;  // as a module's parameter is
    leaves_.push_back(t);
    values_.push_back(t);
  }
  const DTensor& Any() { return values_[dice_.Below(static_cast<int64_t>(values_.size()))]; }
  // Values stay small enough to be exact.
  DTensor Small(const DTensor& t) { return masked_fill(t, logical_not(lt(t * t, 1e6)), 1); }
  void Step() {
    const internal::MemoScope call;  // as a module has
    const DTensor x = Any();
    const int64_t kind = dice_.Below(16);
    const int64_t dim = x.ndim() > 0 ? dice_.Below(x.ndim()) : 0;
    if (kind == 0) return Push(relu(x));
    if (kind == 1) return Push(x * static_cast<double>(dice_.Below(3) - 1) - x);
    if (kind == 2) return Push(x + static_cast<double>(dice_.Below(3)));
    if (kind == 3) return Push(x.Redistribute(Draw(x.shape())));
    if (kind == 4) return Push(sum(x, x.ndim() > 0 ? DimList{dim} : DimList{}, dice_.Chance(50)));
    if (kind == 5 && x.ndim() >= 2) return Push(transpose(x, 0, -1));
    if (kind == 6 && x.ndim() == 2 && dice_.Chance(50)) {  // as heads of a fused dim
      const int64_t heads = x.size(1) % 2 == 0 ? 2 : 1;
      return Push(reshape(x, {x.size(0), heads, x.size(1) / heads}));
    }
    if (kind == 6) return Push(reshape(x, {x.numel()}));
    if (kind == 7) return Push(unsqueeze(x, dim));
    if (kind == 8 && x.ndim() == 2) {
      Leaf({x.size(1), dice_.Between(1, 4)});
      return Push(Small(matmul(x, values_.back())));
    }
    if (kind == 9) {
      Leaf(x.shape());
      return Push(Small(dice_.Chance(50) ? x * values_.back() : x - values_.back()));
    }
    if (kind == 10 && x.ndim() > 0) return Push(cat({x, x * 2}, dim));
    if (kind == 11 && x.ndim() > 0 && x.size(static_cast<int>(dim)) > 1) {
      const int64_t size = x.size(static_cast<int>(dim)), start = dice_.Below(size);
      return Push(slice(x, dim, start, dice_.Between(start + 1, size)));
    }
    if (kind == 12 && x.ndim() > 0 && x.size(static_cast<int>(dim)) > 0) {
      // Ties would share gradients in fractions: make them whole again.
      return Push(amax(x.Detach(), {dim}) + sum(x, {dim}));
    }
    if (kind == 13 && x.ndim() > 0 && x.size(static_cast<int>(dim)) > 0) {
      const int64_t n = x.size(static_cast<int>(dim));
      return Push(select(x, dim, dice_.Below(n)) - select(x, dim, n - 1));
    }
    if (kind == 14 && x.ndim() > 0 && x.size(static_cast<int>(dim)) > 2) {
      const int64_t n = x.size(static_cast<int>(dim)), cut = dice_.Between(1, n - 1);
      const Values parts = split(x, {cut, n - cut}, dim);
      return Push(cat({parts[1], -parts[0], slice(x, dim, 0, n, 2)}, dim));
    }
    if (kind == 15) {  // run again in backward
      const auto fn = [](const Values& in) -> Values {
        const DTensor r = relu(in[0]);
        return {r - relu(r - in[0])};
      };
      return Push(Recompute(fn, {x})[0]);
    }
    Push(-x);
  }
  void Push(const DTensor& t) {
    if (t.numel() <= 4000) values_.push_back(t);
  }

  Dice dice_, place_;
  DeviceMesh mesh_;
  std::vector<DTensor> leaves_, values_;
};

// Of tensors like these and like their gradients.
int64_t MemoryOf(const std::vector<DTensor>& leaves) {
  const auto in_use = [] { return RankContext::Current().allocator()->stats().in_use_bytes; };
  const int64_t before = in_use();
  std::vector<Tensor> like;
  for (const DTensor& leaf : leaves) {
    like.push_back(*leaf.local().Clone());
    if (leaf.grad().defined()) like.push_back(*leaf.grad().local().Clone());
  }
  return in_use() - before;
}

RC_GTEST_PROP(Laws, RandomProgramsAreOneRanksBitForBit, (uint64_t seed)) {
  const std::vector<std::vector<double>> want = Program(seed, DeviceMesh::Self()).Run();
  Dice dice(seed + 1);
  const Dims mesh_shape = RandomMesh(dice, 8);
  const std::vector<std::string> names = {"a", "b", "c"};
  const absl::Status status = RunSpmd(Numel(mesh_shape), [&](RankContext& rank) {
    const auto in_use = [&] { return rank.allocator()->stats().in_use_bytes; };
    const int64_t before = in_use();
    {
      Program program(seed, *DeviceMesh::Create(
                                mesh_shape, {names.begin(), names.begin() + mesh_shape.size()}));
      EXPECT_EQ(program.Run(), want) << "mesh " << ToString(mesh_shape);
      program.Drop();
      // A step leaves the leaves and their gradients, and no copy that a leaf was moved to.
      EXPECT_EQ(in_use() - before, MemoryOf(program.leaves()))
          << "mesh " << ToString(mesh_shape) << ": " << DescribeMemory().ToString();
    }
    EXPECT_EQ(in_use(), before);
    return absl::OkStatus();
  });
  if (!status.ok()) std::printf("%s\n", std::string(status.message()).c_str());
  RC_ASSERT(status.ok());
  RC_ASSERT(!::testing::Test::HasFailure());
}

}  // namespace
}  // namespace dtensor

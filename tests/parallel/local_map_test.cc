// LocalMap: a program written on this rank's tensors gives the bits and the collectives of the same
// program on DTensors, and what would be counted wrongly is refused where it is written.
#include "dtensor/parallel/local/local_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "dtensor/mesh/comm_trace.h"
#include "dtensor/mesh_scope.h"
#include "dtensor/ops/nn/attention.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/plan/explain.h"
#include "dtensor/rng/generator.h"
#include "dtensor/rng/tracker.h"
#include "tests/parallel/support.h"

namespace dtensor::local_map_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Integers;
using testing::MessageOf;

constexpr LocalType kV = LocalType::kVarying, kP = LocalType::kPartial, kR = LocalType::kReplicate,
                    kI = LocalType::kInvariant;

constexpr int64_t kBatch = 4, kSeq = 12, kHidden = 6, kInner = 24;

DTensor Leaf(int64_t seed, IntSpan shape, const DeviceMesh& mesh, const Placements& placements) {
  int64_t n = 1;
  for (const int64_t s : shape) n *= s;
  DTensor t = DistributeTensor(FromVector(Integers(n, seed), shape), mesh, placements).Detach();
  t.RequiresGrad();
  return t;
}

// What two ways of writing a program are compared by.
struct Outcome {
  std::vector<std::vector<double>> values;  // result, gradients of the inputs
  std::string comm;                         // kinds, mesh dims, phases, bytes, in order
};

Outcome Backward(const DTensor& y, const Values& leaves, const CommTrace& trace) {
  const DTensor c = FromVector(Integers(y.numel(), 9), y.shape());
  y.Backward(DistributeTensor(c, y.mesh(), WithoutPending(y.placements())));
  Outcome outcome;
  for (const CommEvent& e : trace.events()) {
    absl::StrAppend(&outcome.comm, Name(e.kind).data(), " ", e.mesh_dims, " ",
                    e.phase == CommPhase::kForward ? "forward" : "backward", " ", e.bytes, "\n");
  }
  outcome.values.push_back(y.ToVector<double>());
  for (const DTensor& leaf : leaves) outcome.values.push_back(leaf.grad().ToVector<double>());
  return outcome;
}

// x w where both are cut along the inner index: each rank has a term of the sum over it.
DTensor Terms(const LocalRegion& region, const DTensor& x, const DTensor& w) {
  return region.Reinterpret(matmul(x, w), "tp", LocalType::kPartial);
}

// A pair of products: columns, rows, one all-reduce each way.
Outcome TensorParallel(const DeviceMesh& mesh, bool local) {
  const Values leaves = {Leaf(1, {kBatch, kHidden}, mesh, {Replicate()}),
                         Leaf(2, {kHidden, kInner}, mesh, {Shard(1)}),
                         Leaf(3, {kInner, kHidden}, mesh, {Shard(0)})};
  const CommTrace trace;
  DTensor y;
  if (local) {
    y = LocalMap(
        [](const LocalRegion& region, const Values& in) -> Values {
          // Whole, and so is its gradient, as that of a replicated DTensor.
          return {region.AllReduce(Terms(region, relu(matmul(in[0], in[1])), in[2]), "tp", kI)};
        },
        leaves, {.in = {{Replicate()}, {Shard(1)}, {Shard(0)}}, .out = {{Invariant()}}})[0];
  } else {
    y = matmul(relu(matmul(leaves[0], leaves[1])), leaves[2]).Redistribute({Replicate()});
  }
  return Backward(y, leaves, trace);
}

// The same with the sequence sharded outside: a gather and a scatter each way.
Outcome SequenceParallel(const DeviceMesh& mesh, bool local) {
  const Values leaves = {Leaf(1, {kSeq, kHidden}, mesh, {Shard(0)}),
                         Leaf(2, {kHidden, kInner}, mesh, {Shard(1)}),
                         Leaf(3, {kInner, kHidden}, mesh, {Shard(0)})};
  const CommTrace trace;
  DTensor y;
  if (local) {
    y = LocalMap(
        [](const LocalRegion& region, const Values& in) -> Values {
          const DTensor x = region.AllGather(in[0], "tp", 0);
          return {region.ReduceScatter(Terms(region, relu(matmul(x, in[1])), in[2]), "tp", 0)};
        },
        leaves,
        {.in = {{Shard(0)}, {Shard(1)}, {Shard(0)}},
         .out = {{Shard(0)}},
         .out_shapes = {{kSeq, kHidden}}})[0];
  } else {
    const DTensor x = leaves[0].Redistribute({Replicate()});
    y = matmul(relu(matmul(x, leaves[1])), leaves[2]).Redistribute({Shard(0)});
  }
  return Backward(y, leaves, trace);
}

TEST(LocalMap, OneProgramWrittenTwiceGivesTheSameBitsAndCollectives) {
  for (const int64_t ranks : {1, 2, 3, 4}) {
    const absl::Status status = RunSpmd(ranks, [&](RankContext&) {
      const DeviceMesh mesh({ranks}, {"tp"});
      for (const auto& program : {TensorParallel, SequenceParallel}) {
        const Outcome global = program(mesh, false), local = program(mesh, true);
        EXPECT_EQ(local.values, global.values);
        EXPECT_EQ(local.comm, global.comm);
        EXPECT_EQ(global.comm.empty(), ranks == 1);
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Megatron's f and g: what enters and leaves is invariant, f is I to R, g is P to I.
TEST(LocalMap, InvariantsGiveOneAllReduceEachWay) {
  const absl::Status status = RunSpmd(4, [](RankContext&) {
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    const Values leaves = {Leaf(1, {kBatch, kHidden}, mesh, {Shard(0), Replicate()}),
                           Leaf(2, {kHidden, kInner}, mesh, {Replicate(), Shard(1)}),
                           Leaf(3, {kInner, kHidden}, mesh, {Replicate(), Shard(0)})};
    CommTrace trace;
    const DTensor y = LocalMap(
        [](const LocalRegion& region, const Values& in) -> Values {
          EXPECT_EQ(region.TypeOf(in[0], "dp"), kV);
          EXPECT_EQ(region.TypeOf(in[0], "tp"), kI);
          EXPECT_EQ(region.TypeOf(in[1], "dp"), kR);
          const DTensor x = region.Convert(in[0], "tp", kR);
          const DTensor h = Terms(region, relu(matmul(x, in[1])), in[2]);
          EXPECT_EQ(region.TypeOf(h, "dp"), kV);
          EXPECT_EQ(region.TypeOf(h, "tp"), kP);
          return {region.AllReduce(h, "tp", kI)};
        },
        leaves,
        {.in = {{Shard(0), Invariant()}, {Replicate(), Shard(1)}, {Replicate(), Shard(0)}},
         .out = {{Shard(0), Invariant()}},
         .check_bits = false})[0];
    EXPECT_EQ(trace.Count(CollectiveKind::kAllReduce, CommPhase::kForward), 1);
    trace.Clear();
    const Outcome got = Backward(y, leaves, trace);
    EXPECT_EQ(std::count(got.comm.begin(), got.comm.end(), '\n'), 2) << got.comm;
    EXPECT_THAT(got.comm, AllOf(HasSubstr("tp backward"), HasSubstr("dp backward")));
    // One rank.
    DTensor x = FromVector(Integers(kBatch * kHidden, 1), {kBatch, kHidden});
    DTensor w = FromVector(Integers(kHidden * kInner, 2), {kHidden, kInner});
    DTensor v = FromVector(Integers(kInner * kHidden, 3), {kInner, kHidden});
    for (DTensor* t : {&x, &w, &v}) t->RequiresGrad();
    const DTensor z = matmul(relu(matmul(x, w)), v);
    z.Backward(FromVector(Integers(z.numel(), 9), z.shape()));
    EXPECT_EQ(got.values[0], z.ToVector<double>());
    EXPECT_EQ(got.values[1], x.grad().ToVector<double>());
    EXPECT_EQ(got.values[2], w.grad().ToVector<double>());
    EXPECT_EQ(got.values[3], v.grad().ToVector<double>());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// <A x, c> must be <x, A^T c> for every operator and its backward, in whole numbers.
TEST(LocalMap, OperatorsAndTheirBackwardsAreTransposes) {
  struct Case {
    const char* name;
    LocalLayout in, out;
    std::function<DTensor(const LocalRegion&, const DTensor&)> apply;
  };
  const Case cases[] = {
      {"P to R", Partial(), Replicate(),
       [](const LocalRegion& r, const DTensor& x) { return r.AllReduce(x, "tp"); }},
      {"P to I", Partial(), Invariant(),
       [](const LocalRegion& r, const DTensor& x) { return r.AllReduce(x, "tp", kI); }},
      {"V to R", Shard(0), Replicate(),
       [](const LocalRegion& r, const DTensor& x) { return r.AllGather(x, "tp", 0, kR, 8); }},
      {"V to I", Shard(0), Invariant(),
       [](const LocalRegion& r, const DTensor& x) { return r.AllGather(x, "tp", 0, kI, 8); }},
      {"P to V", Partial(), Shard(0),
       [](const LocalRegion& r, const DTensor& x) { return r.ReduceScatter(x, "tp", 0); }},
      {"I to R", Invariant(), Replicate(),
       [](const LocalRegion& r, const DTensor& x) { return r.Convert(x, "tp", kR); }},
      {"I to V", Invariant(), Shard(0),
       [](const LocalRegion& r, const DTensor& x) { return r.Convert(x, "tp", kV, 0); }},
      {"R to V", Replicate(), Shard(0),
       [](const LocalRegion& r, const DTensor& x) { return r.Convert(x, "tp", kV, 0); }},
      {"V to P", Shard(0), Partial(),
       [](const LocalRegion& r, const DTensor& x) { return r.Convert(x, "tp", kP, 0, 8); }},
      {"R to P", Replicate(), Partial(),
       [](const LocalRegion& r, const DTensor& x) { return r.Convert(x, "tp", kP); }},
  };
  const absl::Status status = RunSpmd(3, [&](RankContext&) {
    const DeviceMesh mesh({3}, {"tp"});
    for (const Case& c : cases) {
      SCOPED_TRACE(c.name);
      const Placements from = {c.in.placement};
      DTensor x = DistributeTensor(FromVector(Integers(16, 1), {8, 2}), mesh, WithoutPending(from))
                      .Redistribute(from)
                      .Detach();
      const std::vector<double> before = x.ToVector<double>();
      x.RequiresGrad();
      LocalMapOptions options = {.in = {{c.in}}, .out = {{c.out}}, .out_shapes = {{8, 2}}};
      options.check_bits = !c.out.placement.cuts() && !c.out.placement.is_partial();
      const DTensor y = LocalMap(
          [&](const LocalRegion& r, const Values& in) -> Values { return {c.apply(r, in[0])}; },
          {x}, options)[0];
      EXPECT_EQ(y.ToVector<double>(), before);  // each keeps the global value
      const DTensor w = FromVector(Integers(16, 4), {8, 2});
      y.Backward(DistributeTensor(w, mesh, WithoutPending(y.placements())));
      EXPECT_EQ(x.grad().ToVector<double>(), w.ToVector<double>());
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(LocalMap, AllToAllAndReinterpret) {
  const absl::Status status = RunSpmd(2, [](RankContext& rank) {
    const DeviceMesh mesh({2}, {"tp"});
    DTensor x = Leaf(1, {4, 6}, mesh, {Shard(0)});
    const DTensor y = LocalMap(
        [](const LocalRegion& region, const Values& in) -> Values {
          const DTensor columns = region.AllToAll(in[0], "tp", 1, 0);
          EXPECT_EQ(columns.shape(), Shape({4, 3}));
          return {columns};
        },
        {x}, {.in = {{Shard(0)}}, .out = {{Shard(1)}}})[0];
    EXPECT_EQ(y.ToVector<double>(), Integers(24, 1));
    sum(y * y).Backward();
    EXPECT_EQ(x.grad().ToVector<double>(), (x.Detach() * 2).ToVector<double>());
    // What each rank has is a term: their sum, with the gradient of every term.
    x.ZeroGrad();
    const DTensor total = LocalMap(
        [](const LocalRegion& region, const Values& in) -> Values {
          const DTensor terms = region.Reinterpret(sum(in[0] * in[0]), "tp", kP);
          EXPECT_EQ(region.TypeOf(terms, "tp"), kP);
          return {region.AllReduce(terms, "tp")};
        },
        {x}, {.in = {{Shard(0)}}})[0];
    EXPECT_EQ(total.Item(), sum(x.Detach() * x.Detach()).Item());
    total.Backward();
    EXPECT_EQ(x.grad().ToVector<double>(), (x.Detach() * 2).ToVector<double>());
    EXPECT_EQ(rank.world_size(), 2);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Uneven parts: heads of a sequence and back, of 9 on 2 ranks and 3 on 4.
TEST(LocalMap, AllToAllOfUnevenPartsIsUndoneWithTheirSize) {
  for (const auto& [ranks, heads] : {std::pair<int64_t, int64_t>{2, 9}, {4, 3}}) {
    const absl::Status status = RunSpmd(ranks, [ranks = ranks, heads = heads](RankContext&) {
      const DeviceMesh mesh({ranks}, {"tp"});
      const int64_t seq = ranks + 1;
      const DTensor x = Leaf(1, {seq, heads, 2}, mesh, {Shard(0)});
      const Values y = LocalMap(
          [&](const LocalRegion& region, const Values& in) -> Values {
            const DTensor by_heads = region.AllToAll(in[0], "tp", 1, 0, seq);
            EXPECT_EQ(by_heads.size(0), seq);
            return {region.AllToAll(by_heads * by_heads, "tp", 0, 1, heads)};
          },
          {x}, {.in = {{Shard(0)}}, .out = {{Shard(0)}}, .out_shapes = {x.shape()}});
      EXPECT_EQ(y[0].ToVector<double>(), mul(x, x).ToVector<double>());
      sum(y[0]).Backward();
      EXPECT_EQ(x.grad().ToVector<double>(), (x.Detach() * 2).ToVector<double>());
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Sizes that nobody says are as long as the parts together (pytorch/pytorch 172812).
TEST(LocalMap, UnevenResultsHaveTheirSizes_172812) {
  const absl::Status status = RunSpmd(4, [&](RankContext& rank) {
    const DTensor rows = FromVector(Integers(14, 1), {7, 2});
    const std::vector<double> doubled = (rows * 2.0).ToVector<double>();
    const auto twice = [](const LocalRegion&, const Values& in) -> Values { return {in[0] * 2.0}; };
    for (const DeviceMesh& mesh : {DeviceMesh({4}, {"tp"}), DeviceMesh({2, 2}, {"dp", "tp"})}) {
      Placements where(mesh.ndim(), Replicate());
      where.back() = Shard(0);
      const LocalLayouts cut(where.begin(), where.end());
      const DTensor x = DistributeTensor(rows, mesh, where);
      CommTrace trace;
      const DTensor y = LocalMap(twice, {x}, {.in = {cut}, .out = {cut}})[0];
      EXPECT_EQ(y.shape(), rows.shape());
      EXPECT_EQ(y.ToVector<double>(), doubled);
      trace.Clear();  // said, they need no exchange
      LocalMap(twice, {x}, {.in = {cut}, .out = {cut}, .out_shapes = {rows.shape()}});
      EXPECT_TRUE(trace.events().empty());
    }
    // Cut over both mesh dims, one in the other.
    const DeviceMesh square({2, 2}, {"dp", "tp"});
    const LocalLayouts both = {Shard(0), Shard(0)};
    const DTensor x = DistributeTensor(rows, square, {Shard(0), Shard(0)});
    EXPECT_EQ(LocalMap(twice, {x}, {.in = {both}, .out = {both}})[0].ToVector<double>(), doubled);
    // The last rank has the most, which no Shard does.
    const auto grows = [&](const LocalRegion& region, const Values& in) -> Values {
      return {region.Reinterpret(slice(in[0], 0, 0, rank.rank() + 1), "tp", kV)};
    };
    const DeviceMesh line({4}, {"tp"});
    EXPECT_THAT(
        MessageOf([&] { LocalMap(grows, {DistributeTensor(rows, line)}, {.out = {{Shard(0)}}}); }),
        AllOf(HasSubstr("[local_map] result 0: rank 0 has a part of shape [1, 2]"),
              HasSubstr("of [10, 2]"), HasSubstr("gives it [3, 2]")));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// --- recomputing ---------------------------------------------------------------------------------

// A part whose rows are apart is as others are, also on a rank that has one row of it.
TEST(LocalMap, ResultsThatAreNotRowMajor) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DTensor x = ones({3, 4}, {DType::kF64, DeviceMesh({2}), {Shard(0)}});
    const DTensor part =
        LocalMap([](const LocalRegion&,
                    const Values& in) -> Values { return {slice(in[0] * 2.0, 1, 0, 2)}; },
                 {x}, {.in = {{Shard(0)}}, .out = {{Shard(0)}}})[0];
    DTensor flat = reshape(part, {6});
    mul_(flat, 5.0);
    EXPECT_EQ(part.ToVector<double>(), std::vector<double>(6, 10.0));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(LocalMap, RunsAgainWithinRecompute) {
  for (const int64_t ranks : {1, 2, 3}) {
    const absl::Status status = RunSpmd(ranks, [&](RankContext&) {
      const DeviceMesh mesh({ranks}, {"tp"});
      std::vector<std::vector<double>> plain;
      for (const bool recompute : {false, true}) {
        const Values leaves = {Leaf(1, {kBatch, kHidden}, mesh, {Replicate()}),
                               Leaf(2, {kHidden, kInner}, mesh, {Shard(1)}),
                               Leaf(3, {kInner, kHidden}, mesh, {Shard(0)})};
        const auto block = [](const Values& in) {
          return LocalMap(
              [](const LocalRegion& region, const Values& part) -> Values {
                const DTensor h = relu(matmul(part[0], part[1]));
                const DTensor y = region.AllReduce(Terms(region, h * h, part[2]), "tp", kI);
                return {y * y};
              },
              in, {.in = {{Replicate()}, {Shard(1)}, {Shard(0)}}, .out = {{Invariant()}}});
        };
        const CommTrace trace;
        const DTensor y = recompute ? Recompute(block, leaves)[0] : block(leaves)[0];
        const Outcome outcome = Backward(y, leaves, trace);
        if (!recompute) plain = outcome.values;
        EXPECT_EQ(outcome.values, plain);
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// The region would be gone when the function runs again.
TEST(LocalMap, RefusesRecomputeInside) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = Leaf(1, {4}, mesh, {Replicate()});
    const auto ops = [](const LocalRegion&, const Values& in) {
      return Recompute([](const Values& v) -> Values { return {v[0] * v[0]}; }, in);
    };
    const auto calls = [](const LocalRegion& region, const Values& in) {
      return Recompute(
          [&region](const Values& v) -> Values { return {region.Convert(v[0], "tp", kP)}; }, in);
    };
    for (const LocalFn& fn : {LocalFn(ops), LocalFn(calls)}) {
      EXPECT_THAT(MessageOf([&] { LocalMap(fn, {x}, {}); }),
                  HasSubstr("put the LocalMap inside of Recompute"));
    }
    const NoGrad no_grad;  // nothing runs again
    EXPECT_EQ(LocalMap(ops, {x}, {})[0].ToVector<double>(), (x * x).ToVector<double>());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// --- planted errors ------------------------------------------------------------------------------

struct Planted {
  const char* name;
  LocalFn fn;
  std::vector<const char*> says;
  LocalLayouts out = {Replicate()};
};

// Inputs: in[0] V, in[1] R, in[2] P, in[3] I, all taking gradients, all [4, 4] locally.
std::vector<Planted> PlantedErrors(const DTensor& outside) {
  using Region = LocalRegion;
  using In = Values;
  return {
      {"a forgotten all-reduce",
       [](const Region&, const In& in) -> In { return {in[2] * 2}; },
       {"result 0 over tp is P (made by mul_scalar)", "layout says R", "AllReduce"}},
      {"an all-reduce too many",
       [](const Region& r, const In& in) -> In {
         return {r.AllReduce(r.AllReduce(in[2], "tp"), "tp")};
       },
       {"[all_reduce]", "is R (made by all_reduce), not P", "reduced already"}},
      {"R + P",
       [](const Region&, const In& in) -> In { return {in[1] + in[2]}; },
       {"add over tp", "is P (input 2 of the region)", "is R (input 1 of the region)",
        "once per rank", "AllReduce"}},
      {"a bias before the reduce",
       [](const Region& r, const In& in) -> In {
         return {r.AllReduce(matmul(in[0], in[0]) + in[1], "tp")};
       },
       {"[all_reduce]", "is V (made by add), not P", "Reinterpret"}},
      {"a bias that is a term, of a product that is whole",
       [](const Region&, const In& in) -> In {
         return {linear(in[1], in[1], select(in[2], 0, 0))};
       },
       {"linear over tp", "is P", "is R (input 1"}},
      {"elements by a mask of its own, as the whole",
       [](const Region&, const In& in) -> In { return {masked_select(in[1], gt(in[0], 0.0))}; },
       {"result 0 over tp is V"}},
      {"places of what each rank has, as the whole",
       [](const Region&, const In& in) -> In { return {nonzero(in[0])}; },
       {"result 0 over tp is V"}},
      {"repeats of each rank's own, as the whole",
       [](const Region&, const In& in) -> In {
         return {repeat_interleave(in[1], to(gt(select(in[0], 0, 0), 0.0), DType::kI64), 0)};
       },
       {"result 0 over tp is V"}},
      {"a backward of its own",
       [](const Region&, const In& in) -> In {
         DTensor a = in[0].Detach();
         a.RequiresGrad();
         sum(a * a).Backward();
         return {a.grad()};
       },
       {"Backward inside of the region", "call it outside"}},
      {"V + P",
       [](const Region&, const In& in) -> In { return {in[0] + in[2]}; },
       {"add over tp", "is P (input 2", "is V (input 0", "AllReduce or ReduceScatter"}},
      {"P * P",
       [](const Region&, const In& in) -> In { return {in[2] * in[2]}; },
       {"mul over tp", "is P (input 2", "not linear"}},
      {"relu of terms",
       [](const Region&, const In& in) -> In { return {relu(in[2])}; },
       {"relu over tp", "is P (input 2", "not linear"}},
      {"a gradient counted twice",
       [](const Region&, const In& in) -> In { return {in[3] * in[1]}; },
       {"mul over tp", "is I (input 3", "is R (input 1", "Convert", "to R first"}},
      {"a gradient that differs",
       [](const Region&, const In& in) -> In { return {in[3] * in[0]}; },
       {"is I (input 3", "is V (input 0", "Convert"}},
      {"gathering terms",
       [](const Region& r, const In& in) -> In { return {r.AllGather(in[2], "tp", 0)}; },
       {"[all_gather]", "is P (input 2", "not V", "AllReduce sums terms"}},
      {"scattering parts",
       [](const Region& r, const In& in) -> In { return {r.ReduceScatter(in[0], "tp", 0)}; },
       {"[reduce_scatter]", "is V (input 0", "not P"}},
      {"converting a sum",
       [](const Region& r, const In& in) -> In { return {r.Convert(in[2], "tp", kR)}; },
       {"[convert]", "is P (input 2", "AllReduce"}},
      {"R to I",
       [](const Region& r, const In& in) -> In { return {r.Convert(in[1], "tp", kI)}; },
       {"[convert]", "R (input 1", "to I is no conversion"}},
      {"I to P",
       [](const Region& r, const In& in) -> In { return {r.Convert(in[3], "tp", kP)}; },
       {"[convert]", "I (input 3", "Convert to R, then to P"}},
      {"parts that leave as the whole",
       [](const Region&, const In& in) -> In { return {in[0]}; },
       {"result 0 over tp is V (input 0", "AllGather"}},
      {"an invariant that leaves as R",
       [](const Region&, const In& in) -> In { return {in[3]}; },
       {"is I (input 3", "Invariant()"}},
      {"an R that leaves as an invariant",
       [](const Region&, const In& in) -> In { return {in[1]}; },
       {"is R (input 1", "says I", "on request"},
       {Invariant()}},
      {"a parameter from outside",
       [&](const Region&, const In& in) -> In { return {in[1] * outside}; },
       {"takes a gradient and is from outside", "as an input"}},
      {"a loss that forgets its ranks",
       [](const Region&, const In& in) -> In { return {sum(in[0])}; },
       {"result 0 over tp is V (made by sum)"}},
      {"a mesh dim that is not there",
       [](const Region& r, const In& in) -> In { return {r.AllReduce(in[2], "dp")}; },
       {"[all_reduce]", "dp", "tp"}},
  };
}

TEST(LocalMap, PlantedTypeErrorsAreRefusedWhereTheyAreWritten) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    DTensor term = DistributeTensor(FromVector(Integers(16, 3), {4, 4}), mesh)
                       .Redistribute({Partial()})
                       .Detach();
    term.RequiresGrad();
    const Values inputs = {Leaf(1, {8, 4}, mesh, {Shard(0)}), Leaf(2, {4, 4}, mesh, {Replicate()}),
                           term, Leaf(4, {4, 4}, mesh, {Replicate()})};
    DTensor outside = ones({4, 4});
    outside.RequiresGrad();
    for (const Planted& p : PlantedErrors(outside)) {
      const LocalMapOptions options = {
          .in = {{Shard(0)}, {Replicate()}, {Partial()}, {Invariant()}}, .out = {p.out}};
      const std::string message = MessageOf([&] { LocalMap(p.fn, inputs, options); });
      for (const char* part : p.says) EXPECT_THAT(message, HasSubstr(part)) << p.name;
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(LocalMap, WhatFitsIsTaken) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = Leaf(1, {8, 4}, mesh, {Shard(0)}), w = Leaf(2, {4, 4}, mesh, {Replicate()});
    LocalMap(
        [](const LocalRegion& region, const Values& in) -> Values {
          const DTensor p = region.Reinterpret(matmul(in[0], in[1]), "tp", kP);
          EXPECT_EQ(region.TypeOf(p + p, "tp"), kP);
          EXPECT_EQ(region.TypeOf(p * 3, "tp"), kP);
          EXPECT_EQ(region.TypeOf(matmul(p, in[1]), "tp"), kP);
          EXPECT_EQ(region.TypeOf(transpose(p, 0, 1), "tp"), kP);
          EXPECT_EQ(region.TypeOf(sum(p, {0}), "tp"), kP);
          EXPECT_EQ(region.TypeOf(in[1] * in[1], "tp"), kR);
          EXPECT_EQ(region.TypeOf(in[0] + 1.0, "tp"), kV);
          EXPECT_EQ(region.TypeOf(softmax(in[0].Detach(), -1), "tp"), kV);  // as its base
          EXPECT_EQ(region.TypeOf(ones({2}) * 2, "tp"), kR);
          // An I without its gradient is an R: as Detach gives it, as integers, as NoGrad has it.
          EXPECT_EQ(region.TypeOf(in[2].Detach() * in[0], "tp"), kV);
          EXPECT_EQ(region.TypeOf(in[2].Detach() * in[1], "tp"), kR);
          EXPECT_EQ(region.TypeOf(one_hot(argmax(in[2], 1), 4) * in[0], "tp"), kV);
          {
            const NoGrad no_grad;
            EXPECT_EQ(region.TypeOf(in[2] * in[0], "tp"), kV);
          }
          const DTensor target = FromVector<int64_t>({0, 1, 2, 3}, {4});
          EXPECT_EQ(region.TypeOf(cross_entropy(in[0], target), "tp"), kV);  // made of many ops
          const DTensor written = clone(in[1]);
          {
            const NoGrad no_grad;
            add_(written, in[0]);
          }
          EXPECT_EQ(region.TypeOf(written, "tp"), kV);
          return {region.AllReduce(p, "tp")};
        },
        {x, w, w}, {.in = {{Shard(0)}, {Replicate()}, {Invariant()}}});
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A region's ranks draw the same numbers: what would use them as their own is refused.
TEST(LocalMap, DrawsForWhatVariesAreRefused) {
  const absl::Status status = RunSpmd(2, [](RankContext& rank) {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = DistributeTensor(ones({4, 16}), mesh, {Shard(0)});
    using Draw = std::function<DTensor(const DTensor& part, const DTensor& whole)>;
    const auto run = [&](const Draw& draw, const Placement& where) {
      ManualSeed(3);
      const auto fn = [&](const LocalRegion&, const Values& in) -> Values {
        return {draw(in[0], in[1])};
      };
      return LocalMap(fn, {x, x}, {.in = {{where}}, .out = {{where}}})[0];
    };
    const Draw drop = [](const DTensor& t, const DTensor&) { return dropout(t, 0.5); };
    const std::vector<Draw> draws = {
        drop,
        [](const DTensor& t, const DTensor&) { return dropout_(clone(t), 0.5); },
        [](const DTensor& t, const DTensor&) { return alpha_dropout(t, 0.5); },
        [](const DTensor& t, const DTensor&) { return t * rand({2, 16}); },
        [](const DTensor& t, const DTensor&) {
          const DTensor q = reshape(t, {1, 1, 2, 16});
          return causal_attention(q, q, q, {}, {}, false, 0.5);
        },
        [](const DTensor& t, const DTensor&) {
          const DTensor y = t * 2;
          uniform_(y);
          return y;
        },
        [](const DTensor& t, const DTensor& whole) {
          const DTensor y = t * 2;
          uniform_(y);
          EXPECT_EQ(whole.shape(), (whole * 2).shape());
          return y;
        }};
    for (size_t i = 0; i < draws.size(); ++i) {
      EXPECT_THAT(MessageOf([&] { run(draws[i], Shard(0)); }),
                  HasSubstr("draw on the DTensor outside"))
          << i;
    }
    // The same numbers are right for what is the same.
    const DTensor dropped = run(drop, Replicate());
    ManualSeed(3);
    EXPECT_EQ(dropped.ToVector<double>(), dropout(x, 0.5).ToVector<double>());
    // A stream of one's own.
    RngTracker streams;
    ThrowIfError(streams.Add("mine", 100 + rank.rank()));
    const Draw forked = [&](const DTensor& t, const DTensor&) {
      const RngTracker::Fork fork(streams, "mine");
      return dropout(t, 0.5);
    };
    const std::vector<double> own = run(forked, Shard(0)).ToVector<double>();
    EXPECT_FALSE(std::equal(own.begin(), own.begin() + 32, own.begin() + 32));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Without gradients R and I are one.
// A region writes to its own tensors only: the replicas of the input stay alike.
TEST(LocalMap, WritesDoNotReachWhatIsShared) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = ones({4}, {.mesh = mesh});
    const NoGrad no_grad;
    const Values y =
        LocalMap([](const LocalRegion&, const Values& v) -> Values { return {mul_(v[0], 2)}; }, {x},
                 {.in = {{Shard(0)}}, .out = {{Shard(0)}}});
    EXPECT_EQ(x.ToVector<double>(), (std::vector<double>{1, 1, 1, 1}));
    EXPECT_EQ(y[0].ToVector<double>(), (std::vector<double>{2, 2, 2, 2}));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(MessageOf([] { LocalMap(nullptr, {}, {}); }), HasSubstr("the function is null"));
}

TEST(LocalMap, InferenceTellsNoInvariants) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = DistributeTensor(ones({4}), mesh);
    const NoGrad no_grad;
    const Values y = LocalMap(
        [](const LocalRegion&, const Values& in) -> Values { return {in[0] * in[1], in[0]}; },
        {x, x}, {.in = {{Invariant()}, {Replicate()}}, .out = {{Replicate()}, {Replicate()}}});
    EXPECT_EQ(y[0].ToVector<double>(), std::vector<double>(4, 1.0));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(LocalMap, BitsAreCheckedOnRequest) {
  const absl::Status status = RunSpmd(2, [](RankContext& rank) {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = DistributeTensor(ones({4}), mesh);
    const auto differs = [&](const LocalRegion&, const Values& in) -> Values {
      return {in[0] * static_cast<double>(rank.rank())};  // the types cannot know
    };
    EXPECT_THAT(MessageOf([&] { LocalMap(differs, {x}, {.check_bits = true}); }),
                HasSubstr("rank"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A region is a part of the program: Explain says what it will communicate, on any mesh.
TEST(LocalMap, IsExplained) {
  const absl::Status status = RunSpmd(1, [](RankContext&) -> absl::Status {
    DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, DeviceMesh::Create({16}, {"tp"}, DeviceType::kMeta));
    const auto leaf = [&](IntSpan shape, const Placement& where) {
      DTensor t = empty(shape, {.mesh = mesh, .placements = {where}});
      t.RequiresGrad();
      return t;
    };
    const auto program = [&](const Values& in) {
      return LocalMap(
          [&](const LocalRegion& region, const Values& parts) -> Values {
            const DTensor x = region.AllGather(parts[0], "tp", 0) * 2.0;
            return {
                region.ReduceScatter(Terms(region, relu(matmul(x, parts[1])), parts[2]), "tp", 0)};
          },
          in, {.in = {{Shard(0)}, {Shard(1)}, {Shard(0)}}, .out = {{Shard(0)}}});
    };
    const Values inputs = {leaf({64, 8}, Shard(0)), leaf({8, 32}, Shard(1)),
                           leaf({32, 8}, Shard(0))};
    DT_ASSIGN_OR_RETURN(const ModuleExplanation told, Explain(program, inputs));
    EXPECT_EQ(told.ended, "");
    std::map<std::pair<CollectiveKind, CommPhase>, int64_t> counts;
    for (const CommEvent& e : told.events) ++counts[{e.kind, e.phase}];
    EXPECT_EQ(counts.size(), 4u);
    for (const auto& [what, count] : counts) EXPECT_EQ(count, 1);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(LocalMap, RefusesLayoutsThatDoNotFit) {
  const DeviceMesh mesh({1, 1}, {"dp", "tp"});
  const DTensor x = DistributeTensor(ones({4}), mesh);
  const auto same = [](const LocalRegion&, const Values& in) { return in; };
  EXPECT_THAT(MessageOf([&] { LocalMap(same, {x}, {.in = {{Shard(0)}}}); }),
              HasSubstr("input 0 has 1 layouts for mesh dp=1 tp=1"));
  EXPECT_THAT(MessageOf([&] { LocalMap(same, {x}, {.in = {{}, {}}}); }),
              HasSubstr("2 layouts for 1 inputs"));
  EXPECT_THAT(MessageOf([&] { LocalMap(same, {x}, {.out = {{}, {}}}); }),
              HasSubstr("2 layouts for 1 results"));
  EXPECT_THAT(
      MessageOf([&] { LocalMap(same, {x}, {.in = {{Replicate(), Partial(ReduceOp::kMax)}}}); }),
      HasSubstr("a term of a sum"));
  EXPECT_THAT(MessageOf([&] { LocalMap(same, {ones({4})}, {}); }), HasSubstr("needs a mesh"));
  const DTensor y = DistributeTensor(ones({4}), DeviceMesh({1, 1}, {"pp", "tp"}));
  EXPECT_THAT(MessageOf([&] { LocalMap(same, {x, y}, {}); }),
              HasSubstr("input 1 is on mesh pp=1 tp=1, the region on dp=1 tp=1"));
  const absl::Status outside = RunSpmd(2, [&](RankContext& rank) -> absl::Status {
    DT_ASSIGN_OR_RETURN(const DeviceMesh first, DeviceMesh::FromRanks({1}, {0}, {"tp"}));
    const DTensor z = DistributeTensor(ones({4}), first);
    EXPECT_EQ(MessageOf([&] { LocalMap(same, {z}, {}); }),
              rank.rank() == 0 ? ""
                               : "[local_map] rank 1 is not in mesh tp=1, and a region runs on "
                                 "the ranks of its mesh only: call it where mesh.Contains(rank)");
    return absl::OkStatus();
  });
  EXPECT_TRUE(outside.ok()) << outside;
}

}  // namespace
}  // namespace dtensor::local_map_test

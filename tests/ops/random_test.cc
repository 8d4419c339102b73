// Random ops on DTensor: the numbers of one device under any placement, gradients through dropout,
// the state of the generators, Recompute, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/rng/dropout.h"
#include "dtensor/rng/generator.h"
#include "tests/ops/gradcheck.h"

namespace dtensor::random_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::MessageOf;

// What a program of random ops gives on a mesh: all values, and the generator's state.
using Results = std::vector<std::vector<double>>;

Results Program(const DeviceMesh& mesh, const Placement& placement) {
  ManualSeed(11);
  Results results;
  const auto keep = [&](const DTensor& t) { results.push_back(t.ToVector<double>()); };
  const auto options = [&](DType dtype) {
    return TensorOptions{
        .dtype = dtype, .mesh = mesh, .placements = Placements(mesh.ndim(), placement)};
  };
  for (int round = 0; round < 3; ++round) {
    for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
      const DTensor t = empty({6, 10}, options(dtype));
      keep(rand({6, 10}, options(dtype)));
      keep(randn({6, 10}, options(dtype)));
      exponential_(t, 2);
      keep(t);
      cauchy_(t);
      keep(t);
      log_normal_(t, 0, 0.25);
      keep(t);
      geometric_(t, 0.3);
      keep(t);
      bernoulli_(t, 0.4);
      keep(t);
      keep(dropout(rand({6, 10}, options(dtype)), 0.3));
      keep(bernoulli(rand_like(t)));
      random_(t);
      keep(t);
    }
    keep(randint(-3, 1000, {6, 10}, options(DType::kI64)));
    keep(randint(0, int64_t{1} << 40, {6, 10}, options(DType::kI64)));
    keep(feature_dropout(rand({6, 10}, options(DType::kF32)), 0.5));
    keep(alpha_dropout(rand({6, 10}, options(DType::kF32)), 0.2));
    keep(randperm(37, {.dtype = DType::kI64, .mesh = mesh}));
    keep(multinomial(rand({6, 10}, options(DType::kF32)), 3));
    keep(multinomial(rand({6, 10}, options(DType::kF32)), 20, true));
    const DTensor in_place = rand({6, 10}, options(DType::kF32));
    dropout_(in_place, 0.5);
    keep(in_place);
  }
  results.push_back({static_cast<double>(DefaultGenerator().offset())});
  return results;
}

TEST(RandomOps, AreOneDevicesUnderAnyPlacement) {
  const Results want = Program(DeviceMesh::Self(), Replicate());
  EXPECT_GT(want.size(), 100u);  // more than 100 random ops, one after the other
  for (const int64_t ranks : {2, 3}) {
    for (const Placement& p : {Replicate(), Shard(0), Shard(1)}) {
      const absl::Status status = RunSpmd(ranks, [&](RankContext&) {
        EXPECT_EQ(Program(DeviceMesh({ranks}, {"tp"}), p), want) << p.ToString();
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(RandomOps, DistributionsLookRight) {
  ManualSeed(1);
  const int64_t n = 20000;
  const auto mean_of = [&](const DTensor& t) { return mean(to(t, DType::kF64)).Item(); };
  const DTensor t = empty({n});
  exponential_(t, 2);
  EXPECT_NEAR(mean_of(t), 0.5, 0.02);
  log_normal_(t, 0.5, 0.25);
  EXPECT_NEAR(mean_of(t), std::exp(0.5 + 0.25 * 0.25 / 2), 0.02);
  geometric_(t, 0.25);
  EXPECT_NEAR(mean_of(t), 4, 0.15);
  bernoulli_(t, 0.3);
  EXPECT_NEAR(mean_of(t), 0.3, 0.02);
  cauchy_(t, 3, 2);
  EXPECT_NEAR(mean_of(lt(t, 3)), 0.5, 0.02);
  EXPECT_NEAR(mean_of(randint(10, 20, {n})), 14.5, 0.1);
  const std::vector<int64_t> p = randperm(1000).ToVector<int64_t>();
  EXPECT_EQ(std::set<int64_t>(p.begin(), p.end()).size(), 1000u);
  std::map<int64_t, int> counts;
  const DTensor chances = FromVector<double>({1, 0, 3}, {3});
  for (int64_t i : multinomial(chances, 4000, true).ToVector<int64_t>()) ++counts[i];
  EXPECT_EQ(counts[1], 0);
  EXPECT_NEAR(counts[2], 3000, 120);
}

TEST(Dropout, GradientIsTheMask) {
  ManualSeed(3);
  DTensor x = ones({4, 8}, {.dtype = DType::kF64}).RequiresGrad();
  const Values both = dropout_with_mask(x, 0.25);
  sum(both[0] * 3).Backward();
  const std::vector<double> mask = both[1].ToVector<double>();
  std::vector<double> want;
  for (double m : mask) want.push_back(m * 3 / 0.75);
  testing::ExpectClose(x.grad().ToVector<double>(), want);
  EXPECT_EQ(dropout(x, 0).impl(), x.impl());
  EXPECT_EQ(dropout(x, 0.5, /*training=*/false).impl(), x.impl());
  EXPECT_EQ(dropout(x, 1).ToVector<double>(), std::vector<double>(32, 0));
}

// On a device that draws and multiplies in one pass too, however x lies and is cut.
TEST(Dropout, IsTheInputTimesTheMaskToTheBit) {
  const auto compare = [](const DTensor& x, double p) {
    const Values both = dropout_with_mask(x, p);
    EXPECT_EQ(both[0].placements(), x.placements());
    const double scale = 1 / KeepChance(x.dtype(), p);
    EXPECT_EQ(both[0].ToVector<double>(), dropout_apply(x, both[1], scale).ToVector<double>())
        << x.spec().ToString();
    const std::vector<double> mask = both[1].ToVector<double>();
    const double kept = std::accumulate(mask.begin(), mask.end(), 0.0);
    EXPECT_NEAR(kept / static_cast<double>(mask.size()), 1 - p, 0.15);
  };
  for (const DType t : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    // Groups of 8, of fewer, and of one element.
    for (const Shape& shape : {Shape{16, 24}, Shape{10, 22}, Shape{11, 19}}) {
      ManualSeed(6);
      const DTensor x = to(randn(shape), t);
      compare(x, 0.3);
      compare(transpose(x, 0, 1), 0.3);
      compare(slice(x, 1, 3, 17), 0.3);
      const absl::Status status = RunSpmd(2, [&](RankContext&) {
        const DeviceMesh mesh({2}, {"tp"});
        for (const Placement& p : {Replicate(), Shard(0), Shard(1), Partial()}) {
          compare(to(randn(shape, {.mesh = mesh}), t).Redistribute({p}), 0.3);
        }
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(Dropout, TermsOfAPendingSumShareTheMask) {
  ManualSeed(4);
  const std::vector<double> want = dropout(ones({3, 5}), 0.4).ToVector<double>();
  const absl::Status status = RunSpmd(2, [&](RankContext&) {
    ManualSeed(4);
    const DTensor pending =
        ones({3, 5}, {.mesh = DeviceMesh({2}, {"tp"})}).Redistribute({Partial()});
    const DTensor y = dropout(pending, 0.4);
    EXPECT_TRUE(y.placements()[0].is_partial());
    EXPECT_EQ(y.ToVector<double>(), want);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// torch fills memory in its order: the base of a transposed tensor gets what it would have got
// itself. Every rank of any placement agrees, also where its part has one row.
TEST(RandomViews, AreFilledInMemoryOrderOfOneDevice) {
  const auto draw = [](const DeviceMesh& mesh, const Placements& placements, int view) {
    ManualSeed(11);
    const TensorOptions options = {.mesh = mesh, .placements = placements};
    const DTensor base = zeros({3, 5, 4}, options);
    const DTensor t = view == 0   ? transpose(base, 0, 2)
                      : view == 1 ? permute(slice(base, 1, 0, 5, 2), {1, 0, 2})
                                  : select(transpose(base, 0, 2), 1, 1);
    uniform_(t);
    std::vector<double> all = base.ToVector<double>();
    for (const DTensor& more : {rand_like(t), dropout(ones_like(t), 0.5), dropout(t, 0.5)}) {
      const std::vector<double> values = more.ToVector<double>();
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  };
  ManualSeed(11);
  const DTensor plain = zeros({3, 5, 4});
  uniform_(plain);
  std::vector<double> whole = draw(DeviceMesh::Self(), {}, 0);
  whole.resize(60);
  EXPECT_EQ(whole, plain.ToVector<double>());
  ManualSeed(11);  // drawn as the row-major base is
  EXPECT_EQ(transpose(rand_like(transpose(plain, 0, 2)), 0, 2).ToVector<double>(),
            plain.ToVector<double>());
  for (int view = 0; view < 3; ++view) {
    const std::vector<double> want = draw(DeviceMesh::Self(), {}, view);
    for (const Placements& p : std::vector<Placements>{{Shard(0), Replicate()},
                                                       {Shard(0), Shard(0)},
                                                       {Shard(2), Shard(0)},
                                                       {Replicate(), Replicate()}}) {
      const absl::Status status = RunSpmd(4, [&](RankContext&) {
        EXPECT_EQ(draw(DeviceMesh({2, 2}, {"dp", "tp"}), p, view), want) << view << ToString(p);
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

// Long runs of numbers into memory with gaps: those of a tensor without, and nothing in between.
TEST(RandomViews, LongRunsLeaveTheGapsAlone) {
  for (const int64_t gap : {2, 3}) {
    const DTensor whole = zeros({3000, gap});
    ManualSeed(4);
    uniform_(select(whole, 1, 0));
    ManualSeed(4);
    EXPECT_EQ(select(whole, 1, 0).ToVector<float>(), rand({3000}).ToVector<float>());
    for (int64_t column = 1; column < gap; ++column) {
      EXPECT_EQ(select(whole, 1, column).ToVector<float>(), std::vector<float>(3000));
    }
  }
}

// Narrow types are drawn as float32 and rounded.
TEST(RandomOps, NarrowNormalsAreRoundedOnes) {
  for (const DType narrow : {DType::kBF16, DType::kF16}) {
    for (const int64_t n : {7, 300, 100000}) {
      ManualSeed(9);
      const DTensor rounded = to(randn({n}), narrow);
      ManualSeed(9);
      EXPECT_EQ(randn({n}, {.dtype = narrow}).ToVector<float>(), rounded.ToVector<float>()) << n;
    }
  }
}

// The noise of features is a tensor of its own, row-major however the input lies.
TEST(Dropout, FeaturesAreDrawnInRowsHoweverTheyLie) {
  for (const Shape& shape : {Shape{12, 20}, Shape{12, 20, 1}, Shape{12, 20, 3}}) {
    const DTensor x = rand(shape) + 1.0;
    ManualSeed(6);
    const std::vector<float> want = feature_dropout(x, 0.5).ToVector<float>();
    const DTensor turned = transpose(clone(transpose(x, 0, 1)), 0, 1);
    ManualSeed(6);
    EXPECT_EQ(feature_dropout(turned, 0.5).ToVector<float>(), want) << ToString(shape);
  }
}

// By chances that lie as the tensor does it is filled in the order of memory, by others in that of
// indices.
TEST(RandomViews, ChancesAreTakenInMemoryOrderWhereBothHaveIt) {
  const auto run = [](const DeviceMesh& mesh, const Placements& cut) {
    const auto made = [&](const Shape& shape, const Placements& placements) {
      return full(shape, 0.5, {.dtype = DType::kF64, .mesh = mesh, .placements = placements});
    };
    const auto turned = [&](const DTensor& t) { return permute(t, {1, 2, 0}); };
    const Shape shape = {6, 4, 5};
    std::vector<std::vector<double>> got;
    for (const bool tensor_is : {false, true}) {
      for (const bool chances_are : {false, true}) {
        Placements rotated = cut;  // cut is of the shape with its dims turned
        for (Placement& p : rotated) {
          if (p.cuts_dim()) p = Shard((p.dim() + 1) % 3);
        }
        const Shape around = {shape[2], shape[0], shape[1]};
        const DTensor base = made(around, rotated);
        const DTensor out = tensor_is ? turned(base) : made(shape, cut);
        const DTensor chances = chances_are ? turned(made(around, rotated)) : made(shape, cut);
        ManualSeed(8);
        bernoulli_(out, chances);
        got.push_back(out.ToVector<double>());
        if (tensor_is) got.push_back(base.ToVector<double>());
      }
    }
    return got;  // rows, rows; turned with rows (by index, in memory), turned with turned (the
                 // same)
  };
  const std::vector<std::vector<double>> one = run(DeviceMesh::Self(), {});
  EXPECT_EQ(one[0], one[1]);
  EXPECT_EQ(one[0], one[2]);
  EXPECT_NE(one[0], one[4]);
  ManualSeed(8);
  const DTensor in_order = empty({120}, {.dtype = DType::kF64});
  bernoulli_(in_order, full({120}, 0.5, {.dtype = DType::kF64}));
  EXPECT_EQ(one[5], in_order.ToVector<double>());
  for (const int dim : {0, 1, 2}) {
    const absl::Status status = RunSpmd(3, [&](RankContext&) {
      EXPECT_EQ(run(DeviceMesh({3}, {"tp"}), {Shard(dim)}), one) << dim;
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Which are reduced first.
TEST(Dropout, OfPendingExtremesIsThatOfOneDevice) {
  for (const auto drop : {+[](const DTensor& x) { return dropout(x, 0.4); },
                          +[](const DTensor& x) { return alpha_dropout(x, 0.4); },
                          +[](const DTensor& x) { return feature_dropout(x, 0.4); }}) {
    for (const auto extreme : {+[](const DTensor& x) { return amax(x, {2}); },
                               +[](const DTensor& x) { return amin(x, {2}); },
                               +[](const DTensor& x) { return prod(x, {2}); }}) {
      const auto run = [&](const DeviceMesh& mesh) {
        ManualSeed(4);
        const Placements cut = mesh.is_self() ? Placements{} : Placements{Shard(2)};
        DTensor x = rand({3, 5, 4}, {.dtype = DType::kF64, .mesh = mesh, .placements = cut});
        x.RequiresGrad();
        const DTensor y = drop(extreme(x));
        sum(y * y).Backward();
        return std::pair(y.ToVector<double>(), x.grad().ToVector<double>());
      };
      const auto want = run(DeviceMesh::Self());
      const absl::Status status = RunSpmd(2, [&](RankContext&) {
        const auto got = run(DeviceMesh({2}, {"tp"}));
        EXPECT_THAT(got.first, ::testing::Pointwise(::testing::DoubleNear(1e-14), want.first));
        EXPECT_THAT(got.second, ::testing::Pointwise(::testing::DoubleNear(1e-14), want.second));
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(RandomErrors, PendingMaxAndMin) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) {
    for (ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) {
      const DTensor t = ones({4}, {.mesh = DeviceMesh({2}, {"tp"})}).Redistribute({Partial(op)});
      const uint64_t offset = DefaultGenerator().offset();
      for (const auto& draw : std::vector<std::function<void()>>{
               [&] { uniform_(t); }, [&] { normal_(t); }, [&] { random_(t); },
               [&] { bernoulli_(t, 0.5); }, [&] { exponential_(t); }, [&] { dropout_(t, 0.5); }}) {
        EXPECT_THAT(MessageOf(draw), AllOf(HasSubstr(Partial(op).ToString()),
                                           HasSubstr("redistribute it to Replicate first")));
      }
      EXPECT_EQ(DefaultGenerator().offset(), offset);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(RandomErrors, SayWhatIsWrong) {
  const DTensor x = ones({4}), i = ones({4}, {.dtype = DType::kI64});
  EXPECT_THAT(MessageOf([&] { dropout(x, 1.5); }), HasSubstr("p must be in [0, 1], got 1.5"));
  EXPECT_THAT(MessageOf([&] { dropout(i, 0.5); }), HasSubstr("floating"));
  EXPECT_THAT(MessageOf([&] { bernoulli_(x, -0.1); }), HasSubstr("p must be in [0, 1], got -0.1"));
  EXPECT_THAT(MessageOf([&] { bernoulli(x * 2); }), HasSubstr("outside of [0, 1]"));
  EXPECT_THAT(MessageOf([&] { random_(x, 5, 5); }), HasSubstr("from (5) must be below to (5)"));
  EXPECT_THAT(MessageOf([&] { random_(ones({2}, {.dtype = DType::kU8}), 0, 300); }),
              HasSubstr("do not fit in uint8"));
  EXPECT_THAT(MessageOf([&] { exponential_(x, 0); }), HasSubstr("lambda must be > 0"));
  EXPECT_THAT(MessageOf([&] { exponential_(i); }), HasSubstr("needs a floating dtype, not int64"));
  EXPECT_THAT(MessageOf([&] { geometric_(x, 1); }), HasSubstr("p must be in (0, 1)"));
  EXPECT_THAT(MessageOf([&] { cauchy_(x, 0, 0); }), HasSubstr("sigma must be > 0"));
  EXPECT_THAT(MessageOf([&] { randperm(-1); }), HasSubstr("[randperm]"));
  EXPECT_THAT(MessageOf([&] { multinomial(x, 5); }), HasSubstr("got 5 samples"));
  EXPECT_THAT(MessageOf([&] { multinomial(x * 0, 1); }), HasSubstr("row 0"));
  const uint64_t before = DefaultGenerator().offset();
  MessageOf([&] { bernoulli_(x, 2); });
  EXPECT_EQ(DefaultGenerator().offset(), before);  // a refused op draws nothing
}

// --- Recompute ----------------------------------------------------------------------------------

// Two dropouts around a product, with or without keeping what lies between.
Results Trained(bool recompute, const DeviceMesh& mesh, const Placements& p) {
  ManualSeed(21);
  const TensorOptions options = {.dtype = DType::kF64, .mesh = mesh, .placements = p};
  DTensor x = rand({4, 6}, options).RequiresGrad(), w = rand({4, 6}, options).RequiresGrad();
  const auto block = [&](const Values& in) -> Values {
    const DTensor h = dropout(tanh(in[0] * w), 0.3);
    return {dropout(h * in[0], 0.2), h};
  };
  const auto twice = [&](const Values& in) -> Values {
    return recompute ? Recompute(block, in) : block(in);
  };
  const Values a = recompute ? Recompute(twice, {x}) : twice({x});  // nested
  const DTensor between = rand({4, 6}, options);  // a draw between forward and backward
  const Values b = twice({a[0] + a[1] * between});
  sum(b[0] * b[0]).Backward();
  return {b[0].ToVector<double>(),
          x.grad().ToVector<double>(),
          w.grad().ToVector<double>(),
          {static_cast<double>(DefaultGenerator().offset())}};
}

TEST(Recompute, IsBitEqualAndLeavesTheGeneratorAlone) {
  const Results want = Trained(false, DeviceMesh::Self(), {});
  EXPECT_EQ(Trained(true, DeviceMesh::Self(), {}), want);
  const absl::Status status = RunSpmd(2, [&](RankContext&) {
    EXPECT_EQ(Trained(true, DeviceMesh({2}, {"tp"}), {Shard(0)}), want);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Recompute, ReducesOnce) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"dp"});
    DTensor w = ones({3}, {.mesh = mesh}).RequiresGrad();
    DTensor x = ones({4, 3}, {.mesh = mesh, .placements = {Shard(0)}}).RequiresGrad();
    const auto fn = [&](const Values& in) -> Values { return {exp(in[0] * w)}; };
    const DTensor y = Recompute(fn, Recompute(fn, {x}))[0];
    CommTrace trace;
    sum(y).Backward();
    EXPECT_EQ(trace.TotalCount(), 1);  // w's gradient, of both uses together
    EXPECT_EQ(trace.Count(CollectiveKind::kAllReduce, CommPhase::kBackward), 1);
    EXPECT_TRUE(w.grad().defined());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Recompute, RestoresTheGeneratorWhenTheFunctionThrows) {
  ManualSeed(5);
  DTensor x = ones({3}).RequiresGrad();
  int calls = 0;
  const auto fn = [&](const Values& in) -> Values {
    const DTensor y = dropout(in[0], 0.5);
    if (++calls == 2) ThrowIfError(absl::InternalError("second time"));
    return {y * y};  // reads y, so the function is needed up to here
  };
  const DTensor y = Recompute(fn, {x})[0];
  const uint64_t after = DefaultGenerator().offset();
  EXPECT_THAT(MessageOf([&] { sum(y).Backward(); }), HasSubstr("second time"));
  EXPECT_EQ(DefaultGenerator().offset(), after);
}

TEST(Dropout, ThatDropsNothingTakesIntegers) {
  const DTensor x = ones({2, 3}, {.dtype = DType::kI64});
  EXPECT_EQ(dropout(x, 0).dtype(), DType::kI64);
  EXPECT_EQ(feature_dropout(x, 0.5, false).dtype(), DType::kI64);
  EXPECT_EQ(alpha_dropout(x, 0.5, false).dtype(), DType::kI64);
  EXPECT_THAT(MessageOf([&] { dropout(x, 0.5); }), HasSubstr("needs a floating tensor, got int64"));
}

// A program that goes on after the error draws what it would have drawn, on a rank and on a mesh,
// which meet the error at different places.
TEST(Dropout, ThatIsRefusedDrawsNothing) {
  for (const int64_t ranks : {1, 2}) {
    const absl::Status status = RunSpmd(ranks, [&](RankContext&) {
      const DeviceMesh mesh({ranks}, {"tp"});
      const DTensor base = ones({2, 6, 4}, {.mesh = mesh, .placements = {Shard(0)}});
      const DTensor old = slice(base, 2, 0, 2), leaf = ones({2, 6, 4}).RequiresGrad();
      add_(base, DTensor(ones({2, 6, 4}, {.mesh = mesh, .placements = {Shard(0)}})).RequiresGrad());
      ManualSeed(5);
      EXPECT_THAT(MessageOf([&] { dropout(old, 0.5); }), HasSubstr("make the view again"));
      EXPECT_THAT(MessageOf([&] { feature_dropout(old, 0.5); }), HasSubstr("make the view again"));
      EXPECT_THAT(MessageOf([&] { alpha_dropout(old, 0.5); }), HasSubstr("make the view again"));
      EXPECT_THAT(MessageOf([&] { dropout_(leaf, 0.5); }), HasSubstr("a leaf"));
      EXPECT_EQ(DefaultGenerator().offset(), 0);
      dropout(leaf, 0.5);
      EXPECT_GT(DefaultGenerator().offset(), 0);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

}  // namespace
}  // namespace dtensor::random_test

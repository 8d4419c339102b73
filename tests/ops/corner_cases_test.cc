// Programs that are legal but rare, and wrong ones that must not pass in silence. Each was once
// wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "dtensor/intercept.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "tests/common/message.h"

namespace dtensor::corner_cases_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MessageOf;

// Runs on `ranks` ranks; expectations inside fail the test.
void OnRanks(int64_t ranks, const std::function<void(RankContext&)>& body) {
  const absl::Status status = RunSpmd(ranks, [&](RankContext& rank) {
    body(rank);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

DTensor Numbers(std::vector<double> v, Shape shape, const DeviceMesh& mesh, Placements p) {
  return FromVector(v, shape, {.dtype = DType::kF64, .mesh = mesh, .placements = std::move(p)});
}

TEST(SetGrad, IsBroughtToTheLeafsPlacement) {
  OnRanks(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"dp"});
    DTensor w = Numbers({1, 2, 3, 4}, {4}, mesh, {Shard(0)}).RequiresGrad();
    w.SetGrad(Numbers({10, 10, 10, 10}, {4}, mesh, {Replicate()}));
    EXPECT_EQ(w.grad().placements()[0], Shard(0));
    sum(w * w).Backward();
    EXPECT_THAT(w.grad().ToVector<double>(), ElementsAre(12, 14, 16, 18));
    EXPECT_THAT(MessageOf([&] { w.SetGrad(ones({4}, {.mesh = mesh})); }),
                AllOf(HasSubstr("float32"), HasSubstr("float64")));
    EXPECT_THAT(MessageOf([&] { w.SetGrad(ones({4}, {.dtype = DType::kF64})); }),
                HasSubstr("[set_grad]"));
  });
}

TEST(Partials, OfTwoKindsMeetInOneOp) {
  OnRanks(2, [](RankContext&) {
    const DTensor x = Numbers({1, 2, 3, 5}, {4}, DeviceMesh({2}, {"tp"}), {Shard(0)});
    EXPECT_EQ((sum(x) - amax(x)).Item(), 6);
    EXPECT_EQ((amax(x) - sum(x)).Item(), -6);
    EXPECT_THAT(stack({sum(x), amax(x)}).ToVector<double>(), ElementsAre(11, 5));
  });
  OnRanks(4, [](RankContext&) {
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    const DTensor a = amax(Numbers({1, 2, 3, 4}, {4}, mesh, {Shard(0), Replicate()}));
    const DTensor b = sum(Numbers({1, 2, 3, 4}, {4}, mesh, {Replicate(), Shard(0)}));
    EXPECT_EQ((a + b).Item(), 14);
    EXPECT_EQ((b + a).Item(), 14);
    EXPECT_EQ(maximum(a, neg(a)).Item(), 4);
  });
}

TEST(Partials, OfProductsHoldOnesElsewhere) {
  OnRanks(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    const TensorOptions pending = {.mesh = mesh, .placements = {Partial(ReduceOp::kProd)}};
    EXPECT_THAT(full({2}, 3, pending).ToVector<double>(), ElementsAre(3, 3));
    EXPECT_THAT(arange(1, 3, 1, pending).ToVector<double>(), ElementsAre(1, 2));
    EXPECT_THAT(full({1}, 5, {.mesh = mesh})
                    .Redistribute({Partial(ReduceOp::kProd)})
                    .Redistribute({Partial()})
                    .ToVector<double>(),
                ElementsAre(5));
  });
}

TEST(Partials, TimesInfinityIsInfinity) {
  OnRanks(2, [](RankContext&) {
    const DTensor s = sum(Numbers({1, 2}, {2}, DeviceMesh({2}, {"tp"}), {Shard(0)}));
    EXPECT_EQ((s.Redistribute({Replicate()}).Redistribute({Partial()}) * HUGE_VAL).Item(),
              HUGE_VAL);
    EXPECT_EQ((s.Redistribute({Replicate()}).Redistribute({Partial()}) / 0.0).Item(), HUGE_VAL);
  });
}

TEST(InPlace, OnAViewThatWasMovedIsRefused) {
  OnRanks(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = Numbers({1, 2, 3, 4}, {4}, mesh, {Shard(0)});
    EXPECT_THAT(MessageOf([&] { add_(select(x, 0, 2), 10); }),
                AllOf(HasSubstr("it is a copy"), HasSubstr("clone()")));
    EXPECT_THAT(MessageOf([&] { uniform_(select(x, 0, 0)); }), HasSubstr("it is a copy"));
    const DTensor mine = clone(select(x, 0, 1));
    add_(mine, 10);
    EXPECT_THAT(mine.ToVector<double>(), ElementsAre(12));
    EXPECT_THAT(x.ToVector<double>(), ElementsAre(1, 2, 3, 4));
    // Each rank has its part of a slice already, as segments: that is a view.
    add_(slice(x, 0, 1, 3), 10);
    EXPECT_THAT(x.ToVector<double>(), ElementsAre(1, 12, 13, 4));
  });
}

// FromLocal shares the local tensor's memory: changed in place while recording, that would not
// know.
TEST(InPlace, OnAFromLocalWithHistoryIsRefused) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    DTensor leaf = ones({2});
    leaf.RequiresGrad();
    const DTensor x = FromLocal(leaf * 1, mesh, {Shard(0)});
    EXPECT_THAT(MessageOf([&] { add_(x, 1); }), HasSubstr("a view cannot be changed in place"));
    const NoGrad no_grad;
    add_(x, 1);
    EXPECT_EQ(x.ToVector<float>(), std::vector<float>(4, 2));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(InPlace, OperandsThatShareMemoryAreReadFirst) {
  const DTensor x = Numbers({1, 2, 3, 4}, {2, 2}, DeviceMesh::Self(), {});
  add_(x, transpose(x, 0, 1));
  EXPECT_THAT(x.ToVector<double>(), ElementsAre(2, 5, 5, 8));
  mul_(x, select(x, 0, 0));
  EXPECT_THAT(x.ToVector<double>(), ElementsAre(4, 25, 10, 40));
}

TEST(Versions, SavedValuesAreProtectedEverywhere) {
  const auto logits = [] {
    return Numbers({1, 2, 3, 4}, {2, 2}, DeviceMesh::Self(), {}).RequiresGrad();
  };
  const DTensor target = FromVector<int64_t>({0, 1}, {2}, {.dtype = DType::kI64});
  DTensor w = logits();
  const DTensor x = w * 1;
  const DTensor loss = cross_entropy(x, target);
  add_(x, 1);
  EXPECT_THAT(MessageOf([&] { loss.Backward(); }), HasSubstr("changed in place"));
  const DTensor again = cross_entropy(w * 1, target);
  mul_(target, 0);
  EXPECT_THAT(MessageOf([&] { again.Backward(); }), HasSubstr("changed in place"));
  // The operand of mul_ is what it overwrites.
  const DTensor y = w * 1;
  mul_(y, y.Detach());
  EXPECT_THAT(MessageOf([&] { sum(y).Backward(); }), HasSubstr("changed in place"));
  // Writing through the plain tensor counts too.
  const DTensor z = w * w;
  Fill(w.local(), 3);
  EXPECT_THAT(MessageOf([&] { sum(z).Backward(); }), HasSubstr("changed in place"));
}

TEST(Versions, WhatWasSavedAsAViewOnOneRankAndACopyOnAnotherIsRefusedOnBoth) {
  OnRanks(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = Numbers({1, 2}, {2, 1}, mesh, {Replicate()}).RequiresGrad() * 1;
    // The only column falls to rank 0, a view of x; rank 1 has a part without elements.
    const DTensor row = Numbers({3, 4, 5}, {1, 3}, mesh, {Shard(0)}).RequiresGrad();
    const DTensor y = matmul(x, row);
    mul_(x, 2);
    EXPECT_THAT(MessageOf([&] { sum(y).Backward(); }), HasSubstr("changed in place"));
  });
}

// Nor after a backward that was refused.
TEST(Versions, WhatIsChangedByItselfInPlaceDoesNotKeepItselfAlive) {
  const int64_t before = CurrentAllocator()->stats().in_use_bytes;
  const std::vector<std::function<void(const DTensor&)>> changes = {
      [](const DTensor& x) { mul_(x, x); }, [](const DTensor& x) { add_(x, x * x); },
      [](const DTensor& x) { copy_(x, exp(sum(x * x, {0}, true)) * x); },
      [](const DTensor& x) { add_(x, sum(matmul(reshape(x, {1, 3}), reshape(x, {3, 1})))); }};
  for (const auto& change : changes) {
    {
      const DTensor x = Numbers({1, 2, 3}, {3}, DeviceMesh::Self(), {}).RequiresGrad() * 1;
      change(x);
      EXPECT_THAT(MessageOf([&] { sum(x).Backward(); }), HasSubstr("changed in place"));
    }
    EXPECT_EQ(CurrentAllocator()->stats().in_use_bytes, before);
  }
}

TEST(Versions, AnExpandedTensorIsRefusedAlsoWhereOneRowOfItIs) {
  OnRanks(4, [](RankContext&) {
    const DeviceMesh mesh({4}, {"tp"});
    const DTensor x = Numbers({1, 2, 3}, {3}, mesh, {Replicate()});
    for (const int64_t rows : {5, 2}) {  // 2, 2, 1 and 0 of them on a rank; 1, 1, 0 and 0
      const DTensor y = expand(x, {rows, 3}).Redistribute({Shard(0)}, {.shared = true});
      EXPECT_THAT(MessageOf([&] { add_(y, 10); }), HasSubstr("an expanded tensor"));
    }
  });
}

// The product of a place with itself, twice, is another one where its parts are pending.
TEST(Versions, WindowsThatOverlapAreRefusedOnEveryRank) {
  OnRanks(3, [](RankContext&) {
    const DeviceMesh mesh({3}, {"tp"});
    for (const Placement& placed : {Placement(Replicate()), Placement(Shard(1)),
                                    Placement(Partial())}) {  // the last rank has no column
      const DTensor x = Numbers({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, {5, 2}, mesh, {Replicate()})
                            .Redistribute({placed});
      const DTensor windows = unfold(x, 0, 3, 2);
      EXPECT_THAT(MessageOf([&] { mul_(windows, windows); }), HasSubstr("windows that overlap"));
      const DTensor apart = unfold(x, 0, 2, 2);
      EXPECT_THAT(mul_(apart, 2).ToVector<double>(), ElementsAre(2, 6, 4, 8, 10, 14, 12, 16));
    }
    const DTensor x = Numbers({1, 2, 3, 4}, {4}, mesh, {Replicate()});
    EXPECT_THAT(MessageOf([&] { add_(as_strided(x, {2, 2}, {1, 1}), 1); }),
                HasSubstr("windows that overlap"));
  });
}

TEST(Versions, APartWithoutElementsKnowsThatItsSourceChanged) {
  OnRanks(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = Numbers({3}, {1}, mesh, {Replicate()}).RequiresGrad() * 1;
    mul_(x, x.Redistribute({Shard(0)}, {.shared = true}));  // rank 1 has none of it
    EXPECT_THAT(MessageOf([&] { sum(x).Backward(); }), HasSubstr("changed in place"));
    // Nobody lacks anything of the only element, although the cuts say otherwise: a copy.
    const DTensor y = Numbers({1}, {1}, mesh, {Shard(0)}).RequiresGrad() * 1;
    const DTensor whole = Numbers({2}, {1}, mesh, {FlatShard({1, 0})});
    const DTensor z = y * whole;
    bernoulli_(whole);
    sum(z).Backward();
  });
}

// The first rank has the value, the others zeros.
TEST(Versions, ANewPendingSumIsACopyOnTheFirstRankToo) {
  OnRanks(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = Numbers({3}, {1}, mesh, {Replicate()}).RequiresGrad() * 1;
    mul_(x, x.Redistribute({Partial()}, {.shared = true}));
    sum(x).Backward();
    EXPECT_EQ(x.ToVector<double>(), std::vector<double>{9});
  });
}

// Ranks 4 and 5 have nothing of w, and need no peer to have nothing of it cut otherwise.
TEST(Versions, WhoNeedsNoPeerWhereOthersDoMakesACopyToo) {
  OnRanks(6, [](RankContext&) {
    const DeviceMesh mesh({3, 2}, {"dp", "tp"});
    const DTensor x = Numbers({0, 1, 2, 3}, {4}, mesh, {Partial(), Replicate()}).RequiresGrad();
    const DTensor w =
        Numbers({-1, -2, -3, 3, 1, 1, -3, -3, 1, -1, 3, -3}, {3, 4}, mesh, {Shard(0, 2), Shard(0)})
            .RequiresGrad();
    const DTensor y = linear(x.Redistribute({Replicate(), Shard(0)}, {.shared = true}), w,
                             Numbers({-1, -1, -2}, {3}, mesh, {Replicate(), Shard(0)}));
    {
      const NoGrad no_grad;
      bernoulli_(w);
    }
    sum(y).Backward();
  });
}

TEST(Versions, AnOpReadsAViewOfWhatItWrites) {
  const DTensor w = Numbers({1, 2, 3, 4}, {2, 2}, DeviceMesh::Self(), {}).RequiresGrad();
  const DTensor x = w * 1;
  add_(x, transpose(x, 0, 1));
  EXPECT_THAT(x.ToVector<double>(), ElementsAre(2, 5, 5, 8));
  sum(x).Backward();
  EXPECT_THAT(w.grad().ToVector<double>(), ElementsAre(2, 2, 2, 2));
}

TEST(Versions, AnOldViewIsRefusedBeforeAnythingIsWritten) {
  OnRanks(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor w = Numbers({1, 2, 3, 4}, {4}, mesh, {Shard(0)}).RequiresGrad();
    const DTensor x = w * 1, y = w * 1, old = slice(x, 0, 0, 4);
    mul_(x, 2);
    EXPECT_THAT(MessageOf([&] { add_(y, old); }), HasSubstr("make the view again"));
    EXPECT_THAT(y.ToVector<double>(), ElementsAre(1, 2, 3, 4));
    // A move does not make it young.
    EXPECT_THAT(MessageOf([&] { old.Redistribute({Replicate()}); }),
                HasSubstr("make the view again"));
    EXPECT_THAT(MessageOf([&] { old.ToLocal(); }), HasSubstr("make the view again"));
    const auto mine = [&] {  // as roll of a sharded dim is made
      CustomFunction(
          "mine", {old}, [&] { return Values{old + 1}; }, [](const Values& g) { return g; });
    };
    EXPECT_THAT(MessageOf(mine), HasSubstr("[mine] an input is a view"));
    // What records nothing takes it, also where it has to be moved.
    const DTensor whole = Numbers({2, 4, 6, 0}, {4}, mesh, {Replicate()});
    EXPECT_THAT(eq(old, whole).ToVector<double>(), ElementsAre(1, 1, 1, 0));
    EXPECT_THAT(eq(old, old.Detach().Redistribute({Partial()})).ToVector<double>(),
                ElementsAre(1, 1, 1, 1));
  });
}

TEST(Versions, AViewOlderThanItsBasesHistoryIsRefused) {
  DTensor w = ones({2}).RequiresGrad();
  const DTensor base = zeros({2}), view = reshape(base, {2, 1}), copy = base.Detach();
  add_(base, w);
  EXPECT_THAT(MessageOf([&] { sum(view * w).Backward(); }), HasSubstr("make the view again"));
  // To write it, with nothing that is recorded, would change what the history speaks of.
  EXPECT_THAT(MessageOf([&] { mul_(view, 2); }), HasSubstr("make the view again"));
  EXPECT_THAT(base.ToVector<double>(), ElementsAre(1, 1));
  sum(copy * w).Backward();  // on purpose without history
  EXPECT_THAT(w.grad().ToVector<double>(), ElementsAre(1, 1));
  EXPECT_THAT(MessageOf([&] { uniform_(w * 2); }), HasSubstr("history"));
}

TEST(Values, WhereThereAreNoneIsAnError) {
  const DeviceMesh meta = *DeviceMesh::Create({2}, {"tp"}, DeviceType::kMeta);
  EXPECT_THAT(MessageOf([&] { ones({}, {.mesh = meta}).Item(); }), HasSubstr("meta mesh"));
  OnRanks(3, [](RankContext& rank) {
    const DTensor x = ones({2}, {.mesh = DeviceMesh({2}, {"tp"}), .placements = {Shard(0)}});
    if (rank.rank() == 2) {
      EXPECT_THAT(MessageOf([&] { x.ToVector<double>(); }), HasSubstr("rank 2 is not in the mesh"));
    } else {
      EXPECT_THAT(x.ToVector<double>(), ElementsAre(1, 1));
    }
  });
}

TEST(Meta, PlansOnMeshesLargerThanTheWorld) {
  const DeviceMesh meta = *DeviceMesh::Create({16384}, {"dp"}, DeviceType::kMeta);
  const DTensor x = zeros({16384, 4}, {.mesh = meta, .placements = {Shard(0)}});
  EXPECT_EQ(x.Redistribute({Replicate()}).local().shape(), Shape({16384, 4}));
  EXPECT_THAT(MessageOf([] { zeros({4}, {.mesh = DeviceMesh({4}, {"tp"})}); }),
              AllOf(HasSubstr("needs ranks 0 to 3"), HasSubstr("world has 1")));
}

TEST(Arange, CountsExactly) {
  const int64_t big = 9007199254740993;
  EXPECT_EQ(arange(big, big + 3, 1, {.dtype = DType::kI64}).numel(), 3);
  EXPECT_EQ(arange(big, big + 3, 1, {.dtype = DType::kI64}).ToVector<int64_t>()[2], big + 2);
  EXPECT_EQ(arange(5, -1, -2, {.dtype = DType::kI64}).ToVector<int64_t>(),
            (std::vector<int64_t>{5, 3, 1}));
  EXPECT_THAT(MessageOf([] { arange(0, HUGE_VAL); }), HasSubstr("finite"));
  EXPECT_THAT(MessageOf([] { arange(0, std::nan("")); }), HasSubstr("[arange]"));
}

TEST(Variadic, ManyInputs) {
  std::vector<DTensor> xs;
  for (int i = 0; i < 100; ++i) xs.push_back(full({1}, i));
  EXPECT_EQ(sum(cat(xs)).Item(), 4950);
}

TEST(NullInputs, AreNamed) {
  const DTensor null, x = ones({2, 2});
  EXPECT_THAT(MessageOf([&] { linear(x, null); }), HasSubstr("[linear] input w is null"));
  EXPECT_THAT(MessageOf([&] { stack({x, null}); }), HasSubstr("[stack] input xs1 is null"));
  EXPECT_THAT(MessageOf([&] { sum(null); }), HasSubstr("[sum] input x is null"));
  EXPECT_THAT(MessageOf([&] { cross_entropy(x, null); }), HasSubstr("input target is null"));
  EXPECT_THAT(MessageOf([&] { view(null, {2}); }), HasSubstr("[view] input x is null"));
}

TEST(Worlds, TensorsStayInTheirs) {
  DTensor old;
  OnRanks(1, [&](RankContext&) { old = ones({2}); });
  EXPECT_THAT(MessageOf([&] { old.ToVector<double>(); }), HasSubstr("another rank or world"));
  EXPECT_EQ(RunSpmd(int64_t{1} << 40, [](RankContext&) { return absl::OkStatus(); }).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(FromLocal, ChecksGradPlacementsAtOnce) {
  OnRanks(2, [](RankContext&) {
    DTensor local = ones({2}).RequiresGrad();
    FromLocalOptions options;
    options.grad_placements = {Shard(7)};
    EXPECT_THAT(MessageOf([&] { FromLocal(local, DeviceMesh({2}, {"tp"}), {Shard(0)}, options); }),
                HasSubstr("S(7)"));
  });
}

// Found by the fuzzer or by the judge.
TEST(Found, AmaxOfNarrowIntegersHasItsOwnIdentity) {
  OnRanks(3, [](RankContext&) {  // two ranks have no element
    for (DType t : {DType::kI32, DType::kI64, DType::kF32}) {
      const DTensor x = full({1, 1}, -2, {t, DeviceMesh({3}), {Shard(0)}});
      EXPECT_EQ(amax(x).Item(), -2);
    }
    const DTensor no = full({1, 2}, 0, {DType::kBool, DeviceMesh({3}), {Shard(0)}});
    EXPECT_EQ(amax(no).Item(), 0);
  });
}

TEST(Found, AmaxReducesAPendingMinimumFirst) {
  OnRanks(2, [](RankContext& rank) {  // the minimum of [0, 5] and [5, 0] is [0, 0]
    const DTensor mine =
        FromVector(rank.rank() == 0 ? std::vector<double>{0, 5} : std::vector<double>{5, 0}, {2},
                   {.dtype = DType::kF64});
    const DTensor x = FromLocal(mine, DeviceMesh({2}), {Partial(ReduceOp::kMin)});
    EXPECT_EQ(amax(x).Item(), 0);
  });
}

TEST(Found, AStepBeyondTheEndTakesOneElement) {
  const DTensor x = arange(0, 12.0).RequiresGrad();
  const DTensor y = slice(reshape(x, {2, 6}), 0, 0, 2, int64_t{1} << 62);
  EXPECT_THAT(y.ToVector<double>(), ElementsAre(0, 1, 2, 3, 4, 5));
  sum(y).Backward();
  EXPECT_EQ(sum(x.grad()).Item(), 6);
}

TEST(Found, SplitSizesThatOverflowAreRefused) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  EXPECT_THAT(MessageOf([&] { split(ones({4}), DimList{2, most, most}, 0); }),
              HasSubstr("do not sum to dim 0"));
}

TEST(Found, RegisteredOpsRefuseWhatTheirKernelsDoNotTake) {
  const auto call = [](const char* op, std::vector<DTensor> inputs, Attrs attrs = {}) {
    std::vector<const DTensor*> pointers;
    for (const DTensor& t : inputs) pointers.push_back(&t);
    return std::string(Dispatch(GetOp(op), pointers, attrs).status().message());
  };
  const DTensor a = ones({3}), b = ones({2, 3}), n = ones({}), mask = zeros({2}, {DType::kBool});
  EXPECT_THAT(call("where", {mask, ones({2}), ones({2}, {DType::kF64})}),
              HasSubstr("different dtypes"));
  EXPECT_THAT(call("outer_sum", {ones({2, 2}), ones({4, 2, 6})}), HasSubstr("leading dims differ"));
  EXPECT_THAT(call("rms_norm_backward", {a, a, a, a}), HasSubstr("leading dims differ"));
  EXPECT_THAT(call("attention", {n, n, n}, {FloatAttr(1), BoolAttr(false)}),
              HasSubstr("must have 4 dims"));
}

TEST(Found, AttributesThatNoOpFunctionHasSeenAreChecked) {
  const DTensor x = ones({2, 3, 4});
  const Dims twice = {1, 1}, far = {0, 7}, small = {4}, order = {2, 0, 1};
  const struct {
    const char* op;
    Attrs attrs;
    const char* says;  // null: fine
  } kCalls[] = {
      {"transpose", {IntAttr(5), IntAttr(1)}, "attribute a = 5 is not in [0, 3)"},
      {"transpose", {IntAttr(1), IntAttr(-1)}, "attribute b = -1"},
      {"transpose", {IntAttr(1), IntAttr(2)}, nullptr},
      {"permute", {IntsAttr(order)}, nullptr},
      {"permute", {IntsAttr(twice)}, "does not ascend"},
      {"permute", {IntsAttr(far)}, "attribute dims = 7"},
      {"squeeze", {IntsAttr(far)}, "attribute dims = 7"},
      {"unsqueeze", {IntAttr(4)}, "is not in [0, 4)"},
      {"expand", {IntsAttr(small)}, "has fewer dims than x [2, 3, 4]"},
      {"sum", {IntsAttr(far), BoolAttr(false)}, "attribute axes = 7"},
      {"sum", {IntsAttr(twice), BoolAttr(false)}, "does not ascend"},
      {"amax", {IntsAttr(far), BoolAttr(false)}, "attribute axes = 7"},
      {"softmax", {IntAttr(3)}, "attribute dim = 3"},
      {"cat", {IntAttr(-1)}, "attribute dim = -1"},
      {"select", {IntAttr(3), IntAttr(0)}, "attribute dim = 3"},
      {"select", {IntAttr(1), IntAttr(3)}, "attribute index = 3 is not in [0, 3)"},
      {"slice", {IntAttr(-2), IntAttr(0), IntAttr(1), IntAttr(1)}, "attribute dim = -2"},
      {"slice", {IntAttr(2), IntAttr(1), IntAttr(2), IntAttr(2)}, nullptr},
      {"slice",
       {IntAttr(2), IntAttr(2), IntAttr(2), IntAttr(2)},
       "2 elements from 2 in steps of 2"},
      {"slice_backward", {IntAttr(2), IntAttr(3), IntAttr(1), IntAttr(6)}, "not in [0, 6)"},
      {"slice_backward", {IntAttr(2), IntAttr(2), IntAttr(1), IntAttr(6)}, nullptr},
  };
  for (const auto& c : kCalls) {
    absl::Status status = Dispatch(GetOp(c.op), {&x}, c.attrs).status();
    status.Update(RankDevices::Current().Synchronize());  // what a kernel says on a device
    EXPECT_EQ(status.ok(), c.says == nullptr) << c.op << ": " << status;
    if (c.says == nullptr) continue;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.says)) << c.op;
  }
}

TEST(Found, ManyDims) {
  std::vector<int64_t> wide(40, 1);
  wide[3] = wide[35] = wide[39] = 2;
  const DTensor x = reshape(arange(0, 8.0, 1), wide);
  EXPECT_EQ(sum(x, DimList{35}).ToVector<int64_t>(), (std::vector<int64_t>{2, 4, 10, 12}));
  EXPECT_EQ(amax(x, DimList{3, 39}).ToVector<int64_t>(), (std::vector<int64_t>{5, 7}));
  EXPECT_THAT(MessageOf([] { zeros(Shape(65, 1)); }), HasSubstr("has 65 dims, more than 64"));
  const DTensor most = zeros(Shape(64, 1));
  EXPECT_THAT(MessageOf([&] { unsqueeze(most, 0); }), HasSubstr("has 65 dims, more than 64"));
}

// --- as torch has it, where its samples in tests/data do not show it
// ------------------------------

DTensor OnOne(const std::vector<double>& v, const Shape& shape, DType dtype = DType::kF64) {
  return FromVector(v, shape, {.dtype = dtype});
}
DTensor WholeNumbers(const std::vector<double>& v, const Shape& shape) {
  return OnOne(v, shape, DType::kI64);
}
void ExpectNear(const DTensor& got, const std::vector<double>& want) {
  const std::vector<double> values = got.ToVector<double>();
  ASSERT_EQ(values.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_NEAR(values[i], want[i], 1e-5 * std::max(1.0, std::fabs(want[i]))) << i;
  }
}

TEST(AsTorch, UniqueSlicesAreInTheOrderOfTheirOtherDims) {
  const DTensor x = OnOne({0, 0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0}, {2, 2, 3});
  const Values y = unique(x, true, true, true, 2);
  EXPECT_THAT(y[0].ToVector<double>(), ElementsAre(0, 0, 0, 1, 1, 0, 0, 0));
  EXPECT_THAT(y[1].ToVector<int64_t>(), ElementsAre(1, 0, 1));
  EXPECT_THAT(y[2].ToVector<int64_t>(), ElementsAre(1, 2));
  EXPECT_EQ(unique_consecutive(x, false, false, 2)[0].ToVector<double>(), x.ToVector<double>());
}

TEST(AsTorch, ACircularRimIsOfWhatIsLeft) {
  const DTensor x = OnOne({1, 2, 3, 4, 5}, {1, 1, 5});
  const auto padded = [&](const DimList& rim) {
    return pad(x, rim, "circular").ToVector<double>();
  };
  EXPECT_THAT(padded({-1, 1}), ElementsAre(2, 3, 4, 5, 2));
  EXPECT_THAT(padded({2, -2}), ElementsAre(2, 3, 1, 2, 3));
  EXPECT_THAT(padded({-1, 2}), ElementsAre(2, 3, 4, 5, 2, 3));
  EXPECT_THAT(MessageOf([&] { pad(x, {2, -4}, "circular"); }), HasSubstr("more than 1 elements"));
}

TEST(AsTorch, IndicesFromTheEnd) {
  const DTensor x = OnOne({0, 1, 2, 3}, {2, 2});
  EXPECT_THAT(take_along_dim(x, WholeNumbers({-1}, {1, 1}), 1).ToVector<double>(),
              ElementsAre(1, 3));
  EXPECT_THAT(MessageOf([&] { take_along_dim(x, WholeNumbers({-3}, {1, 1}), 1); }),
              HasSubstr("index -3 is not in [-2, 2)"));
  EXPECT_THAT(MessageOf([&] { take_along_dim(x, WholeNumbers({-1}, {1})); }),
              HasSubstr("out of range"));
  for (const DTensor& filled :
       {index_fill(x, 1, WholeNumbers({-1}, {1}), 7),
        index_fill(x, 1, WholeNumbers({-1}, {1}), OnOne({7}, {})),
        index_fill_(clone(x), 1, WholeNumbers({-1}, {1}), OnOne({7}, {}))}) {
    EXPECT_THAT(filled.ToVector<double>(), ElementsAre(0, 7, 2, 7));
  }
  EXPECT_THAT(MessageOf([&] { index_fill(x, 1, WholeNumbers({-3}, {1}), 7); }),
              HasSubstr("index -3 is not in [-2, 2)"));
}

TEST(AsTorch, AValueThatFillsHasItsGradientOnce) {
  for (const int64_t dim : {0, 1}) {
    DTensor x = OnOne({1, 2, 3, 4}, {2, 2}).RequiresGrad(), value = OnOne({5}, {}).RequiresGrad();
    const DTensor y = index_fill(x, dim, WholeNumbers({1, 1}, {2}), value);
    y.Backward(OnOne({1, 2, 4, 8}, {2, 2}));
    EXPECT_EQ(value.grad().Item(), dim == 0 ? 12 : 10);
    EXPECT_EQ(sum(x.grad()).Item(), dim == 0 ? 3 : 5);
  }
}

TEST(AsTorch, BoolsStayBools) {
  const DTensor m = OnOne({0, 1, 0, 1}, {2, 2}, DType::kBool), v = OnOne({1, 0}, {2}, DType::kBool);
  EXPECT_EQ(addr(m, v, v, 3, 2).dtype(), DType::kBool);
  EXPECT_THAT(addr(m, v, v, 3, 2).ToVector<double>(), ElementsAre(1, 1, 0, 1));
  EXPECT_THAT(addr(m, v, v, 0, 1).ToVector<double>(), ElementsAre(1, 0, 0, 0));
  EXPECT_THAT(addr(m, v, v, 1, 0).ToVector<double>(), ElementsAre(0, 1, 0, 1));
  const DTensor none = zeros({3}, {.dtype = DType::kBool}), at = WholeNumbers({1, 2}, {2});
  const DTensor both = OnOne({1, 1}, {2}, DType::kBool);
  EXPECT_THAT(index_add(none, 0, at, both, 2).ToVector<double>(), ElementsAre(0, 1, 1));
  EXPECT_THAT(index_add(none, 0, at, both, 0).ToVector<double>(), ElementsAre(0, 0, 0));
}

TEST(AsTorch, MeansOfIntegersAreCut) {
  const DTensor x = WholeNumbers({-7, 0, 2, 5, -1}, {1, 1, 5});
  EXPECT_EQ(avg_pool1d(x, {2}).dtype(), DType::kI64);
  EXPECT_THAT(avg_pool1d(x, {2}, {2}, {1}).ToVector<double>(), ElementsAre(-3, 1, 2));
  EXPECT_THAT(avg_pool1d(x, {2}, {2}, {0}, true).ToVector<double>(), ElementsAre(-3, 3, -1));
  EXPECT_THAT(avg_pool1d(x, {3}, {1}, {1}, false, false).ToVector<double>(),
              ElementsAre(-3, -1, 2, 2, 2));
  EXPECT_THAT(
      avg_pool2d(reshape(x, {1, 1, 1, 5}), {1, 2}, {}, {0}, false, true, -3).ToVector<double>(),
      ElementsAre(2, -2));
  OnRanks(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor rows = to(reshape(arange(0, 36, 1, {.mesh = mesh}), {1, 6, 6}), DType::kI64);
    const DTensor cut = rows.Redistribute({Shard(1)});
    EXPECT_EQ(avg_pool2d(cut, {3}, {2}, {1}).ToVector<double>(),
              avg_pool2d(rows, {3}, {2}, {1}).ToVector<double>());
  });
  const DTensor y = local_response_norm(
      reshape(WholeNumbers({0, 1, 2, 3, 4, 5, 6, 7, 8}, {9}), {1, 3, 3}), 3, 0.5);
  EXPECT_EQ(y.dtype(), DType::kF32);
  ExpectNear(y, {0.000000, 0.390795, 0.556875, 0.602639, 0.620403, 0.610741, 1.205278, 1.120920,
                 1.024097});
}

TEST(AsTorch, LossesOfIntegersAreFloat32) {
  const DTensor x = WholeNumbers({1, 2}, {2}), t = WholeNumbers({3, 1}, {2});
  EXPECT_EQ(poisson_nll_loss(x, t).dtype(), DType::kF32);
  ExpectNear(poisson_nll_loss(x, t), {2.553669});
  ExpectNear(poisson_nll_loss(x, t, false, true, 1e-8, Reduction::kNone), {2.764081, 1.306853});
  ExpectNear(margin_ranking_loss(WholeNumbers({1, 5}, {2}), t, WholeNumbers({1, -1}, {2}), 0.5,
                                 Reduction::kNone),
             {2.5, 4.5});
}

TEST(AsTorch, BytesAreReadAtTheNearestPlaces) {
  const DTensor x = OnOne({1, 200, 255}, {1, 1, 3}, DType::kU8);
  EXPECT_THAT(interpolate(x, {5}).ToVector<double>(), ElementsAre(1, 1, 200, 200, 255));
  EXPECT_THAT(interpolate(x, {5}, {}, "nearest-exact").ToVector<double>(),
              ElementsAre(1, 1, 200, 255, 255));
  EXPECT_THAT(MessageOf([&] { interpolate(x, {5}, {}, "linear"); }), HasSubstr("uint8"));
}

TEST(AsTorch, NormalizeTakesAnyOrder) {
  const DTensor x = OnOne({1, 0, 2, -1, 3, 0.5}, {2, 3});
  ExpectNear(normalize(x, 0), {0.5, 0, 1, -1.0 / 3, 1, 0.5 / 3});
  ExpectNear(slice(normalize(x, -1), 0, 1, 2), {-10.0 / 3, 10, 5.0 / 3});
  ExpectNear(slice(normalize(x, -HUGE_VAL), 0, 1, 2), {-2, 6, 1});
}

TEST(AsTorch, HeadsAndBatchesOfAttentionBroadcast) {
  const auto make = [](const Shape& shape) {
    return OnOne(std::vector<double>(Numel(shape), 0.5), shape);
  };
  const auto shape = [&](const Shape& q, const Shape& k, const Shape& v) {
    return scaled_dot_product_attention(make(q), make(k), make(v)).shape();
  };
  EXPECT_EQ(shape({4, 3, 8}, {4, 4, 6, 8}, {4, 4, 6, 8}), Shape({4, 4, 3, 8}));
  EXPECT_EQ(shape({3, 8}, {4, 4, 6, 8}, {4, 4, 6, 8}), Shape({4, 4, 3, 8}));
  EXPECT_EQ(shape({1, 2, 3, 8}, {1, 1, 6, 8}, {1, 2, 6, 8}), Shape({1, 2, 3, 8}));
  EXPECT_EQ(shape({1, 2, 3, 8}, {1, 2, 6, 8}, {1, 1, 6, 8}), Shape({1, 2, 3, 8}));
  EXPECT_EQ(shape({1, 1, 3, 8}, {1, 2, 6, 8}, {1, 2, 6, 8}), Shape({1, 2, 3, 8}));
  EXPECT_EQ(shape({2, 3, 8}, {6, 8}, {6, 8}), Shape({2, 3, 8}));
  const DTensor q = randn({4, 3, 8}), k = randn({4, 4, 6, 8}), v = randn({4, 4, 6, 8});
  EXPECT_EQ(scaled_dot_product_attention(q, k, v).ToVector<double>(),
            scaled_dot_product_attention(expand(q, {4, 4, 3, 8}), k, v).ToVector<double>());
}

TEST(AsTorch, BicubicPlacesOfAGrid) {
  struct Want {
    const char* padding;
    bool corners;
    std::vector<double> values, gradient;
  };
  const DTensor x = square(reshape(arange(0, 12, 1, {DType::kF64}), {1, 1, 3, 4}));
  for (const Want& w : std::vector<Want>{
           {"zeros", false, {14.515714, 0}, {19.5335, 37.22817, 0, 0}},
           {"zeros", true, {17.962778, -5.451633}, {13.69624, 34.47642, 16.3549, -9.19195}},
           {"border", false, {14.226946, 61.44475}, {18.71656, 38.36574, 0, 122.6925}},
           {"border", true, {17.820272, 57.334}, {13.41558, 35.22288, 0, 82.62}},
           {"reflection", false, {14.226946, 40.062125}, {18.71656, 38.36574, -19.00762, 99.43875}},
           {"reflection", true, {16.402016, 37.151}, {12.83724, 42.65184, -13.7205, 73.98}}}) {
    SCOPED_TRACE(w.padding);
    DTensor grid = OnOne({0.2, -0.3, 2, 0.1}, {1, 1, 2, 2}).RequiresGrad();
    const DTensor y = grid_sample(x, grid, "bicubic", w.padding, w.corners);
    ExpectNear(y, w.values);
    sum(y).Backward();
    ExpectNear(grid.grad(), w.gradient);
  }
  EXPECT_THAT(
      MessageOf([] { grid_sample(zeros({1, 1, 2, 2, 2}), zeros({1, 1, 1, 1, 3}), "bicubic"); }),
      HasSubstr("mode bicubic takes x of 4 dims"));
}

TEST(AsTorch, NamesOfDocument003) {
  DTensor x = OnOne({1, 2, 3, 4}, {2, 2}).RequiresGrad();
  const DTensor same = alias(x.Detach());
  fill_(same, 7);
  EXPECT_EQ(x.ToVector<double>(), std::vector<double>(4, 7)) << "one memory";
  EXPECT_THAT(rsub(x, 2, 3).ToVector<double>(), ElementsAre(-19, -19, -19, -19));
  EXPECT_THAT(rsub(x, ones({2})).ToVector<double>(), ElementsAre(-6, -6, -6, -6));
  EXPECT_THAT(true_divide(WholeNumbers({1, 4}, {2}), 2).ToVector<double>(), ElementsAre(0.5, 2));
  EXPECT_EQ(split_with_sizes(x, {2, 0}, 1)[0].shape(), Shape({2, 2}));
  EXPECT_THAT(MessageOf([&] { rsub(WholeNumbers({1}, {1}), 2, 0.5); }), HasSubstr("[rsub]"));
}

TEST(Scalar, NumbersThatNoInt64HoldsAreRefused) {
  EXPECT_THAT(MessageOf([&] { ones({1}) * (uint64_t{1} << 63); }),
              HasSubstr("the number 9223372036854775808 is above 2^63 - 1"));
  EXPECT_EQ((ones({1}, {DType::kI64}) * uint64_t{INT64_MAX}).ToVector<int64_t>()[0], INT64_MAX);
}

TEST(Scalar, ABoolIsNoInteger) {
  const DTensor yes = full({2}, true);
  EXPECT_EQ(yes.dtype(), DType::kBool);
  EXPECT_EQ(bitwise_xor(yes, true).dtype(), DType::kBool);
  EXPECT_EQ((yes + true).dtype(), DType::kBool);
  EXPECT_EQ((yes + 1).dtype(), DType::kI64);
  EXPECT_EQ(where(yes, true, false).dtype(), DType::kBool);
  EXPECT_EQ(where(yes, yes, false).dtype(), DType::kBool);
  EXPECT_EQ(where(yes, true, 2).dtype(), DType::kI64);
  EXPECT_EQ((full({1}, 2) * true).ToVector<int64_t>()[0], 2);
  EXPECT_EQ((full({1}, 0.5) + true).ToVector<double>()[0], 1.5);
}

TEST(Round, TakesAnyNumberOfDecimals) {  // the least has no absolute value
  const DTensor x = full({2}, 12.5, {DType::kF64});
  EXPECT_EQ(round(x, -1).ToVector<double>()[0], 10);
  const double least = round(x, INT64_MIN).ToVector<double>()[0];
  EXPECT_TRUE(std::isnan(least) || least == 0) << least;
}

TEST(Prints, WholeNumbersWithAllTheirDigits) {
  EXPECT_THAT(full({2}, 1234567890123456789).ToString(),
              HasSubstr("{1234567890123456789, 1234567890123456789}"));
  EXPECT_THAT(full({1}, true, {DType::kBool}).ToString(), HasSubstr("{1}"));
}

// A result that redistributions share records, or does not, as its source does by now.
TEST(RequiresGrad, EndsWhatRecordedBefore) {
  OnRanks(2, [](RankContext&) {
    DTensor x = Numbers({1, 2, 3, 4}, {4}, DeviceMesh({2}), {Shard(0)}).RequiresGrad();
    EXPECT_TRUE(x.Redistribute({Replicate()}, {.shared = true}).requires_grad());
    x.RequiresGrad(false);
    EXPECT_FALSE(x.Redistribute({Replicate()}, {.shared = true}).requires_grad());
    x.RequiresGrad();
    EXPECT_TRUE(x.Redistribute({Replicate()}, {.shared = true}).requires_grad());
  });
}

// What is planned is dropped while an op that is made of others runs: it has its own plan still
// (read after it was freed, which the address sanitizer sees).
TEST(DispatchCache, MayBeClearedInsideOfADecomposedOp) {
  OnRanks(2, [](RankContext&) {
    DTensor x = ones({4, 4096}, {.mesh = DeviceMesh({2}), .placements = {Shard(1)}});
    x.RequiresGrad();
    int cleared = 0;
    const InterceptCalls clear("exp", [&](InterceptedCall& call) {
      ClearDispatchCache();
      ++cleared;
      return call.Proceed();
    });
    sum(softmax(x, 1)).Backward();
    EXPECT_GT(cleared, 0);
    EXPECT_TRUE(x.grad().defined());
  });
}

// What changes nothing is x itself, and yet no part of a history that is not recorded.
TEST(NoGrad, AppliesToFunctionsThatReturnWhatTheyAreGiven) {
  const DTensor x = full({3}, 2.0).RequiresGrad();
  const auto same = [&](const DTensor& y) { return y.requires_grad() && y.shape() == x.shape(); };
  EXPECT_TRUE(same(flatten(x)));
  const NoGrad no_grad;
  for (const DTensor& y : {flatten(x), reshape(x, {3}), expand(x, {3}), squeeze(x), x[kEllipsis],
                           broadcast_tensors({x})[0]}) {
    EXPECT_FALSE(y.requires_grad());
  }
}

// A program may write to the result of a redistribution, whatever the placements were.
TEST(Redistribute, HasMemoryOfItsOwnAlsoWhereNothingMoves) {
  OnRanks(2, [](RankContext&) {
    const std::vector<double> values = {1, 2, 3, 4};
    const DeviceMesh mesh({2});
    for (const Placement& p : {Shard(0), Replicate()}) {
      const DTensor x = Numbers(values, {4}, mesh, {p});
      zero_(x.Redistribute({p}));
      EXPECT_EQ(x.ToVector<double>(), values);
      const DTensor local = FromVector(values, {4}, {.dtype = DType::kF64});
      zero_(DistributeTensor(local, mesh, {p}));
      EXPECT_EQ(local.ToVector<double>(), values);
      DTensor w = Numbers(values, {4}, mesh, {p}).RequiresGrad();
      {
        const NoGrad no_grad;
        EXPECT_FALSE(w.Redistribute({p}).requires_grad());
        mul_(w.Redistribute({p}), 0.5);
      }
      EXPECT_EQ(w.ToVector<double>(), values);
      sum(w.Redistribute({p}) * w).Backward();
      EXPECT_EQ(w.grad().ToVector<double>(), (w * 2.0).ToVector<double>());
    }
  });
}

DTensor CopyVia(const char* name, void (*vjp)(VjpCall&), const DTensor& x) {
  RegisterKernel(name, DeviceType::kCpu,
                 {[](const KernelCall& call) {
                    const auto* in = static_cast<const double*>(call.in[0].data);
                    std::copy(in, in + call.out[0].sizes[0],
                              static_cast<double*>(call.out[0].data));
                  },
                  DTypeBit(DType::kF64), KernelLayout::kContiguous});
  return Call1(Op(absl::StrCat(name, "(x)")).Factors("n -> n").Elementwise().Vjp(vjp, ""), {&x});
}

TEST(Vjp, WhatItIsNotGivenIsNamed) {
  const DTensor x = full({3}, 2.0, {DType::kF64}).RequiresGrad();
  const auto message = [&](const char* name, void (*vjp)(VjpCall&)) {
    return MessageOf([&] { sum(CopyVia(name, vjp, x)).Backward(); });
  };
  EXPECT_THAT(message("reads_unsaved", [](VjpCall& c) { c.set(0, c.in(0)); }),
              HasSubstr("the gradient function of reads_unsaved reads what its Vjp does not save: "
                        "input 0"));
  EXPECT_THAT(message("reads_output", [](VjpCall& c) { c.set(0, c.out()); }),
              HasSubstr("does not save: output 0"));
  EXPECT_THAT(message("sets_other", [](VjpCall& c) { c.set(5, c.grad()); }),
              HasSubstr("sets the gradient of input 5"));
  EXPECT_THAT(message("asks_other", [](VjpCall& c) { c.set(0, zeros(c.in_spec(1).shape())); }),
              HasSubstr("asks for input 1"));
}

// The source of an asynchronous redistribution may be changed, also where nothing has to move.
TEST(Async, ToTheSamePlacementsIsACopy) {
  OnRanks(2, [](RankContext&) {
    const std::vector<double> values = {1, 2, 3, 4};
    for (const Placement& p : {Shard(0), Replicate()}) {
      const DTensor x = Numbers(values, {4}, DeviceMesh({2}), {p});
      const DTensor y = x.Redistribute({p}, {.async = true});
      zero_(x);
      EXPECT_EQ(y.ToVector<double>(), values);
    }
    DTensor x = Numbers(values, {4}, DeviceMesh({2}), {Shard(0)}).RequiresGrad();
    sum(x.Redistribute({Shard(0)}, {.async = true}) * 3.0).Backward();
    EXPECT_EQ(x.grad().ToVector<double>(), std::vector<double>(4, 3.0));
  });
}

}  // namespace
}  // namespace dtensor::corner_cases_test

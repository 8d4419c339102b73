// Rules that users write by hand: right ones work, wrong ones say which tensor and what is legal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
#include "dtensor/dispatch.h"
#include "dtensor/distribute.h"
#include "dtensor/explain.h"
#include "dtensor/intercept.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/names.h"
#include "dtensor/op.h"
#include "dtensor/redistribute.h"
#include "dtensor/sharding.h"
#include "dtensor/tensor/status.h"
#include "dtensor/verify/verify.h"
#include "dtensor/verify/verify_function.h"
#include "dtensor/watch.h"
#include "test_ops.h"

namespace dtensor::user_rules_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

void Double(const KernelCall& call) {
  const auto* x = static_cast<const float*>(call.in[0].data);
  auto* y = static_cast<float*>(call.out[0].data);
  int64_t n = 1;
  for (int d = 0; d < call.out[0].ndim; ++d) n *= call.out[0].sizes[d];
  for (int64_t i = 0; i < n; ++i) y[i] = 2 * x[i];
}

// Registers the op and runs it on x [4] S(0) on two ranks; the message, or the values.
std::string Outcome(const std::string& name, const std::function<void(OpDef&)>& declare) {
  OpDef& op = Op(name + "(x)");
  op.Shapes([](const OpCall& c) { return std::vector<Shape>{c.shape(0)}; });
  declare(op);
  RegisterKernel(name, DeviceType::kCpu,
                 {Double, DTypeBit(DType::kF32), KernelLayout::kContiguous});
  std::string text;
  const absl::Status status = RunSpmd(2, [&](RankContext& rank) -> absl::Status {
    const DTensor x = ones({4}, {.mesh = DeviceMesh({2}, {"tp"}), .placements = {Shard(0)}});
    const DTensor* inputs[] = {&x};
    const DTensor y = Call1(op, inputs);
    if (y.ToVector<double>() != std::vector<double>({2, 2, 2, 2})) {
      return absl::InternalError("wrong values");
    }
    if (rank.rank() == 0) text = y.spec().ToString();
    return absl::OkStatus();
  });
  return status.ok() ? text : std::string(status.message());
}

TEST(UserRules, NegativeDimsCountFromTheEnd) {
  EXPECT_THAT(Outcome("ur_negative",
                      [](OpDef& op) {
                        op.Strategies(std::vector<StrategyRow>{{{Shard(-1)}, {Shard(-1)}, 0}});
                      }),
              HasSubstr("[S(0)]"));
  EXPECT_THAT(Outcome("ur_rule",
                      [](OpDef& op) {
                        op.Rule([](const OpCall&) -> absl::StatusOr<ShardingDecision> {
                          return ShardingDecision{{{Shard(-1)}}, {{Shard(-1)}}};
                        });
                      }),
              HasSubstr("[S(0)]"));
}

TEST(UserRules, WrongOnesAreErrors) {
  EXPECT_THAT(Outcome("ur_far",
                      [](OpDef& op) {
                        op.Strategies(std::vector<StrategyRow>{{{Shard(5)}, {Shard(0)}, 0}});
                      }),
              AllOf(HasSubstr("ur_far"), HasSubstr("S(5)"), HasSubstr("for x of shape [4]")));
  EXPECT_THAT(
      Outcome("ur_mean",
              [](OpDef& op) {
                op.Strategies(std::vector<StrategyRow>{{{Shard(0)}, {Partial(ReduceOp::kAvg)}, 0}});
              }),
      AllOf(HasSubstr("gives P(avg)"), HasSubstr("means have no mean")));
  EXPECT_THAT(Outcome("ur_few",
                      [](OpDef& op) {
                        op.Rule([](const OpCall&) -> absl::StatusOr<ShardingDecision> {
                          return ShardingDecision{{{}}, {{}}};
                        });
                      }),
              AllOf(HasSubstr("ur_few"), HasSubstr("0 placements for x, needs 1")));
  EXPECT_THAT(Outcome("ur_none",
                      [](OpDef& op) {
                        op.Rule([](const OpCall&) -> absl::StatusOr<ShardingDecision> {
                          return ShardingDecision{};
                        });
                      }),
              HasSubstr("places 0 inputs"));
  EXPECT_THAT(Outcome("ur_shapes",
                      [](OpDef& op) {
                        op.Strategies(std::vector<StrategyRow>{{{Shard(0)}, {Shard(0)}, 0}});
                        op.Shapes([](const OpCall&) { return std::vector<Shape>{}; });
                      }),
              HasSubstr("gives 0 shapes"));
}

TEST(UserRules, EveryRowGivenIsAnAlternative) {
  Op("ur_alternatives(x)")
      .Shapes([](const OpCall& c) { return std::vector<Shape>{c.shape(0)}; })
      .Strategies({{{Replicate()}, {Replicate()}}, {{Shard(0)}, {Shard(0)}}});
  const absl::Status status = RunFake({.world = 2, .rank = 0}, [](RankContext&) -> absl::Status {
    const DTensor x = ones({4}, {.mesh = DeviceMesh({2}, {"tp"}), .placements = {Shard(0)}});
    const Spec* specs[] = {&x.spec()};
    const OpCall call(**OpRegistry::Find("ur_alternatives"), specs, {});
    EXPECT_EQ(LegalStrategies(call).size(), 2);
    EXPECT_DEATH(call.Int("alpha"), "ur_alternatives has no attribute alpha");
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(UserRules, NearestNamesKeepTheOrderOfEquals) {
  EXPECT_THAT(NearestNames("ad", {"zzzz", "ac", "ab", "aa"}, 2),
              ::testing::ElementsAre("ac", "ab"));
}

// --- layer_norm as users of other systems register it: rows that enumerate x's placements, and a
// rule that looks at the ones there are -------------------------------------------------------

constexpr int64_t kBatch = 3, kSeq = 5, kHidden = 4;

void LayerNormKernel(const KernelCall& call) {
  const auto* x = static_cast<const double*>(call.in[0].data);
  const auto* g = static_cast<const double*>(call.in[1].data);
  const auto* b = static_cast<const double*>(call.in[2].data);
  auto* y = static_cast<double*>(call.out[0].data);
  const int64_t rows = call.in[0].sizes[0] * call.in[0].sizes[1], n = call.in[0].sizes[2];
  for (int64_t r = 0; r < rows; ++r, x += n, y += n) {
    double mean = 0, variance = 0;
    for (int64_t i = 0; i < n; ++i) mean += x[i] / static_cast<double>(n);
    for (int64_t i = 0; i < n; ++i) {
      variance += (x[i] - mean) * (x[i] - mean) / static_cast<double>(n);
    }
    for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) / std::sqrt(variance + 1e-5) * g[i] + b[i];
  }
}

// Every placement that leaves the normalised dim whole; weight and bias replicated.
absl::StatusOr<std::vector<StrategyRow>> LayerNormStrategies(const OpCall& call) {
  std::vector<StrategyRow> rows = {{{Replicate(), Replicate(), Replicate()}, {Replicate()}}};
  for (int d = 0; d + 1 < call.in(0).ndim(); ++d) {
    rows.push_back({{Shard(d), Replicate(), Replicate()}, {Shard(d)}});
  }
  return rows;
}

// x stays as it is; only what the kernel cannot take is changed.
absl::StatusOr<ShardingDecision> LayerNormRule(const OpCall& call) {
  Placements x(call.in(0).placements().begin(), call.in(0).placements().end());
  for (Placement& p : x) {
    if (p.is_partial() || (p.is_shard() && p.dim() == call.in(0).ndim() - 1)) p = Replicate();
  }
  const Placements whole(x.size());
  return ShardingDecision{{x, whole, whole}, {x}};
}

const OpDef& LayerNormOp(const char* name, const std::function<void(OpDef&)>& declare) {
  OpDef& op = Op(absl::StrCat(name, "(x, g, b)"));
  op.Shapes([](const OpCall& c) { return std::vector<Shape>{c.shape(0)}; });
  declare(op);
  RegisterKernel(name, DeviceType::kCpu,
                 {LayerNormKernel, DTypeBit(DType::kF64), KernelLayout::kContiguous});
  return op;
}

std::vector<double> Values(int64_t n, int64_t seed) {
  std::vector<double> v;
  for (int64_t i = 0; i < n; ++i) v.push_back(static_cast<double>((i * i * 3 + seed) % 11) - 5);
  return v;
}

// All lists of `dims` placements out of `of`.
std::vector<Placements> Lists(const std::vector<Placement>& of, int dims) {
  std::vector<Placements> all = {{}};
  for (int m = 0; m < dims; ++m) {
    std::vector<Placements> longer;
    for (const Placements& p : all) {
      for (const Placement& next : of) {
        longer.push_back(p);
        longer.back().push_back(next);
      }
    }
    all = std::move(longer);
  }
  return all;
}

using PlanCheck = std::function<void(const OpCall& call, const OpPlan& plan)>;

void RunLayerNorm(const OpDef& op, const PlanCheck& check) {
  const std::vector<double> xs = Values(kBatch * kSeq * kHidden, 1), gs = Values(kHidden, 2),
                            bs = Values(kHidden, 3);
  const auto apply = [&](const DeviceMesh& mesh, const Placements& px, const Placements& pg,
                         const Placements& pb) {
    const auto at = [&](const std::vector<double>& v, Shape shape, const Placements& p) {
      return FromVector(v, shape, {DType::kF64, mesh, p});
    };
    const DTensor x = at(xs, {kBatch, kSeq, kHidden}, px), g = at(gs, {kHidden}, pg),
                  b = at(bs, {kHidden}, pb);
    const DTensor* inputs[] = {&x, &g, &b};
    if (!mesh.is_self()) {
      const Spec* specs[] = {&x.spec(), &g.spec(), &b.spec()};
      const OpCall call(op, specs, {});
      const OpPlan plan = *PlanOp(call, nullptr), exact = *PlanOpExhaustively(call);
      EXPECT_FALSE(plan.beam);
      EXPECT_EQ(plan.strategy.cost_bytes, exact.strategy.cost_bytes);
      EXPECT_EQ(plan.strategy.cost_us, exact.strategy.cost_us);
      check(call, plan);
    }
    return Call1(op, inputs);
  };
  const std::vector<double> want = apply(DeviceMesh::Self(), {}, {}, {}).ToVector<double>();
  for (const Dims& shape : {Dims{2, 2}, Dims{3}}) {
    const int n = static_cast<int>(shape.size());
    const absl::Status status = RunSpmd(Numel(shape), [&](RankContext&) -> absl::Status {
      const DeviceMesh mesh = *DeviceMesh::Create(shape);
      for (const Placements& px :
           Lists({Replicate(), Shard(0), Shard(1), Shard(2), Partial()}, n)) {
        for (const Placements& pg : Lists({Replicate(), Shard(0), Partial()}, n)) {
          const DTensor y = apply(mesh, px, pg, Placements(n));
          const std::vector<double> got = y.ToVector<double>();
          for (size_t i = 0; i < want.size(); ++i) {
            EXPECT_NEAR(got[i], want[i], 1e-12) << ToString(px) << " " << ToString(pg);
          }
          for (int m = 0; m < n; ++m) {  // what can stay does
            if (px[m].is_shard() && px[m].dim() < 2) {
              EXPECT_EQ(y.placements()[m], px[m]);
            }
          }
        }
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(UserRules, LayerNormByStrategies) {
  const OpDef& op =
      LayerNormOp("ur_layer_norm_rows", [](OpDef& o) { o.Strategies(LayerNormStrategies); });
  RunLayerNorm(op, [](const OpCall& call, const OpPlan& plan) {  // the cheapest of several
    const std::vector<Strategy> legal = LegalStrategies(call);
    EXPECT_GT(legal.size(), 1u);
    double least = legal[0].cost_bytes;
    for (const Strategy& s : legal) least = std::min(least, s.cost_bytes);
    EXPECT_EQ(plan.strategy.cost_bytes, least);
  });
}
// A rule is called once and gives one decision for the whole mesh: there is nothing to search
// (op.h: "What a Rule decides for the whole mesh"), so what it says is what is done, at the price
// of the moves that it asks for. The exact search through the rows for the same call finds nothing
// dearer.
TEST(UserRules, LayerNormByRule) {
  const OpDef& op = LayerNormOp("ur_layer_norm_rule", [](OpDef& o) { o.Rule(LayerNormRule); });
  const OpDef& rows =
      LayerNormOp("ur_layer_norm_both", [](OpDef& o) { o.Strategies(LayerNormStrategies); });
  std::atomic<int64_t> moving = 0, cheaper = 0;
  RunLayerNorm(op, [&](const OpCall& call, const OpPlan& plan) {
    const ShardingDecision said = *LayerNormRule(call);
    EXPECT_EQ(plan.strategy.inputs, said.inputs);
    EXPECT_EQ(plan.strategy.outputs, said.outputs);
    EXPECT_EQ(plan.candidates, 1);
    EXPECT_TRUE(LegalStrategies(call).empty());
    double bytes = 0;
    std::vector<const Spec*> specs;
    for (int i = 0; i < call.num_inputs(); ++i) {
      const Spec& from = call.in(i);
      specs.push_back(&from);
      bytes +=
          RedistributeCost(from, *ValueOrThrow(RankContext::Current().specs().Intern(
                                     call.mesh(), said.inputs[i], from.shape(), from.dtype())));
    }
    EXPECT_NEAR(plan.strategy.cost_bytes, bytes, 0.01);  // plans round to 1 / 1024
    const OpPlan searched = *PlanOp(OpCall(rows, specs, {}), nullptr);
    EXPECT_LE(searched.strategy.cost_bytes, bytes + 0.01);
    moving += bytes > 0 ? 1 : 0;
    cheaper += searched.strategy.cost_bytes < bytes - 0.01 ? 1 : 0;
  });
  EXPECT_GT(moving, 0);
  std::printf("%lld decisions move something; rows move less for %lld of them\n",
              static_cast<long long>(moving), static_cast<long long>(cheaper));
}

// Rows drawn from a seed, with costs or without, on meshes of up to three dims. `kinds`: so many of
// the inputs may be placed unlike each other; those that are alike are priced once where there are
// many.
void ExpectExactSearch(const OpDef& op, int inputs, int kinds) {
  for (int64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed + 1000);
    Dims shape;
    for (uint64_t d = random() % 3 + 1; d > 0; --d) shape.push_back(2 + random() % 3);
    const absl::Status status = RunFake({.world = Numel(shape)}, [&](RankContext& context) {
      const DeviceMesh mesh = *DeviceMesh::Create(shape);
      const Placement all[] = {Replicate(), Shard(0), Shard(1), Partial()};
      std::vector<SpecRef> specs;
      for (int i = 0; i < kinds; ++i) {
        Placements p;
        for (int m = 0; m < mesh.ndim(); ++m) p.push_back(all[random() % 4]);
        specs.push_back(*context.specs().Intern(mesh, p, {24, 12}, DType::kF32));
      }
      std::vector<const Spec*> in;
      for (int i = 0; i < inputs; ++i) in.push_back(specs[i % kinds].get());
      const Attr attrs[] = {IntAttr(seed)};
      const OpCall call(op, in, attrs);
      const OpPlan plan = *PlanOp(call, nullptr), exact = *PlanOpExhaustively(call);
      EXPECT_FALSE(plan.beam);
      EXPECT_EQ(plan.strategy.cost_bytes, exact.strategy.cost_bytes) << seed;
      EXPECT_EQ(plan.strategy.cost_us, exact.strategy.cost_us) << seed;
      if (inputs == kinds) return absl::OkStatus();
      double bytes = 0;  // both read their prices from one table: these are the moves' own
      for (int i = 0; i < inputs; ++i) {
        bytes +=
            RedistributeCost(*in[i], *ValueOrThrow(context.specs().Intern(
                                         mesh, plan.strategy.inputs[i], {24, 12}, DType::kF32)));
      }
      EXPECT_NEAR(plan.strategy.cost_bytes, bytes, 0.1) << seed;  // plans round to 1 / 1024
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status;
  }
}

// Inputs of one kind are asked for alike, nearly always.
absl::StatusOr<std::vector<StrategyRow>> DrawnRows(const OpCall& c, int kinds,
                                                   const std::vector<Placement>& from) {
  std::mt19937_64 random(c.Int("seed"));
  std::vector<StrategyRow> rows;
  for (uint64_t r = random() % 6 + 1; r > 0; --r) {
    StrategyRow row;
    for (int i = 0; i < c.num_inputs(); ++i) {
      const bool alike = i >= kinds && random() % 40 != 0;
      row.inputs.push_back(alike ? row.inputs[i - kinds] : from[random() % from.size()]);
    }
    row.outputs = {Replicate()};
    row.cost_us = static_cast<double>(random() % 3);
    rows.push_back(std::move(row));
  }
  return rows;
}

TEST(UserRules, TheSearchThroughRowsIsExact) {
  const auto first = [](const OpCall& c) { return std::vector<Shape>{c.shape(0)}; };
  ExpectExactSearch(Op("ur_drawn(x, y; seed)").Shapes(first).Strategies([](const OpCall& c) {
    return DrawnRows(c, 2, {Replicate(), Shard(0), Shard(1), Partial(), Shard(0, 2)});
  }),
                    2, 2);
  ExpectExactSearch(Op("ur_drawn_many(a, b, c, d, e, f, g, h, i, j; seed)")
                        .Shapes(first)
                        .Strategies([](const OpCall& c) {
                          return DrawnRows(c, 3, {Replicate(), Shard(0), Shard(1), Partial()});
                        }),
                    10, 3);
}

// Which of the rows is taken for x [8, 8] S(0), y [8, 8] S(0) on two ranks: the number of the first
// output placement's dim.
int Chosen(const std::string& name, std::vector<StrategyRow> rows) {
  OpDef& op = Op(name + "(x, y)");
  op.Shapes([](const OpCall& c) { return std::vector<Shape>{c.shape(0)}; });
  op.Strategies(std::move(rows));
  int chosen = -1;
  const absl::Status status = RunFake({.world = 2}, [&](RankContext& context) -> absl::Status {
    const DeviceMesh mesh({2});
    const SpecRef x = *context.specs().Intern(mesh, {Shard(0)}, {8, 8}, DType::kF32);
    const Spec* inputs[] = {x.get(), x.get()};
    DT_ASSIGN_OR_RETURN(const OpPlan plan, PlanOp(OpCall(op, inputs, {}), nullptr));
    chosen = plan.strategy.outputs[0][0].dim();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return chosen;
}

TEST(UserRules, BytesComeFirstThenTimeThenOrder) {
  const Placement r = Replicate(), s0 = Shard(0), s1 = Shard(1);
  // Stated times do not weigh against bytes.
  EXPECT_EQ(Chosen("ur_bytes", {{{r, s0}, {s1}, 0}, {{s0, s0}, {s0}, 1e6}}), 0);
  // Equal bytes: one collective is faster than two; what a row says counts with that.
  EXPECT_EQ(Chosen("ur_time", {{{s1, s1}, {s0}, 0}, {{r, s0}, {s1}, 0}}), 1);
  EXPECT_EQ(Chosen("ur_stated", {{{s1, s1}, {s0}, 0}, {{r, s0}, {s1}, 5}}), 0);
  EXPECT_EQ(Chosen("ur_stated_only", {{{s0, s0}, {s0}, 3}, {{s0, s0}, {s1}, 2}}), 1);
  EXPECT_EQ(Chosen("ur_order", {{{s0, s0}, {s0}, 2}, {{s0, s0}, {s1}, 2}}), 0);
  EXPECT_THAT(Outcome("ur_below_zero",
                      [](OpDef& op) {
                        op.Strategies(std::vector<StrategyRow>{{{Shard(0)}, {Shard(0)}, -1}});
                      }),
              HasSubstr("costs -1 us"));
}

// y[i] = x[i] + i, for whichever part of the rows a rank has.
void AddIndexKernel(const KernelCall& call) {
  const auto* x = static_cast<const double*>(call.in[0].data);
  auto* y = static_cast<double*>(call.out[0].data);
  const int64_t rows = call.out[0].sizes[0], n = call.out[0].sizes[1];
  for (int64_t i = 0; i < rows * n; ++i) {
    y[i] = x[i] + static_cast<double>(call.factors[0].start + i / n);
  }
}

TEST(UserRules, OffsetsFollowTheDimsThatFactorsName) {
  const auto declare = [](const char* name) -> OpDef& {
    RegisterKernel(name, DeviceType::kCpu,
                   {AddIndexKernel, DTypeBit(DType::kF64), KernelLayout::kContiguous});
    return Op(absl::StrCat(name, "(x)")).NeedsOffset("n");
  };
  const std::vector<StrategyRow> rows = {
      {{Replicate()}, {Replicate()}}, {{Shard(0)}, {Shard(0)}}, {{Shard(1)}, {Shard(1)}}};
  const auto rule = [](const OpCall& c) -> absl::StatusOr<ShardingDecision> {
    const Placements p(c.in(0).placements().begin(), c.in(0).placements().end());
    return ShardingDecision{{p}, {p}};
  };
  const OpDef* ops[] = {&declare("ur_index_rows").Factors("n m -> n m").Strategies(rows),
                        &declare("ur_index_rule").Factors("n m -> n m").Rule(rule)};
  std::vector<double> want;
  for (int64_t i = 0; i < 7 * 3; ++i) want.push_back(static_cast<double>(i + i / 3));
  for (const OpDef* op : ops) {
    for (const Dims& shape : {Dims{2, 2}, Dims{3}}) {
      const int n = static_cast<int>(shape.size());
      const absl::Status status = RunSpmd(Numel(shape), [&](RankContext&) -> absl::Status {
        std::vector<double> v(7 * 3);
        std::iota(v.begin(), v.end(), 0);
        for (const Placements& p : Lists({Replicate(), Shard(0), Shard(1)}, n)) {
          const DTensor x = FromVector(v, {7, 3}, {DType::kF64, *DeviceMesh::Create(shape), p});
          const DTensor* inputs[] = {&x};
          EXPECT_EQ(Call1(*op, inputs).ToVector<double>(), want) << ToString(p);
        }
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
  EXPECT_THAT(Outcome("ur_offset_of_what",
                      [&](OpDef& op) {
                        op.NeedsOffset("n").Strategies(
                            std::vector<StrategyRow>{{{Shard(0)}, {Shard(0)}, 0}});
                      }),
              AllOf(HasSubstr("offset of factor n"), HasSubstr("add .Factors")));
}

// A dim that is one part after another, cut twice: how much of a part a rank has.
TEST(UserRules, PartsOfADimThatIsCutTwice) {
  Op("ur_parts(x)")
      .Factors([](const OpCall&) -> absl::StatusOr<FactorText> {
        return FactorText{"{a b} -> {a b}", {{"a", 3}, {"b", 4}}};
      })
      .NeedsCount("a")
      .NeedsCount("b");
  // Of 7 indices ranks hold 0 and 1, 2 and 3, 4 and 5, and 6; `a` are the first three.
  const int64_t want[4][2] = {{2, 0}, {1, 1}, {0, 2}, {0, 1}};
  for (int64_t rank = 0; rank < 4; ++rank) {
    const absl::Status status =
        RunFake({.world = 4, .rank = rank}, [&](RankContext&) -> absl::Status {
          const Placements twice = {Shard(0), Shard(0)};
          const DTensor x = ones({7}, {.mesh = DeviceMesh({2, 2}), .placements = twice});
          const Spec* specs[] = {&x.spec()};
          const OpCall call(**OpRegistry::Find("ur_parts"), specs, {});
          DT_ASSIGN_OR_RETURN(const std::vector<FactorMap> maps, FactorMapsOf(call));
          const auto ranges = FactorRanges(call, maps[0], {twice}, {twice}, {rank / 2, rank % 2});
          EXPECT_EQ(ranges[0].local, want[rank][0]) << rank;
          EXPECT_EQ(ranges[1].local, want[rank][1]) << rank;
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
  }
}

void ProductKernel(const KernelCall& call) {
  for (int64_t i = 0; i < NumelOf(call.out[0]); ++i) {
    double product = 1;
    for (const TensorRef& x : call.in) product *= static_cast<const double*>(x.data)[i];
    static_cast<double*>(call.out[0].data)[i] = product;
  }
}

// Its name stands for all inputs, however many a call has.
TEST(UserRules, AGradientFunctionHasAllThatItsOneNameSaves) {
  testing::RegisterTestOps();
  RegisterKernel("ur_product", DeviceType::kCpu,
                 {ProductKernel, DTypeBit(DType::kF64), KernelLayout::kContiguous});
  const OpDef& op = Op("ur_product(xs...)")
                        .Factors([](const OpCall& call) -> absl::StatusOr<FactorText> {
                          std::string text = "n";
                          for (int i = 1; i < call.num_inputs(); ++i) text += ", n";
                          return FactorText{text + " -> n", {}};
                        })
                        .Vjp(
                            [](VjpCall& c) {
                              for (int i = 0; i < c.num_inputs(); ++i) {
                                DTensor g = c.grad();
                                for (int k = 0; k < c.num_inputs(); ++k) {
                                  if (k != i) g = testing::Apply("t_mul", {g, c.in(k)});
                                }
                                c.set(i, g);
                              }
                            },
                            "xs");
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const std::vector<Placements> placements = {{Shard(0)}, {Replicate()}, {Shard(0)}};
    std::vector<DTensor> xs;
    std::vector<const DTensor*> inputs;
    for (int i = 0; i < 3; ++i) {
      xs.push_back(full({5}, i + 2.0, {DType::kF64, mesh, placements[i]}).RequiresGrad());
    }
    for (const DTensor& x : xs) inputs.push_back(&x);
    testing::Apply("t_sum", {Call1(op, inputs)}).Backward();
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(xs[i].grad().ToVector<double>(), std::vector<double>(5, 24.0 / (i + 2))) << i;
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(UserRules, GradientFunctionsAskForWhatThereIs) {
  testing::RegisterTestOps();
  const auto message = [](const std::string& name, VjpFn fn) {
    RegisterKernel(name, DeviceType::kCpu, {testing::ReluKernel, DTypeBit(DType::kF64)});
    const OpDef& op = Op(name + "(x)").Factors("n -> n").Vjp(fn);
    const DTensor x = ones({3}, {.dtype = DType::kF64}).RequiresGrad();
    return testing::MessageOf([&] { Call1(op, {{&x}}).Backward(ones({3}, {DType::kF64})); });
  };
  EXPECT_THAT(message("ur_far_grad", [](VjpCall& c) { c.set(0, c.grad(3)); }),
              HasSubstr("of ur_far_grad asks for the gradient of output 3"));
  EXPECT_THAT(message("ur_far_has", [](VjpCall& c) { c.has_grad(-1); }),
              HasSubstr("asks for the gradient of output -1"));
  EXPECT_THAT(message("ur_far_needs", [](VjpCall& c) { c.needs(4); }),
              HasSubstr("of ur_far_needs asks for input 4"));
}

TEST(UserRules, DeclarationsThatCannotBeEndTheProgram) {
  const auto none = [](VjpCall&) {};
  EXPECT_DEATH(Op("ur_twice(x, x)"), "two operands have one name, x: ur_twice");
  EXPECT_DEATH(Op("(x)"), "an op needs a name");
  EXPECT_DEATH(Op("ur_overwritten_(x, y)").InPlace().Vjp(none, "x, y"),
               "Vjp saves x, which the op overwrites in place; .* output out");
  EXPECT_DEATH(Op("ur_overwritten_(x, y)").Vjp(none, "x").InPlace(), "Vjp saves x");
  EXPECT_DEATH(Op("ur_readers(x, y)").Vjp(none, "x for z"), "\"x for z\" .* names no inputs of it");
  Op("ur_not_overwritten_(x, y)").InPlace().Vjp(none, "y, out");
  EXPECT_DEATH(Op("ur_more_(x) -> a, b").InPlace(), "needs an input for each output");
  EXPECT_DEATH(Op("ur_views(x) -> a, b").View(testing::TransposeView), "op of one output");
}

TEST(UserRules, AFactorThatNoStringHasIsNamed) {
  EXPECT_THAT(
      Outcome("ur_unknown_offset", [](OpDef& op) { op.Factors("n -> n").NeedsOffset("m"); }),
      HasSubstr("needs the offset of factor m, which none of its factor strings has"));
  // One of several strings is enough.
  EXPECT_THAT(
      Outcome("ur_known_offset",
              [](OpDef& op) { op.Factors("[m] -> [m]").Factors("n -> n").NeedsOffset("n"); }),
      HasSubstr("[S(0)]"));
}

// A matrix with x on its diagonal: cut in one of its dims it would not be what a part of x gives.
TEST(UserRules, AFactorInTwoDimsOfATensorIsReadWhole) {
  const OpDef& op = Op("ur_diagonal(x)").Factors("n -> n n");
  RegisterKernel("ur_diagonal", DeviceType::kCpu,
                 {[](const KernelCall& call) {
                    const int64_t n = call.in[0].sizes[0];
                    auto* y = static_cast<float*>(call.out[0].data);
                    std::fill(y, y + NumelOf(call.out[0]), 0.f);
                    for (int64_t i = 0; i < n; ++i) y[i * n + i] = 1;
                  },
                  DTypeBit(DType::kF32)});
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DTensor x = ones({3}, {.mesh = DeviceMesh({2}, {"tp"}), .placements = {Shard(0)}});
    EXPECT_EQ(Call1(op, {{&x}}).ToVector<double>(),
              std::vector<double>({1, 0, 0, 0, 1, 0, 0, 0, 1}));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(UserRules, AKernelMayFailWithoutAWord) {
  RegisterKernel("ur_silent", DeviceType::kCpu,
                 {[](const KernelCall& call) { call.workspace->Fail(""); }, DTypeBit(DType::kF32)});
  const OpDef& op = Op("ur_silent(x)").Factors("n -> n");
  const DTensor x = ones({3});
  EXPECT_THAT(testing::MessageOf([&] { Call1(op, {{&x}}); }), HasSubstr("[ur_silent]"));
}

TEST(UserRules, AFactorStringHasTheResultsOfTheOp) {
  EXPECT_THAT(Outcome("ur_more_results", [](OpDef& op) { op.Factors("n -> n, n"); }),
              HasSubstr("factor string has 2 results, the op 1: x [4]"));
}

// What is declared by its decomposition alone has no strategy of its own to tell of.
TEST(UserRules, ADecompositionAloneIsExplained) {
  testing::RegisterTestOps();
  const OpDef& op =
      Op("ur_made(x)")
          .Shapes([](const OpCall& c) { return std::vector<Shape>{c.shape(0)}; })
          .Decompose([](absl::Span<const DTensor> in, absl::Span<const Attr>) -> dtensor::Values {
            return {testing::Apply("t_scale", {in[0]}, {FloatAttr(2)})};
          });
  const absl::Status status = RunFake({.world = 2}, [&](RankContext&) -> absl::Status {
    const DTensor x = ones({4}, {DType::kF64, DeviceMesh({2}, {"tp"}), {Shard(0)}});
    DT_ASSIGN_OR_RETURN(const Explanation e, Explain(op, {{&x}}));
    EXPECT_EQ(ToString(e.chosen.inputs.at(0)), "[S(0)]");
    EXPECT_EQ(e.chosen.bytes, 0);
    EXPECT_THAT(e.why, AllOf(HasSubstr("no strategies of its own"), HasSubstr("t_scale")));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(UserRules, NullFunctionsAndForgottenAttributesAreErrors) {
  testing::RegisterTestOps();
  EXPECT_THAT(testing::MessageOf([] { RegisterRule({"t_relu"}, nullptr); }),
              HasSubstr("[RegisterRule] the function is null"));
  EXPECT_THAT(testing::MessageOf([] { RegisterStrategies({"t_relu"}, StrategiesFn()); }),
              HasSubstr("[RegisterStrategies] the function is null"));
  EXPECT_THAT(testing::MessageOf([] { const WatchCalls none(nullptr); }),
              HasSubstr("[WatchCalls] the function is null"));
  const DTensor x = ones({3}, {.dtype = DType::kF64});
  testing::Apply("t_scale", {x}, {FloatAttr(2)});  // its plan is kept
  const InterceptCalls forgets("t_scale", [](InterceptedCall& call) {
    call.attrs.clear();
    return call.Proceed();
  });
  EXPECT_THAT(testing::MessageOf([&] { testing::Apply("t_scale", {x}, {FloatAttr(2)}); }),
              HasSubstr("takes 1 attributes, got 0 from an interceptor"));
}

TEST(UserRules, ForgottenAttributesAreAnErrorOfEveryCall) {
  testing::RegisterTestOps();
  const DTensor x = ones({3}, {.dtype = DType::kF64});
  const OpDef& op = *ValueOrThrow(OpRegistry::Find("t_scale"));
  for (int call = 0; call < 2; ++call) {  // before there is a plan, and after
    EXPECT_THAT(testing::MessageOf([&] { Call1(op, {{&x}}); }),
                HasSubstr("takes 1 attributes, got 0"));
    Call1(op, {{&x}}, {FloatAttr(2)});
  }
}

// x becomes x * z, and y becomes y + 1.
TEST(UserRules, InPlaceOpsOfSeveralResults) {
  testing::RegisterTestOps();
  const auto kernel = [](const KernelCall& call) {
    const auto data = [](const TensorRef& t) { return static_cast<double*>(t.data); };
    const int64_t n = NumelOf(call.out[0]);
    for (int64_t i = 0; i < n; ++i) data(call.out[0])[i] *= data(call.in[2])[i];
    for (int64_t i = 0; i < n; ++i) data(call.out[1])[i] += 1;
  };
  RegisterKernel("ur_two_", DeviceType::kCpu,
                 {kernel, DTypeBit(DType::kF64), KernelLayout::kStrided});
  const OpDef& op = Op("ur_two_(x, y, z) -> a, b")
                        .Factors("n m, n m, n m -> n m, n m")
                        .InPlace()
                        .Vjp(
                            [](VjpCall& c) {
                              if (c.has_grad(0)) {
                                c.set(0, testing::Apply("t_mul", {c.grad(0), c.in(2)}));
                              }
                              if (c.has_grad(1)) c.set(1, c.grad(1));
                            },
                            "z");
  const auto made = [](double value) { return full({2, 2}, value, {.dtype = DType::kF64}); };
  const auto error = [](const DTensor& of) {
    return testing::MessageOf([&] { testing::Apply("t_sum", {of}).Backward(); });
  };
  DTensor leaf = made(2);
  leaf.RequiresGrad();
  const auto with_history = [&] { return testing::Apply("t_scale", {leaf}, {FloatAttr(1)}); };
  DTensor x = with_history(), y = made(5);
  Call(op, {{&x, &y, &y}});  // what it saves is overwritten as its second result
  EXPECT_THAT(error(x), HasSubstr("in place"));
  // A view from before has no history, but what it is a view of has one by now: of either result.
  for (const bool second : {false, true}) {
    x = with_history(), y = made(5);
    const DTensor z = made(3), view = testing::Apply("t_transpose", {y});
    Call(op, second ? std::vector<const DTensor*>{&x, &y, &z}
                    : std::vector<const DTensor*>{&y, &x, &z});
    EXPECT_THAT(testing::MessageOf([&] { testing::Apply("t_sum", {view}); }), HasSubstr("view"))
        << second;
  }
}

// What does not fit the op is said, whichever judge it is given to.
TEST(UserRules, TheJudgeRefusesSamplesThatDoNotFit) {
  testing::RegisterTestOps();
  const OpDef& add = **OpRegistry::Find("t_add");
  const OpDef& scale = **OpRegistry::Find("t_scale");
  const VerifySample good = {{{{4}}, {{4}}}};
  const auto message = [](const absl::Status& status) { return std::string(status.message()); };
  const std::vector<Placements> two = {{Shard(0)}, {Shard(0)}};
  EXPECT_TRUE(VerifyStrategy(add, good, {2}, two, {{Shard(0)}}).ok());
  EXPECT_THAT(message(VerifyStrategy(add, good, {2}, {}, {{Shard(0)}})),
              HasSubstr("placements of 0 inputs, the op has 2"));
  EXPECT_THAT(message(VerifyStrategy(add, good, {2}, two, {})),
              HasSubstr("placements of 0 outputs, the op has 1"));
  EXPECT_THAT(message(VerifyStrategy(add, good, {2, 2}, two, {{Shard(0)}})),
              HasSubstr("for mesh 2x2 of 2 dims"));
  EXPECT_THAT(message(VerifyStrategy(add, good, {0}, two, {{Shard(0)}})), HasSubstr("less than 1"));
  EXPECT_THAT(message(VerifyOp(add, {{{{{4}}}}}).status()),
              HasSubstr("a sample has 1 inputs; the op is t_add(x, y)"));
  EXPECT_THAT(message(VerifyGradients(add, {{{{{4}}}}}).status()), HasSubstr("has 1 inputs"));
  EXPECT_THAT(message(VerifyOp(scale, {{{{{4}}}}}).status()), HasSubstr("has 0 attributes"));
  const VerifySample list = {.inputs = {{{4}}}, .attrs = {FloatAttr(2)}, .ints_attr = 3};
  EXPECT_THAT(message(VerifyOp(scale, {list}).status()), HasSubstr("ints_attr of a sample is 3"));
  FunctionSample sample;
  sample.inputs = {{{2}, DType::kF64, {1, 2}}};
  sample.call = [](const std::vector<DTensor>& x) -> dtensor::Values { return {x[0]}; };
  EXPECT_THAT(message(VerifyFunction("f", {sample}).status()), HasSubstr("of 0 inputs whether"));
  sample.differentiable = {true};
  sample.inputs[0].values = {1};
  EXPECT_THAT(message(VerifyFunction("f", {sample}).status()), HasSubstr("1 values for shape [2]"));
  sample.call = nullptr;
  EXPECT_THAT(message(VerifyFunction("f", {sample}).status()), HasSubstr("is null"));
}

}  // namespace
}  // namespace dtensor::user_rules_test

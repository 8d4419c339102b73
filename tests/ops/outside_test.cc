// What a program says of ops from outside their declarations: rules and strategies of shipped ops,
// calls that are looked at, changed or answered in dispatch's place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dtensor/intercept.h"
#include "dtensor/mesh/comm_trace.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/verify/verify.h"
#include "tests/common/message.h"

namespace dtensor::outside_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MessageOf;

DTensor Vector(const std::vector<double>& v) {
  return FromVector(v, {static_cast<int64_t>(v.size())});
}
std::vector<double> Numbers(const DTensor& t) { return t.ToVector<double>(); }

TEST(Intercept, SeesChangesAndAnswersCalls) {
  const DTensor x = Vector({1, -2, 3});
  std::vector<std::string> seen;
  {
    const InterceptCalls all([&](InterceptedCall& call) {
      seen.push_back("all " + call.op.name());
      return call.Proceed();
    });
    const InterceptCalls before("abs", [&](InterceptedCall& call) {
      seen.push_back("inner");
      call.inputs[0] = call.inputs[0] * 2;  // seen by the outer scope
      return call.Proceed();
    });
    EXPECT_THAT(Numbers(abs(x)), ElementsAre(2, 4, 6));
    EXPECT_THAT(Numbers(neg(x)), ElementsAre(-1, 2, -3));
  }
  EXPECT_THAT(seen, ElementsAre("inner", "all mul_scalar", "all abs", "all neg"));
  EXPECT_THAT(Numbers(abs(x)), ElementsAre(1, 2, 3));
  const InterceptCalls instead("abs", [](InterceptedCall&) { return Values{Vector({7})}; });
  EXPECT_THAT(Numbers(abs(x)), ElementsAre(7));
}

TEST(Intercept, WhatItCallsDoesNotComeBackToIt) {
  int calls = 0;
  const InterceptCalls twice("abs", [&](InterceptedCall& call) {
    ++calls;
    return Values{abs(call.inputs[0]) + call.Proceed()[0]};
  });
  EXPECT_THAT(Numbers(abs(Vector({-1, 2}))), ElementsAre(2, 4));
  EXPECT_EQ(calls, 1);
}

TEST(Intercept, GradientsGoThroughIt) {
  std::vector<std::string> seen;
  const InterceptCalls watch([&](InterceptedCall& call) {
    seen.push_back(call.op.name());
    return call.Proceed();
  });
  DTensor x = Vector({1, 2});
  x.RequiresGrad();
  tanh(x).Backward(Vector({1, 1}));
  EXPECT_THAT(seen, ElementsAre("tanh", "tanh_backward"));
  EXPECT_TRUE(x.grad().defined());
}

TEST(Intercept, SeesLayoutsThatDispatchRefuses) {
  ASSERT_TRUE(RunSpmd(2, [](RankContext&) -> absl::Status {
                const DeviceMesh mesh({2}, {"tp"});
                const DTensor x = DistributeTensor(Vector({1, 2}), mesh, {Shard(0)});
                const DTensor local = Vector({3, 4});
                EXPECT_THAT(MessageOf([&] { x + local; }), HasSubstr("is a local tensor"));
                const InterceptCalls place("add", [&](InterceptedCall& call) {
                  for (DTensor& t : call.inputs) {
                    if (t.mesh().is_self()) t = DistributeTensor(t, mesh, {Shard(0)});
                  }
                  return call.Proceed();
                });
                EXPECT_THAT(Numbers(x + local), ElementsAre(4, 6));
                return absl::OkStatus();
              }).ok());
}

TEST(Intercept, WrongAnswersNameTheOp) {
  const DTensor x = Vector({1});
  {
    const InterceptCalls none("abs", [](InterceptedCall&) { return Values{}; });
    EXPECT_THAT(MessageOf([&] { abs(x); }),
                AllOf(HasSubstr("[abs]"), HasSubstr("gave 0 results, the op has 1")));
  }
  {
    const InterceptCalls null("abs", [](InterceptedCall&) { return Values{DTensor()}; });
    EXPECT_THAT(MessageOf([&] { abs(x); }), HasSubstr("gave null as result 0"));
  }
  {
    const InterceptCalls throws("abs",
                                [](InterceptedCall&) -> Values { throw std::runtime_error("no"); });
    EXPECT_THAT(MessageOf([&] { abs(x); }), AllOf(HasSubstr("[abs]"), HasSubstr("no")));
  }
  EXPECT_THAT(Numbers(abs(x)), ElementsAre(1));
}

TEST(Intercept, NamesThatAreNoOpAreRefused) {
  const auto same = [](InterceptedCall& call) { return call.Proceed(); };
  const DTensor x = Vector({-1});
  const auto message = [&](const char* name) {
    const InterceptCalls scope(name, same);
    return MessageOf([&] { abs(x); });
  };
  EXPECT_THAT(message("relv"),
              AllOf(HasSubstr("[InterceptCalls] no op \"relv\""), HasSubstr("nearest: relu")));
  for (const char* function : {"conv2d", "nonzero"}) {
    EXPECT_THAT(message(function), HasSubstr("made of several ops has no call to intercept"));
  }
  EXPECT_THAT(Numbers(abs(x)), ElementsAre(1)) << "no scope is left open";
}

// Each on an op of its own: what an op was called with it keeps.
TEST(Outside, RulesReplaceWhatWasDeclared) {
  RegisterOps();
  RegisterRule({"silu", "logical_not"}, [](const OpCall& call) -> absl::StatusOr<ShardingDecision> {
    const Placements whole(call.mesh().ndim());
    return ShardingDecision{{whole}, {whole}};
  });
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = DistributeTensor(Vector({1, 2, 3, 4}), mesh, {Shard(0)});
    EXPECT_EQ(silu(x).placements()[0], Replicate());
    EXPECT_EQ(neg(x).placements()[0], Shard(0));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(MessageOf([] { RegisterRule({"logical_not", "silu"}, nullptr); }),
              AllOf(HasSubstr("[silu]"), HasSubstr("after its first call")));
  EXPECT_THAT(MessageOf([] { RegisterRule({"no_such_op"}, nullptr); }),
              HasSubstr("no op of this name"));
}

// The kernel would be called with sizes that it cannot join.
TEST(Outside, ARuleThatCutsATensorAndNotAnotherIsAnError) {
  RegisterOps();
  RegisterRule({"sinh"}, [](const OpCall&) -> absl::StatusOr<ShardingDecision> {
    return ShardingDecision{{{Shard(0)}}, {{Replicate()}}};
  });
  RegisterStrategies({"cosh"}, {{{Shard(0)}, {Shard(0, 2)}}});
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = full({6}, 1, {DType::kF64, mesh, {Shard(0)}});
    EXPECT_THAT(MessageOf([&] { sinh(x); }),
                AllOf(HasSubstr("the rule of op sinh"), HasSubstr("of 6, coordinate 0"),
                      HasSubstr("3 in dim 0 of x (S(0))"), HasSubstr("6 in dim 0 of out (R)")));
    EXPECT_THAT(MessageOf([&] { cosh(x); }),
                AllOf(HasSubstr("3 in dim 0 of x (S(0))"), HasSubstr("4 in dim 0 of out")));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Outside, StrategiesAreSearchedAndJudged) {
  RegisterOps();
  // Right: rows. Wrong: a pending sum does not pass a square root.
  RegisterStrategies({"rsqrt"}, {{{Replicate()}, {Replicate()}}, {{Shard(0)}, {Shard(0)}}});
  RegisterStrategies({"sqrt"}, {{{Replicate()}, {Replicate()}}, {{Partial()}, {Partial()}}});
  const std::vector<VerifySample> samples = {{{{{4, 6}}}}, {{{{5, 3}}}}};
  EXPECT_TRUE(VerifyOp(GetOp("rsqrt"), samples)->wrong.empty());
  EXPECT_FALSE(VerifyOp(GetOp("sqrt"), samples)->wrong.empty());
  // Wrong, too: rows that its own factors contradict, so that a run would be an error.
  RegisterStrategies({"asinh"}, {{{Replicate()}, {Replicate()}}, {{Shard(0)}, {Shard(1)}}});
  const absl::StatusOr<VerifyReport> turned = VerifyOp(GetOp("asinh"), samples);
  ASSERT_FALSE(turned->wrong.empty());
  EXPECT_THAT(turned->wrong[0].row, HasSubstr("S(0) -> nothing on mesh 2"));
  EXPECT_THAT(turned->wrong[0].why,
              HasSubstr("the rule of op asinh gives its kernel other indices"));
  EXPECT_EQ(VerifyOp(GetOp("sqrt"), {}).status().message(),
            "[verify] sqrt has no samples: there is nothing to judge it by");
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = full({4, 4}, 4, {DType::kF64, mesh, {Shard(1)}});
    EXPECT_EQ(rsqrt(x).placements()[0], Shard(0)) << "columns are not offered, rows are nearest";
    const DTensor rows = rsqrt(full({4, 4}, 4, {DType::kF64, mesh, {Shard(0)}}));
    EXPECT_EQ(rows.placements()[0], Shard(0));
    EXPECT_EQ(rows.ToVector<double>(), std::vector<double>(16, 0.5));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Deferred resharding (document 003) without a mode.
TEST(Outside, APendingSumPassesAdditionsAndIsReducedOnce) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const auto at = [&](double v, Shape shape, Placement p) {
      return full(shape, v, {DType::kF64, mesh, {p}});
    };
    const DTensor y = matmul(at(1, {2, 4}, Shard(1)), at(1, {4, 2}, Shard(0)));
    CommTrace trace;
    const DTensor sum = (y + y * 3 - at(5, {2, 2}, Replicate())) + y;
    EXPECT_TRUE(sum.placements()[0].is_partial());
    EXPECT_EQ(trace.TotalCount(), 0);
    EXPECT_EQ(sum.ToVector<double>(), std::vector<double>(4, 15));
    EXPECT_EQ(trace.TotalCount(), 1);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::outside_test

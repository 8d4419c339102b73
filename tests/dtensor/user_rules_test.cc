// Rules that users write by hand: right ones work, wrong ones say which tensor and what is legal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dtensor/dispatch.h"
#include "dtensor/distribute.h"
#include "dtensor/op.h"
#include "mesh/launch.h"

namespace dtensor {
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

}  // namespace
}  // namespace dtensor

#include "dtensor/autograd.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "test_ops.h"

namespace dtensor::autograd_test {
namespace {

using ::testing::HasSubstr;
using namespace testing;  // NOLINT: the test ops

class AutogradTest : public ::testing::Test {
 protected:
  void SetUp() override { RegisterTestOps(); }
};

struct MlpResult {
  double loss;
  std::vector<double> dx, dw1, dw2;
};

// sum(relu(x w1) w2), integer data: every partition must give the same bits.
MlpResult RunMlp(const DeviceMesh& mesh, const Placements& px, const Placements& p1,
                 const Placements& p2) {
  DTensor x = DistributeTensor(Ints({6, 5}, 1), mesh, px).RequiresGrad();
  DTensor w1 = DistributeTensor(Ints({5, 8}, 2), mesh, p1).RequiresGrad();
  DTensor w2 = DistributeTensor(Ints({8, 3}, 3), mesh, p2).RequiresGrad();
  DTensor y = Matmul(Apply("t_relu", {Matmul(x, w1)}), w2);
  DTensor loss = Apply("t_sum", {Apply("t_mul", {y, y})});
  loss.Backward();
  EXPECT_EQ(w1.grad().spec_ref(), w1.spec_ref());
  return {loss.Item(), x.grad().ToVector<double>(), w1.grad().ToVector<double>(),
          w2.grad().ToVector<double>()};
}

TEST_F(AutogradTest, EveryPartitionGivesTheBitsOfOneRank) {
  const MlpResult one = RunMlp(DeviceMesh::Self(), {}, {}, {});
  const std::vector<Placement> kinds = {Replicate(), Shard(0), Shard(1)};
  for (int n : {2, 3}) {
    absl::Status status = RunSpmd(n, [&](RankContext&) {
      const DeviceMesh mesh({n}, {"tp"});
      for (const Placement& a : kinds) {
        for (const Placement& b : kinds) {
          for (const Placement& c : kinds) {
            const MlpResult r = RunMlp(mesh, {a}, {b}, {c});
            EXPECT_EQ(r.loss, one.loss);
            EXPECT_EQ(r.dx, one.dx);
            EXPECT_EQ(r.dw1, one.dw1);
            EXPECT_EQ(r.dw2, one.dw2);
          }
        }
      }
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status;
  }
  absl::Status status = RunSpmd(4, [&](RankContext&) {
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    const MlpResult r =
        RunMlp(mesh, {Shard(0), Replicate()}, {Replicate(), Shard(1)}, {Replicate(), Shard(0)});
    EXPECT_EQ(r.loss, one.loss);
    EXPECT_EQ(r.dx, one.dx);
    EXPECT_EQ(r.dw1, one.dw1);
    EXPECT_EQ(r.dw2, one.dw2);
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
}

TEST_F(AutogradTest, ColwiseThenRowwiseCommunicatesOnceEachWay) {
  absl::Status status = RunSpmd(2, [&](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    DTensor x0 = DistributeTensor(Ints({4, 6}, 1), mesh, {Replicate()}).RequiresGrad();
    DTensor w1 = DistributeTensor(Ints({6, 8}, 2), mesh, {Shard(1)}).RequiresGrad();
    DTensor w2 = DistributeTensor(Ints({8, 6}, 3), mesh, {Shard(0)}).RequiresGrad();
    DTensor x = Apply("t_scale", {x0}, {FloatAttr(2)});
    CommTrace trace;
    DTensor y = Matmul(Apply("t_relu", {Matmul(x, w1)}), w2).Redistribute({Replicate()});
    EXPECT_EQ(trace.TotalCount(), 1);
    EXPECT_EQ(trace.Count(CollectiveKind::kAllReduce, CommPhase::kForward), 1);
    y.Backward(DistributeTensor(Ints({4, 6}, 4), mesh, {Replicate()}));
    EXPECT_EQ(trace.TotalCount(), 2) << trace.ToString();
    EXPECT_EQ(trace.Count(CollectiveKind::kAllReduce, CommPhase::kBackward), 1);
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
}

TEST_F(AutogradTest, ThreeReadersShareOneGatherAndOneScatter) {
  absl::Status status = RunSpmd(2, [&](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    DTensor leaf = DistributeTensor(Ints({4, 6}, 1), mesh, {Shard(0)}).RequiresGrad();
    DTensor x = Apply("t_scale", {leaf}, {FloatAttr(1)});
    std::vector<DTensor> outs;
    CommTrace trace;
    for (int i = 0; i < 3; ++i) {
      DTensor w = DistributeTensor(Ints({6, 8}, i), mesh, {Shard(1)}).RequiresGrad();
      outs.push_back(Matmul(x, w));
    }
    EXPECT_EQ(trace.Count(CollectiveKind::kAllGather), 1);
    DTensor total = Apply("t_add", {Apply("t_add", {outs[0], outs[1]}), outs[2]});
    Apply("t_sum", {total}).Backward();
    EXPECT_EQ(trace.Count(CollectiveKind::kReduceScatter, CommPhase::kBackward), 1)
        << trace.ToString();
    EXPECT_EQ(trace.TotalCount(), 2) << trace.ToString();
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
}

TEST_F(AutogradTest, DataParallelReducesOncePerParameter) {
  absl::Status status = RunSpmd(2, [&](RankContext&) {
    const DeviceMesh mesh({2}, {"dp"});
    DTensor x = DistributeTensor(Ints({4, 6}, 1), mesh, {Shard(0)});
    DTensor w = DistributeTensor(Ints({6, 3}, 2), mesh, {Replicate()}).RequiresGrad();
    DTensor loss = Apply("t_sum", {Apply("t_add", {Matmul(x, w), Matmul(x, w)})});
    CommTrace trace;
    loss.Backward();
    EXPECT_EQ(trace.Count(CollectiveKind::kAllReduce, CommPhase::kBackward), 1);
    EXPECT_EQ(trace.TotalCount(), 1) << trace.ToString();

    // Accumulation: nothing moves until the gradient is read.
    w.ZeroGrad();
    trace.Clear();
    for (int i = 0; i < 3; ++i) {
      NoGradSync no_sync;
      Apply("t_sum", {Matmul(x, w)}).Backward();
    }
    EXPECT_EQ(trace.TotalCount(), 0);
    const std::vector<double> thrice = w.grad().ToVector<double>();
    EXPECT_EQ(trace.TotalCount(), 1);
    w.ZeroGrad();
    Apply("t_sum", {Matmul(x, w)}).Backward();
    const std::vector<double> once = w.grad().ToVector<double>();
    for (size_t i = 0; i < once.size(); ++i) EXPECT_EQ(thrice[i], 3 * once[i]);
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
}

TEST_F(AutogradTest, GradientsAccumulate) {
  DTensor w = FromVector<double>({1, 2}, {2}, {.dtype = DType::kF64}).RequiresGrad();
  Apply("t_sum", {Apply("t_mul", {w, w})}).Backward();
  Apply("t_sum", {w}).Backward();
  EXPECT_THAT(w.grad().ToVector<double>(), ::testing::ElementsAre(3, 5));
  const DTensor kept = w.grad();
  Apply("t_sum", {w}).Backward();
  EXPECT_THAT(kept.ToVector<double>(), ::testing::ElementsAre(3, 5));  // what was read stays
  EXPECT_THAT(w.grad().ToVector<double>(), ::testing::ElementsAre(4, 6));
}

TEST_F(AutogradTest, OneGradientToTwoInputsIsNotShared) {
  DTensor a = ones({2}, {.dtype = DType::kF64}).RequiresGrad();
  DTensor b = ones({2}, {.dtype = DType::kF64}).RequiresGrad();
  Apply("t_sum", {Apply("t_add", {a, b})}).Backward();
  Apply("t_sum", {Apply("t_add", {a, a})}).Backward();
  EXPECT_THAT(a.grad().ToVector<double>(), ::testing::ElementsAre(3, 3));
  EXPECT_THAT(b.grad().ToVector<double>(), ::testing::ElementsAre(1, 1));
}

TEST_F(AutogradTest, LocalBoundary) {
  absl::Status status = RunSpmd(2, [&](RankContext& context) {
    const DeviceMesh mesh({2}, {"tp"});
    DTensor x = DistributeTensor(Ints({4}, 1), mesh, {Shard(0)}).RequiresGrad();
    DTensor local = x.ToLocal();
    EXPECT_TRUE(local.mesh().is_self());
    DTensor scaled = Apply("t_scale", {local}, {FloatAttr(context.rank() + 1.0)});
    DTensor back = FromLocal(scaled, mesh, {Shard(0)});
    Apply("t_sum", {back}).Backward();
    EXPECT_THAT(x.grad().ToVector<double>(), ::testing::ElementsAre(1, 1, 2, 2));
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
}

TEST_F(AutogradTest, CustomFunction) {
  DTensor x = FromVector<double>({2, 3}, {2}, {.dtype = DType::kF64}).RequiresGrad();
  const std::vector<DTensor> inputs = {x};
  Values y = CustomFunction(
      "double_but_pass_triple", inputs,
      [&] { return Values{Apply("t_scale", {x}, {FloatAttr(2)})}; },
      [](const Values& g) { return Values{Apply("t_scale", {g[0]}, {FloatAttr(3)})}; });
  EXPECT_THAT(y[0].ToVector<double>(), ::testing::ElementsAre(4, 6));
  Apply("t_sum", {y[0]}).Backward();
  EXPECT_THAT(x.grad().ToVector<double>(), ::testing::ElementsAre(3, 3));
}

TEST_F(AutogradTest, CustomFunctionsMayLeaveOutTheLastGradients) {
  DTensor x = FromVector<double>({2, 3}, {2}, {.dtype = DType::kF64}).RequiresGrad();
  DTensor w = FromVector<double>({4, 5}, {2}, {.dtype = DType::kF64}).RequiresGrad();
  const auto run = [&](int64_t gradients) {
    const Values y = CustomFunction(
        "first", {x, w}, [&] { return Values{Apply("t_scale", {x}, {FloatAttr(2)})}; },
        [=](const Values& g) { return Values(gradients, g[0]); });
    Apply("t_sum", {y[0]}).Backward();
  };
  run(1);
  EXPECT_THAT(x.grad().ToVector<double>(), ::testing::ElementsAre(1, 1));
  EXPECT_FALSE(w.grad().defined());
  EXPECT_THAT(MessageOf([&] { run(3); }), HasSubstr("gave 3 gradients for 2 inputs"));
}

TEST_F(AutogradTest, Errors) {
  DTensor w = FromVector<double>({1, 2}, {2}, {.dtype = DType::kF64}).RequiresGrad();
  DTensor plain = ones({2}, {.dtype = DType::kF64});
  DTensor y = Apply("t_mul", {w, w});
  EXPECT_THAT(MessageOf([&] { y.Backward(); }),
              HasSubstr("[backward] needs a tensor of one element, got shape [2]"));
  EXPECT_THAT(MessageOf([&] { y.RequiresGrad(); }),
              HasSubstr("[requires_grad] only a leaf can be told to record"));
  EXPECT_THAT(MessageOf([&] { Apply("t_sum", {plain}).Backward(); }),
              HasSubstr("has no gradient history"));
  DTensor loss = Apply("t_sum", {y});
  loss.Backward();
  EXPECT_THAT(MessageOf([&] { loss.Backward(); }), HasSubstr("a backward has already passed"));
  EXPECT_THAT(MessageOf([&] { Apply("t_add_", {w, plain}); }),
              HasSubstr("[t_add_] a leaf that requires grad cannot be changed in place"));
  DTensor h = Apply("t_scale", {w}, {FloatAttr(1)});
  DTensor saved = Apply("t_mul", {h, h});
  Apply("t_add_", {h, plain});
  EXPECT_THAT(MessageOf([&] { Apply("t_sum", {saved}).Backward(); }),
              HasSubstr("saved tensor x (float64 [2] on self []) was changed in place"));
  EXPECT_THAT(MessageOf([&] { zeros({2}, {.dtype = DType::kI64}).RequiresGrad(); }),
              HasSubstr("only floating tensors have gradients"));
  EXPECT_THAT(MessageOf([&] { Apply("t_sum", {Apply("t_relu_backward", {w, plain})}).Backward(); }),
              HasSubstr("[backward of t_relu_backward] this op has no gradient"));
}

TEST_F(AutogradTest, InPlaceIsRecorded) {
  DTensor w = FromVector<double>({1, 2}, {2}, {.dtype = DType::kF64}).RequiresGrad();
  DTensor h = Apply("t_scale", {w}, {FloatAttr(3)});
  Apply("t_add_", {h, w});
  EXPECT_THAT(h.ToVector<double>(), ::testing::ElementsAre(4, 8));
  Apply("t_sum", {h}).Backward();
  EXPECT_THAT(w.grad().ToVector<double>(), ::testing::ElementsAre(4, 4));
}

TEST_F(AutogradTest, LongTapesUnwindWithoutRecursion) {
  DTensor w = ones({1}, {.dtype = DType::kF64}).RequiresGrad();
  DTensor h = w;
  for (int i = 0; i < 200000; ++i) h = Apply("t_scale", {h}, {FloatAttr(1)});
  h = DTensor();  // the whole chain dies here
  SUCCEED();
}

TEST_F(AutogradTest, LongChainsOfMemosUnwindWithoutRecursion) {
  const DeviceMesh mesh({1}, {"tp"});
  DTensor head = ones({1}, {.mesh = mesh, .placements = {Shard(0)}});
  DTensor y = head;
  for (int i = 0; i < 300000; ++i) {
    y = y.Redistribute({i % 2 == 0 ? Replicate() : Shard(0)}, {.shared = true});
  }
  y = DTensor();
  head = DTensor();  // all memos die here
  SUCCEED();
}

// Its statics are destroyed after main's thread_local objects.
[[noreturn]] void LeaveHistoriesInStatics() {
  static DTensor w = ones({2}, {.dtype = DType::kF64}).RequiresGrad();
  static DTensor chain = w;
  for (int i = 0; i < 100; ++i) chain = Apply("t_scale", {chain}, {FloatAttr(1)});
  static DTensor loss = Apply("t_sum", {Apply("t_mul", {w, w})});
  loss.Backward();
  std::exit(0);
}

TEST_F(AutogradTest, HistoriesMayLiveInStatics) {
  EXPECT_EXIT(LeaveHistoriesInStatics(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace dtensor::autograd_test

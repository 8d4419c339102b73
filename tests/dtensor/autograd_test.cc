#include "dtensor/autograd.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "dtensor/intercept.h"
#include "test_ops.h"

namespace dtensor::autograd_test {
namespace {

using ::testing::AllOf;
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

// Under NoGradSync leaves keep what came; the program may use its memory again.
TEST_F(AutogradTest, GradientsThatWaitAreTheProgramsNoMore) {
  absl::Status status = RunSpmd(2, [&](RankContext&) {
    const DeviceMesh mesh({2}, {"dp"});
    const TensorOptions f64 = {.dtype = DType::kF64, .mesh = mesh};
    DTensor w = zeros({2}, f64).RequiresGrad();
    const DTensor buffer = full({2}, 2.0, f64);
    {
      const NoGradSync hold;
      w.Redistribute({Replicate()}).Backward(buffer);
      Apply("t_add_", {buffer, buffer});
      w.Redistribute({Replicate()}).Backward(buffer);
      Apply("t_add_", {buffer, buffer});
      const Values y = CustomFunction(
          "receive", {w}, [&] { return Values{ones({2}, f64)}; },
          [=](const Values&) { return Values{buffer}; });
      Apply("t_sum", {y[0]}).Backward();
      Apply("t_add_", {buffer, buffer});
    }
    EXPECT_THAT(w.grad().ToVector<double>(), ::testing::ElementsAre(2 + 4 + 8, 2 + 4 + 8));
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
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

TEST_F(AutogradTest, TermsHaveTheGradientOfTheirReduction) {
  absl::Status status = RunSpmd(3, [&](RankContext& context) {
    const DeviceMesh mesh({3}, {"dp"});
    const auto rank = static_cast<double>(context.rank());
    // The loss of a batch is the average of the ranks' losses.
    DTensor w = FromVector<double>({rank + 1, 6}, {2}, {.dtype = DType::kF64}).RequiresGrad();
    const DTensor term = Apply("t_scale", {w}, {FloatAttr(3)});
    Apply("t_sum", {FromLocal(term, mesh, {Partial(ReduceOp::kAvg)})}).Backward();
    EXPECT_THAT(w.grad().ToVector<double>(), ::testing::ElementsAre(1, 1));
    // There and back is nothing but the value.
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin}) {
      DTensor x = DistributeTensor(Ints({4}, 1), mesh, {Shard(0)}).RequiresGrad();
      const DTensor pending = x.Redistribute({Partial(op)});
      const DTensor back = FromLocal(pending.ToLocal(), mesh, {Partial(op)});
      Apply("t_sum", {Apply("t_mul", {back, back})}).Backward();
      EXPECT_EQ(x.grad().ToVector<double>(),
                Apply("t_scale", {x}, {FloatAttr(2)}).ToVector<double>());
    }
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
}

// Whoever takes a view of what was changed since, with its base's history or from before it, says
// so: there would be no gradient, or one of what the view was.
TEST_F(AutogradTest, OldViewsAreRefusedEverywhere) {
  absl::Status status = RunSpmd(2, [&](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    const auto old_view = [&](const DeviceMesh& of, bool history) {
      const DTensor w = ones({4, 1}, {.dtype = DType::kF64, .mesh = of}).RequiresGrad();
      const DTensor base = history ? Apply("t_scale", {w}, {FloatAttr(1)})
                                   : zeros({4, 1}, {.dtype = DType::kF64, .mesh = of});
      const DTensor view = Apply("t_transpose", {base});
      Apply("t_add_", {base, w});
      return view;
    };
    for (const bool history : {true, false}) {
      const DTensor local = old_view(DeviceMesh::Self(), history), v = old_view(mesh, history);
      const std::function<void()> readers[] = {
          [&] { FromLocal(local, mesh, {Replicate()}); },
          [&] { DistributeTensor(local, mesh, {Shard(1)}); },
          [&] { v.Redistribute({Shard(1)}); },
          [&] { v.Redistribute({Shard(1)}, {.async = true}); },
          [&] { v.ToLocal(); },
          [&] { v.FullTensor(); },
          [&] {
            CustomFunction("f", {v}, [&] { return Values{v}; }, [](const Values& g) { return g; });
          },
          [&] { v.Backward(ones({1, 4}, {.dtype = DType::kF64, .mesh = mesh})); }};
      for (size_t i = 0; i < std::size(readers); ++i) {
        EXPECT_NE(MessageOf(readers[i]), "") << i << history;
        if (i < std::size(readers) - 1 || history) {
          EXPECT_THAT(MessageOf(readers[i]), HasSubstr("changed in place after the view was made"))
              << i << history;
        }
      }
      const NoGrad values;  // these are there
      EXPECT_EQ(v.Redistribute({Shard(1)}).ToVector<double>(), v.ToVector<double>());
      FromLocal(local, mesh, {Replicate()});
    }
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
}

TEST_F(AutogradTest, BoundariesSayWhatIsWrong) {
  absl::Status status = RunSpmd(2, [&](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    DTensor x = DistributeTensor(Ints({4}, 1), mesh, {Shard(0)}).RequiresGrad();
    EXPECT_THAT(MessageOf([&] { x.ToLocal(Placements{Shard(0), Shard(0)}); }),
                HasSubstr("[to_local] grad_placements: 2 placements"));
    const DTensor local = x.ToLocal();
    EXPECT_THAT(
        MessageOf([&] { FromLocal(local, mesh, {Shard(0)}, {.grad_placements = {Shard(3)}}); }),
        HasSubstr("[from_local] grad_placements: placement S(3)"));
    EXPECT_THAT(MessageOf([&] { FromLocal(local, DeviceMesh(), {Shard(0)}); }),
                HasSubstr("[from_local] the mesh is null"));
    EXPECT_THAT(MessageOf([&] { x.Redistribute(DeviceMesh(), {Shard(0)}); }),
                HasSubstr("[redistribute] the mesh is null"));
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
  // Of one rank's part: the others are told at once.
  status = RunSpmd(2, [&](RankContext&) {
    const DTensor local = ones({2}, {.dtype = DType::kF64});
    FromLocal(local, DeviceMesh({2}), {Shard(0)}, {.shape = {5}});
    return absl::OkStatus();
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("options.shape is the global shape"));
  status = RunSpmd(3, [&](RankContext& context) {
    DTensor x =
        ones({4}, {.dtype = DType::kF64, .mesh = DeviceMesh({3}), .placements = {Shard(0)}});
    const DTensor local = x.RequiresGrad().ToLocal(Placements{Shard(0, 3)});
    EXPECT_THAT(MessageOf([&] { Apply("t_sum", {local}).Backward(); }),
                HasSubstr(context.rank() < 2 ? "but grad_placements [S(0, unit=3)] give ["
                                             : "the local gradient has shape [2]"));  // it is told
    return absl::OkStatus();
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("the local gradient has shape"));
}

TEST_F(AutogradTest, CustomFunction) {
  DTensor x = FromVector<double>({2, 3}, {2}, {.dtype = DType::kF64}).RequiresGrad();
  const std::vector<DTensor> inputs = {x};
  const auto call = [&] {
    return CustomFunction(
        "double_but_pass_triple", inputs,
        [&] { return Values{Apply("t_scale", {x}, {FloatAttr(2)})}; },
        [](const Values& g) { return Values{Apply("t_scale", {g[0]}, {FloatAttr(3)})}; });
  };
  {
    const NoGrad no_grad;
    EXPECT_FALSE(call()[0].requires_grad());
  }
  const Values y = call();
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

// A part of a value, whose gradient comes on another mesh than the value is on.
TEST_F(AutogradTest, ACustomGradientMayBeOnAnotherMesh) {
  Op("t_second_row(x)")
      .Factors("[n] m -> m")
      .View([](const Tensor& in, const Shape&, absl::Span<const Attr>,
               absl::Span<const FactorRange>) -> absl::StatusOr<Tensor> { return in.Select(0, 1); })
      .Cuts([](absl::Span<const Attr>) { return ViewCut{0, 1, 1, true}; })
      .Vjp([](VjpCall& c) {
        const Tensor row = c.grad().local();
        const Tensor part = ValueOrThrow(Tensor::Full({3, row.size(0)}, DType::kF64, 0));
        Copy(row, part.Select(0, 1));
        FromLocalOptions options;
        options.shape = {3, 8};
        c.set(0, FromLocal(OnSelf(part), c.grad().mesh(), {Replicate(), Shard(1)}, options));
      });
  const absl::Status status = RunSpmd(4, [](RankContext&) -> absl::Status {
    const DeviceMesh square({2, 2}), line({4});
    const DTensor x = zeros({3, 8}, {DType::kF64, square, {Replicate(), Shard(1)}}).RequiresGrad();
    const DTensor row = Apply("t_second_row", {Apply("t_scale", {x}, {FloatAttr(1)})});
    const DTensor g = DistributeTensor(Ints({8}, 2), square, {Replicate(), Shard(0)});
    const auto forward = [&] { return Values{Apply("t_scale", {row}, {FloatAttr(1)})}; };
    const auto backward = [&](const Values& grads) {
      return Values{grads[0].Redistribute(line, {Shard(0)})};
    };
    CustomFunction("moves", {row}, forward, backward)[0].Backward(g);
    std::vector<double> want(24, 0);
    const std::vector<double> given = g.ToVector<double>();
    std::copy(given.begin(), given.end(), want.begin() + 8);
    EXPECT_EQ(x.grad().ToVector<double>(), want);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(AutogradTest, FunctionsThatAreNullAreNamed) {
  const DTensor x = ones({2}, {.dtype = DType::kF64}).RequiresGrad();
  EXPECT_THAT(MessageOf([&] { Recompute(nullptr, {x}); }),
              HasSubstr("[recompute] the function is null"));
  EXPECT_THAT(MessageOf([&] { CustomFunction("f", {x}, [&] { return Values{x}; }, nullptr); }),
              HasSubstr("[f] the backward is null"));
  EXPECT_THAT(MessageOf([&] { const InterceptCalls none("t_add", nullptr); }),
              HasSubstr("[InterceptCalls] the function is null"));
  Apply("t_add", {x, x});  // none is open
}

// Its peers wait for it, whatever its program makes of the exception.
TEST_F(AutogradTest, ACustomFunctionThatThrowsOnOneRankIsTold) {
  absl::Status status = RunSpmd(2, [&](RankContext& context) {
    const DTensor x =
        ones({4}, {.dtype = DType::kF64, .mesh = DeviceMesh({2}), .placements = {Shard(0)}});
    try {
      CustomFunction(
          "f", {x},
          [&] {
            if (context.rank() == 1) throw std::runtime_error("no such file");
            return Values{x};
          },
          [](const Values& g) { return g; });
      x.Redistribute({Replicate()});
      return absl::InternalError("nobody was told");
    } catch (const std::runtime_error& e) {
      EXPECT_EQ(context.rank(), 1);
    } catch (const Error& e) {
      EXPECT_EQ(e.status().code(), absl::StatusCode::kAborted) << e.what();
    }
    return absl::OkStatus();
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("no such file"));
}

TEST_F(AutogradTest, BackwardInsideOfRecompute) {
  const DTensor x = ones({2}, {.dtype = DType::kF64}).RequiresGrad();
  EXPECT_THAT(MessageOf([&] {
                Recompute(
                    [](const Values& in) {
                      Apply("t_sum", {Apply("t_mul", {in[0], in[0]})}).Backward();
                      return in;
                    },
                    {x});
              }),
              AllOf(HasSubstr("[backward of t_mul]"), HasSubstr("inside of a function that")));
}

TEST_F(AutogradTest, RecomputeReadsNumbersThatAreAsTheyWere) {
  absl::Status status = RunSpmd(2, [&](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    for (const Placement& p : {Replicate(), Shard(0)}) {
      for (const bool changed : {false, true}) {
        const DTensor x = ones({2}, {.dtype = DType::kF64, .mesh = mesh}).RequiresGrad();
        const DTensor by = full({2}, 2.0, {.dtype = DType::kF64, .mesh = mesh, .placements = {p}});
        const auto scaled_square = [&](const Values& in) {
          const DTensor y = Apply("t_scale", {in[0]}, {FloatAttr(by.ToVector<double>()[0])});
          return Values{Apply("t_mul", {y, y})};
        };
        const DTensor y = Recompute(scaled_square, {x})[0];
        if (changed) Apply("t_add_", {by, by});
        const std::string message = MessageOf([&] { Apply("t_sum", {y}).Backward(); });
        EXPECT_THAT(message, HasSubstr(changed ? "was changed in place after the forward" : ""));
        if (!changed) {
          EXPECT_THAT(x.grad().ToVector<double>(), ::testing::ElementsAre(8, 8));
        }
      }
    }
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
}

// The gradient function that gives it is named, not whatever takes it next.
TEST_F(AutogradTest, GradientsOnOtherKindsOfMeshesAreRefused) {
  Op("at_self_gradient(x)").Factors("n -> n").Vjp([](VjpCall& c) {
    c.set(0, ones(c.in_spec(0).shape(), {.dtype = DType::kF64}));
  });
  RegisterKernel("at_self_gradient", DeviceType::kCpu,
                 {[](const KernelCall& c) {
                    ForEach(c.out[0], [&](const auto& i) { RefAt(c.out[0], i) = At(c.in[0], i); });
                  },
                  DTypeBit(DType::kF64), KernelLayout::kStrided});
  const DeviceMesh mesh({1}, {"tp"});
  DTensor x = ones({2}, {.dtype = DType::kF64, .mesh = mesh}).RequiresGrad();
  const DTensor scaled = Apply("t_scale", {x}, {FloatAttr(2)});
  EXPECT_THAT(
      MessageOf([&] { Apply("t_sum", {Apply("at_self_gradient", {scaled})}).Backward(); }),
      AllOf(HasSubstr("[backward of at_self_gradient]"), HasSubstr("is float64 [2] on self")));
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

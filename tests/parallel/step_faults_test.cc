// The same ten faults inside a training step, through dispatch: a rank that runs another op is
// caught even where the ops' collectives are alike, and errors say which op on which specs.
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/watchdog.h"

namespace dtensor::step_faults_test {
namespace {

using ::testing::HasSubstr;

enum Fault {
  kNone,
  kThrows,
  kSleeps,
  kExitsEarly,
  kOtherOp,  // its collective is the same
  kOtherDtype,
  kOtherShape,
  kOtherPlacement,
  kOtherRoot,
  kOtherOrder,
  kAbortsInsideAWait,
  kRunsOutOfMemory,
};
constexpr const char* kNames[] = {"None",
                                  "Throws",
                                  "Sleeps",
                                  "ExitsEarly",
                                  "OtherOp",
                                  "OtherDtype",
                                  "OtherShape",
                                  "OtherPlacement",
                                  "OtherRoot",
                                  "OtherOrder",
                                  "AbortsInsideAWait",
                                  "RunsOutOfMemory"};

constexpr int kSteps = 4, kFaultyStep = 2;
constexpr int64_t kHidden = 24, kBatch = 6;

DTensor Input(const DeviceMesh& mesh, int64_t rows, DType dtype = DType::kF32) {
  const TensorOptions options{dtype, mesh, {Replicate()}};
  return reshape(arange(0, rows * kHidden, 1, options), {rows, kHidden}) * 0.01;
}

// Row-parallel product: a pending sum, which the nonlinear op behind it has to have reduced.
struct Model {
  DTensor w1, w2;
  explicit Model(const DeviceMesh& mesh, DType dtype = DType::kF32) {
    const auto weight = [&](const Placement& p) {
      const TensorOptions options{dtype, mesh, {p}};
      DTensor w = full({kHidden, kHidden}, 0.05, options);
      w.RequiresGrad();
      return w;
    };
    w1 = weight(Shard(1));
    w2 = weight(Shard(0));
  }
  DTensor Hidden(const DTensor& x) const { return matmul(relu(matmul(x, w1)), w2); }
};

void AbortSoon(RankContext& context, std::thread* second) {
  *second = std::thread([&context] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    context.AbortAll(absl::InternalError("stop"));
  });
}

// One step; the culprit does something else in the middle. Returns the loss.
double Step(Model& model, const DeviceMesh& mesh, Fault fault, RankContext& context) {
  std::thread second;
  struct Join {
    std::thread& t;
    ~Join() {
      if (t.joinable()) t.join();
    }
  } join{second};
  const int64_t rows = fault == kOtherShape ? kBatch + 1 : kBatch;
  DTensor x = Input(mesh, rows), h = model.Hidden(x), g = model.Hidden(x * 0.5);
  if (fault == kThrows) throw std::runtime_error("boom");
  if (fault == kSleeps) {
    Comm* comm = ValueOrThrow(context.CommFor(mesh, {0}));
    while (comm->Health().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (fault == kOtherDtype) h = Model(mesh, DType::kF64).Hidden(Input(mesh, rows, DType::kF64));
  if (fault == kOtherPlacement) h = h.Redistribute({Shard(0)});
  if (fault == kOtherRoot) {
    DistributeTensor(Tensor::FromVector(std::vector<float>(4, 1.f), {4}).value(), mesh,
                     {Replicate()}, 1);
  }
  if (fault == kAbortsInsideAWait) AbortSoon(context, &second);
  if (fault == kRunsOutOfMemory) {
    context.device_allocator()->ReleaseCached();
    context.device_allocator()->SetLimit(context.device_allocator()->stats().in_use_bytes + 1);
  }
  DTensor a, b;
  if (fault == kOtherOrder) {
    b = sigmoid(g);
    a = relu(h);
  } else {
    a = fault == kOtherOp ? tanh(h) : relu(h);
    b = sigmoid(g);
  }
  const DTensor loss = mean(a * a) + mean(b * b);
  loss.Backward();
  for (DTensor* w : {&model.w1, &model.w2}) {
    NoGrad no_grad;
    add_(*w, w->grad() * -0.1);
    w->ZeroGrad();
  }
  return loss.Item();
}

struct Outcome {
  absl::Status all;
  std::vector<absl::Status> ranks;
  std::vector<std::vector<double>> losses;  // of every rank, by step that it finished
};

Outcome Train(int n, Fault fault, int64_t culprit) {
  const Watchdog watchdog(absl::StrCat(kNames[fault], " ", n), std::chrono::seconds(120));
  Outcome outcome;
  outcome.ranks.resize(n);
  outcome.losses.resize(n);
  const SpmdOptions options{fault == kSleeps ? absl::Milliseconds(300) : absl::Seconds(60)};
  outcome.all = RunSpmd(
      n,
      [&](RankContext& context) -> absl::Status {
        const int64_t rank = context.rank();
        const DeviceMesh mesh({n}, {"tp"});
        absl::Status& seen = outcome.ranks[rank];
        try {
          Model model(mesh);
          for (int step = 0; step < kSteps; ++step) {
            const bool faulty = step == kFaultyStep && rank == culprit;
            if (faulty && fault == kExitsEarly) return absl::OkStatus();
            if (step == kFaultyStep && fault == kAbortsInsideAWait && rank == (culprit + 1) % n) {
              Comm* comm = ValueOrThrow(context.CommFor(mesh, {0}));
              while (comm->Health().ok()) std::this_thread::yield();
            }
            outcome.losses[rank].push_back(Step(model, mesh, faulty ? fault : kNone, context));
          }
        } catch (const Error& error) {
          seen = error.status();
        }
        return seen;
      },
      options);
  return outcome;
}

bool Differs(Fault fault) {
  return fault == kOtherOp || fault == kOtherDtype || fault == kOtherShape ||
         fault == kOtherPlacement || fault == kOtherRoot || fault == kOtherOrder;
}

class StepFaults : public ::testing::TestWithParam<std::tuple<Fault, int>> {};

TEST_P(StepFaults, NoHangNoWrongNumberCulpritNamed) {
  const auto [fault, n] = GetParam();
  const int64_t culprit = n - 1;
  const Outcome good = Train(n, kNone, 0), bad = Train(n, fault, culprit);
  ASSERT_TRUE(good.all.ok()) << good.all;
  EXPECT_FALSE(bad.all.ok());
  const std::string name = absl::StrCat("rank ", culprit);
  EXPECT_THAT(std::string(bad.all.message()), HasSubstr(name));
  for (int r = 0; r < n; ++r) {
    ASSERT_EQ(good.losses[r].size(), size_t{kSteps});
    EXPECT_LE(bad.losses[r].size(), size_t{kFaultyStep}) << "rank " << r << " went on";
    for (size_t s = 0; s < bad.losses[r].size(); ++s) {
      EXPECT_EQ(bad.losses[r][s], good.losses[r][s]) << "rank " << r << " step " << s;
    }
    if (r == culprit && (fault == kThrows || fault == kExitsEarly)) continue;
    EXPECT_THAT(std::string(bad.ranks[r].message()), HasSubstr(name)) << "rank " << r;
    if (!Differs(fault)) continue;
    EXPECT_EQ(bad.ranks[r].code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(bad.ranks[r].message()),
                ::testing::AllOf(HasSubstr("[comm tp] collectives differ at call #"),
                                 HasSubstr(name + " issued "), HasSubstr("flight report:")));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, StepFaults,
    ::testing::Combine(::testing::Values(kThrows, kSleeps, kExitsEarly, kOtherOp, kOtherDtype,
                                         kOtherShape, kOtherPlacement, kOtherRoot, kOtherOrder,
                                         kAbortsInsideAWait, kRunsOutOfMemory),
                       ::testing::Values(2, 3, 8)),
    [](const ::testing::TestParamInfo<std::tuple<Fault, int>>& info) {
      return absl::StrCat(kNames[std::get<0>(info.param)], std::get<1>(info.param));
    });

// Both sides of a divergence are named with their op and specs.
TEST(StepFaults, MessageNamesOpsAndSpecs) {
  const Outcome outcome = Train(3, kOtherOp, 1);
  for (const absl::Status& status : outcome.ranks) {
    const std::string text(status.message());
    EXPECT_THAT(
        text.substr(0, text.find('\n')),
        ::testing::MatchesRegex(
            "\\[(relu|tanh)\\] input x: \\[comm tp\\] collectives differ at call #[0-9]+: "
            "ranks 0, 2 issued reduce_scatter\\(sum, float32 \\[6, 24\\], counts \\[2, 2, 2\\]\\) "
            "for "
            "relu\\(x = float32 \\[6, 24\\] on tp=3 \\[P\\(sum\\)\\] -> \\[S\\(0\\)\\]\\); "
            "rank 1 issued reduce_scatter\\(sum, float32 \\[6, 24\\], counts \\[2, 2, 2\\]\\) for "
            "tanh\\(x = float32 \\[6, 24\\] on tp=3 \\[P\\(sum\\)\\] -> \\[S\\(0\\)\\]\\); "
            "inputs: x = float32 \\[6, 24\\] on tp=3 \\[P\\(sum\\)\\] \\(rank [0-2] of 3\\)"));
  }
}

// The same values moved to other placements by collectives that look alike.
TEST(StepFaults, OtherSpecSameCollective) {
  std::vector<absl::Status> seen(2);
  const absl::Status all = RunSpmd(2, [&](RankContext& context) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    // A gather of [4, 4] from rows and one from columns of halves move tensors of the same shape.
    const DTensor x = ones({4, 4}, {.mesh = mesh, .placements = {Shard(context.rank() == 0)}});
    try {
      x.Redistribute({Replicate()});
    } catch (const Error& error) {
      seen[context.rank()] = error.status();
    }
    return seen[context.rank()];
  });
  EXPECT_FALSE(all.ok());
  for (const absl::Status& status : seen) {
    EXPECT_THAT(std::string(status.message()),
                ::testing::AllOf(HasSubstr("float32 [4, 4] on tp=2 [S(1)] to float32 [4, 4]"),
                                 HasSubstr("float32 [4, 4] on tp=2 [S(0)] to float32 [4, 4]")));
  }
}

// The same op on the same specs, with another number: a wrong result but for the fingerprint.
TEST(StepFaults, OtherAttribute) {
  std::vector<absl::Status> seen(2);
  const absl::Status all = RunSpmd(2, [&](RankContext& context) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = ones({4, 4}, {.mesh = mesh, .placements = {Partial()}});
    try {
      add(x, context.rank() == 0 ? 2.0 : 3.0);
    } catch (const Error& error) {
      seen[context.rank()] = error.status();
    }
    return seen[context.rank()];
  });
  EXPECT_FALSE(all.ok());
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(
        std::string(status.message()),
        ::testing::AllOf(HasSubstr("collectives differ"), HasSubstr("(with other attributes)"),
                         HasSubstr("rank 0 issued"), HasSubstr("rank 1 issued")));
  }
}

}  // namespace
}  // namespace dtensor::step_faults_test

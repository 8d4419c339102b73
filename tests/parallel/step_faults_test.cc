// The same ten faults inside a training step, through dispatch: a rank that runs another op is
// caught even where the ops' collectives are alike, and errors say which op on which specs.
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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

// The placement over tp, which is the last mesh dim; over dp, where there is one, the batch is cut
// and weights are whole.
Placements OverTp(const DeviceMesh& mesh, const Placement& p, bool batch) {
  Placements all(static_cast<size_t>(mesh.ndim()), batch ? Shard(0) : Replicate());
  all.back() = p;
  return all;
}
DeviceMesh MeshOf(const Dims& shape) {
  const bool one = shape.size() == 1;
  return ValueOrThrow(DeviceMesh::Create(
      shape, one ? std::vector<std::string>{"tp"} : std::vector<std::string>{"dp", "tp"}));
}
Comm* TpComm(RankContext& context, const DeviceMesh& mesh) {
  return ValueOrThrow(context.CommFor(mesh, {mesh.ndim() - 1}));
}

DTensor Input(const DeviceMesh& mesh, int64_t rows, DType dtype = DType::kF32) {
  const TensorOptions options{dtype, mesh, OverTp(mesh, Replicate(), false)};
  const DTensor whole = reshape(arange(0, rows * kHidden, 1, options), {rows, kHidden}) * 0.01;
  return whole.Redistribute(OverTp(mesh, Replicate(), true));
}

// Row-parallel product: a pending sum, which the nonlinear op behind it has to have reduced.
struct Model {
  DTensor w1, w2;
  explicit Model(const DeviceMesh& mesh, DType dtype = DType::kF32) {
    const auto weight = [&](const Placement& p) {
      const TensorOptions options{dtype, mesh, OverTp(mesh, p, false)};
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
    Comm* comm = TpComm(context, mesh);
    while (comm->Health().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (fault == kOtherDtype) h = Model(mesh, DType::kF64).Hidden(Input(mesh, rows, DType::kF64));
  if (fault == kOtherPlacement) h = h.Redistribute(OverTp(mesh, Shard(0), true));
  if (fault == kOtherRoot) {
    DistributeTensor(Tensor::FromVector(std::vector<float>(4, 1.f), {4}).value(), mesh,
                     OverTp(mesh, Replicate(), false), 1);
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

// A call on a group that its peers are not at: a wait in both groups, which ends at the deadline.
bool IsElsewhere(const Dims& shape, Fault fault) { return shape.size() > 1 && fault == kOtherRoot; }

Outcome Train(const Dims& shape, Fault fault, int64_t culprit) {
  const int64_t n = Numel(shape);
  const Watchdog watchdog(absl::StrCat(kNames[fault], " ", ToString(shape)),
                          std::chrono::seconds(120));
  Outcome outcome;
  outcome.ranks.resize(n);
  outcome.losses.resize(n);
  const bool times_out = fault == kSleeps || IsElsewhere(shape, fault);
  const SpmdOptions options{times_out ? absl::Milliseconds(300) : absl::Seconds(60)};
  outcome.all = RunSpmd(
      n,
      [&](RankContext& context) -> absl::Status {
        const int64_t rank = context.rank();
        const DeviceMesh mesh = MeshOf(shape);
        absl::Status& seen = outcome.ranks[rank];
        try {
          Model model(mesh);
          for (int step = 0; step < kSteps; ++step) {
            const bool faulty = step == kFaultyStep && rank == culprit;
            if (faulty && fault == kExitsEarly) return absl::OkStatus();
            if (step == kFaultyStep && fault == kAbortsInsideAWait && rank == culprit - 1) {
              Comm* comm = TpComm(context, mesh);
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

class StepFaults : public ::testing::TestWithParam<std::tuple<Fault, Dims>> {};

TEST_P(StepFaults, NoHangNoWrongNumberCulpritNamed) {
  const auto& [fault, shape] = GetParam();
  const int64_t n = Numel(shape), culprit = n - 1;
  const Outcome good = Train(shape, kNone, 0), bad = Train(shape, fault, culprit);
  ASSERT_TRUE(good.all.ok()) << good.all;
  EXPECT_FALSE(bad.all.ok());
  const std::string name = absl::StrCat("rank ", culprit);
  EXPECT_THAT(std::string(bad.all.message()), HasSubstr(name));
  for (int64_t r = 0; r < n; ++r) {
    ASSERT_EQ(good.losses[r].size(), size_t{kSteps});
    EXPECT_LE(bad.losses[r].size(), size_t{kFaultyStep}) << "rank " << r << " went on";
    for (size_t s = 0; s < bad.losses[r].size(); ++s) {
      EXPECT_EQ(bad.losses[r][s], good.losses[r][s]) << "rank " << r << " step " << s;
    }
    if (r == culprit && (fault == kThrows || fault == kExitsEarly)) continue;
    EXPECT_THAT(std::string(bad.ranks[r].message()), HasSubstr(name)) << "rank " << r;
    if (!Differs(fault)) continue;
    if (IsElsewhere(shape, fault)) {
      EXPECT_THAT(std::string(bad.ranks[r].message()), HasSubstr("did not arrive within"));
      continue;
    }
    // Seen in the culprit's tp group; ranks of the other are stopped, and told why.
    const int64_t tp = shape.back();
    EXPECT_EQ(bad.ranks[r].code(), r / tp == culprit / tp ? absl::StatusCode::kFailedPrecondition
                                                          : absl::StatusCode::kAborted)
        << "rank " << r << ": " << bad.ranks[r];
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
                       ::testing::Values(Dims{2}, Dims{3}, Dims{8}, Dims{2, 2})),
    [](const ::testing::TestParamInfo<std::tuple<Fault, Dims>>& info) {
      return absl::StrCat(kNames[std::get<0>(info.param)],
                          absl::StrJoin(std::get<1>(info.param), "x"));
    });

// Both sides of a divergence are named with their op and specs.
TEST(StepFaults, MessageNamesOpsAndSpecs) {
  const Outcome outcome = Train({3}, kOtherOp, 1);
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

// On 2 x 2 every row of tp has a rank that does otherwise.
const Dims kShapes[] = {{2}, {2, 2}};
bool First(const RankContext& context) { return context.rank() % 2 == 0; }

// The same values moved to other placements by collectives that look alike.
TEST(StepFaults, OtherSpecSameCollective) {
  for (const Dims& shape : kShapes) {
    std::vector<absl::Status> seen(Numel(shape));
    const absl::Status all = RunSpmd(Numel(shape), [&](RankContext& context) -> absl::Status {
      const DeviceMesh mesh = MeshOf(shape);
      // A gather of [4, 4] from rows and one from columns of halves move tensors of the same shape.
      const Placement from = Shard(First(context));
      const DTensor x = ones({4, 4}, {.mesh = mesh, .placements = OverTp(mesh, from, false)});
      try {
        x.Redistribute(OverTp(mesh, Replicate(), false));
      } catch (const Error& error) {
        seen[context.rank()] = error.status();
      }
      return seen[context.rank()];
    });
    EXPECT_FALSE(all.ok());
    const bool one = shape.size() == 1;
    const auto moved = [&](const char* from) {
      return HasSubstr(absl::StrCat("float32 [4, 4] on ", one ? "tp=2 [" : "dp=2 tp=2 [R, ", from,
                                    "] to float32 [4, 4]"));
    };
    for (const absl::Status& status : seen) {
      EXPECT_THAT(std::string(status.message()), ::testing::AllOf(moved("S(1)"), moved("S(0)")));
    }
  }
}

// The same op on the same specs, with another number: a wrong result but for the fingerprint.
TEST(StepFaults, OtherAttribute) {
  for (const Dims& shape : kShapes) {
    std::vector<absl::Status> seen(Numel(shape));
    const absl::Status all = RunSpmd(Numel(shape), [&](RankContext& context) -> absl::Status {
      const DeviceMesh mesh = MeshOf(shape);
      const DTensor x = ones({4, 4}, {.mesh = mesh, .placements = OverTp(mesh, Partial(), true)});
      try {
        add(x, First(context) ? 2.0 : 3.0);
      } catch (const Error& error) {
        seen[context.rank()] = error.status();
      }
      return seen[context.rank()];
    });
    EXPECT_FALSE(all.ok());
    for (const absl::Status& status : seen) {
      // Of two rows that see it, the second to say so may have been stopped by the first.
      if (shape.size() == 1) {
        EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      } else {
        EXPECT_FALSE(status.ok());
      }
      EXPECT_THAT(std::string(status.message()),
                  ::testing::AllOf(
                      HasSubstr("collectives differ"), HasSubstr("(with other attributes)"),
                      ::testing::AnyOf(HasSubstr("rank 0 issued"), HasSubstr("rank 2 issued")),
                      ::testing::AnyOf(HasSubstr("rank 1 issued"), HasSubstr("rank 3 issued"))));
    }
  }
}

}  // namespace
}  // namespace dtensor::step_faults_test

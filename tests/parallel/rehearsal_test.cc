// Explanations and runs in any order: a run after an explanation is the run without one, whatever
// tensors the program captures, writes to, keeps or gives gradients to.
#include "dtensor/rehearsal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/explain.h"
#include "tests/parallel/support.h"

namespace dtensor::rehearsal_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::MessageOf;

// A module that captures a tensor which is not a parameter of its own.
class Captures : public Module {
 public:
  using Use = std::function<DTensor(Captures&, const DTensor& h)>;
  Captures(DTensor buffer, Use use) : buffer_(std::move(buffer)), use_(std::move(use)) {
    AddParameter("w", {8, 8}, Init::Ones());
  }
  const DTensor& buffer() const { return buffer_; }
  std::string type_name() const override { return "Captures"; }
  DTensor kept;
  using Module::Cached;

 protected:
  Values Forward(const Values& in) override {
    return {use_(*this, matmul(in[0], FindParameter("w")->tensor()))};
  }

 private:
  DTensor buffer_;
  Use use_;
};

// Everything that a run leaves: loss, gradients, the buffer, what was communicated.
struct Left {
  std::vector<double> numbers;
  std::vector<std::string> events;
  friend bool operator==(const Left&, const Left&) = default;
};

std::vector<std::string> Lines(const std::vector<CommEvent>& events) {
  std::vector<std::string> lines;
  for (const CommEvent& e : events) {
    lines.push_back(absl::StrCat(std::string(Name(e.kind)), " ", e.mesh_dims, " ", e.bytes, " ",
                                 e.module, " ", e.op, e.implicit ? " implicit" : ""));
  }
  return lines;
}

struct Setting {
  Placement placement = Replicate();
  bool requires_grad = false;
  Captures::Use use;
};

std::unique_ptr<Captures> Build(const Setting& setting, const DeviceMesh& mesh) {
  DTensor buffer = ones({2, 8, 8}, {.mesh = mesh, .placements = {Shard(0)}}) * 1.5;
  buffer = sum(buffer, {0}).Redistribute({setting.placement}).Detach();
  if (setting.requires_grad) buffer.RequiresGrad();
  auto model = std::make_unique<Captures>(buffer, setting.use);
  model->FindParameter("w")->Place(mesh, {Replicate()});
  Materialize(*model);
  return model;
}

Left Run(Captures& model, const DTensor& x) {
  Left left;
  const CommTrace trace;
  const DTensor loss = sum(model(x));
  loss.Backward();
  left.numbers.push_back(loss.Item());
  for (const DTensor& t : {model.FindParameter("w")->tensor().grad(), model.buffer().grad(),
                           model.buffer().Detach()}) {
    if (!t.defined()) continue;
    const std::vector<double> values = t.ToVector<double>();
    left.numbers.insert(left.numbers.end(), values.begin(), values.end());
  }
  left.events = Lines(trace.events());
  return left;
}

// "e" explains, "r" runs: the runs of every order are those without the explanations.
void ExpectNoTrace(const Setting& setting) {
  const absl::Status status = RunSpmd(2, [&](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = ones({8, 8}, {.mesh = mesh});
    std::vector<Left> want;
    const std::unique_ptr<Captures> plain = Build(setting, mesh);
    for (int k = 0; k < 3; ++k) want.push_back(Run(*plain, x));
    for (const char* order : {"errr", "rerr", "erer", "eerer"}) {
      const std::unique_ptr<Captures> model = Build(setting, mesh);
      size_t runs = 0;
      for (const char step : std::string(order)) {
        if (step == 'r') {
          const Left left = Run(*model, x);
          EXPECT_EQ(left, want[runs++]) << order << " on rank " << rank.rank();
          continue;
        }
        DT_ASSIGN_OR_RETURN(const ModuleExplanation e, Explain(*model, {x}));
        EXPECT_EQ(e.ended, "");
        const std::vector<std::string> events = Lines(e.events);
        const std::vector<std::string>& run = want[runs].events;
        const size_t n = std::min(events.size(), run.size());  // a run also reads the values
        EXPECT_EQ(events, std::vector<std::string>(run.begin(), run.begin() + n));
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Rehearsal, CapturedTensorsThatAreRedistributed) {
  ExpectNoTrace({Shard(0), false, [](Captures& m, const DTensor& h) { return h * m.buffer(); }});
  ExpectNoTrace(
      {Partial(), false, [](Captures& m, const DTensor& h) { return h * relu(m.buffer()); }});
  ExpectNoTrace({Shard(0), false, [](Captures& m, const DTensor& h) {
                   return h * m.buffer().Redistribute({Replicate()}, {.shared = true});
                 }});
  ExpectNoTrace({Shard(0), false, [](Captures& m, const DTensor& h) {
                   return h * m.buffer().Redistribute({Replicate()});
                 }});
  ExpectNoTrace({Shard(1), false, [](Captures& m, const DTensor& h) {
                   return h * m.buffer().Redistribute({Replicate()}, {.async = true});
                 }});
}

TEST(Rehearsal, CapturedLeavesAndTheirGradients) {
  for (const Placement& p : {Replicate(), Shard(0)}) {
    ExpectNoTrace({p, true, [](Captures& m, const DTensor& h) { return h * m.buffer(); }});
    ExpectNoTrace({p, true, [](Captures& m, const DTensor& h) {
                     return CustomFunction(
                         "own", {m.buffer()}, [&] { return Values{h * 2}; },
                         [](const Values& g) { return Values{g[0]}; })[0];
                   }});
  }
}

TEST(Rehearsal, CapturedTensorsThatAreWrittenTo) {
  ExpectNoTrace({Replicate(), false, [](Captures& m, const DTensor& h) {
                   {
                     const NoGrad no_grad;
                     mul_(m.buffer(), 0.5);
                   }
                   return h * m.buffer();
                 }});
  ExpectNoTrace({Shard(0), false, [](Captures& m, const DTensor& h) {
                   {
                     const NoGrad no_grad;
                     add_(transpose(m.buffer(), 0, 1), 1.0);
                   }
                   return h * m.buffer();
                 }});
  ExpectNoTrace({Replicate(), true, [](Captures& m, const DTensor& h) {
                   DTensor(m.buffer()).ZeroGrad();
                   return h * m.buffer();
                 }});
}

TEST(Rehearsal, TablesMadeOnFirstUse) {
  ExpectNoTrace({Shard(0), false, [](Captures& m, const DTensor& h) {
                   return h * m.Cached("twice", [&] {
                     const NoGrad no_grad;
                     return m.buffer().Redistribute({Replicate()}) * 2;
                   });
                 }});
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = ones({8, 8}, {.mesh = mesh});
    const Setting setting = {Replicate(), false, [](Captures& m, const DTensor& h) {
                               if (!m.kept.defined()) m.kept = m.buffer() * 2;
                               return h * m.kept;
                             }};
    const std::unique_ptr<Captures> model = Build(setting, mesh);
    DT_RETURN_IF_ERROR(Explain(*model, {x}).status());
    EXPECT_THAT(MessageOf([&] { (*model)(x); }),
                AllOf(HasSubstr("[mul]"), HasSubstr("input y"),
                      HasSubstr("float32 [8, 8] on tp=2 [R] was made in a rehearsal")));
    EXPECT_THAT(MessageOf([&] { model->kept.ToVector<double>(); }), HasSubstr("in a rehearsal"));
    EXPECT_THAT(MessageOf([&] { model->kept.Detach(); }), HasSubstr("[detach]"));
    EXPECT_THAT(MessageOf([&] { model->kept.grad(); }), HasSubstr("[grad]"));
    EXPECT_THAT(MessageOf([&] { model->kept.local(); }), HasSubstr("[local]"));
    EXPECT_THAT(MessageOf([&] { model->kept.Redistribute({Shard(0)}); }),
                HasSubstr("[redistribute]"));
    EXPECT_THAT(MessageOf([&] { FromLocal(model->kept.ToLocal(), mesh, {Replicate()}); }),
                HasSubstr("[to_local]"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Rehearsal, WhatReadsValuesEndsIt) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = ones({8, 8}, {.mesh = mesh});
    const Captures::Use readers[] = {
        [](Captures& m, const DTensor& h) { return h * m.buffer().ToVector<double>()[3]; },
        [](Captures& m, const DTensor& h) { return h * sum(m.buffer()).Item(); },
        [](Captures& m, const DTensor& h) { return h * m.buffer().local().data_as<float>()[0]; },
        [](Captures&, const DTensor& h) { return h * h.local().data_as<float>()[0]; },
    };
    for (const Captures::Use& use : readers) {
      const std::unique_ptr<Captures> model = Build({Shard(0), false, use}, mesh);
      DT_ASSIGN_OR_RETURN(const ModuleExplanation e, Explain(*model, {x}));
      EXPECT_THAT(e.ended, AllOf(HasSubstr("has no values"), HasSubstr("asked for after")));
      EXPECT_THAT(e.ToString(), HasSubstr("ended early: "));
      EXPECT_THAT(e.ToString(/*all=*/true), HasSubstr("Captures  matmul  forward"));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Rehearsal, AnyFunctionOfTensorsATrainingStepAmongThem) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    DTensor w = ones({6, 4}, {.mesh = mesh});
    w.RequiresGrad();
    const DTensor x = ones({8, 6}, {.mesh = mesh, .placements = {Shard(0)}});
    const auto step = [&](const Values& in) -> Values {
      const DTensor loss = mean(matmul(in[0], w));
      loss.Backward();
      const NoGrad no_grad;
      add_(w, w.grad() * -0.1);
      w.ZeroGrad();
      return {loss};
    };
    DT_ASSIGN_OR_RETURN(const ModuleExplanation e, Explain(step, {x}, {.backward = false}));
    EXPECT_FALSE(w.grad().defined());
    EXPECT_EQ(w.ToVector<double>(), std::vector<double>(24, 1));
    EXPECT_GT(e.modelled_us, 0);
    const CommTrace trace;
    step({x});
    EXPECT_EQ(Lines(e.events), Lines(trace.events()));
    EXPECT_GT(trace.TotalCount(), 0);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Rehearsal, GradientsThatWaitAreKnownToIt) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    DTensor w = ones({6, 4}, {.mesh = mesh});
    w.RequiresGrad();
    const DTensor x = ones({8, 6}, {.mesh = mesh, .placements = {Shard(0)}});
    const auto half = [&](const Values& in) -> Values { return {sum(matmul(in[0], w))}; };
    {
      const NoGradSync no_sync;
      half({x})[0].Backward();
    }
    DT_ASSIGN_OR_RETURN(const ModuleExplanation e, Explain(half, {x}));
    const CommTrace trace;
    half({x})[0].Backward();
    EXPECT_EQ(Lines(e.events), Lines(trace.events()));
    EXPECT_EQ(w.grad().ToVector<double>(), std::vector<double>(24, 16));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Rehearsal, InsideOfBackwardAndOfAnotherOne) {
  DTensor w = ones({3}), x = ones({3});
  w.RequiresGrad();
  const auto program = [&](const Values& in) -> Values { return {sum(in[0] * w)}; };
  int64_t told = 0;
  const auto backward = [&](const Values& g) -> Values {
    told += static_cast<int64_t>(ValueOrThrow(Explain(program, {x})).calls.size());
    return {g[0]};
  };
  const auto forward = [&] { return Values{w * 1.0}; };
  const auto outer = [&](const Values&) -> Values {
    return {sum(CustomFunction("explains", {w}, forward, backward)[0])};
  };
  ASSERT_TRUE(Explain(outer, {}).ok());
  EXPECT_GT(told, 0);
  EXPECT_FALSE(w.grad().defined());
  outer({})[0].Backward();
  EXPECT_EQ(w.grad().ToVector<double>(), std::vector<double>({1, 1, 1}));
}

TEST(Rehearsal, CollectivesOfPlainTensorsAreRefused) {
  const absl::Status status = RunSpmd(2, [&](RankContext& rank) -> absl::Status {
    if (rank.rank() == 1) return absl::OkStatus();
    const CostModel cost;
    const Rehearsal rehearsal(cost);
    DT_ASSIGN_OR_RETURN(Comm * comm, rank.WorldComm());
    const Tensor t = ValueOrThrow(Tensor::Full({2}, DType::kF32, 1));
    EXPECT_THAT(std::string(comm->AllReduce(t, t, ReduceOp::kSum).Wait().message()),
                HasSubstr("in a rehearsal (Explain) there are no peers"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::rehearsal_test

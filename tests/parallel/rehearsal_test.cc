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

// Runs what it is given as a module call.
class Inner : public Module {
 public:
  std::function<DTensor()> body;

 protected:
  Values Forward(const Values&) override { return {body()}; }
};

// A module that reads a tensor which is not a parameter: one that it captures, or its buffer.
class Captures : public Module {
 public:
  using Use = std::function<DTensor(Captures&, const DTensor& h)>;
  // `values`: what it captures; on Self what its buffer holds.
  Captures(DTensor values, Use use) : captured_(std::move(values)), use_(std::move(use)) {
    AddParameter("w", {8, 8}, Init::Ones());
    if (captured_.mesh().is_self()) own_ = &AddBuffer("buffer", captured_);
  }
  const DTensor& buffer() const { return own_ == nullptr ? captured_ : own_->tensor(); }
  std::string type_name() const override { return "Captures"; }
  DTensor Inside(const std::function<DTensor()>& body) {
    inner_.body = body;
    return inner_(buffer());
  }
  DTensor kept;
  using Module::Cached;

 protected:
  Values Forward(const Values& in) override {
    return {use_(*this, matmul(in[0], FindParameter("w")->tensor()))};
  }

 private:
  DTensor captured_;
  Parameter* own_ = nullptr;
  Inner& inner_ = AddChild<Inner>("inner");
  Use use_;
};

// Everything that a run leaves: loss, gradients, the buffer, what was communicated by the run and
// by reading all these.
struct Left {
  std::vector<double> numbers;
  std::vector<std::string> events, reading;
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
  bool own = false;  // a buffer of the module (AddBuffer) instead of a tensor that it captures
};

// A model of recipes.
std::unique_ptr<Captures> Build(const Setting& setting, const DeviceMesh& mesh) {
  const std::vector<double> values = testing::Integers(64, 5);
  std::unique_ptr<Captures> model;
  if (setting.own) {
    model = std::make_unique<Captures>(FromVector(values, {8, 8}, {}), setting.use);
    model->FindParameter("buffer")->Place(mesh, {setting.placement});
  } else {
    DTensor buffer = FromVector(values, {8, 8}, {.mesh = mesh}).Redistribute({setting.placement});
    buffer = buffer.Detach();
    if (setting.requires_grad) buffer.RequiresGrad();
    model = std::make_unique<Captures>(buffer, setting.use);
  }
  model->FindParameter("w")->Place(mesh, {Replicate()});
  return model;
}

DTensor LossOf(const Values& outputs) { return sum(outputs[0]); }

Left RunOnce(Captures& model, const DTensor& x) {
  Left left;
  const CommTrace trace;
  const DTensor loss = LossOf({model(x)});
  loss.Backward();
  left.events = Lines(trace.events());
  const CommTrace reading;
  left.numbers.push_back(loss.Item());
  for (const DTensor& t : {model.FindParameter("w")->tensor().grad(), model.buffer().grad(),
                           model.buffer().Detach()}) {
    if (!t.defined()) continue;
    const std::vector<double> values = t.ToVector<double>();
    left.numbers.insert(left.numbers.end(), values.begin(), values.end());
  }
  left.reading = Lines(reading.events());
  return left;
}

// "e" explains, "r" runs, "m" makes the values: the runs of every order are those without the
// explanations, and every explanation is what the run after it communicates, no less and no more.
// Of runs after an explanation before "m" parameters and buffers were recipes.
void ExpectNoTrace(const Setting& setting) {
  const absl::Status status = RunSpmd(2, [&](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = ones({8, 8}, {.mesh = mesh});
    std::vector<Left> want;
    const std::unique_ptr<Captures> plain = Build(setting, mesh);
    Materialize(*plain);
    for (int k = 0; k < 4; ++k) want.push_back(RunOnce(*plain, x));
    for (const char* order : {"merrr", "mrerr", "merer", "meerer", "emrr", "ememer", "mrrre"}) {
      const std::unique_ptr<Captures> model = Build(setting, mesh);
      size_t runs = 0;
      for (const char step : std::string(order)) {
        if (step == 'm') {
          Materialize(*model);
          continue;
        }
        if (step == 'r') {
          const Left left = RunOnce(*model, x);
          EXPECT_EQ(left, want[runs++]) << order << " on rank " << rank.rank();
          continue;
        }
        DT_ASSIGN_OR_RETURN(const ModuleExplanation e, Explain(*model, {x}, {.loss = LossOf}));
        EXPECT_EQ(e.ended, "");
        EXPECT_EQ(Lines(e.events), want[runs].events)
            << order << ", run " << runs << " on rank " << rank.rank();
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Of a captured tensor and of a buffer, which has no pending placement and needs no gradient.
void ExpectNoTraceOfEither(Setting setting) {
  ExpectNoTrace(setting);
  setting.own = true;
  ExpectNoTrace(setting);
}

TEST(Rehearsal, TensorsThatAreRedistributed) {
  ExpectNoTraceOfEither(
      {Shard(0), false, [](Captures& m, const DTensor& h) { return h * m.buffer(); }});
  ExpectNoTrace(
      {Partial(), false, [](Captures& m, const DTensor& h) { return h * relu(m.buffer()); }});
  ExpectNoTraceOfEither({Shard(0), false, [](Captures& m, const DTensor& h) {
                           return h * m.buffer().Redistribute({Replicate()}, {.shared = true});
                         }});
  ExpectNoTraceOfEither({Shard(0), false, [](Captures& m, const DTensor& h) {
                           return h * m.buffer().Redistribute({Replicate()});
                         }});
  ExpectNoTraceOfEither({Shard(1), false, [](Captures& m, const DTensor& h) {
                           return h * m.buffer().Redistribute({Replicate()}, {.async = true});
                         }});
}

// What is gathered of a module's own tensor goes with the call that gathered it unless the tape
// holds it; of another tensor it stays. So the own one is gathered once more.
TEST(Rehearsal, GatheredCopiesLiveAsLongAsInARun) {
  Setting setting = {Shard(0), false, [](Captures& m, const DTensor& h) {
                       const auto gather = [&] {
                         return m.buffer().Redistribute({Replicate()}, {.shared = true});
                       };
                       {
                         const NoGrad no_grad;
                         m.Inside([&] { return gather() * 2; });
                       }
                       const DTensor first = m.Inside([&] { return h * gather(); });
                       return first + m.Inside([&] { return h * (gather() * 2); });
                     }};
  ExpectNoTraceOfEither(setting);
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = ones({8, 8}, {.mesh = mesh});
    size_t gathered[2] = {};
    for (const bool own : {false, true}) {
      Setting of = setting;
      of.own = own;
      const std::unique_ptr<Captures> model = Build(of, mesh);
      Materialize(*model);
      gathered[own ? 1 : 0] = RunOnce(*model, x).events.size();
    }
    EXPECT_EQ(gathered[1], gathered[0] + 1);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
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

TEST(Rehearsal, TensorsThatAreWrittenTo) {
  ExpectNoTraceOfEither({Replicate(), false, [](Captures& m, const DTensor& h) {
                           {
                             const NoGrad no_grad;
                             mul_(m.buffer(), 0.5);
                           }
                           return h * m.buffer();
                         }});
  ExpectNoTraceOfEither({Shard(0), false, [](Captures& m, const DTensor& h) {
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
  ExpectNoTraceOfEither({Shard(0), false, [](Captures& m, const DTensor& h) {
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
    Materialize(*model);
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
      for (const bool own : {false, true}) {
        const std::unique_ptr<Captures> model = Build({Shard(0), false, use, own}, mesh);
        for (const bool recipes : {true, false}) {
          if (!recipes) Materialize(*model);
          DT_ASSIGN_OR_RETURN(const ModuleExplanation e, Explain(*model, {x}));
          EXPECT_THAT(e.ended, AllOf(HasSubstr("has no values"), HasSubstr("asked for after")));
          EXPECT_THAT(e.ToString(), HasSubstr("ended early: "));
          EXPECT_THAT(e.ToString(/*all=*/true), HasSubstr("Captures  matmul  forward"));
        }
      }
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

// What a run may write to an explanation may: a tensor with a history is no leaf, although Backward
// of the explanation ends at it.
TEST(Rehearsal, AHistoryMayBeChangedInPlaceWhileRecording) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    DTensor x = ones({4, 2}, {.mesh = mesh, .placements = {Shard(0)}});
    x.RequiresGrad();
    const DTensor h = x * 3.0;
    const auto square = [&](const Values&) -> Values {
      add_(h, 1.0);
      return {h * h};
    };
    DT_ASSIGN_OR_RETURN(const ModuleExplanation e, Explain(square, {}, {.loss = LossOf}));
    EXPECT_EQ(e.ended, "");
    const CommTrace trace;
    LossOf(square({})).Backward();
    EXPECT_EQ(Lines(e.events), Lines(trace.events()));
    EXPECT_EQ(x.grad().ToVector<double>(), std::vector<double>(8, 24));  // 2 (3 x + 1) 3

    const auto leaf = [&](const Values&) -> Values { return {add_(x, 1.0)}; };
    EXPECT_THAT(std::string(Explain(leaf, {}, {.loss = LossOf}).status().message()),
                HasSubstr("a leaf that requires grad cannot be changed in place"));
    EXPECT_THAT(MessageOf([&] { leaf({}); }),
                HasSubstr("a leaf that requires grad cannot be changed in place"));
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

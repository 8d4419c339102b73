// Explain(op) is the run: collectives, bytes and outputs, for the ops and samples of the judge
// under placements that fit and placements that do not. And it leaves nothing behind.
// DT_EXPLAIN_CALLS: placements per sample and mesh (default few).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "absl/strings/str_join.h"
#include "dtensor/explain.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/verify_samples.h"
#include "dtensor/tensor/status.h"
#include "tests/common/message.h"
#include "tests/common/thin.h"

namespace dtensor::testing::explain_run_test {
namespace {

using ::testing::HasSubstr;

std::string Line(const CommEvent& e) {
  return absl::StrCat(std::string(Name(e.kind)), " ", e.mesh_dims, " ",
                      e.implicit ? "implicit " : "", e.bytes, " of ", e.payload_bytes, " ", e.op);
}
std::string Lines(const std::vector<CommEvent>& events) {
  std::string text;
  for (const CommEvent& e : events) absl::StrAppend(&text, Line(e), "\n");
  return text;
}

// One input, on this rank's side of the placements.
DTensor Make(const VerifyInput& in, const DeviceMesh& mesh, const Placements& placements) {
  std::vector<double> values = in.values;
  for (int64_t i = 0; values.size() < static_cast<size_t>(Numel(in.shape)); ++i) {
    values.push_back(static_cast<double>(1 + i * 7 % 5));
  }
  const DTensor whole = FromVector(values, in.shape, {.dtype = in.dtype, .mesh = mesh});
  return whole.Redistribute(placements);
}

Placements Drawn(std::mt19937_64& random, const VerifyInput& in, int mesh_dims) {
  Placements p;
  for (int m = 0; m < mesh_dims; ++m) {
    const auto choice = static_cast<int>(random() % (in.shape.size() + 2));
    if (choice < static_cast<int>(in.shape.size())) {
      p.push_back(Shard(choice));
    } else {
      const bool pending = choice > static_cast<int>(in.shape.size()) && IsFloating(in.dtype);
      p.push_back(pending ? Partial() : Replicate());
    }
  }
  return p;
}

// "" where the explanation is what then happens.
std::string Compare(const OpDef& op, const VerifySample& sample, const std::vector<DTensor>& made) {
  Attrs attrs = sample.attrs;
  if (sample.ints_attr >= 0) attrs[sample.ints_attr] = IntsAttr(sample.ints);
  std::vector<const DTensor*> inputs;
  for (const DTensor& t : made) inputs.push_back(&t);
  const absl::StatusOr<Explanation> told = Explain(op, inputs, attrs);
  const CommTrace trace;
  const absl::StatusOr<Values> outputs = Dispatch(op, inputs, attrs);
  if (told.ok() != outputs.ok()) {
    return absl::StrCat("told ", told.status().ToString(), ", got ", outputs.status().ToString());
  }
  if (!told.ok()) return told.status() == outputs.status() ? "" : "another error";
  std::string specs, told_specs = absl::StrJoin(told->output_specs, "\n");
  for (const DTensor& y : *outputs) {
    absl::StrAppend(&specs, specs.empty() ? "" : "\n", y.spec().ToString());
  }
  if (specs != told_specs) return absl::StrCat("outputs: told ", told_specs, ", got ", specs);
  const std::string events = Lines(trace.events()), told_events = Lines(told->events);
  if (events != told_events) return absl::StrCat("told\n", told_events, "got\n", events);
  return "";
}

int64_t CallsPerSample() {
  const char* text = std::getenv("DT_EXPLAIN_CALLS");
  return text == nullptr ? 4 : std::atoll(text);
}

// All ranks run; one explains.
int64_t CheckSamples(const Dims& mesh_shape, int64_t calls) {
  int64_t compared = 0;
  const absl::Status status = RunSpmd(Numel(mesh_shape), [&](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh = *DeviceMesh::Create(mesh_shape);
    std::mt19937_64 random(11);
    size_t number = 0;
    for (const VerifyCase& c : VerifyCases()) {
      if (!testing::InTurn(number++, 4)) continue;
      for (const VerifySample& sample : c.samples) {
        for (int64_t k = 0; k < calls; ++k) {
          std::vector<DTensor> inputs;
          std::string text;
          for (const VerifyInput& in : sample.inputs) {
            const Placements p = Drawn(random, in, mesh.ndim());
            inputs.push_back(Make(in, mesh, p));
            absl::StrAppend(&text, " ", inputs.back().spec().ToString());
          }
          const bool explains = static_cast<int64_t>(random() % mesh.size()) == rank.rank();
          const OpDef& op = GetOp(c.op);
          if (explains) {
            EXPECT_EQ(Compare(op, sample, inputs), "") << c.op << text;
            ++compared;  // one rank at a time: the others wait for it, or it for them
          } else {
            Attrs attrs = sample.attrs;
            if (sample.ints_attr >= 0) attrs[sample.ints_attr] = IntsAttr(sample.ints);
            std::vector<const DTensor*> pointers;
            for (const DTensor& t : inputs) pointers.push_back(&t);
            Dispatch(op, pointers, attrs).status().IgnoreError();
          }
          DT_ASSIGN_OR_RETURN(Comm * world, rank.WorldComm());
          const Tensor one = ValueOrThrow(Tensor::Full({1}, DType::kF32, 1));
          DT_RETURN_IF_ERROR(world->AllReduce(one, one, ReduceOp::kSum).Wait());
        }
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return compared;
}

TEST(ExplainRun, SamplesOfTheJudgeOnTwoRanks) {
  EXPECT_GT(CheckSamples({2}, CallsPerSample()), 500 / testing::Thin(8));
}
TEST(ExplainRun, SamplesOfTheJudgeOnThreeRanks) {
  EXPECT_GT(CheckSamples({3}, CallsPerSample() / 2), 250 / testing::Thin(8));
}
TEST(ExplainRun, SamplesOfTheJudgeOnTwoByTwo) {
  EXPECT_GT(CheckSamples({2, 2}, CallsPerSample() / 2), 250 / testing::Thin(8));
}

TEST(ExplainRun, Decompositions) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2});
    const DTensor x = ones({4, 1024}, {.mesh = mesh, .placements = {Shard(1)}});
    const DTensor* inputs[] = {&x};
    const Attr dim[] = {IntAttr(1)};
    DT_ASSIGN_OR_RETURN(const Explanation e, Explain(GetOp("log_softmax"), inputs, dim));
    CommTrace trace;
    const DTensor y = log_softmax(x, 1);
    EXPECT_EQ(Lines(e.events), Lines(trace.events()));
    EXPECT_GT(trace.TotalCount(), 1);
    EXPECT_LT(trace.TotalBytes(), 200);
    EXPECT_EQ(e.chosen.outputs[0], Placements({Shard(1)}));
    EXPECT_GT(e.made_of.size(), 3u);
    EXPECT_THAT(e.why, HasSubstr("as other ops"));
    EXPECT_LE(e.chosen.bytes, e.alternatives[0].bytes);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ExplainRun, WhatIsThereFromAnEarlierCallIsNotMovedAgain) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2});
    const DTensor x = ones({4, 6}, {.mesh = mesh, .placements = {Shard(0)}});
    const DTensor w = ones({6, 4}, {.mesh = mesh, .placements = {Shard(0)}});
    const DTensor* inputs[] = {&x, &w};
    for (int k = 0; k < 2; ++k) {
      DT_ASSIGN_OR_RETURN(const Explanation e, Explain(GetOp("matmul"), inputs));
      DT_ASSIGN_OR_RETURN(const Explanation again, Explain(GetOp("matmul"), inputs));
      EXPECT_EQ(Lines(e.events), Lines(again.events));  // the first left nothing
      CommTrace trace;
      const DTensor y = matmul(x, w);
      EXPECT_EQ(Lines(e.events), Lines(trace.events()));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ExplainRun, ErrorsAreThoseOfTheCall) {
  const DTensor x = ones({2, 3}), w = ones({2, 3}), null;
  const DTensor* bad[] = {&x, &w};
  EXPECT_EQ(Explain(GetOp("matmul"), bad).status(), Dispatch(GetOp("matmul"), bad).status());
  const DTensor* without[] = {&x, &null};
  EXPECT_EQ(Explain(GetOp("matmul"), without).status(),
            Dispatch(GetOp("matmul"), without).status());
  DTensor leaf = ones({2});
  leaf.RequiresGrad();
  const DTensor* in_place[] = {&leaf, &leaf};
  const Attr one[] = {IntAttr(1)};
  EXPECT_THAT(std::string(Explain(GetOp("add_"), in_place, one).status().message()),
              HasSubstr("a leaf that requires grad cannot be changed in place"));
}

}  // namespace
}  // namespace dtensor::testing::explain_run_test

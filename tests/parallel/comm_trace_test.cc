// To whom communication is attributed: module, op, direction, implicit or asked for; and what
// EXPECT_COMM says when a budget is not kept.
#include "dtensor/mesh/comm_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include "absl/strings/str_split.h"
#include "dtensor/mesh/expect_comm.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "tests/parallel/support.h"

namespace dtensor::comm_trace_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr CollectiveKind kAllReduce = CollectiveKind::kAllReduce;
constexpr CollectiveKind kAllGather = CollectiveKind::kAllGather;

GPTConfig Small(bool recompute) {
  return {.vocab = 16, .seq = 8, .layers = 2, .hidden = 8, .heads = 2, .recompute = recompute};
}

// Traces a step of a GPT on dp=2 tp=2.
void TraceStep(bool recompute, const std::function<void(const CommTrace&)>& check) {
  const absl::Status status = RunSpmd(4, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh = testing::DpTp(2, 2);
    GPT model(Small(recompute));
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, GPTPlan(model.config())));
    Materialize(model);
    const DTensor ids = FromVector<int64_t>(
        {0, 1, 2, 3, 4, 5, 6, 7}, {2, 4},
        {.dtype = DType::kI64, .mesh = mesh, .placements = {Shard(0), Replicate()}});
    CommTrace trace;
    cross_entropy(flatten(model(ids), 0, 1), flatten(ids, 0, 1)).Backward();
    check(trace);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(CommTrace, NamesTheModuleOfForwardAndOfBackward) {
  TraceStep(/*recompute=*/false, [](const CommTrace& trace) {
    EXPECT_COMM(
        trace,
        // Forward: where the plan reduces.
        {.kind = kAllReduce,
         .phase = CommPhase::kForward,
         .module = "tokens",
         .count = 1,
         .bytes = 4 * 8 * 4},  // [1, 4, 8] over two ranks
        {.kind = kAllReduce,
         .phase = CommPhase::kForward,
         .module = "blocks.*.attn.wo",
         .count = 2},
        {.kind = kAllReduce,
         .phase = CommPhase::kForward,
         .module = "blocks.*.mlp.down",
         .count = 2},
        {.phase = CommPhase::kForward, .module = "", .op = "cross_entropy", .count = 3},
        {.phase = CommPhase::kForward, .count = 0},
        // Backward over tp: once for each value that sharded layers read, where it was made.
        {.mesh_dims = "tp", .module = "blocks.*.norm?", .op = "layer_norm", .count = 4},
        {.mesh_dims = "tp", .module = "norm", .op = "layer_norm", .count = 1},
        {.mesh_dims = "tp", .count = 0},
        // Backward over dp: all parameters together, those of no one module.
        {.mesh_dims = "dp", .module = "", .op = "gradient", .count = 1});
  });
}

TEST(CommTrace, ARecomputedModuleIsNamedByItself) {
  TraceStep(/*recompute=*/true, [](const CommTrace& trace) {
    int64_t again = 0;
    for (const CommEvent& e : trace.events()) {
      again += e.phase == CommPhase::kBackward && e.module == "blocks.1.attn.wo" &&
               e.mesh_dims == "tp" && e.op == "redistribute";
    }
    EXPECT_EQ(again, 1) << trace.ToString(CommBy::kOp);
  });
}

TEST(CommTrace, ImplicitMovesNameTheOpThatAskedForThem) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = ones({4, 4}, {.mesh = mesh, .placements = {Shard(1)}});
    const DTensor w = ones({4}, {.mesh = mesh});
    CommTrace trace;
    layer_norm(x, {4}, w);
    x.Redistribute({Replicate()});
    EXPECT_COMM(trace,
                {.kind = CollectiveKind::kExchange,
                 .module = "",
                 .op = "layer_norm",
                 .implicit = true,
                 .count = 1,
                 .bytes = 16},
                {.kind = kAllGather, .op = "redistribute", .implicit = false, .count = 1});
    EXPECT_THAT(trace.ToString(CommBy::kOp),
                AllOf(HasSubstr("layer_norm    implicit  exchange"),
                      HasSubstr("redistribute            all_gather")));
    EXPECT_THAT(trace.ToString(), Not(HasSubstr("layer_norm")));
    layer_norm(x + 1, {4}, w);
    EXPECT_EQ(trace.Rows(CommBy::kOp).size(), 2u);
    EXPECT_EQ(trace.Rows(CommBy::kOp)[1].count, 2);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(CommTrace, ColumnsAreAsWideAsTheirWidestCell) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"a_long_name_of_a_mesh_dim"});
    Sequential outer;
    Sequential* inner = &outer;
    for (int i = 0; i < 20; ++i) inner = &inner->Append<Sequential>();  // "0.0.0. ..."
    inner->AddPreHook(
        [](Module&, const Values& in) { return Values{in[0].Redistribute({Replicate()})}; });
    CommTrace trace;
    outer(ones({4}, {.mesh = mesh, .placements = {Shard(0)}}));
    const std::vector<std::string> lines =
        absl::StrSplit(trace.ToString(CommBy::kOp), '\n', absl::SkipEmpty());
    EXPECT_EQ(lines.size(), 2u);
    EXPECT_EQ(lines[0].size(), lines[1].size());
    for (const char* column : {"module", "op", "collective", "mesh dims", "phase"}) {
      const size_t at = lines[0].find(column);
      EXPECT_NE(lines[1][at], ' ') << column;
      if (at > 0) {
        EXPECT_EQ(lines[1].substr(at - 2, 2), "  ") << column;
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(CommTrace, GroupsByModuleInTheOrderOfTheProgram) {
  TraceStep(/*recompute=*/false, [](const CommTrace& trace) {
    const std::vector<CommRow> rows = trace.Rows(CommBy::kModule);
    EXPECT_EQ(rows.front().module, "tokens");
    int64_t count = 0, bytes = 0;
    for (const CommRow& row : rows) {
      EXPECT_EQ(row.op, "");
      count += row.count;
      bytes += row.bytes;
    }
    EXPECT_EQ(count, trace.TotalCount());
    EXPECT_EQ(bytes, trace.TotalBytes());
  });
}

// What CommMismatch says of an all-gather of 64 bytes over tp in module "up".
std::string Mismatch(const std::vector<CommExpectation>& expected) {
  std::string why;
  const absl::Status status =
      RunFake({.world = 2, .rank = 0}, [&](RankContext& context) -> absl::Status {
        const DTensor x = ones({8, 4}, {.mesh = DeviceMesh({2}, {"tp"}), .placements = {Shard(0)}});
        CommTrace trace;
        const ScopedModule module(context.trace(), context.trace().PathOf("mlp.up"));
        x.Redistribute({Replicate()});
        why = CommMismatch(trace, expected);
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  return why;
}

TEST(ExpectComm, SaysWhichBudgetIsNotKept) {
  EXPECT_EQ(Mismatch({{.kind = kAllGather, .module = "mlp", .count = 1, .bytes = 64}}), "");
  EXPECT_EQ(Mismatch({{}}), "");  // anything
  EXPECT_EQ(Mismatch({{.max_bytes = 64}}), "");
  EXPECT_THAT(Mismatch({}), AllOf(HasSubstr("not expected: 1 collectives, 64 bytes"),
                                  HasSubstr("mlp.up"), HasSubstr("redistribute")));
  EXPECT_THAT(Mismatch({{.max_bytes = 63}}),
              HasSubstr("anything: expected at most bytes 63, got 64"));
  EXPECT_THAT(Mismatch({{.kind = kAllGather, .mesh_dims = "tp", .module = "m*", .count = 2}}),
              HasSubstr("all_gather over tp of module m*: expected count 2, got 1"));
  EXPECT_THAT(
      Mismatch({{.phase = CommPhase::kBackward, .op = "matmul", .implicit = true, .count = 1}}),
      HasSubstr("in backward by matmul implicit: expected count 1, got 0"));
  for (const CommExpectation& other : std::vector<CommExpectation>{{.kind = kAllReduce},
                                                                   {.mesh_dims = "dp"},
                                                                   {.phase = CommPhase::kBackward},
                                                                   {.module = "mlp.up.x"},
                                                                   {.module = "ml"},
                                                                   {.op = "matmul"},
                                                                   {.implicit = true}}) {
    EXPECT_THAT(Mismatch({other}), HasSubstr("not expected: 1 collectives"));
  }
}

TEST(ExpectComm, TheMacroFailsTheTest) {
  const absl::Status status = RunFake({.world = 2}, [&](RankContext&) -> absl::Status {
    CommTrace trace;
    EXPECT_COMM(trace);
    sum(ones({2}, {.mesh = DeviceMesh({2}, {"tp"}), .placements = {Shard(0)}})).Item();
    EXPECT_NONFATAL_FAILURE(EXPECT_COMM(trace), "not expected: 1 collectives");
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::comm_trace_test

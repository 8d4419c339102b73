// What the plans of Llama and GPT-2 communicate, block by block; nothing is moved that they do not
// say.
#include <gmock/gmock.h>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/parallel/hf_support.h"

namespace dtensor::hf_plan_test {
namespace {

using testing::HfFolder;

// Per block and phase: how many collectives of each kind.
using Counts = std::map<CollectiveKind, int64_t>;

// Each moves activations [2, 4, hidden] in float32 between two ranks, and no more.
Counts CountIn(const CommTrace& trace, const std::string& block, CommPhase phase, int64_t hidden) {
  Counts counts;
  const int64_t half = 2 * 4 * hidden * 4 / 2;
  for (const CommEvent& e : trace.events()) {
    if (!absl::StartsWith(e.module, block + ".") || e.phase != phase) continue;
    ++counts[e.kind];
    EXPECT_EQ(e.bytes, e.kind == CollectiveKind::kAllReduce ? 2 * half : half) << e.module;
  }
  return counts;
}

void CheckBlocks(const std::string& name, const ModelPlanOptions& plan, const Counts& forward,
                 const Counts& backward) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh = testing::DpTp(1, 2);
    DT_ASSIGN_OR_RETURN(const auto model, testing::LoadOn(mesh, HfFolder(name), DType::kF32, plan));
    const std::vector<int64_t> ids = {1, 2, 3, 4, 5, 6, 7, 8};
    const CommTrace trace;
    {
      const StrictRedistribute strict;
      const DTensor logits = (*model)(testing::Rows(ids, {2, 4}, mesh));
      const DTensor loss = cross_entropy(flatten(logits, 0, 1), testing::Rows(ids, {8}, mesh));
      loss.Backward();
    }
    // Of parameters that every rank has whole, in one.
    const auto is_bucket = [](const CommEvent& e) { return e.op == "gradient"; };
    EXPECT_EQ(absl::c_count_if(trace.events(), is_bucket), plan.sequence_parallel ? 1 : 0)
        << trace.ToString(CommBy::kOp);
    const std::string body = name == "gpt2" ? "transformer.h." : "model.layers.";
    const int64_t hidden =
        model
            ->FindParameter(body + "0." + (name == "gpt2" ? "ln_1" : "input_layernorm") + ".weight")
            ->numel();
    for (int64_t i = 0; i < model->layers(); ++i) {
      SCOPED_TRACE(i);
      const std::string block = body + std::to_string(i);
      EXPECT_EQ(CountIn(trace, block, CommPhase::kForward, hidden), forward) << trace.ToString();
      EXPECT_EQ(CountIn(trace, block, CommPhase::kBackward, hidden), backward)
          << trace.ToString(CommBy::kModule);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(HfPlans, TensorParallelBlocksReduceTwiceEachWay) {
  const Counts two = {{CollectiveKind::kAllReduce, 2}};
  CheckBlocks("llama-gqa", {}, two, two);
  CheckBlocks("llama-uneven", {}, two, two);
  CheckBlocks("gpt2", {}, two, two);
}

TEST(HfPlans, SequenceParallelBlocksGatherAndScatterTwiceEachWay) {
  const Counts each = {{CollectiveKind::kAllGather, 2}, {CollectiveKind::kReduceScatter, 2}};
  CheckBlocks("llama-gqa", {.sequence_parallel = true}, each, each);
  CheckBlocks("gpt2", {.sequence_parallel = true}, each, each);
}

// The collectives of one block in order, a line each.
std::string TraceOfBlock(const std::string& name, const std::string& block, bool sequence) {
  std::string text;
  const absl::Status status = RunSpmd(2, [&](RankContext& context) -> absl::Status {
    const DeviceMesh mesh = testing::DpTp(1, 2);
    DT_ASSIGN_OR_RETURN(const auto model, testing::LoadOn(mesh, HfFolder(name), DType::kF32,
                                                          {.sequence_parallel = sequence}));
    const std::vector<int64_t> ids = {1, 2, 3, 4, 5, 6, 7, 8};
    const CommTrace trace;
    const DTensor logits = (*model)(testing::Rows(ids, {2, 4}, mesh));
    cross_entropy(flatten(logits, 0, 1), testing::Rows(ids, {8}, mesh)).Backward();
    for (const CommEvent& e : trace.events()) {
      if (context.rank() != 0 || !absl::StartsWith(e.module, block + ".")) continue;
      absl::StrAppend(&text, std::string(Name(e.phase)), " ", e.module.substr(block.size() + 1),
                      " ", e.op, ": ", std::string(Name(e.kind)), " over ", e.mesh_dims, ", ",
                      e.bytes, " bytes\n");
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return text;
}

// Of activations [2, 4, 64] in float32, 2,048 bytes: all of them for an all-reduce of two ranks,
// half for a gather.
TEST(HfPlans, TheTraceOfABlock) {
  EXPECT_EQ(TraceOfBlock("llama-gqa", "model.layers.0", false),
            R"(forward self_attn.o_proj redistribute: all_reduce over tp, 2048 bytes
forward mlp.down_proj redistribute: all_reduce over tp, 2048 bytes
backward post_attention_layernorm rms_norm: all_reduce over tp, 2048 bytes
backward input_layernorm rms_norm: all_reduce over tp, 2048 bytes
)");
  EXPECT_EQ(TraceOfBlock("llama-gqa", "model.layers.0", true),
            R"(forward self_attn.q_proj redistribute: all_gather over tp, 1024 bytes
forward self_attn.o_proj redistribute: reduce_scatter over tp, 1024 bytes
forward mlp.up_proj redistribute: all_gather over tp, 1024 bytes
forward mlp.down_proj redistribute: reduce_scatter over tp, 1024 bytes
backward mlp.down_proj redistribute: all_gather over tp, 1024 bytes
backward mlp.up_proj redistribute: reduce_scatter over tp, 1024 bytes
backward self_attn.o_proj redistribute: all_gather over tp, 1024 bytes
backward self_attn.q_proj redistribute: reduce_scatter over tp, 1024 bytes
)");
  EXPECT_EQ(TraceOfBlock("gpt2", "transformer.h.0", false),
            R"(forward attn.c_proj redistribute: all_reduce over tp, 2048 bytes
forward mlp.c_proj redistribute: all_reduce over tp, 2048 bytes
backward ln_2 layer_norm: all_reduce over tp, 2048 bytes
backward ln_1 layer_norm: all_reduce over tp, 2048 bytes
)");
}

// Gradients of all parameters wait for each other: on dp x tp three collectives over dp reduce
// them, with as many bytes as this rank's parameters have; of a table of positions the rows that
// were read are enough.
TEST(HfPlans, GradientsAreReducedOverDpInThreeCollectives) {
  for (const char* name : {"gpt2", "llama-gqa"}) {
    const absl::Status status = RunSpmd(4, [&](RankContext&) -> absl::Status {
      const DeviceMesh mesh = testing::DpTp(2, 2);
      DT_ASSIGN_OR_RETURN(const auto model, testing::LoadOn(mesh, HfFolder(name), DType::kF32, {}));
      const std::vector<int64_t> ids = {1, 2, 3, 4, 5, 6, 7, 8};
      const DTensor batch = testing::Rows(ids, {2, 4}, mesh).Redistribute({Shard(0), Replicate()});
      const DTensor targets = testing::Rows(ids, {8}, mesh).Redistribute({Shard(0), Replicate()});
      const CommTrace trace;
      cross_entropy(flatten((*model)(batch), 0, 1), targets).Backward();
      int64_t count = 0, bytes = 0, held = 0;
      for (const CommEvent& e : trace.events()) {
        if (e.mesh_dims != "dp" || e.phase != CommPhase::kBackward) continue;
        ++count;
        bytes += e.bytes;
      }
      for (const NamedParameter& p : model->NamedParameters()) {
        const Tensor& mine = p.parameter->tensor().local();
        held +=
            p.fqn == "transformer.wpe.weight" ? 4 * mine.nbytes() / mine.size(0) : mine.nbytes();
      }
      EXPECT_LE(count, 3) << name;
      EXPECT_EQ(bytes, held) << name;  // an all-reduce of two ranks brings each as much
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// With one group of heads a rank of tp has them all, and one row is nobody's to cut over dp.
TEST(HfPlans, MeshDimsInEitherOrderGiveOneRanksLogits) {
  const LlamaConfig config = {.vocab = 12,
                              .hidden = 16,
                              .inner = 8,
                              .layers = 2,
                              .heads = 2,
                              .kv_heads = 1,
                              .head_size = 8,
                              .max_positions = 16};
  const auto logits = [&](const DeviceMesh& mesh) {
    ManualSeed(5);
    Llama model(config);
    if (!mesh.is_self()) {
      ThrowIfError(ParallelizeModule(model, mesh, LlamaPlan(config), {.mesh_dim = "tp"}));
      ThrowIfError(DistributeModule(model, mesh));
    }
    Materialize(model);
    const DTensor ids = FromVector<int64_t>({3, 1, 4, 1, 5}, {1, 5}, {.dtype = DType::kI64});
    const NoGrad no_grad;
    return model(mesh.is_self() ? ids : DistributeTensor(ids, mesh, Placements(mesh.ndim())))
        .ToVector<double>();
  };
  const absl::Status status = RunSpmd(4, [&](RankContext&) -> absl::Status {
    const std::vector<double> alone = logits(DeviceMesh::Self());
    for (const bool tp_first : {true, false}) {
      const std::vector<double> all =
          logits(tp_first ? DeviceMesh({2, 2}, {"tp", "dp"}) : DeviceMesh({2, 2}, {"dp", "tp"}));
      EXPECT_EQ(all.size(), alone.size());
      for (size_t k = 0; k < all.size(); ++k) EXPECT_NEAR(all[k], alone[k], 1e-6) << tp_first;
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::hf_plan_test

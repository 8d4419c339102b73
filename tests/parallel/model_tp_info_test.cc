// Llama and GPT-2 of Hugging Face's files by TPInfo and by strict plans: transformers' logits,
// losses and gradients.
#include "dtensor/parallel/models/model_tp_info.h"

#include <gmock/gmock.h>

#include "dtensor/parallel/models/model_plans.h"
#include "tests/parallel/hf_support.h"

namespace dtensor::model_tp_info_test {
namespace {

using testing::Golden;
using testing::HfFolder;
using testing::Off;

constexpr int64_t kBatch = 3, kSeq = 20;

absl::StatusOr<TPInfo> InfoOf(CausalLM& model) {
  if (auto* llama = dynamic_cast<Llama*>(&model)) return LlamaTPInfo(llama->config());
  if (auto* gpt2 = dynamic_cast<GPT2*>(&model)) return GPT2TPInfo(gpt2->config());
  return absl::InvalidArgumentError("neither");
}

// What is tied in the files may have one name, or two.
double GradientsOff(CausalLM& model, const Golden& golden) {
  double worst = 0;
  for (const auto& [fqn, gradient] : testing::Gather(model, /*gradients=*/true)) {
    worst = std::max(worst, Off(gradient, golden["grad." + fqn]));
  }
  return worst;
}

using Spread = std::function<absl::Status(CausalLM&, const DeviceMesh&)>;

absl::Status CheckGolden(const std::string& name, const DeviceMesh& mesh, const Spread& spread) {
  const Golden golden(name);
  DT_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(HfFolder(name)));
  const std::unique_ptr<CausalLM> model = MakeModel(config);
  SetDType(*model, DType::kF64);
  DT_RETURN_IF_ERROR(spread(*model, mesh));
  DT_RETURN_IF_ERROR(LoadPretrained(*model, HfFolder(name)));
  const auto ids = golden.tensors.at("input_ids").ToVector<int64_t>();
  const auto labels = golden.tensors.at("labels").ToVector<int64_t>();
  const DTensor logits = (*model)(testing::Rows(ids, {kBatch, kSeq}, mesh));
  EXPECT_TRUE(logits.placements()[1].is_shard() || mesh.size(1) == 1) << logits.spec().ToString();
  const DTensor targets = testing::Rows(testing::Targets(labels, kSeq), {kBatch, kSeq}, mesh);
  const DTensor loss = cross_entropy(flatten(logits, 0, 1), flatten(targets, 0, 1));
  loss.Backward();
  const double most = golden.json["tolerances"]["f64"]["rel"];
  EXPECT_LE(Off(logits.ToVector<double>(), golden["logits"]), most);
  EXPECT_LE(Off({loss.Item()}, golden["loss"]), most);
  EXPECT_LE(GradientsOff(*model, golden), most);
  return absl::OkStatus();
}

void OnMeshes(const Spread& spread) {
  for (const auto& [dp, tp] : {std::pair<int64_t, int64_t>{1, 2}, {1, 3}, {1, 4}, {2, 2}}) {
    const absl::Status status = RunSpmd(dp * tp, [&, dp = dp, tp = tp](RankContext&) {
      for (const char* name : {"llama-gqa", "llama-uneven", "gpt2"}) {
        SCOPED_TRACE(absl::StrCat(name, " on dp=", dp, " tp=", tp));
        const absl::Status one = CheckGolden(name, testing::DpTp(dp, tp), spread);
        if (!one.ok()) return one;
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(ModelTPInfo, GivesTransformersNumbers) {
  OnMeshes([](CausalLM& model, const DeviceMesh& mesh) -> absl::Status {
    DT_ASSIGN_OR_RETURN(const TPInfo info, InfoOf(model));
    return ParallelizeModule(model, mesh, info, {.warn = false, .strict = true});
  });
}

// No parameter is left out.
TEST(StrictModelPlans, GiveTransformersNumbers) {
  for (const bool sequence : {false, true}) {
    OnMeshes([&](CausalLM& model, const DeviceMesh& mesh) -> absl::Status {
      const ModelPlanOptions options = {.sequence_parallel = sequence};
      const auto* llama = dynamic_cast<Llama*>(&model);
      const Plan plan = llama ? LlamaPlan(llama->config(), options)
                              : GPT2Plan(dynamic_cast<GPT2&>(model).config(), options);
      return ParallelizeModule(model, mesh, plan, {.warn = false, .strict = true});
    });
  }
}

constexpr char kTree[] = R"(Tensor Parallel Sharding Tree:
transformer
    wte -> [tp_shard] VocabParallelEmbedding, {}
    wpe -> [replicate]
    drop -> [randomizer] ('tensor',)
    h
        ['0', '1', '2']
            ln_1 -> [replicate]
            attn
                c_attn -> [tp_shard] ColumnParallelLinear, {'stride': 3, 'unit': 8}
                c_proj -> [tp_shard] RowParallelLinear, {'unit': 8}
                resid_dropout -> [randomizer] ('tensor',)
            ln_2 -> [replicate]
            mlp
                c_fc -> [tp_shard] ColumnParallelLinear, {}
                c_proj -> [tp_shard] RowParallelLinear, {}
                dropout -> [randomizer] ('tensor',)
    ln_f -> [replicate]
lm_head -> [tp_shard] ColumnParallelLinear, {}
)";

TEST(ModelTPInfo, TheTreeOfGpt2) {
  const GPT2Config config = {
      .vocab = 50, .hidden = 24, .inner = 96, .layers = 3, .heads = 3, .max_positions = 16};
  GPT2 model(config);
  EXPECT_EQ(ValueOrThrow(TensorParallelTree(model, GPT2TPInfo(config))), kTree);
}

}  // namespace
}  // namespace dtensor::model_tp_info_test

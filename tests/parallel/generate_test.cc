// Generation with small Llama and GPT-2 files against known answers (tests/data/hf): the same
// tokens on every mesh, alone and in padded batches.
#include "dtensor/parallel/generate/generate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/comm_trace.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/io/safetensors.h"
#include "dtensor/parallel/models/pretrained.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/file.h"
#include "nlohmann/json.hpp"
#include "tests/common/thin.h"
#include "tests/parallel/support.h"

namespace dtensor::generate_test {
namespace {

using dtensor::testing::DpTp;
using dtensor::testing::MessageOf;
using ::testing::HasSubstr;
using Json = nlohmann::json;
using Tokens = std::vector<std::vector<int64_t>>;

std::string Folder(const std::string& name) { return absl::StrCat(DT_TEST_DATA, "/hf/", name); }

Json Golden(const std::string& name) {
  return Json::parse(ValueOrThrow(ReadFile(Folder(name) + "/golden.json")))["generation"];
}

std::unique_ptr<CausalLM> Load(const std::string& name, const DeviceMesh& mesh,
                               std::optional<DType> dtype = {}) {
  const ModelConfig config = ValueOrThrow(ReadModelConfig(Folder(name)));
  std::unique_ptr<CausalLM> model = MakeModel(config);
  if (dtype) SetDType(*model, *dtype);
  if (!mesh.is_self()) {
    ThrowIfError(ParallelizeModule(*model, mesh, PlanFor(config), {.warn = false}));
  }
  ThrowIfError(LoadPretrained(*model, Folder(name)));
  return model;
}

const std::vector<std::pair<int64_t, int64_t>> kMeshes = {{1, 1}, {1, 2}, {1, 3}, {1, 4}, {2, 2}};

void OnMeshes(absl::FunctionRef<void(int64_t dp, int64_t tp)> body) {
  for (size_t i = 0; i < kMeshes.size();
       i += dtensor::testing::Thin(2)) {  // thin: 1, 3 and 2 x 2 ranks
    const auto [dp, tp] = kMeshes[i];
    const absl::Status status = RunSpmd(dp * tp, [&](RankContext&) {
      const StrictRedistribute strict;  // Nothing moves by itself.
      body(dp, tp);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << "dp=" << dp << " tp=" << tp << ": " << status;
  }
}

class GenerateTest : public ::testing::TestWithParam<const char*> {};

TEST_P(GenerateTest, GreedyContinuationsAreTheKnownOnesAloneAndInABatch) {
  const Json golden = Golden(GetParam());
  const Tokens prompts = golden["prompts"], expected = golden["tokens"];
  ASSERT_EQ(expected.at(0).size(), 24u);
  OnMeshes([&](int64_t dp, int64_t tp) {
    const std::unique_ptr<CausalLM> model = Load(GetParam(), DpTp(dp, tp), DType::kF32);
    for (size_t i = 0; i < prompts.size(); ++i) {
      EXPECT_EQ(Generate(*model, {prompts[i]}, {.max_new = 24})[0], expected[i]) << "prompt " << i;
    }
    // Prompts of 3, 7 and 12 tokens: padded on the left.
    EXPECT_EQ(Generate(*model, prompts, {.max_new = 24}), expected);
    EXPECT_TRUE(model->training());  // as it was
  });
}

INSTANTIATE_TEST_SUITE_P(Models, GenerateTest,
                         ::testing::Values("llama-gqa", "llama-uneven", "gpt2", "llama-bf16"));

// A tensor of golden.safetensors in doubles.
std::vector<double> Values64(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsEntry& entry = file.tensors().at(name);
  EXPECT_EQ(entry.dtype, "F64") << name;
  std::vector<double> values(static_cast<size_t>(Numel(entry.shape)));
  ThrowIfError(file.Read(entry.begin, entry.end - entry.begin, values.data()));
  return values;
}

TEST(Generate, FilteredProbabilitiesAreTheKnownOnes) {
  for (const char* name : {"llama-gqa", "llama-uneven", "gpt2"}) {
    const auto file = ValueOrThrow(SafetensorsFile::Open(Folder(name) + "/golden.safetensors"));
    const std::vector<double> logits = Values64(*file, "gen.first_logits");
    const std::pair<const char*, SamplingOptions> cases[] = {
        {"sample.temp_probs", {.temperature = 0.7}},
        {"sample.topk_probs", {.temperature = 0.7, .top_k = 5}},
        {"sample.topp_probs", {.temperature = 0.7, .top_p = 0.9}},
        {"sample.topk_topp_probs", {.temperature = 0.7, .top_k = 5, .top_p = 0.9}}};
    OnMeshes([&](int64_t dp, int64_t tp) {
      const DTensor x = FromVector(
          logits, {3, static_cast<int64_t>(logits.size()) / 3},
          {.dtype = DType::kF64, .mesh = DpTp(dp, tp), .placements = {Shard(0), Shard(1)}});
      for (const auto& [key, options] : cases) {
        const std::vector<double> left =
            softmax(FilterLogits(x, options).FullTensor(), 1).ToVector<double>();
        const std::vector<double> expected = Values64(*file, key);
        ASSERT_EQ(left.size(), expected.size());
        for (size_t i = 0; i < left.size(); ++i) ASSERT_NEAR(left[i], expected[i], 1e-12) << key;
      }
    });
  }
}

TEST(Generate, LastOnlyIsTheLastOfAllLogits) {
  OnMeshes([&](int64_t dp, int64_t tp) {
    for (const char* name : {"llama-uneven", "gpt2"}) {
      const std::unique_ptr<CausalLM> model = Load(name, DpTp(dp, tp), DType::kF64);
      const DTensor ids = FromVector(std::vector<int64_t>{5, 1, 7, 2, 9, 4}, {2, 3},
                                     {.mesh = DpTp(dp, tp), .placements = {Shard(0), Replicate()}});
      KVCache one(4), other(4);
      const DTensor all = model->Decode(ids, one), last = model->Decode(ids, other, {}, {}, true);
      EXPECT_EQ(last.shape(), (Shape{2, 1, model->vocab()}));
      EXPECT_TRUE(allclose(last, slice(all, 1, 2, 3), 1e-12, 1e-14));
      EXPECT_EQ(other.length, 3);
    }
  });
}

// No rank holds another's keys and values: where there are as many heads as ranks, each holds its
// own; where there are fewer, some hold none (llama-uneven: 2 on 3 and 4 ranks).
TEST(Generate, TheCacheIsCutAsTheHeadsAre) {
  OnMeshes([&](int64_t dp, int64_t tp) {
    if (dp * tp == 1) return;
    for (const char* name : {"llama-gqa", "llama-uneven", "gpt2"}) {
      const std::unique_ptr<CausalLM> model = Load(name, DpTp(dp, tp), DType::kF64);
      const DTensor ids = FromVector(std::vector<int64_t>{5, 1, 7, 2, 9, 4}, {2, 3},
                                     {.mesh = DpTp(dp, tp), .placements = {Shard(0), Replicate()}});
      KVCache cache(4);
      model->Decode(ids, cache);
      ASSERT_EQ(static_cast<int64_t>(cache.layers.size()), model->layers());
      const Shape whole = {2, model->kv_heads(), 4, model->head_size()};
      const int64_t rank = RankContext::Current().rank() % tp, heads = model->kv_heads(),
                    per = (heads + tp - 1) / tp,
                    mine = std::clamp<int64_t>(heads - rank * per, 0, per);
      for (const KVCache::Layer& layer : cache.layers) {
        for (const DTensor* x : {&layer.k, &layer.v}) {
          EXPECT_EQ(x->shape(), whole) << name;
          EXPECT_EQ(x->placements()[1], Shard(1)) << name;
          EXPECT_EQ(x->local().shape(), (Shape{2 / dp, mine, 4, whole[3]})) << name;
        }
      }
    }
  });
}

TEST(Generate, DrawsTheSameTokensOnEveryMeshAndStops) {
  const Tokens prompts = Golden("llama-gqa")["prompts"];
  const GenerateOptions options = {
      .max_new = 20,
      .sampling = {.temperature = 0.9, .top_k = 40, .top_p = 0.95, .repetition_penalty = 1.2}};
  Tokens expected;
  OnMeshes([&](int64_t dp, int64_t tp) {
    const std::unique_ptr<CausalLM> model = Load("llama-gqa", DpTp(dp, tp), DType::kF64);
    ManualSeed(4);
    const Tokens tokens = Generate(*model, prompts, options);
    if (dp * tp == 1) expected = tokens;
    EXPECT_EQ(tokens, expected);
    if (RankContext::Current().rank() != 0) return;
    for (const auto& row : tokens) EXPECT_EQ(row.size(), 20u);
  });
  // The fifth token of the first row ends it there; the others go on.
  ASSERT_EQ(expected.size(), 3u);
  const std::unique_ptr<CausalLM> model = Load("llama-gqa", DeviceMesh::Self(), DType::kF64);
  GenerateOptions stopped = options;
  stopped.stop = {expected[0][4]};
  std::vector<std::vector<int64_t>> steps;
  stopped.on_tokens = [&](absl::Span<const int64_t> next) {
    steps.emplace_back(next.begin(), next.end());
  };
  ManualSeed(4);
  const Tokens tokens = Generate(*model, prompts, stopped);
  const auto first = std::find(expected[0].begin(), expected[0].end(), stopped.stop[0]);
  EXPECT_EQ(tokens[0], std::vector<int64_t>(expected[0].begin(), first + 1));
  EXPECT_GT(tokens[1].size(), tokens[0].size());
  ASSERT_GT(steps.size(), tokens[0].size());
  EXPECT_EQ(steps[tokens[0].size()][0], -1);
}

TEST(Generate, EndsAtTheLastPositionAndNamesWhatIsWrong) {
  const std::unique_ptr<CausalLM> model = Load("gpt2", DeviceMesh::Self());
  const int64_t positions = model->max_positions();
  const std::vector<int64_t> longest(positions - 3, 1);
  EXPECT_EQ(Generate(*model, {longest}, {.max_new = 100})[0].size(), 3u);
  const auto message = [&](const Tokens& prompts, const GenerateOptions& options = {}) {
    return MessageOf([&] { Generate(*model, prompts, options); });
  };
  EXPECT_THAT(message({}), HasSubstr("there are no prompts"));
  EXPECT_THAT(message({{1}, {}}), HasSubstr("prompt 1 has no tokens"));
  EXPECT_THAT(message({{1, 257}}), HasSubstr("prompt 0 has the token 257; the model has 257"));
  EXPECT_THAT(message({{-1}}), HasSubstr("token -1"));
  EXPECT_THAT(message({std::vector<int64_t>(positions, 1)}),
              HasSubstr("prompt 0 has 64 tokens; the model has 64 positions"));
  EXPECT_THAT(message({{1}}, {.max_new = 0}), HasSubstr("max_new must be positive"));
  EXPECT_THAT(message({{1}}, {.sampling = {.top_p = 2}}), HasSubstr("top_p"));
}

// Rotary positions of type "dynamic" are made for what comes after the last one.
TEST(Generate, GoesBeyondTheLastPositionWhereRotationIsDynamic) {
  const absl::Status status = RunSpmd(1, [](RankContext&) {
    LlamaConfig config = {.vocab = 11, .hidden = 16, .inner = 8, .layers = 1};
    config.heads = config.kv_heads = 2;
    config.head_size = 8;
    config.max_positions = 6;
    Llama fixed(config);
    Materialize(fixed);
    EXPECT_EQ(Generate(fixed, {{1, 2, 3}}, {.max_new = 9})[0].size(), 3u);
    config.rope.type = "dynamic";
    config.rope.factor = 2;
    Llama model(config);
    Materialize(model);
    const std::vector<int64_t> prompt = {1, 2, 3, 4, 5, 6, 7, 8};
    const std::vector<int64_t> text = Generate(model, {prompt}, {.max_new = 9})[0];
    EXPECT_EQ(text.size(), 9u);
    const DTensor last = select(model(FromVector(prompt, {1, 8})), 1, -1);
    EXPECT_EQ(text[0], argmax(last, 1).ToVector<int64_t>()[0]);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Generate, ThePaddingTokenLearnsNothingWhereItIsLookedUp) {
  for (const int64_t tp : {1, 2, 3}) {
    const absl::Status status = RunSpmd(tp, [&](RankContext&) {
      LlamaConfig config = {.vocab = 11,
                            .hidden = 16,
                            .inner = 8,
                            .layers = 1,
                            .heads = 2,
                            .kv_heads = 1,
                            .head_size = 8,
                            .padding = 4};
      Llama model(config);
      ThrowIfError(ParallelizeModule(model, DpTp(1, tp), LlamaPlan(config), {.warn = false}));
      Materialize(model);
      const DTensor ids =
          FromVector(std::vector<int64_t>{4, 3, 4, 7}, {1, 4}, {.mesh = DpTp(1, tp)});
      sum(square(model(ids))).Backward();
      const DTensor grad = model.FindParameter("model.embed_tokens.weight")->tensor().grad();
      const std::vector<double> rows = sum(abs(grad), {1}).ToVector<double>();
      for (int64_t row = 0; row < 11; ++row) {
        EXPECT_EQ(rows[row] > 0, row == 3 || row == 7) << row;
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(Generate, AStepGathersNeitherVocabularyNorCache) {
  ASSERT_TRUE(RunSpmd(2, [](RankContext&) {
                const std::unique_ptr<CausalLM> model = Load("llama-gqa", DpTp(1, 2));
                const CommTrace trace;
                Generate(*model, {std::vector<int64_t>(40, 3)}, {.max_new = 8});
                const int64_t prompt = 40 * 64 * 4;  // activations of the prompt, in bytes
                for (const CommEvent& event : trace.events()) {
                  EXPECT_LE(event.payload_bytes, prompt) << event.op << " in " << event.module;
                  if (event.module.empty()) {
                    EXPECT_LE(event.bytes, 64) << event.op;
                  }
                }
                return absl::OkStatus();
              }).ok());
}

// A cache whose tensors could not be made is as new: with more memory it serves.
TEST(KVCache, ServesAfterADecodeThatFoundNoMemory) {
  const absl::Status status = RunSpmd(1, [](RankContext& rank) -> absl::Status {
    const std::unique_ptr<CausalLM> model = Load("llama-gqa", DeviceMesh::Self(), DType::kF32);
    const DTensor ids = FromVector(std::vector<int64_t>{1, 2, 3}, {1, 3});
    KVCache small(8), large(int64_t{1} << 17);
    const std::vector<double> want = model->Decode(ids, small).ToVector<double>();
    const auto& allocator = rank.device_allocator();
    allocator->SetLimit(allocator->stats().in_use_bytes + (int64_t{1} << 22));
    EXPECT_THAT(MessageOf([&] { model->Decode(ids, large); }), HasSubstr("limit"));
    EXPECT_EQ(large.length, 0);
    allocator->SetLimit(0);
    EXPECT_EQ(model->Decode(ids, large).ToVector<double>(), want);
    EXPECT_EQ(large.length, 3);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// What somebody froze stays frozen, and what trains goes on training.
TEST(Generate, LeavesEachModuleItsMode) {
  const std::unique_ptr<CausalLM> model = Load("gpt2", DeviceMesh::Self());
  model->Train(true);
  Module* const frozen = model->FindModule("transformer.h.0");
  ASSERT_NE(frozen, nullptr);
  frozen->Train(false);
  Generate(*model, {{1, 2}}, {.max_new = 2});
  for (const NamedModule& m : model->NamedModules()) {
    EXPECT_EQ(m.module->training(), m.fqn.rfind("transformer.h.0", 0) != 0) << m.fqn;
  }
}

}  // namespace
}  // namespace dtensor::generate_test

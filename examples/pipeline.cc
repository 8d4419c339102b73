// A Llama trained as a pipeline of two stages, each of two ranks by the model's tensor-parallel
// plan, and on one device: the same losses.
#include <cstdio>
#include <vector>

#include "dtensor/dtensor.h"
#include "dtensor/parallel/models/llama.h"
#include "dtensor/parallel/models/model_plans.h"
#include "dtensor/parallel/pipeline/model_stages.h"

using namespace dtensor;

constexpr int64_t kMicrobatches = 4, kRows = 2, kSeq = 16, kVocab = 64;

LlamaConfig Config() {
  LlamaConfig config;
  config.vocab = kVocab;
  config.layers = 4;
  return config;
}

DTensor Tokens(const DeviceMesh& mesh, int64_t k, int64_t shift) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < kRows * kSeq; ++i) tokens.push_back((i * i + 7 * k + shift) % kVocab);
  return FromVector(tokens, {kRows, kSeq}, {.dtype = DType::kI64, .mesh = mesh});
}

// A mean over the microbatches.
DTensor LossOf(const DTensor& logits, int64_t k) {
  const DTensor labels = reshape(Tokens(logits.mesh(), k, 1), {kRows * kSeq});
  return cross_entropy(reshape(logits, {kRows * kSeq, kVocab}), labels) * (1.0 / kMicrobatches);
}

absl::Status Train(RankContext& rank) {
  const DeviceMesh mesh({2, 2}, {"pp", "tp"});
  Llama model(Config());
  DT_ASSIGN_OR_RETURN(const std::vector<PipelineStage> stages, LlamaStages(model, 2));
  DT_RETURN_IF_ERROR(ParallelizeStages(model, mesh, stages,
                                       LlamaPlan(model.config(), {.sequence_parallel = true})));
  ManualSeed(0);
  Materialize(model);  // each rank its own, of the values that one device draws
  AdamW optimizer(model.NamedParameters(), {.lr = 3e-3}, LikeParameter, {VectorsDoNotDecay()});
  Pipeline pipeline(mesh, stages, {.microbatches = kMicrobatches});

  Llama whole(Config());
  ManualSeed(0);
  Materialize(whole);
  AdamW one(whole.NamedParameters(), {.lr = 3e-3}, LikeParameter, {VectorsDoNotDecay()});

  if (rank.rank() == 0) std::printf("%s", ToString(pipeline.schedule()).c_str());
  std::vector<Values> inputs;
  for (int64_t k = 0; k < kMicrobatches; ++k) {
    inputs.push_back({Tokens(StageMesh(mesh, "pp", 0), k, 0)});
  }
  for (int step = 1; step <= 5; ++step) {
    const double loss =
        pipeline.Step(inputs, [](int64_t k, const Values& y) { return LossOf(y[0], k); }).Item();
    ClipGradNorm(model.NamedParameters(), 1);
    optimizer.Step();
    optimizer.ZeroGrad();

    double expected = 0;
    for (int64_t k = 0; k < kMicrobatches; ++k) {
      const DTensor part = LossOf(whole(Tokens(DeviceMesh::Self(), k, 0)), k);
      part.Backward();
      expected += part.Item();
    }
    ClipGradNorm(whole.NamedParameters(), 1);
    one.Step();
    one.ZeroGrad();
    if (rank.rank() == 0) std::printf("step %d: %.4f, on one device %.4f\n", step, loss, expected);
  }
  return absl::OkStatus();
}

int main() {
  return RunProgram([] { return RunSpmd(4, Train); });
}

// A GPT's training steps by a plain loop, and captured once as a graph of the device and launched
// again: the same losses, to the last bit. Needs a device that has graphs: --device cuda.
#include <cstdio>
#include <vector>

#include "dtensor/dtensor.h"
#include "dtensor/parallel/models/gpt.h"

using namespace dtensor;

constexpr GPTConfig kConfig = {
    .vocab = 16, .seq = 4, .layers = 1, .hidden = 8, .heads = 2, .dropout = 0.1};

struct Batch {
  DTensor ids, targets;
};
Batch batch(int64_t i) {
  std::vector<int64_t> tokens;
  for (int64_t k = 0; k < 2 * kConfig.seq; ++k) tokens.push_back((3 * k + i) % kConfig.vocab);
  const DTensor ids = FromVector(tokens, {2, kConfig.seq}, {.dtype = DType::kI64});
  return {ids, remainder(ids + 3, kConfig.vocab)};
}

std::vector<double> Losses(bool graphed, int64_t steps) {
  ManualSeed(1);
  GPT model(kConfig);
  Materialize(model);
  AdamW optimizer(model.NamedParameters());
  const LearningRate schedule = {.peak = 0.01, .steps = steps};
  std::vector<double> losses;

  // What a step reads lies in tensors that stay.
  const DTensor ids = batch(0).ids, targets = batch(0).targets;
  const auto train = [&] {
    const DTensor loss = NextTokenLoss(model(ids), targets);
    optimizer.ZeroGrad();
    loss.Backward();
    ClipGradients(model.NamedParameters(), 1.0);
    optimizer.Step();
    return loss;
  };
  GraphedStep step(optimizer, train);
  for (int64_t i = 0; i < steps; ++i) {
    {
      const NoGrad no_grad;
      copy_(ids, batch(i).ids);
      copy_(targets, batch(i).targets);
    }
    optimizer.set_lr(schedule.At(i));
    const DTensor loss = graphed ? step() : train();
    losses.push_back(loss.Item());
  }
  return losses;
}

int main(int argc, char** argv) {
  return Launch(&argc, argv, [](RankContext&) -> absl::Status {
    const std::vector<double> plain = Losses(false, 5), graphed = Losses(true, 5);
    for (size_t i = 0; i < plain.size(); ++i) {
      std::printf("step %zu: %.6f, as a graph %.6f\n", i + 1, plain[i], graphed[i]);
    }
    std::printf("%s\n", plain == graphed ? "the same losses" : "other losses");
    return absl::OkStatus();
  });
}

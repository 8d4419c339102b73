// A GPT's training steps on a mesh of dp and tp (the first argument), by a plain loop and captured
// once as a graph that is launched again: every rank says whether the losses are the same, to the
// last bit. For cuda_test.cc.
#include <cstdio>
#include <vector>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "dtensor/parallel/module/init.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/parallel/train/graphed_step.h"
#include "dtensor/parallel/train/trainer.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

constexpr GPTConfig kConfig = {.vocab = 16, .seq = 4, .layers = 1, .hidden = 8, .heads = 2};

std::vector<double> Losses(const DeviceMesh& mesh, bool graphed) {
  ManualSeed(7);
  GPT model(kConfig);
  ThrowIfError(ParallelizeModule(model, mesh, GPTPlan(kConfig)));
  ThrowIfError(DistributeModule(model, mesh));
  Materialize(model);
  AdamW optimizer(model.NamedParameters(), AdamWOptions{.lr = 0.01});
  const auto placed = [&](int64_t step) {
    std::vector<int64_t> tokens;
    for (int64_t i = 0; i < 2 * kConfig.seq; ++i) tokens.push_back((5 * i + step) % kConfig.vocab);
    const DTensor t = FromVector(tokens, {2, kConfig.seq}, {.dtype = DType::kI64});
    return DistributeTensor(t, mesh, {Shard(0), Replicate()});
  };
  const DTensor ids = placed(0),
                targets = placed(3);  // what a step reads lies in tensors that stay
  const auto train = [&] {
    const DTensor loss = NextTokenLoss(model(ids), targets);
    optimizer.ZeroGrad();
    loss.Backward();
    optimizer.Step();
    return loss;
  };
  GraphedStep step(optimizer, train);
  std::vector<double> losses;
  for (int64_t i = 0; i < 5; ++i) {
    {
      const NoGrad no_grad;
      copy_(ids, placed(i));
      copy_(targets, placed(i + 3));
    }
    losses.push_back((graphed ? step() : train()).Item());
  }
  return losses;
}

absl::Status Compare(RankContext& context, const char* mesh_text) {
  DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, DeviceMesh::Parse(mesh_text));
  const std::vector<double> plain = Losses(mesh, false), graphed = Losses(mesh, true);
  printf("rank %d: %.6f, then %.6f, %s\n", static_cast<int>(context.rank()), plain.front(),
         plain.back(), plain == graphed ? "as a graph too" : "other losses as a graph");
  return absl::OkStatus();
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  return dtensor::Launch(&argc, argv, [&](dtensor::RankContext& context) {
    return dtensor::Compare(context, argc > 1 ? argv[1] : "dp=1,tp=1");
  });
}

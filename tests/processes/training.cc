// A small training in which something goes wrong in the way that the first argument names: "nan"
// (the third step's loss of the second argument's rank), "flip" (one bit of one of its copies,
// after the second step), "log" (its lines go to the file that the second argument names), "none".
// Then come a mesh of dp and tp, in whatever order of dims (all ranks are dp), and a number of
// steps, of which lines are printed. Prints the losses; with "explain" what Explain says of the
// time of all collectives where two ranks are a host and hosts have links of 1 Gbit/s and 5 ms.
// "sums" trains nothing: an all-reduce and an all-gather of so many MiB. For
// training_faults_test.cc and hosts.py.
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/data/sampler.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "dtensor/parallel/module/materialize.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/explain.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/parallel/train/trainer.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// Of a float32, where it lies.
void FlipABit(const Tensor& t, int64_t element) {
  auto* const bits = static_cast<uint32_t*>(t.data());
  bits[element] ^= 1;
}

struct Options {
  std::string how = "none", what = "1", mesh;
  int64_t steps = 0;  // 0: a few, of which nothing is printed
};

// Of a step's forward and backward.
absl::Status PrintModelledTime(RankContext& context, GPT& model, TokenSampler& data,
                               const TrainerOptions& o) {
  DT_ASSIGN_OR_RETURN(const TokenBatch batch, data.Next(o.batch, o.mesh, o.placements));
  ExplainOptions options;
  options.loss = [&](const Values& logits) { return NextTokenLoss(logits[0], batch.targets); };
  DT_ASSIGN_OR_RETURN(const ModuleExplanation explained, Explain(model, {batch.ids}, options));
  if (!explained.ended.empty()) return absl::InternalError(explained.ended);
  if (context.rank() == 0) {
    printf("modelled %.0f us, %d ranks on a machine\n", explained.modelled_us,
           static_cast<int>(context.cost_model().ranks_per_node));
  }
  return absl::OkStatus();
}

// An all-reduce of random numbers, of which each rank then gives a part to all.
absl::Status Sums(RankContext& context, int64_t mib) {
  const int64_t ranks = context.world_size(), rows = (mib << 18) / ranks;
  ManualSeed(5);
  DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
  const Tensor all = randn({rows * ranks}).local();
  const absl::Time start = absl::Now();
  DT_RETURN_IF_ERROR(comm->AllReduce(all, all, ReduceOp::kSum).Wait());
  const absl::Time middle = absl::Now();
  const Tensor mine = ValueOrThrow(all.Slice(0, context.rank() * rows, rows).Clone());
  DT_RETURN_IF_ERROR(comm->AllGather(mine, all).Wait());
  const absl::Time end = absl::Now();
  if (context.rank() > 0) return absl::OkStatus();
  uint64_t hash = 1469598103934665603u;  // FNV-1a
  const auto* words = static_cast<const uint32_t*>(all.data());
  for (int64_t i = 0; i < all.numel(); ++i) hash = (hash ^ words[i]) * 1099511628211u;
  printf("hash %016llx\nsums %.1f ms, gather %.1f ms\n", static_cast<unsigned long long>(hash),
         absl::ToDoubleMilliseconds(middle - start), absl::ToDoubleMilliseconds(end - middle));
  return absl::OkStatus();
}

absl::Status Train(RankContext& context, const Options& options) {
  const std::string &how = options.how, &what = options.what;
  if (how == "sums") return Sums(context, atoi(what.c_str()));
  const bool me = how != "log" && context.rank() == atoi(what.c_str());
  const int64_t ranks = context.world_size();
  const std::string text = (std::filesystem::temp_directory_path() /
                            absl::StrCat("dtensor_training_", getpid(), "_", context.rank()))
                               .string();
  const absl::Cleanup remove = [&] { std::filesystem::remove(text); };
  std::string lines;
  for (int i = 0; i < 400; ++i) absl::StrAppend(&lines, "line ", i * i, " of a text\n");
  DT_RETURN_IF_ERROR(WriteFile(text, lines));
  ManualSeed(5);
  const bool large = options.steps > 0;
  const int64_t seq = large ? 64 : 8;
  const GPTConfig config = {.vocab = 256, .seq = seq, .layers = 1, .hidden = 24, .heads = 4};
  GPT model(config);
  DT_ASSIGN_OR_RETURN(
      const DeviceMesh mesh,
      DeviceMesh::Parse(options.mesh.empty() ? absl::StrCat("dp=", ranks, ",tp=1") : options.mesh));
  DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, GPTPlan(config)));
  Materialize(model);
  AdamW optimizer(model.NamedParameters(), AdamWOptions{});
  DT_ASSIGN_OR_RETURN(TokenFile file, TokenFile::Open(text));
  DT_ASSIGN_OR_RETURN(TokenSampler data,
                      TokenSampler::Create(std::move(file), {.seq = seq, .seed = 5}));
  std::vector<double> losses;
  TrainerOptions o = {.steps = 5, .batch = 2 * ranks, .mesh = mesh, .check_every = 1};
  if (large) {
    o.steps = options.steps;
    o.batch = 24;
    o.check_every = 0;
    o.name = "train";
  }
  DT_ASSIGN_OR_RETURN(const int dp, mesh.DimIndex("dp"));
  o.placements.assign(static_cast<size_t>(mesh.ndim()), Replicate());
  o.placements[static_cast<size_t>(dp)] = Shard(0);
  if (how == "explain") return PrintModelledTime(context, model, data, o);
  o.lr = {.peak = 1e-2, .steps = o.steps};
  if (how == "log") o.log = what;
  o.loss = [&](Module& m, const TokenBatch& batch) {
    const DTensor loss = NextTokenLoss(m(batch.ids), batch.targets);
    // A factor of this rank's term alone, as what its device computes.
    if (how == "nan" && me && losses.size() == 2) Fill(loss.Detach().local(), NAN);
    return loss;
  };
  o.after_step = [&](const StepReport& report) -> absl::Status {
    losses.push_back(report.loss);
    if (how == "flip" && me && report.step == 2) {
      FlipABit(model.FindParameter("blocks.0.mlp.down.weight")->tensor().Detach().local(), 3);
    }
    return absl::OkStatus();
  };
  DT_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer,
                      Trainer::Create(model, optimizer, data, std::move(o)));
  DT_RETURN_IF_ERROR(trainer->Run());
  if (context.rank() == 0) printf("losses %s\n", absl::StrJoin(losses, " ").c_str());
  return absl::OkStatus();
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  dtensor::Options options;
  if (argc > 1) options.how = argv[1];
  if (argc > 2) options.what = argv[2];
  if (argc > 3 && argv[3][0] != '-') options.mesh = argv[3];
  if (argc > 4) options.steps = atoi(argv[4]);
  return dtensor::Launch(
      &argc, argv, [&](dtensor::RankContext& context) { return dtensor::Train(context, options); });
}

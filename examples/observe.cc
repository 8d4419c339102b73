// What docs/guide/observe.md shows: a program explained before it runs, described and traced.
#include <cstdio>

#include "dtensor/explain.h"
#include "dtensor/mesh/expect_comm.h"
#include "dtensor/mesh/program.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/parallel/plan/explain.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

absl::Status Body(RankContext& rank) {
  const DeviceMesh mesh({2, 2}, {"dp", "tp"});
  const auto print = [&](const std::string& text) {
    if (rank.rank() == 0) std::printf("%s\n", text.c_str());
  };
  // An op: what it would choose for these inputs, and what else it could.
  const DTensor x = ones({8, 6}, {.mesh = mesh, .placements = {Shard(0), Shard(1)}});
  const DTensor w = ones({6, 4}, {.mesh = mesh, .placements = {Replicate(), Shard(1)}});
  const DTensor* inputs[] = {&x, &w};
  DT_ASSIGN_OR_RETURN(const Explanation op, Explain(GetOp("matmul"), inputs));
  print(op.ToString(/*most=*/3));
  print(Describe(x));

  // A module, forward and backward, before its parameters have values.
  MLP mlp(64, 256);
  DT_RETURN_IF_ERROR(
      ParallelizeModule(mlp, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}}));
  const TensorOptions rows = {.mesh = mesh, .placements = {Shard(0), Replicate()}};
  const DTensor in = ones({16, 64}, rows).RequiresGrad();
  DT_ASSIGN_OR_RETURN(const ModuleExplanation whole, Explain(mlp, {in}));
  print(whole.ToString());

  // The same, run and counted.
  Materialize(mlp);
  CommTrace trace;
  mlp(in).Backward(ones({16, 64}, rows));
  print(trace.ToString(CommBy::kModule));
  print(CommMismatch(trace, {{.mesh_dims = "tp", .count = 1}, {.mesh_dims = "dp"}}));

  // Nothing that was not asked for.
  const StrictRedistribute strict;
  try {
    layer_norm(x, {6});
  } catch (const Error& error) {
    print(error.what());
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace dtensor

int main() {
  return dtensor::RunProgram([] { return dtensor::RunSpmd(4, dtensor::Body); });
}

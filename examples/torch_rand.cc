// torch.manual_seed(0); torch.rand(8, device="cuda"), on a CPU and in shards.
#include <cstdio>

#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/program.h"
#include "dtensor/ops/ops.h"
#include "dtensor/rng/generator.h"

using namespace dtensor;  // NOLINT: as a user writes it

int main() {
  const auto body = [](RankContext& rank) -> absl::Status {
    ManualSeed(0);
    const DTensor x = rand({8}, {.mesh = DeviceMesh({2}, {"tp"}), .placements = {Shard(0)}});
    for (const double v : x.ToVector<double>()) {
      if (rank.rank() == 0) std::printf("%.4f ", v);
    }
    if (rank.rank() == 0) std::printf("\n");
    return absl::OkStatus();
  };
  return RunProgram([&] { return RunSpmd(2, body); });
}

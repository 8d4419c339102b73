// The program of the README: a sharded product and its gradient on four ranks.
#include <dtensor/dtensor.h>

#include <cstdio>

using namespace dtensor;  // NOLINT: as a user writes it

int main() {
  const auto body = [](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    ManualSeed(0);
    const DTensor x = randn({8, 16}, {.mesh = mesh, .placements = {Shard(0), Replicate()}});
    DTensor w = randn({16, 32}, {.mesh = mesh, .placements = {Replicate(), Shard(1)}});
    w.RequiresGrad();
    const DTensor y = relu(matmul(x, w));  // [S(0), S(1)]: nothing was communicated
    const DTensor loss = mean(y * y);      // a pending sum over both mesh dims
    loss.Backward();                       // w.grad() is reduced over dp, once
    const double value = loss.Item();
    if (rank.rank() == 0) std::printf("%.4f %s\n", value, w.grad().spec().ToString().c_str());
    return absl::OkStatus();
  };
  return RunProgram([&] { return RunSpmd(4, body); });
}

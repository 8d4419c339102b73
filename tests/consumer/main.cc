// A user's project: an op of its own, registered with one declaration, beside a shipped layer.
#include <dtensor/dtensor.h>

#include <cstdio>

using namespace dtensor;  // NOLINT: as a user writes it

namespace {

void Cube(const KernelCall& call) {
  const auto* x = static_cast<const float*>(call.in[0].data);
  auto* y = static_cast<float*>(call.out[0].data);
  int64_t n = 1;
  for (int d = 0; d < call.in[0].ndim; ++d) n *= call.in[0].sizes[d];
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * x[i] * x[i];
}

absl::Status Body(RankContext& rank) {
  const DeviceMesh mesh({2}, {"tp"});
  Linear layer(4, 6);
  DT_RETURN_IF_ERROR(ParallelizeModule(layer, mesh, {{"", ColwiseParallel()}}));
  Materialize(layer);
  const DTensor h = layer(ones({3, 4}, {.mesh = mesh}));
  const DTensor y = Call1(**OpRegistry::Find("my_cube"), {&h});
  const double difference = sum(abs(y - h * h * h)).Item();
  if (rank.rank() == 0) std::printf("%s %g\n", y.spec().ToString().c_str(), difference);
  const bool sharded = y.placements()[0].is_shard();
  return sharded && difference < 1e-6 ? absl::OkStatus() : absl::InternalError("wrong");
}

}  // namespace

int main() {
  Op("my_cube(x)").Factors("... -> ...");
  RegisterKernel("my_cube", DeviceType::kCpu,
                 {Cube, DTypeBit(DType::kF32), KernelLayout::kContiguous});
  const absl::Status status = RunSpmd(2, Body);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

// A step of a layer of whole numbers, sharded, on the device that --device names: what the faults
// of tests/cuda_suite.cmake strike. Prints a sum, which is the same on every device and any ranks;
// with "divide" a kernel finds a division by 0.
#include <cstdio>
#include <string>

#include "dtensor/distribute.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

DTensor Numbers(IntSpan shape, int64_t factor, const DeviceMesh& mesh, const Placement& placement) {
  std::vector<int64_t> values;
  for (int64_t i = 0; i < Numel(shape); ++i) values.push_back(i * factor % 23 - 11);
  return DistributeTensor(ValueOrThrow(Tensor::FromVector(values, shape, DType::kI64)), mesh,
                          {placement});
}

absl::Status Step(RankContext& rank, bool divide) {
  const DeviceMesh mesh({rank.world_size()}, {"tp"});
  const DTensor x = Numbers({6, 10}, 7, mesh, Replicate());
  const DTensor up = Numbers({10, 14}, 5, mesh, Shard(1));
  const DTensor down = Numbers({14, 10}, 3, mesh, Shard(0));
  DTensor y = matmul(relu(matmul(x, up)), down).Redistribute({Replicate()});
  if (divide) y = remainder(y, y - y);
  int64_t sum = 0;
  for (const int64_t value : y.ToVector<int64_t>()) sum += value;
  if (rank.rank() == 0) std::printf("sum %lld\n", static_cast<long long>(sum));
  return absl::OkStatus();
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  return dtensor::Launch(&argc, argv, [&](dtensor::RankContext& rank) {
    return dtensor::Step(rank, argc > 1 && std::string(argv[1]) == "divide");
  });
}

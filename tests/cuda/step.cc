// A step of a layer of whole numbers, sharded, on the device that --device names: what the faults
// of tests/cuda_suite.cmake strike. Prints a sum, which is the same on every device and any ranks;
// with "divide" a kernel finds a division by 0, with "timeline" the step is recorded. With
// "product": a product of f32, in full; with "sort" an op launches several kernels.
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/distribute.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/status.h"
#include "dtensor/timeline.h"
#include "nlohmann/json.hpp"

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

// 1 + 2^-11 + 2^-20, of which tf32 keeps 1 + 2^-10.
absl::Status Product(RankContext& rank) {
  const DeviceMesh mesh({rank.world_size()});
  const auto factor = [&mesh](double v) {
    const std::vector<double> values = {v, 0, 0, v};
    return DistributeTensor(ValueOrThrow(Tensor::FromVector(values, {2, 2}, DType::kF32)), mesh,
                            {Replicate()});
  };
  const DTensor y = matmul(factor(1 + 0x1p-11 + 0x1p-20), factor(1));
  std::printf("product %.9f\n", y.ToVector<double>()[0]);
  return absl::OkStatus();
}

// A line of 2000 numbers, which takes several launches to sort.
absl::Status Sorted() {
  std::vector<int64_t> values;
  for (int64_t i = 0; i < 2000; ++i) values.push_back(i * 7 % 2000);
  const auto sorted = sort(FromVector(values, {2000}))[0].ToVector<int64_t>();
  std::printf("sorted %lld to %lld\n", static_cast<long long>(sorted[0]),
              static_cast<long long>(sorted[1999]));
  return absl::OkStatus();
}

// The same recorded: how many spans of products the timeline has on the host and on the device, and
// how many of the latter take time. With `divide`, what the kernel found is still told.
absl::Status Recorded(RankContext& rank, bool divide) {
  Timeline timeline;
  {
    const RecordTimeline record(timeline);
    DT_RETURN_IF_ERROR(Step(rank, false));
    if (divide) remainder(ones({1}, {.dtype = DType::kI64}), zeros({1}, {.dtype = DType::kI64}));
  }
  const nlohmann::json file = nlohmann::json::parse(timeline.ToJson());
  int64_t device = -1;
  int on_host = 0, on_device = 0, long_ones = 0;
  std::vector<std::pair<std::string, double>> open;
  for (const nlohmann::json& e : file.at("traceEvents")) {
    if (e.at("ph") == "M" && e.at("args").value("name", "") == "device") device = e.at("tid");
    if (e.at("tid") == 0) on_host += e.value("name", "") == "matmul" ? 1 : 0;
    if (e.at("tid") != device) continue;
    if (e.at("ph") == "B") open.emplace_back(e.at("name"), e.at("ts"));
    if (e.at("ph") != "E") continue;
    const auto [name, begin] = open.back();
    open.pop_back();
    if (name != "matmul") continue;
    ++on_device;
    long_ones += e.at("ts") > begin ? 1 : 0;
  }
  std::printf("products %d, on the device %d, that take time %d\n", on_host, on_device, long_ones);
  return RankDevices::Current().Synchronize();
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  return dtensor::Launch(&argc, argv, [&](dtensor::RankContext& rank) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "product") return dtensor::Product(rank);
    if (what == "sort") return dtensor::Sorted();
    const bool divide = what.find("divide") != std::string::npos;
    const bool recorded = what.find("timeline") != std::string::npos;
    return recorded ? dtensor::Recorded(rank, divide) : dtensor::Step(rank, divide);
  });
}

// Random numbers per second on one core: whole tensors, shards, and the bare rounds beside them.
//
//   bench_rng [--n=16777216] [--rounds=5] [--short]   prints "NAME Gelem/s <median>" and ratios;
//                                                     --short: whole tensors only
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/rng/draw.h"
#include "dtensor/rng/dropout.h"
#include "dtensor/rng/fill.h"
#include "dtensor/tensor/cpu/level.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

struct Job {
  std::string name;
  double elements;
  std::function<void()> run;
};

// One rank's part of a matrix with rows x columns.
Job Part(const std::string& name, const RandomOp& op, Shape shape, Placements placements,
         int64_t ranks) {
  const DeviceMesh mesh = ranks > 1 ? DeviceMesh({ranks}, {"tp"}) : DeviceMesh::Self();
  const SpecRef spec =
      ValueOrThrow(RankContext::Current().specs().Intern(mesh, placements, shape, DType::kF32));
  const Tensor t = ValueOrThrow(Tensor::Empty(spec->local_shape(), DType::kF32));
  return {name, static_cast<double>(t.numel()), [=] { ThrowIfError(FillRandom(t, *spec, op)); }};
}

std::vector<Job> Jobs(int64_t n) {
  const int64_t rows = 4096, columns = n / rows;
  const auto level = ActiveCpuLevel();
  std::vector<Job> jobs;
  jobs.push_back({"bare rounds", static_cast<double>(n), [=] {
                    [[maybe_unused]] static volatile uint64_t sink;
                    sink = BarePhilox(MakePhiloxKeys(7), n / 4, level);
                  }});
  jobs.push_back(Part("uniform_", UniformOp(), {rows, columns}, {}, 1));
  jobs.push_back(Part("normal_", NormalOp(), {rows, columns}, {}, 1));
  // Inner shards: widths that divide the 270,336 threads of an H100, then widths that do not.
  for (const auto& [name, op] : {std::pair("uniform_", UniformOp()), {"normal_", NormalOp()}}) {
    const std::string shard = std::string(name) + " Shard";
    jobs.push_back(Part(shard + "(0)/4", op, {rows * 4, columns}, {Shard(0)}, 4));
    jobs.push_back(Part(shard + "(1)/4 of 4096", op, {n / 1024, 4096}, {Shard(1)}, 4));
    jobs.push_back(Part(shard + "(1)/4 of 1024", op, {n / 256, 1024}, {Shard(1)}, 4));
    jobs.push_back(Part(shard + "(1)/4 of 256", op, {n / 64, 256}, {Shard(1)}, 4));
    jobs.push_back(Part(shard + "(1)/4 of 16384", op, {n / 4096, 16384}, {Shard(1)}, 4));
    jobs.push_back(Part(shard + "(1)/4 of 5000", op, {n / 1250, 5000}, {Shard(1)}, 4));
  }
  const auto dropout_mask = [&](const std::string& name, Shape shape, Placements placements) {
    const DeviceMesh mesh = placements.empty() ? DeviceMesh::Self() : DeviceMesh({4}, {"tp"});
    const SpecRef spec =
        ValueOrThrow(RankContext::Current().specs().Intern(mesh, placements, shape, DType::kF32));
    const Tensor mask = ValueOrThrow(Tensor::Empty(spec->local_shape(), DType::kBool));
    jobs.push_back({name, static_cast<double>(mask.numel()),
                    [=] { ThrowIfError(FillDropoutMask(mask, *spec, 0.1)); }});
  };
  dropout_mask("dropout mask", {rows, columns}, {});
  dropout_mask("dropout mask Shard(0)/4", {rows * 4, columns}, {Shard(0)});
  dropout_mask("dropout mask Shard(1)/4 of 4096", {n / 1024, 4096}, {Shard(1)});
  dropout_mask("dropout mask Shard(1)/4 of 256", {n / 64, 256}, {Shard(1)});
  const DTensor x = randn({rows, columns});
  jobs.push_back({"dropout", static_cast<double>(n), [=] { dropout(x, 0.1); }});
  return jobs;
}

absl::Status Main(int64_t n, int rounds, bool whole_only) {
  std::vector<Job> jobs = Jobs(n);
  if (whole_only) {
    std::erase_if(jobs, [](const Job& j) { return j.name.find('/') != std::string::npos; });
  }
  std::vector<std::vector<double>> speeds(jobs.size());
  for (int round = 0; round <= rounds; ++round) {  // the first warms up
    for (size_t j = 0; j < jobs.size(); ++j) {
      const auto start = std::chrono::steady_clock::now();
      jobs[j].run();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      if (round > 0) speeds[j].push_back(jobs[j].elements / took.count() / 1e9);
    }
  }
  std::map<std::string, double> median;
  for (size_t j = 0; j < jobs.size(); ++j) {
    std::sort(speeds[j].begin(), speeds[j].end());
    median[jobs[j].name] = speeds[j][speeds[j].size() / 2];
    std::printf("%-32s Gelem/s %.3f\n", jobs[j].name.c_str(), median[jobs[j].name]);
  }
  std::printf("uniform_ / bare rounds: %.2f (goal 0.6)\n",
              median["uniform_"] / median["bare rounds"]);
  for (const Job& job : jobs) {
    const size_t shard = job.name.find(" Shard");
    if (shard == std::string::npos) continue;
    const double whole = median[job.name.substr(0, shard)];
    std::printf("%s / whole: %.2f (goal 0.9 where the width divides 270336)\n", job.name.c_str(),
                median[job.name] / whole);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  int64_t n = 1 << 24;
  int rounds = 5;
  bool whole_only = false;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg.rfind("--n=", 0) == 0) {
      n = std::atoll(arg.c_str() + 4);
    } else if (arg.rfind("--rounds=", 0) == 0) {
      rounds = std::atoi(arg.c_str() + 9);
    } else if (arg == "--short") {
      whole_only = true;
    } else {
      std::fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  const absl::Status status = dtensor::RunFake(
      {.world = 4}, [&](dtensor::RankContext&) { return dtensor::Main(n, rounds, whole_only); });
  if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}

// Redistribution on two pinned ranks of one process, beside a memcpy of the same bytes (what a rank
// writes) by the same two threads in the same run.
//
//   bench_redistribute [--mib=64] [--rounds=30]     prints per kind the MiB that a rank writes, the
//                                                   fastest rounds, their ratio, that of medians
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "dtensor/distribute.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

struct Job {
  std::string name;
  Placement from, to;
  bool bound;  // compared with the goal: it copies and does not compute
};

std::vector<Job> Jobs(int64_t rows, int64_t columns) {
  const int64_t third = rows / 3, numel = rows * columns;
  return {{"S(0) -> S(1)", Shard(0), Shard(1), true},
          {"S(1) -> S(0)", Shard(1), Shard(0), true},
          {"S(0) -> R", Shard(0), Replicate(), true},
          {"S(1) -> R", Shard(1), Replicate(), true},
          {"R -> S(0)", Replicate(), Shard(0), true},
          {"R -> S(1)", Replicate(), Shard(1), true},
          {"S(0) -> Segmented", Shard(0), SegmentedShard(0, {third, rows - third}), true},
          {"Flat -> S(0)", FlatShard({numel / 3, numel - numel / 3}), Shard(0), true},
          {"Flat -> R", FlatShard({numel / 3, numel - numel / 3}), Replicate(), true},
          {"P -> S(0)", Partial(), Shard(0), false},
          {"P -> S(1)", Partial(), Shard(1), false},
          {"P -> R", Partial(), Replicate(), false}};
}

double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

double Min(const std::vector<double>& v) { return *std::min_element(v.begin(), v.end()); }

// Microseconds from when all ranks start `run` to when all have ended.
double Timed(Comm& comm, const std::function<void()>& run) {
  ThrowIfError(comm.Barrier().Wait());
  const auto start = std::chrono::steady_clock::now();
  run();
  ThrowIfError(comm.Barrier().Wait());
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  return took.count();
}

// Ranks that are late by turns: one works before the redistribution, the other one after it.
// Waiting for the peer is what a started redistribution overlaps.
void Overlap(RankContext& context, Comm& comm, const DeviceMesh& mesh, int rounds) {
  const DTensor x = ones({1024, 1024}, {.mesh = mesh, .placements = {Shard(0)}});
  const auto work = [](double us) {  // stands for kernels
    const auto start = std::chrono::steady_clock::now();
    while (std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
               .count() < us) {
    }
  };
  const double before = context.rank() == 0 ? 3000 : 0, after = 3000 - before;
  std::vector<double> sync, async;
  for (int round = 0; round < rounds; ++round) {
    sync.push_back(Timed(comm, [&] {
      work(before);
      const DTensor y = x.Redistribute({Replicate()});
      work(after);
      static_cast<void>(y.local());
    }));
    async.push_back(Timed(comm, [&] {
      work(before);
      const DTensor y = x.Redistribute({Replicate()}, {.async = true});
      work(after);
      static_cast<void>(y.local());
    }));
  }
  if (context.rank() != 0) return;
  std::printf(
      "3 ms of work on ranks that are late by turns, 4 MiB S(0) -> R: Redistribute %.0f us, "
      "Redistribute async %.0f us, %.2fx\n",
      Min(sync), Min(async), Min(sync) / Min(async));
}

absl::Status Main(RankContext& context, int64_t mib, int rounds) {
  const int64_t columns = 4096, rows = (mib << 20) / 4 / columns;
  const DeviceMesh mesh({2}, {"tp"});
  const int dim = 0;
  Comm& comm = *ValueOrThrow(context.CommFor(mesh, {&dim, 1}));
  const bool first = context.rank() == 0;
  bool good = true;
  if (first) {
    std::printf("%-20s%8s%12s%12s%8s%12s\n", "", "MiB", "us", "memcpy us", "ratio", "of medians");
  }
  for (const Job& job : Jobs(rows, columns)) {
    const DTensor x = ones({rows, columns}, {.mesh = mesh, .placements = {job.from}});
    const DTensor y = x.Redistribute({job.to});
    const int64_t bytes = y.spec().local_bytes();
    const Tensor source = ValueOrThrow(Tensor::Full({bytes / 4}, DType::kF32, 1));
    std::vector<double> move, copy;
    for (int round = 0; round <= rounds; ++round) {  // the first warms up
      const double m = Timed(comm, [&] { const DTensor z = x.Redistribute({job.to}); });
      const double c = Timed(comm, [&] {
        const Tensor t = ValueOrThrow(Tensor::Empty({bytes / 4}, DType::kF32));
        std::memcpy(t.data(), source.data(), bytes);
      });
      if (round == 0) continue;
      move.push_back(m);
      copy.push_back(c);
    }
    if (!first) continue;
    // The fastest rounds: whatever else runs on the machine only adds.
    const double ratio = Min(move) / Min(copy);
    good &= !job.bound || ratio <= 1.3;
    std::printf("%-20s%8.1f%12.0f%12.0f%8.2f%12.2f%s\n", job.name.c_str(),
                static_cast<double>(bytes) / (1 << 20), Min(move), Min(copy), ratio,
                Median(move) / Median(copy),
                job.bound ? ratio <= 1.3 ? "" : "  above the goal of 1.3" : "  (computes)");
  }
  Overlap(context, comm, mesh, rounds);
  if (first) std::printf("%s\n", good ? "all copies within 1.3x of memcpy" : "goal of 1.3 missed");
  return absl::OkStatus();
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  int64_t mib = 64;
  int rounds = 30;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg.rfind("--mib=", 0) == 0) {
      mib = std::atoll(arg.c_str() + 6);
    } else if (arg.rfind("--rounds=", 0) == 0) {
      rounds = std::atoi(arg.c_str() + 9);
    } else {
      std::fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  const absl::Status status = dtensor::RunSpmd(
      2, [&](dtensor::RankContext& context) { return dtensor::Main(context, mib, rounds); });
  if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}

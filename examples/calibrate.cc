// Measures the collectives of this machine and writes a cost model (mesh/cost.h) with what it
// found.
//
//   calibrate --ranks 2 --out cost.json
//
// Ranks are threads of one machine, or processes of a launch, and what is between them is taken for
// the link inside of a node; parameters between nodes stay those of --base, or the defaults.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/program.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"
#include "examples/flags.h"

ABSL_FLAG(int64_t, ranks, 2, "number of ranks to measure between");
ABSL_FLAG(std::string, out, "", "JSON file to write the cost model to");
ABSL_FLAG(std::string, base, "", "cost model whose parameters between nodes are kept");
ABSL_FLAG(int64_t, most_bytes, 4 << 20, "largest tensor");
ABSL_FLAG(int64_t, repeats, 15, "measurements of each size; the median counts");

namespace dtensor {
namespace {

using Clock = std::chrono::steady_clock;

double UsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

double Median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<int64_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

struct Sample {
  CollectiveKind kind;
  int64_t bytes;  // received by rank 0
  double us;
};

// One way to communicate: rows of 64 bytes per rank; what rank 0 receives depends on `rows` alone.
struct Pattern {
  CollectiveKind kind;
  std::function<absl::Status(Comm&, const Tensor& part, const Tensor& whole)> run;
};

std::vector<Pattern> AllPatterns() {
  return {
      {CollectiveKind::kAllReduce,
       [](Comm& c, const Tensor&, const Tensor& w) {
         return c.AllReduce(w, w, ReduceOp::kSum).Wait();
       }},
      {CollectiveKind::kAllGather,
       [](Comm& c, const Tensor& p, const Tensor& w) { return c.AllGather(p, w).Wait(); }},
      {CollectiveKind::kReduceScatter,
       [](Comm& c, const Tensor& p, const Tensor& w) {
         return c.ReduceScatter(w, p, {}, ReduceOp::kSum).Wait();
       }},
      {CollectiveKind::kExchange,
       [](Comm& c, const Tensor& p, const Tensor& w) {
         std::vector<Piece> sends, recvs;
         const int64_t rows = p.size(0);
         for (int peer = 0; peer < c.size(); ++peer) {
           if (peer == c.index()) continue;
           sends.push_back({peer, p});
           recvs.push_back({peer, w.Slice(0, peer * rows, rows)});
         }
         return c.Exchange(std::move(sends), std::move(recvs)).Wait();
       }},
      {CollectiveKind::kBroadcast,
       [](Comm& c, const Tensor&, const Tensor& w) { return c.Broadcast(w, c.size() - 1).Wait(); }},
      {CollectiveKind::kRecv,
       [](Comm& c, const Tensor& p, const Tensor&) {
         if (c.index() > 1) return absl::OkStatus();
         return c.index() == 0 ? c.Recv(p, 1).Wait() : c.Send(p, 0).Wait();
       }},
      {CollectiveKind::kBarrier,
       [](Comm& c, const Tensor&, const Tensor&) { return c.Barrier().Wait(); }}};
}

// Every rank runs this; rank 0 keeps what it measured.
absl::Status Measure(RankContext& rank, int64_t most_bytes, int64_t repeats,
                     std::vector<Sample>* samples) {
  constexpr int64_t kColumns = 16, kCalls = 4;  // float32: 64 bytes a row
  rank.allocator()->SetLimit(AvailableMemory() / rank.world_size());
  DT_ASSIGN_OR_RETURN(Comm * comm, rank.WorldComm());
  for (const Pattern& work : AllPatterns()) {
    for (int64_t rows = 1; rows * kColumns * 4 <= most_bytes; rows *= 8) {
      DT_ASSIGN_OR_RETURN(const Tensor part, Tensor::Full({rows, kColumns}, DType::kF32, 0));
      DT_ASSIGN_OR_RETURN(const Tensor whole,
                          Tensor::Full({rows * comm->size(), kColumns}, DType::kF32, 0));
      CommTrace trace;
      DT_RETURN_IF_ERROR(work.run(*comm, part, whole));
      const int64_t bytes = trace.TotalBytes();
      std::vector<double> times;
      for (int64_t r = 0; r < repeats; ++r) {
        DT_RETURN_IF_ERROR(comm->Barrier().Wait());
        const auto start = Clock::now();
        for (int64_t k = 0; k < kCalls; ++k) DT_RETURN_IF_ERROR(work.run(*comm, part, whole));
        times.push_back(UsSince(start) / static_cast<double>(kCalls));
      }
      if (rank.rank() == 0) samples->push_back({work.kind, bytes, Median(std::move(times))});
      if (work.kind == CollectiveKind::kBarrier) break;
    }
  }
  return comm->Barrier().Wait();
}

// us = steps * latency + bytes / rate, with the smallest sum of squares of relative errors. Neither
// comes out below what a model file may hold.
MessageCost Fit(const std::vector<Sample>& samples, int64_t ranks) {
  double ss = 0, sb = 0, bb = 0, s1 = 0, b1 = 0;
  for (const Sample& sample : samples) {
    const double s = CostModel::Steps(sample.kind, ranks) / sample.us;
    const double b = static_cast<double>(sample.bytes) / sample.us;
    ss += s * s;
    sb += s * b;
    bb += b * b;
    s1 += s;
    b1 += b;
  }
  const double det = ss * bb - sb * sb;
  double latency = det > 0 ? (s1 * bb - b1 * sb) / det : s1 / ss;
  latency = std::max(latency, 1e-3);
  const double per_byte = bb > 0 ? (b1 - latency * sb) / bb : 0;
  return {latency, 1 / std::max(per_byte, 1e-9)};
}

// A model file holds numbers; measurements of no time give none.
absl::Status CheckFit(const std::string& what, const MessageCost& cost) {
  if (std::isfinite(cost.latency_us) && std::isfinite(cost.bytes_per_us)) return absl::OkStatus();
  return absl::OutOfRangeError(absl::StrCat("the fit of ", what, " gives ", cost.latency_us,
                                            " us and ", cost.bytes_per_us,
                                            " bytes/us; raise --repeats or --most-bytes"));
}

// How fast a core adds one tensor to another.
absl::StatusOr<double> ReduceBytesPerUs(int64_t repeats) {
  const int64_t bytes = 1 << 20;
  DT_ASSIGN_OR_RETURN(const Tensor sum, Tensor::Full({bytes / 4}, DType::kF32, 0));
  DT_ASSIGN_OR_RETURN(const Tensor x, Tensor::Full({bytes / 4}, DType::kF32, 1));
  std::vector<double> times;
  for (int64_t r = 0; r < repeats; ++r) {
    const auto start = Clock::now();
    ReduceInPlace(sum, x, ReduceOp::kSum);
    times.push_back(UsSince(start));
  }
  return static_cast<double>(bytes) / Median(std::move(times));
}

absl::StatusOr<LinkCost> Calibrate(int64_t ranks, const std::vector<Sample>& samples,
                                   int64_t repeats) {
  LinkCost link;
  std::vector<Sample> moves;  // that do nothing but move
  for (const Pattern& work : AllPatterns()) {
    std::vector<Sample> own;
    for (const Sample& s : samples) {
      if (s.kind == work.kind) own.push_back(s);
    }
    if (work.kind != CollectiveKind::kAllReduce && work.kind != CollectiveKind::kReduceScatter) {
      moves.insert(moves.end(), own.begin(), own.end());
    }
    link.measured[work.kind] = Fit(own, ranks);
  }
  link.measured[CollectiveKind::kSend] = link.measured[CollectiveKind::kRecv];
  static_cast<MessageCost&>(link) = Fit(moves, ranks);
  DT_ASSIGN_OR_RETURN(link.reduce_bytes_per_us, ReduceBytesPerUs(repeats));
  DT_RETURN_IF_ERROR(CheckFit("all that moves", link));
  for (const auto& [kind, cost] : link.measured)
    DT_RETURN_IF_ERROR(CheckFit(std::string(Name(kind)), cost));
  if (std::isfinite(link.reduce_bytes_per_us)) return link;
  return absl::OutOfRangeError("adding up was measured in no time at all; raise --repeats");
}

void Print(const CostModel& model, const std::vector<Sample>& samples, int64_t ranks) {
  std::vector<int64_t> group(ranks);
  for (int64_t r = 0; r < ranks; ++r) group[r] = r;
  std::printf("%-16s%12s%14s%14s%8s\n", "collective", "bytes", "measured us", "modelled us",
              "ratio");
  for (const Sample& s : samples) {
    const double us = model.CollectiveUs(s.kind, s.bytes, group);
    std::printf("%-16s%12lld%14.2f%14.2f%8.2f\n", std::string(Name(s.kind)).c_str(),
                static_cast<long long>(s.bytes), s.us, us, us / s.us);
  }
  std::printf("intra_node: %.3g us, %.0f bytes/us; adding up %.0f bytes/us\n",
              model.intra_node.latency_us, model.intra_node.bytes_per_us,
              model.intra_node.reduce_bytes_per_us);
  std::printf("inter_node: not measured, %.3g us, %.0f bytes/us\n", model.inter_node.latency_us,
              model.inter_node.bytes_per_us);
}

absl::Status Main(const std::vector<char*>& rest) {
  const int64_t ranks = absl::GetFlag(FLAGS_ranks), repeats = absl::GetFlag(FLAGS_repeats);
  const std::string out = absl::GetFlag(FLAGS_out), base = absl::GetFlag(FLAGS_base);
  if (rest.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat("unexpected argument \"", rest[1], "\""));
  }
  if (ranks < 2 || ranks > 256) {
    return absl::InvalidArgumentError(absl::StrCat("--ranks must be from 2 to 256, got ", ranks));
  }
  if (repeats < 1 || repeats > 1000000) {
    return absl::InvalidArgumentError(
        absl::StrCat("--repeats must be from 1 to 1000000, got ", repeats));
  }
  const int64_t most = AvailableMemory() / (4 * ranks * ranks);  // parts and whole, on each rank
  const int64_t most_bytes = absl::GetFlag(FLAGS_most_bytes);
  if (most_bytes < 64 || most_bytes > most) {
    return absl::InvalidArgumentError(
        absl::StrCat("--most_bytes must be from 64 to ", most, ", got ", most_bytes));
  }
  if (out.empty()) return absl::InvalidArgumentError("--out FILE.json is missing");
  CostModel model;
  if (!base.empty()) {
    DT_ASSIGN_OR_RETURN(model, CostModel::FromFile(base));
  }
  const bool writes = ThisProcess() == 0;  // it has rank 0's samples
  const absl::Status writable =
      writes ? CheckWritable(out) : absl::OkStatus();  // before the work, not after
  if (!writable.ok()) {
    return absl::Status(writable.code(), absl::StrCat("--out ", writable.message()));
  }
  std::vector<Sample> samples;
  DT_RETURN_IF_ERROR(RunSpmd(
      ranks, [&](RankContext& rank) { return Measure(rank, most_bytes, repeats, &samples); }));
  if (!writes) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(model.intra_node, Calibrate(ranks, samples, repeats));
  model.ranks_per_node = ranks;
  Print(model, samples, ranks);
  return WriteFile(out, model.ToJson());
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("measures collectives and writes a cost model");
  return dtensor::RunProgram([&]() -> absl::Status {
    DT_RETURN_IF_ERROR(dtensor::CheckFlagNames(argc, argv, "calibrate.cc"));
    return dtensor::Main(absl::ParseCommandLine(argc, argv));
  });
}

// Measures the collectives of this machine and writes a cost model (mesh/cost.h) with what it
// found.
//
//   calibrate --ranks 2 --out cost.json
//
// Ranks are threads of one machine, or processes of a launch. Inside of a machine it measures the
// groups of all its ranks, between machines those of one rank of each, all at once as a training
// uses them. A link that the launch does not have keeps the parameters of --base, or the defaults.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <optional>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/program.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"
#include "examples/flags.h"

ABSL_FLAG(std::optional<int64_t>, ranks, std::nullopt,
          "number of ranks to measure between; default: the launch's, else 2");
ABSL_FLAG(std::string, device, "",
          "cpu, cuda, or auto: cuda where there is one; default: DTENSOR_DEVICE, or cpu");
ABSL_FLAG(std::string, out, "", "JSON file to write the cost model to");
ABSL_FLAG(std::string, base, "",
          "cost model whose parameters are kept where there is no such link");
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
// Of one kind of link, and how many ranks a group has there; none where that is 1.
struct Measured {
  int64_t ranks = 1;
  std::vector<Sample> samples = {};
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

// Every rank of the group runs this; rank 0 keeps what it measured.
absl::Status MeasureGroup(RankContext& rank, Comm* comm, int64_t most_bytes, int64_t repeats,
                          Measured* measured) {
  constexpr int64_t kColumns = 16, kCalls = 4;  // float32: 64 bytes a row
  if (rank.rank() == 0) measured->ranks = comm->size();
  if (comm->size() == 1) return absl::OkStatus();
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
      if (rank.rank() == 0) {
        measured->samples.push_back({work.kind, bytes, Median(std::move(times))});
      }
      if (work.kind == CollectiveKind::kBarrier) break;
    }
  }
  return comm->Barrier().Wait();
}

absl::Status Measure(RankContext& rank, int64_t most_bytes, int64_t repeats, Measured* intra,
                     Measured* inter) {
  const int64_t ranks = rank.world_size(), on_each = rank.cost_model().ranks_per_node;
  if (ranks % on_each != 0) {
    return absl::InvalidArgumentError(absl::StrCat("start as many ranks on every machine: ", ranks,
                                                   " ranks, of which the first ", on_each,
                                                   " are on one"));
  }
  rank.allocator()->SetLimit(AvailableMemory() / on_each);
  DT_ASSIGN_OR_RETURN(const DeviceMesh mesh,
                      DeviceMesh::Create({ranks / on_each, on_each}, {"machines", "ranks"}));
  for (const auto& [dim, measured] : {std::pair{1, intra}, {0, inter}}) {
    DT_ASSIGN_OR_RETURN(Comm * comm, rank.CommFor(mesh, {dim}));
    DT_RETURN_IF_ERROR(MeasureGroup(rank, comm, most_bytes, repeats, measured));
  }
  DT_ASSIGN_OR_RETURN(Comm * all, rank.WorldComm());
  return all->Barrier().Wait();
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

absl::StatusOr<LinkCost> Calibrate(const Measured& measured, int64_t repeats) {
  const auto& [ranks, samples] = measured;
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

void Print(const CostModel& model, const char* name, const LinkCost& link,
           const Measured& measured) {
  if (measured.samples.empty()) {
    std::printf("%s: not measured, %.3g us, %.0f bytes/us\n", name, link.latency_us,
                link.bytes_per_us);
    return;
  }
  std::printf("%-16s%12s%14s%14s%8s\n", "collective", "bytes", "measured us", "modelled us",
              "ratio");
  for (const Sample& s : measured.samples) {
    const double us = model.CollectiveUs(s.kind, static_cast<double>(s.bytes), measured.ranks,
                                         &link == &model.inter_node);
    std::printf("%-16s%12lld%14.2f%14.2f%8.2f\n", std::string(Name(s.kind)).c_str(),
                static_cast<long long>(s.bytes), s.us, us, us / s.us);
  }
  std::printf("%s: %.3g us, %.0f bytes/us; adding up %.0f bytes/us\n", name, link.latency_us,
              link.bytes_per_us, link.reduce_bytes_per_us);
}

absl::Status Main(const std::vector<char*>& rest) {
  const int64_t ranks =
      absl::GetFlag(FLAGS_ranks).value_or(std::max<int64_t>(LaunchedProcesses(), 2));
  const int64_t repeats = absl::GetFlag(FLAGS_repeats);
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
  DT_ASSIGN_OR_RETURN(const std::optional<DeviceType> device,
                      ReadDevice("--device", absl::GetFlag(FLAGS_device)));
  Measured intra, inter;
  DT_RETURN_IF_ERROR(RunSpmd(
      ranks, [&](RankContext& rank) { return Measure(rank, most_bytes, repeats, &intra, &inter); },
      {.device = device}));
  if (!writes) return absl::OkStatus();
  model.ranks_per_node = intra.ranks;
  if (!intra.samples.empty()) {
    DT_ASSIGN_OR_RETURN(model.intra_node, Calibrate(intra, repeats));
  }
  if (!inter.samples.empty()) {
    DT_ASSIGN_OR_RETURN(model.inter_node, Calibrate(inter, repeats));
  }
  Print(model, "intra_node", model.intra_node, intra);
  Print(model, "inter_node", model.inter_node, inter);
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

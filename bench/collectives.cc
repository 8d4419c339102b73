// Two ranks on two pinned cores: microseconds per call of redistributions (--what=redistribute) or
// of plain all-reduces (--what=allreduce), at 4 KiB, 1 MiB and 64 MiB of float32. Prints lines
// "<name> <bytes> <us>": the median of 7 batches of redistributions, the fastest of many short
// batches of all-reduces (as bench/mpi/allreduce.cc). All-reduces are also compared bit for bit
// with their first result, on both ranks, and the program fails if one differs.
//
//   bench_collectives --what=redistribute
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/distribute.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/park.h"
#include "dtensor/mesh/program.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

struct Size {
  int64_t side;  // of a square float32 matrix
  int iterations;
  int short_batches, short_iterations;
  int64_t bytes() const { return side * side * 4; }
};
constexpr Size kSizes[] = {{32, 4000, 500, 200}, {512, 200, 200, 5}, {4096, 4, 15, 1}};

// Microseconds of `call`, which all ranks make together, per batch, ascending.
template <class Call>
std::vector<double> Times(Comm& comm, int batches, int iterations, const Call& call) {
  for (int i = 0; i < std::max(2, iterations / 10); ++i) call();
  std::vector<double> us;
  for (int b = 0; b < batches; ++b) {
    ThrowIfError(comm.Barrier().Wait());
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < iterations; ++i) call();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    us.push_back(took.count() / iterations);
  }
  std::sort(us.begin(), us.end());
  return us;
}

void Print(RankContext& context, const char* name, int64_t bytes, double us) {
  if (context.rank() != 0) return;
  std::printf("%s %ld %.3f\n", name, static_cast<long>(bytes), us);
  std::fflush(stdout);
}

void Redistributions(RankContext& context, Comm& comm) {
  const DeviceMesh mesh({2}, {"tp"});
  const struct {
    const char* name;
    Placement from, to;
  } kMoves[] = {{"P->R", Partial(), Replicate()},
                {"S->R", Shard(0), Replicate()},
                {"P->S", Partial(), Shard(0)},
                {"S->S", Shard(0), Shard(1)}};
  for (const Size& size : kSizes) {
    for (const auto& move : kMoves) {
      const DTensor x = ones({size.side, size.side}, {.mesh = mesh, .placements = {move.from}});
      const std::vector<double> us =
          Times(comm, 7, size.iterations, [&] { const DTensor y = x.Redistribute({move.to}); });
      Print(context, move.name, size.bytes(), us[us.size() / 2]);
    }
  }
}

// Numbers whose sum depends on the order in which they are added.
void FillRough(const Tensor& t, int64_t rank) {
  auto* data = static_cast<float*>(t.data());
  uint32_t state = static_cast<uint32_t>(12345 + 777 * rank);
  for (int64_t i = 0; i < t.numel(); ++i) {
    state = state * 1664525u + 1013904223u;
    data[i] = static_cast<float>(static_cast<int32_t>(state)) * 1e-7f;
  }
}

// What the machine allows: each rank raises a flag and waits for the other's. An all-reduce needs
// at least one such meeting, one that moves data between the ranks' own memory two.
// Of threads: processes share no flags.
void Handoffs(RankContext& context, Comm& comm) {
  if (LaunchedProcesses() > 1) return;
  struct alignas(64) Flag {
    std::atomic<int64_t> value{0};
  };
  static Flag flags[2];
  int64_t turn = 0;
  const auto us = Times(comm, 500, 200, [&] {
    flags[context.rank()].value.store(++turn);
    while (flags[1 - context.rank()].value.load() < turn) SpinHint();
  });
  Print(context, "handoff", 0, us[0]);
}

absl::Status AllReduces(RankContext& context, Comm& comm) {
  Handoffs(context, comm);
  for (const Size& size : kSizes) {
    const Shape shape = {size.side * size.side};
    DT_ASSIGN_OR_RETURN(const Tensor in, Tensor::Empty(shape, DType::kF32));
    DT_ASSIGN_OR_RETURN(const Tensor out, Tensor::Empty(shape, DType::kF32));
    FillRough(in, context.rank());
    DT_RETURN_IF_ERROR(comm.AllReduce(in, out, ReduceOp::kSum).Wait());
    DT_ASSIGN_OR_RETURN(const Tensor first, out.Clone());
    DT_RETURN_IF_ERROR(comm.Broadcast(first, 0).Wait());  // both ranks against rank 0's
    const double us = Times(comm, size.short_batches, size.short_iterations, [&] {
      ThrowIfError(comm.AllReduce(in, out, ReduceOp::kSum).Wait());
    })[0];
    for (int i = 0; i < std::max(100, size.iterations); ++i) {
      if (i > 0) Fill(out, 0);
      if (i > 0) DT_RETURN_IF_ERROR(comm.AllReduce(in, out, ReduceOp::kSum).Wait());
      if (std::memcmp(first.data(), out.data(), static_cast<size_t>(size.bytes())) != 0) {
        return absl::InternalError(
            absl::StrCat("all_reduce of ", size.bytes(), " bytes: other bits at repetition ", i));
      }
    }
    Print(context, "all_reduce", size.bytes(), us);
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  std::string what = "redistribute";
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg.rfind("--what=", 0) == 0) {
      what = arg.substr(7);
    } else {
      what.clear();
    }
  }
  if (what != "redistribute" && what != "allreduce") {
    std::fprintf(stderr, "usage: bench_collectives --what=redistribute|allreduce\n");
    return 2;
  }
  const absl::Status status = RunSpmd(2, [&](RankContext& context) -> absl::Status {
    DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
    if (what == "allreduce") return AllReduces(context, *comm);
    Redistributions(context, *comm);
    return absl::OkStatus();
  });
  if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) { return dtensor::Main(argc, argv); }

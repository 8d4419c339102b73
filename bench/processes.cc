// Collectives of ranks that are processes beside plain calls of MPI, in one run; or over gloo alone
// (bench/compare_torch, beside torch's):
//
//   mpirun -n 2 bench_processes [rounds]
//   dtensor-run --nproc-per-node 2 -- bench_processes [rounds]
//
// For 4 KiB, 1 MiB and 64 MiB of float32 prints lines "<name> <bytes> <MPI us> <ours us> <ratio>":
// medians over rounds, of which each times a batch of one and then a batch of the other, and their
// ratio. Over gloo "<name> <bytes> <ours us>".
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/program.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

struct Size {
  int64_t bytes;
  int iterations;
};
constexpr Size kSizes[] = {{4 << 10, 2000}, {1 << 20, 40}, {64 << 20, 1}};

using Call = std::function<void()>;

double Us(Comm& comm, int iterations, const Call& call) {
  ThrowIfError(comm.Barrier().Wait());
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < iterations; ++i) call();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  return took.count() / iterations;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void Compare(Comm& comm, const char* name, const Size& size, int rounds, const Call& theirs,
             const Call& ours) {
  int by_mpi = 0;
  MPI_Initialized(&by_mpi);
  std::vector<double> mpi, mine;
  for (int round = -1; round < rounds; ++round) {  // the first warms up
    const double a = by_mpi ? Us(comm, size.iterations, theirs) : 0;
    const double b = Us(comm, size.iterations, ours);
    if (round < 0) continue;
    mpi.push_back(a);
    mine.push_back(b);
  }
  if (comm.index() != 0) return;
  std::printf("%s %ld ", name, static_cast<long>(size.bytes));
  if (by_mpi) {
    std::printf("%.2f %.2f %.3f\n", Median(mpi), Median(mine), Median(mine) / Median(mpi));
  } else {
    std::printf("%.2f\n", Median(mine));
  }
  std::fflush(stdout);
}

absl::Status Run(RankContext& context, int rounds) {
  if (LaunchedProcesses() == 1) {
    return absl::FailedPreconditionError(
        "start it by mpirun or dtensor-run: ranks are threads otherwise");
  }
  DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
  MPI_Comm world = MPI_COMM_NULL;
  int by_mpi = 0;
  MPI_Initialized(&by_mpi);
  if (by_mpi) MPI_Comm_dup(MPI_COMM_WORLD, &world);
  const int64_t n = comm->size();
  for (const Size& size : kSizes) {
    const int64_t part = size.bytes / 4 / n, all = part * n;
    DT_ASSIGN_OR_RETURN(const Tensor in, Tensor::Full({all}, DType::kF32, 1.5));
    DT_ASSIGN_OR_RETURN(const Tensor out, Tensor::Full({all}, DType::kF32, 0));
    DT_ASSIGN_OR_RETURN(const Tensor mine, Tensor::Full({part}, DType::kF32, 1.5));
    const int count = static_cast<int>(all), part_count = static_cast<int>(part);
    Compare(
        *comm, "all_reduce", size, rounds,
        [&] { MPI_Allreduce(in.data(), out.data(), count, MPI_FLOAT, MPI_SUM, world); },
        [&] { ThrowIfError(comm->AllReduce(in, out, ReduceOp::kSum).Wait()); });
    Compare(
        *comm, "all_gather", size, rounds,
        [&] {
          MPI_Allgather(mine.data(), part_count, MPI_FLOAT, out.data(), part_count, MPI_FLOAT,
                        world);
        },
        [&] { ThrowIfError(comm->AllGather(mine, out).Wait()); });
    Compare(
        *comm, "reduce_scatter", size, rounds,
        [&] {
          MPI_Reduce_scatter_block(in.data(), mine.data(), part_count, MPI_FLOAT, MPI_SUM, world);
        },
        [&] { ThrowIfError(comm->ReduceScatter(in, mine, {}, ReduceOp::kSum).Wait()); });
  }
  if (by_mpi) MPI_Comm_free(&world);
  return absl::OkStatus();
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 15;
  return dtensor::Launch(
      &argc, argv, [&](dtensor::RankContext& context) { return dtensor::Run(context, rounds); });
}

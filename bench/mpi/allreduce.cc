// The OpenMPI side of bench/allreduce_mpi: MPI_Allreduce of float32 between two processes, each
// pinned to one core. Prints "all_reduce <bytes> <us>" as bench_collectives does: the fastest of
// many short batches. Built with mpicxx by that script; not part of the project's build.
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <vector>

namespace {

// The rank-th core that this process may use: as RunSpmd pins its threads.
void Pin(int rank) {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof(allowed), &allowed);
  for (int core = 0, seen = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed) || seen++ != rank) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof(one), &one);
    return;
  }
}

double FastestUs(const std::vector<float>& in, std::vector<float>* out, int batches,
                 int iterations) {
  double fastest = 1e30;
  for (int b = 0; b < batches; ++b) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    for (int i = 0; i < iterations; ++i) {
      MPI_Allreduce(in.data(), out->data(), static_cast<int>(in.size()), MPI_FLOAT, MPI_SUM,
                    MPI_COMM_WORLD);
    }
    fastest = std::min(fastest, (MPI_Wtime() - start) * 1e6 / iterations);
  }
  return fastest;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  Pin(rank);
  const struct {  // as in bench_collectives
    size_t floats;
    int batches, iterations;
  } kSizes[] = {{1 << 10, 500, 200}, {1 << 18, 200, 5}, {1 << 24, 15, 1}};
  for (const auto& size : kSizes) {
    std::vector<float> in(size.floats, 1.5f), out(size.floats);
    const double us = FastestUs(in, &out, size.batches, size.iterations);
    if (rank == 0) std::printf("all_reduce %zu %.3f\n", 4 * size.floats, us);
  }
  MPI_Finalize();
  return 0;
}

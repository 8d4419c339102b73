// A program that starts and ends MPI itself, around its worlds ("around") or between two of them
// ("between"). For launched_test.cc.
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include <cstdio>
#include <string>

#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/program.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

absl::Status RunWorld() {
  return RunSpmd(LaunchedProcesses(), [](RankContext& context) -> absl::Status {
    DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
    DT_ASSIGN_OR_RETURN(const Tensor x, Tensor::Full({1000}, DType::kF32, 1));
    DT_RETURN_IF_ERROR(comm->AllReduce(x, x, ReduceOp::kSum).Wait());
    std::printf("rank %d: %g\n", comm->index(), x.ToVector<double>()[999]);
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  const bool between = argc > 1 && std::string(argv[1]) == "between";
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  const int code = dtensor::RunProgram([&]() -> absl::Status {
    DT_RETURN_IF_ERROR(dtensor::RunWorld());
    if (!between) return dtensor::RunWorld();
    MPI_Finalize();
    return dtensor::RunWorld();
  });
  if (!between) MPI_Finalize();
  return code;
}

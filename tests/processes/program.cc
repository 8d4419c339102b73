// A program of which one rank (the second argument, else 1) goes wrong in the way that the first
// argument names, while the others make all-reduces. For processes_test.cc.
#include "dtensor/mesh/program.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

absl::Status AllReduce(Comm& comm, int64_t size) {
  DT_ASSIGN_OR_RETURN(const Tensor x, Tensor::Full({size}, DType::kF32, 1));
  DT_RETURN_IF_ERROR(comm.AllReduce(x, x, ReduceOp::kSum).Wait());
  for (const double v : x.ToVector<double>()) {
    if (v != comm.size()) return absl::DataLossError(absl::StrCat("a sum of ", v));
  }
  return absl::OkStatus();
}

absl::Status GoWrong(const std::string& how, Comm& comm) {
  if (how == "kill") raise(SIGKILL);
  if (how == "stop") raise(SIGSTOP);
  if (how == "abort") abort();
  if (how == "exit") exit(3);  // orderly, with all that the runtime does then
  if (how == "_exit") _exit(3);
  if (how == "throw") throw std::runtime_error("boom");
  if (how == "error") return absl::DataLossError("disk on fire");
  if (how == "leave") return absl::OkStatus();
  if (how == "other") return AllReduce(comm, 1000);
  return absl::InvalidArgumentError(absl::StrCat("no fault is called ", how));
}

absl::Status Body(RankContext& context, const std::string& how, int64_t who) {
  DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
  for (int64_t step = 0; step < 20; ++step) {
    if (how != "none" && step == 10 && context.rank() == who) return GoWrong(how, *comm);
    DT_RETURN_IF_ERROR(AllReduce(*comm, step % 2 == 0 ? 10 : 50000));
  }
  // What was printed before the end is seen, in whatever order.
  printf("rank %d of %d is done\n", static_cast<int>(context.rank()),
         static_cast<int>(context.world_size()));
  return absl::OkStatus();
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  return dtensor::Launch(&argc, argv, [&](dtensor::RankContext& context) {
    return dtensor::Body(context, argc > 1 ? argv[1] : "none", argc > 2 ? atoi(argv[2]) : 1);
  });
}

// A program of which one rank (the second argument, else 1) goes wrong in the way that the first
// argument names, while the others make all-reduces; or "overlap", "groups". For processes_test.cc.
#include "dtensor/mesh/program.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/parallel_groups.h"
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

// An all-reduce of 64 MiB goes on while its rank sleeps for 1.5 times what it takes alone: reading
// it afterwards takes nearly nothing. Of some tries one has to be so: others use the cores too.
absl::Status Overlap(Comm& comm) {
  constexpr int64_t kFloats = 16 << 20;
  DT_ASSIGN_OR_RETURN(const Tensor in, Tensor::Full({kFloats}, DType::kF32, 1));
  DT_ASSIGN_OR_RETURN(const Tensor out, Tensor::Full({kFloats}, DType::kF32, 0));
  const auto now = [] { return absl::Now(); };
  absl::Duration alone = absl::InfiniteDuration();
  double least = 1;
  for (int i = 0; i < 3; ++i) {
    DT_RETURN_IF_ERROR(comm.Barrier().Wait());
    const absl::Time start = now();
    DT_RETURN_IF_ERROR(comm.AllReduce(in, out, ReduceOp::kSum).Wait());
    alone = std::min(alone, now() - start);
  }
  for (int i = 0; i < 8 && least > 0.05; ++i) {
    Fill(out, 0);
    DT_RETURN_IF_ERROR(comm.Barrier().Wait());
    Work work = comm.AllReduce(in, out, ReduceOp::kSum, {.overlap = true});
    absl::SleepFor(1.5 * alone);
    const absl::Time start = now();
    DT_RETURN_IF_ERROR(work.Wait());
    least = std::min(least, absl::FDivDuration(now() - start, alone));
    const Tensor last = out.Slice(0, kFloats - 1, 1);
    if (last.ToVector<double>()[0] != comm.size()) return absl::DataLossError("another sum");
  }
  printf("rank %d: %.1f ms alone; after a sleep reading takes %.4f of that\n", comm.index(),
         absl::ToDoubleMilliseconds(alone), least);
  if (least > 0.05) return absl::DeadlineExceededError("it does not overlap");
  return absl::OkStatus();
}

// Every group of this rank adds up its ranks, in whatever order each rank comes to them.
absl::Status GroupsOfAWorld(RankContext& context) {
  const int64_t world = context.world_size(), pp = world == 16 ? 4 : 2;
  DT_ASSIGN_OR_RETURN(ParallelGroups groups, ParallelGroups::Create({.tp = 2, .pp = pp}, world));
  DT_RETURN_IF_ERROR(groups.Store("ends", {{world - 1, 0}}));
  std::string used;
  for (const std::string& name : groups.names()) {
    const absl::StatusOr<DeviceMesh> group = groups.Group(name, context.rank());
    if (!group.ok() || !group->Contains(context.rank())) continue;
    std::vector<int> dims(static_cast<size_t>(group->ndim()));
    std::iota(dims.begin(), dims.end(), 0);
    DT_ASSIGN_OR_RETURN(Comm * comm, context.CommFor(*group, dims));
    DT_ASSIGN_OR_RETURN(const Tensor x,
                        Tensor::Full({5}, DType::kF64, static_cast<double>(context.rank())));
    DT_RETURN_IF_ERROR(comm->AllReduce(x, x, ReduceOp::kSum).Wait());
    const std::vector<int64_t> ranks = group->Ranks();
    const auto sum = static_cast<double>(std::accumulate(ranks.begin(), ranks.end(), int64_t{0}));
    if (x.ToVector<double>()[4] != sum) {
      return absl::DataLossError(absl::StrCat(name, ": a sum of ", x.ToVector<double>()[4]));
    }
    absl::StrAppend(&used, " ", name, "=", absl::StrJoin(ranks, ","));
  }
  printf("rank %d:%s\n", static_cast<int>(context.rank()), used.c_str());
  return absl::OkStatus();
}

absl::Status Body(RankContext& context, const std::string& how, int64_t who) {
  if (how == "groups") return GroupsOfAWorld(context);
  DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
  if (how == "overlap") return Overlap(*comm);
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

// A program of which one rank (the second argument, else 1) goes wrong in the way that the first
// argument names, while the others make all-reduces; or "overlap", "timeline", "groups", "ports",
// "much data", "soak".
// For processes_test.cc.
#include "dtensor/mesh/program.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/parallel_groups.h"
#include "dtensor/mesh/store.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/trace.h"

namespace {
std::atomic<int64_t> clock_is_ahead{0};  // seconds
}

// The system's clock of the day, which somebody sets.
extern "C" int clock_gettime(clockid_t id, timespec* time) noexcept {
  const auto result = static_cast<int>(syscall(SYS_clock_gettime, id, time));
  if (id == CLOCK_REALTIME) time->tv_sec += clock_is_ahead.load();
  return result;
}

namespace dtensor {
namespace {

absl::Status AllReduce(Comm& comm, int64_t size) {
  DT_ASSIGN_OR_RETURN(const Tensor ones, Tensor::Full({size}, DType::kF32, 1));
  DT_ASSIGN_OR_RETURN(const Tensor x, ones.To(RankContext::Current().device()));
  DT_RETURN_IF_ERROR(comm.AllReduce(x, x, ReduceOp::kSum).Wait());
  for (const double v : x.ToVector<double>()) {
    if (v != comm.size()) return absl::DataLossError(absl::StrCat("a sum of ", v));
  }
  return absl::OkStatus();
}

// Stops this process. `ended`: by somebody after a while, else a launcher that kills nobody would
// wait for it.
void Stop(bool ended = true) {
  const pid_t me = getpid();
  if (ended && fork() == 0) {
    absl::SleepFor(absl::Milliseconds(4000));
    kill(me, SIGKILL);
    _exit(0);
  }
  raise(SIGSTOP);
}

// What takes its time to clean up.
struct Slow {
  bool is = false;
  ~Slow() {
    if (is) absl::SleepFor(absl::Milliseconds(5500));
  }
};

// More memory than this process may have.
absl::Status TakeTooMuch() {
  const rlimit most = {int64_t{2} << 30, int64_t{2} << 30};
  setrlimit(RLIMIT_AS, &most);
  return Tensor::Empty({int64_t{1} << 30}, DType::kF32).status();
}

// A call that fails harms nobody.
absl::Status SayTooMuch(Store& store) {
  const absl::Status refused = store.Set("much", std::string(65 << 20, 'a'));
  return absl::IsInvalidArgument(refused) ? store.Set("little", "a")
                                          : absl::InternalError("it was taken");
}

// A child that ends in order is no rank, and is told so.
absl::Status Fork(Comm& comm) {
  const pid_t child = fork();
  if (child == 0) exit(absl::IsFailedPrecondition(AllReduce(comm, 1000)) ? 0 : 1);
  int how = 0;
  const bool ended = child > 0 && waitpid(child, &how, 0) == child && how == 0;
  return ended ? absl::OkStatus() : absl::InternalError("the child did not end in order");
}

// Nothing of a failed group waits, and nothing crashes.
absl::Status UseAfterAbort(Comm& comm) {
  comm.Abort(absl::CancelledError("given up"));
  comm.Abort(absl::CancelledError("given up again"));
  for (int i = 0; i < 3; ++i) {
    if (AllReduce(comm, 50000).ok()) return absl::InternalError("a call after an abort went well");
  }
  return absl::CancelledError("given up");
}

absl::Status GoWrong(const std::string& how, RankContext& context, Comm& comm) {
  printf("rank %d goes wrong at %.3f\n", static_cast<int>(context.rank()),
         absl::ToUnixMillis(absl::Now()) * 1e-3);
  fflush(stdout);
  if (how == "kill" || how == "kill late") raise(SIGKILL);
  if (how == "stop") Stop();
  if (how == "stop for good") Stop(/*ended=*/false);
  if (how == "loop") absl::SleepFor(absl::InfiniteDuration());
  if (how == "abort") abort();
  if (how == "pipe") raise(SIGPIPE);  // as what writes to a connection whose other end has gone
  if (how == "exit") exit(3);         // orderly, with all that the runtime does then
  if (how == "_exit") _exit(3);
  if (how == "throw") throw std::runtime_error("boom");
  if (how == "error") return absl::DataLossError("disk on fire");
  if (how == "leave") return absl::OkStatus();
  if (how == "other") return AllReduce(comm, 1000);
  if (how == "barrier") return comm.Barrier().Wait();
  if (how == "memory") return TakeTooMuch();
  if (how == "much") return SayTooMuch(context.store());
  if (how == "fork") return Fork(comm);
  if (how == "keys") return context.store().Set("dtensor/event/1", "7");
  if (how == "after") return UseAfterAbort(comm);
  if (how == "slow") context.Slot<Slow>().is = true;
  return absl::OkStatus();
}

// Whether the body ends there.
bool EndsBody(const std::string& how) {
  for (const char* end : {"error", "leave", "other", "barrier", "memory", "after"}) {
    if (how == end) return true;
  }
  return false;
}

// Two ranks come to calls of two groups in another order each.
absl::Status SwapCalls(RankContext& context, Comm& world) {
  if (context.rank() > 1) return AllReduce(world, 10);
  const DeviceMesh mesh = *DeviceMesh::FromRanks({2}, {0, 1}, {"pair"});
  DT_ASSIGN_OR_RETURN(Comm * pair, context.CommFor(mesh, {0}));
  for (Comm* comm : {context.rank() == 0 ? pair : &world, context.rank() == 0 ? &world : pair}) {
    DT_RETURN_IF_ERROR(AllReduce(*comm, 10));
  }
  return absl::OkStatus();
}

// An all-reduce of 64 MiB goes on while its rank sleeps for 1.5 times what it takes alone: reading
// it afterwards takes nearly nothing. Where others use the cores too it needs longer, so that after
// some tries the rank sleeps longer: a call that does not go on by itself takes its time anyway.
absl::Status Overlap(Comm& comm) {
  constexpr int64_t kFloats = 16 << 20;
  DT_ASSIGN_OR_RETURN(const Tensor in, Tensor::Full({kFloats}, DType::kF32, 1));
  DT_ASSIGN_OR_RETURN(const Tensor out, Tensor::Full({kFloats}, DType::kF32, 0));
  const auto now = [] { return absl::Now(); };
  absl::Duration alone;
  double least = 1, sleep = 1.5;
  for (int i = 0; i < 12 && least > 0.05; ++i) {
    if (i >= 6) sleep *= 2;
    DT_RETURN_IF_ERROR(comm.Barrier().Wait());
    absl::Time start = now();
    DT_RETURN_IF_ERROR(comm.AllReduce(in, out, ReduceOp::kSum).Wait());
    alone = now() - start;
    Fill(out, 0);
    DT_RETURN_IF_ERROR(comm.Barrier().Wait());
    Work work = comm.AllReduce(in, out, ReduceOp::kSum, {.overlap = true});
    absl::SleepFor(sleep * alone);
    start = now();
    DT_RETURN_IF_ERROR(work.Wait());
    least = std::min(least, absl::FDivDuration(now() - start, alone));
    const Tensor last = out.Slice(0, kFloats - 1, 1);
    if (last.ToVector<double>()[0] != comm.size()) return absl::DataLossError("another sum");
    // Both go on or stop.
    DT_ASSIGN_OR_RETURN(const Tensor mine, Tensor::Full({1}, DType::kF64, least));
    DT_ASSIGN_OR_RETURN(const Tensor most, Tensor::Full({1}, DType::kF64, 0));
    DT_RETURN_IF_ERROR(comm.AllReduce(mine, most, ReduceOp::kMax).Wait());
    least = most.ToVector<double>()[0];
  }
  printf("rank %d: %.1f ms alone; after a sleep of %.1f times that reading takes %.4f of it\n",
         comm.index(), absl::ToDoubleMilliseconds(alone), sleep, least);
  if (least > 0.05) return absl::DeadlineExceededError("it does not overlap");
  return absl::OkStatus();
}

// A call goes on while its rank sleeps; the rank's timeline goes to DT_TIMELINE.
absl::Status RecordOverlap(Comm& comm) {
  DT_ASSIGN_OR_RETURN(const Tensor x, Tensor::Full({1 << 18}, DType::kF32, 1));
  Timeline timeline;
  {
    const TimelineTrack track(timeline, comm.index());
    Work work = comm.AllReduce(x, x, ReduceOp::kSum, {.overlap = true});
    {
      const Span span(SpanKind::kPhase, "sleep");
      absl::SleepFor(absl::Milliseconds(500));
    }
    DT_RETURN_IF_ERROR(work.Wait());
  }
  return timeline.Write(absl::StrCat(std::getenv("DT_TIMELINE"), comm.index()));
}

// More bytes than 32 bits count, in one message and in a sum.
absl::Status MoveMuch(Comm& comm) {
  constexpr int64_t kBytes = (int64_t{1} << 31) + 4099;
  const int64_t me = comm.index(), n = comm.size();
  DT_ASSIGN_OR_RETURN(const Tensor x,
                      Tensor::Full({kBytes}, DType::kU8, static_cast<double>(me + 1)));
  auto* values = static_cast<uint8_t*>(x.data());
  // Before, at and after what ends a part of a message, or a count of 31 or 32 bits.
  std::vector<int64_t> marks = {0, kBytes - 1};
  for (const int64_t end : {int64_t{1} << 30, int64_t{1} << 31}) {
    for (int64_t i = end - 1; i <= end + 1; ++i) marks.push_back(i);
  }
  for (size_t k = 0; k < marks.size(); ++k) {
    if (me == 0) values[marks[k]] = static_cast<uint8_t>(10 + k);
  }
  DT_RETURN_IF_ERROR(comm.Broadcast(x, 0).Wait());
  const auto check = [&](int64_t times) -> absl::Status {
    int64_t others = 0;
    for (int64_t i = 0; i < kBytes; ++i) others += values[i] != times;
    for (size_t k = 0; k < marks.size(); ++k) {
      const int64_t is = values[marks[k]], wanted = times * (10 + static_cast<int64_t>(k));
      if (is == wanted) continue;
      return absl::DataLossError(absl::StrCat("byte ", marks[k], " is ", is, ", not ", wanted));
    }
    if (others == static_cast<int64_t>(marks.size())) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat(others, " bytes are not ", times));
  };
  DT_RETURN_IF_ERROR(check(1));
  DT_RETURN_IF_ERROR(comm.AllReduce(x, x, ReduceOp::kSum).Wait());
  DT_RETURN_IF_ERROR(check(n));
  printf("rank %d moved %ld bytes\n", static_cast<int>(me), static_cast<long>(kBytes));
  return absl::OkStatus();
}

// Calls of random kinds and sizes, the same on all ranks, with random delays, others on each. Every
// number is looked at. For soak.py, which does things to its processes.
absl::Status Soak(RankContext& context, Comm& comm, int64_t seed) {
  std::mt19937 same(static_cast<uint32_t>(seed));
  std::mt19937 mine(static_cast<uint32_t>(seed * 1000 + context.rank()));
  const int64_t n = comm.size(), me = comm.index();
  const DeviceMesh world({n}, {"world"});
  struct Pending {
    Work work;
    Tensor out;
  };
  std::vector<Pending> pending;
  const auto read = [&](Pending& one) -> absl::Status {
    DT_RETURN_IF_ERROR(one.work.Wait());
    for (const double v : one.out.ToVector<double>()) {
      if (v != n) return absl::DataLossError(absl::StrCat("an overlapped sum of ", v));
    }
    return absl::OkStatus();
  };
  for (int step = 0; step < 400; ++step) {
    if (me == 0 && step % 100 == 0) {
      printf("step %d\n", step);
      fflush(stdout);
    }
    if (mine() % 8 == 0) absl::SleepFor(absl::Milliseconds(mine() % 30));
    const auto kind = same() % 5;
    const int64_t size = int64_t{1} << same() % 18;
    if (kind < 2) {
      DT_RETURN_IF_ERROR(AllReduce(comm, size));
    } else if (kind == 2) {
      DT_ASSIGN_OR_RETURN(const Tensor in, Tensor::Full({size}, DType::kF32, 1));
      DT_ASSIGN_OR_RETURN(const Tensor out, Tensor::Full({size}, DType::kF32, 0));
      pending.push_back({comm.AllReduce(in, out, ReduceOp::kSum, {.overlap = true}), out});
    } else if (kind == 3) {
      DT_ASSIGN_OR_RETURN(const Tensor in,
                          Tensor::Full({size}, DType::kI64, static_cast<double>(me)));
      DT_ASSIGN_OR_RETURN(const Tensor out, Tensor::Full({n, size}, DType::kI64, -1));
      DT_RETURN_IF_ERROR(comm.AllGather(*in.Reshape({1, size}), out).Wait());
      const std::vector<int64_t> all = out.ToVector<int64_t>();
      for (int64_t i = 0; i < n * size; ++i) {
        if (all[static_cast<size_t>(i)] != i / size) return absl::DataLossError("a wrong gather");
      }
    } else {
      const std::string text(same() % 5000, static_cast<char>('a' + step % 26));
      DT_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                          context.Exchange(world, {0}, "soak", text));
      for (const std::string& one : all) {
        if (one != text) return absl::DataLossError("other bytes of the host");
      }
    }
    while (pending.size() > same() % 4) {
      DT_RETURN_IF_ERROR(read(pending.front()));
      pending.erase(pending.begin());
    }
  }
  for (Pending& one : pending) DT_RETURN_IF_ERROR(read(one));
  printf("rank %d of %d is done\n", static_cast<int>(me), static_cast<int>(n));
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
    DT_ASSIGN_OR_RETURN(Comm * comm, groups.CommOf(name, context));
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

// At how many ports this process listens.
int ListensAt() {
  std::set<std::string> mine;  // inodes of its sockets
  std::error_code none;        // what is closed meanwhile
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    const std::string link = std::filesystem::read_symlink(file.path(), none).string();
    if (absl::StartsWith(link, "socket:[")) mine.insert(link.substr(8, link.size() - 9));
  }
  int ports = 0;
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream lines(table);
    for (std::string line; std::getline(lines, line);) {
      const std::vector<std::string> row = absl::StrSplit(line, ' ', absl::SkipEmpty());
      ports += row.size() > 9 && row[3] == "0A" && mine.count(row[9]) != 0;  // 0A: it listens
    }
  }
  return ports;
}

absl::Status Body(RankContext& context, const std::string& how, int64_t who) {
  if (how == "groups") return GroupsOfAWorld(context);
  DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
  if (how == "overlap") return Overlap(*comm);
  if (how == "timeline") return RecordOverlap(*comm);
  if (how == "ports") {
    printf("rank %d listens at %d ports\n", comm->index(), ListensAt());
    return absl::OkStatus();
  }
  if (how == "much data") return MoveMuch(*comm);
  if (how == "soak") return Soak(context, *comm, who);
  const bool at_end = how == "stop at the end";
  // Late: where calls of NCCL are not compared any more.
  const int64_t steps = how == "kill late" ? 100 : 20;
  for (int64_t step = 0; step < steps; ++step) {
    if (step == steps - 10 && context.rank() == who && !at_end) {
      const absl::Status wrong = GoWrong(how, context, *comm);
      if (EndsBody(how)) return wrong;
      DT_RETURN_IF_ERROR(wrong);
    }
    if (how == "clock" && context.rank() == who) absl::SleepFor(absl::Milliseconds(20));
    DT_RETURN_IF_ERROR(AllReduce(*comm, step % 2 == 0 ? 10 : 50000));
  }
  if (how == "swap") return SwapCalls(context, *comm);
  if (at_end && context.rank() == who) Stop();
  // What was printed before the end is seen, in whatever order.
  printf("rank %d of %d is done\n", static_cast<int>(context.rank()),
         static_cast<int>(context.world_size()));
  return absl::OkStatus();
}

// Two threads of every process run a world at a time.
absl::Status RunTwoWorlds() {
  const auto run = [](absl::Status* how) {
    *how = RunSpmd(LaunchedProcesses(), [](RankContext& context) -> absl::Status {
      DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
      for (int i = 0; i < 200; ++i) DT_RETURN_IF_ERROR(AllReduce(*comm, 1000));
      absl::SleepFor(absl::Milliseconds(200));  // the other thread's begins
      return comm->Barrier().Wait();
    });
  };
  absl::Status of_thread, mine;
  std::thread other([&] { run(&of_thread); });
  run(&mine);
  other.join();
  if (of_thread.ok() || mine.ok()) return absl::OkStatus();
  return mine;
}

// Sets it forwards and backwards while ranks wait.
void SetClocks() {
  for (const int64_t ahead : {7200, 0, -7200, 0, 100000, 0}) {
    absl::SleepFor(absl::Milliseconds(60));
    clock_is_ahead.store(ahead);
  }
}

int64_t OpenFiles() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return std::distance(begin(files), end(files));
}

// Many worlds of one launch, after which as many files are open as after the second.
absl::Status RunWorlds(absl::FunctionRef<absl::Status(RankContext&)> body) {
  int64_t before = 0;
  for (int i = 0; i < 30; ++i) {
    DT_RETURN_IF_ERROR(RunSpmd(LaunchedProcesses(), body));
    if (i == 1) before = OpenFiles();
  }
  const int64_t after = OpenFiles();
  return after == before ? absl::OkStatus()
                         : absl::InternalError(absl::StrCat(before, " files, then ", after));
}

// What goes wrong outside of a world; the others make one.
absl::Status Main(const std::string& how, int64_t who) {
  const auto body = [&](RankContext& context) { return Body(context, how, who); };
  const bool me = ThisProcess() == who;
  if (me && how == "early error") return absl::NotFoundError("there is no such file");
  if (me && how == "early end") return absl::OkStatus();
  if (me && how == "early exit") exit(4);
  std::thread clock([&] {
    if (how == "clock") SetClocks();
  });
  absl::Status status;
  if (how == "worlds" || how == "two worlds") {
    clock.join();
    return how == "worlds" ? RunWorlds(body) : RunTwoWorlds();
  }
  const int worlds = how == "another world" && me ? 2 : 1;
  for (int i = 0; i < worlds && status.ok(); ++i) status = RunSpmd(LaunchedProcesses(), body);
  clock.join();
  if (me && how == "late error" && status.ok()) return absl::NotFoundError("nowhere to write to");
  return status;
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  const std::string how = argc > 1 ? argv[1] : "none";
  const int64_t who = argc > 2 ? atoi(argv[2]) : 1;
  if (std::string(argv[argc - 1]).rfind("--", 0) == 0) {  // what Launch takes
    return dtensor::Launch(&argc, argv, [&](dtensor::RankContext& context) {
      return dtensor::Body(context, how[0] == '-' ? "none" : how, who);
    });
  }
  return dtensor::RunProgram([&] { return dtensor::Main(how, who); });
}

// NCCL's stand-in with ranks in processes of their own: this program, started again for each. What
// they compute, what is said of calls that do not fit and of who does not come, and what the others
// see of a process that is killed.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <numeric>
#include <sstream>
#include <thread>

#include "tests/cusim/nccl_rank.h"

namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

void Sleep(int ms) { std::this_thread::sleep_for(milliseconds(ms)); }

// ---- What the processes do. ----

ncclUniqueId IdOf(const std::string& text) {
  ncclUniqueId id;
  for (size_t i = 0; i < sizeof id.internal; ++i) {
    id.internal[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  }
  return id;
}
std::string TextOf(const ncclUniqueId& id) {
  std::string text;
  for (const char c : id.internal) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(c));
    text += digits;
  }
  return text;
}

struct Process {
  int number = 0, of = 0;
  ncclUniqueId id;
  std::string folder;  // of the test

  // What processes tell each other beside NCCL.
  void Say(const std::string& what) const { std::ofstream(folder + "/" + what); }
  void Await(const std::string& what) const {
    for (int i = 0; access((folder + "/" + what).c_str(), F_OK) != 0; ++i) {
      ASSERT_LT(i, 2000) << what;
      Sleep(10);
    }
  }
  ncclResult_t Join(Rank* me, int rank, int size, int device) const {
    *me = {rank, size};
    EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithFlags(&me->stream, cudaStreamNonBlocking), cudaSuccess);
    return ncclCommInitRank(&me->comm, size, id, rank);
  }
  Rank Join() const {
    Rank me;
    EXPECT_EQ(Join(&me, number, of, number), ncclSuccess);
    return me;
  }
};

void Leave(const Rank& me) {
  NCCL_OK(ncclCommFinalize(me.comm));
  NCCL_OK(ncclCommDestroy(me.comm));
  CUDA_OK(cudaStreamDestroy(me.stream));
}

void AllCollectives(const Rank& me, size_t n) {
  const auto ranks = static_cast<size_t>(me.size);
  const size_t all = n * ranks;
  std::vector<float> sum(all);
  for (int r = 0; r < me.size; ++r) {
    for (size_t i = 0; i < all; ++i) sum[i] += Values<float>(r, all)[i];
  }
  float* const in = me.Put(Values<float>(me.rank, all));
  float* const out = me.Put(std::vector<float>(all));
  NCCL_OK(ncclAllReduce(in, out, all, ncclFloat32, ncclSum, me.comm, me.stream));
  EXPECT_EQ(me.Take(out, all), sum);
  NCCL_OK(ncclReduceScatter(in, out, n, ncclFloat32, ncclSum, me.comm, me.stream));
  const auto first = sum.begin() + me.rank * static_cast<ptrdiff_t>(n);
  EXPECT_EQ(me.Take(out, n), std::vector<float>(first, first + static_cast<ptrdiff_t>(n)));
  NCCL_OK(ncclAllGather(in, out, n, ncclFloat32, me.comm, me.stream));
  const std::vector<float> got = me.Take(out, all);
  for (size_t i = 0; i < all; ++i) {
    EXPECT_EQ(got[i], Values<float>(static_cast<int>(i / n), all)[i % n]);
  }
  NCCL_OK(ncclBroadcast(in, out, n, ncclFloat32, me.size - 1, me.comm, me.stream));
  EXPECT_EQ(me.Take(out, n)[0], Values<float>(me.size - 1, all)[0]);
  CUDA_OK(cudaMemsetAsync(out, 0, all * sizeof(float), me.stream));
  NCCL_OK(ncclReduce(in, out, all, ncclFloat32, ncclSum, 1, me.comm, me.stream));
  EXPECT_EQ(me.Take(out, all), me.rank == 1 ? sum : std::vector<float>(all));
  // In place, with operators that scale: by a number of each rank, and by their number.
  ncclRedOp_t op;
  float* const by = me.Put<float>({me.rank == 0 ? 2.f : 0.f});
  NCCL_OK(ncclRedOpCreatePreMulSum(&op, by, ncclFloat32, ncclScalarDevice, me.comm));
  NCCL_OK(ncclAllReduce(in, in, 1, ncclFloat32, op, me.comm, me.stream));
  NCCL_OK(ncclAllReduce(in, in, 1, ncclFloat32, ncclAvg, me.comm, me.stream));
  NCCL_OK(ncclRedOpDestroy(op, me.comm));
  EXPECT_NEAR(me.Take(in, 1)[0], 2 * Values<float>(0, all)[0], 1e-5);
  for (float* const p : {in, out, by}) CUDA_OK(cudaFree(p));
}

void Collectives(const Process& p) {
  const Rank me = p.Join();
  AllCollectives(me, 5);
  Leave(me);
}

// More than sockets hold, from all at once.
void Large(const Process& p) {
  const Rank me = p.Join();
  constexpr size_t kMany = 3 << 20;
  float* const in = me.Put(std::vector<float>(kMany, static_cast<float>(me.rank + 1)));
  NCCL_OK(ncclAllReduce(in, in, kMany, ncclFloat32, ncclSum, me.comm, me.stream));
  EXPECT_EQ(me.Take(in, kMany), std::vector<float>(kMany, 3));
  CUDA_OK(cudaFree(in));
  Leave(me);
}

void Messages(const Process& p) {
  const Rank me = p.Join();
  const auto n = static_cast<size_t>(p.of);
  // All to all, itself included, two messages to each: one group.
  std::vector<int> mine(2 * n);
  std::iota(mine.begin(), mine.end(), 100 * me.rank);
  int* const in = me.Put(mine);
  int* const out = me.Put(std::vector<int>(2 * n));
  NCCL_OK(ncclGroupStart());
  for (int peer = 0; peer < me.size; ++peer) {
    for (int k = 0; k < 2; ++k) {
      NCCL_OK(ncclRecv(out + 2 * peer + k, 1, ncclInt32, peer, me.comm, me.stream));
      NCCL_OK(ncclSend(in + 2 * peer + k, 1, ncclInt32, peer, me.comm, me.stream));
    }
  }
  NCCL_OK(ncclGroupEnd());
  const std::vector<int> got = me.Take(out, 2 * n);
  for (int i = 0; i < 2 * me.size; ++i)
    EXPECT_EQ(got[static_cast<size_t>(i)], 100 * (i / 2) + 2 * me.rank + i % 2);
  // A chain, without groups.
  if (me.rank > 0) {
    NCCL_OK(ncclRecv(out, 1, ncclInt32, me.rank - 1, me.comm, me.stream));
  }
  if (me.rank + 1 < me.size) {
    NCCL_OK(ncclSend(me.rank == 0 ? in : out, 1, ncclInt32, me.rank + 1, me.comm, me.stream));
  }
  if (me.rank + 1 == me.size) {
    EXPECT_EQ(me.Take(out, 1)[0], 0);
  }
  CUDA_OK(cudaStreamSynchronize(me.stream));
  for (int* const q : {in, out}) CUDA_OK(cudaFree(q));
  Leave(me);
}

// Two processes of two threads each.
void Threads(const Process& p) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, rank = 2 * p.number + i] {
      Rank me;
      NCCL_OK(p.Join(&me, rank, 2 * p.of, rank));
      AllCollectives(me, 3);
      Leave(me);
    });
  }
  for (std::thread& t : threads) t.join();
}

// A device goes on where its host waits for something else.
void HostsThatDoNotWait(const Process& p) {
  const Rank me = p.Join();
  int* const x = me.Put<int>({me.rank + 1});
  NCCL_OK(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, me.comm, me.stream));
  if (me.rank == 0) {
    EXPECT_EQ(me.Take(x, 1)[0], 3);
    p.Say("done");
  }
  p.Await("done");
  EXPECT_EQ(me.Take(x, 1)[0], 3);
  CUDA_OK(cudaFree(x));
  Leave(me);
}

void Captured(const Process& p) {
  const Rank me = p.Join();
  SumThriceAsAGraph(me);
  Leave(me);
}

// Ranks 0 and 2, in the order of keys; rank 1, which has none, ends before they use it.
void Split(const Process& p) {
  const Rank me = p.Join();
  ncclComm_t part;
  NCCL_OK(ncclCommSplit(me.comm, me.rank == 1 ? NCCL_SPLIT_NOCOLOR : 4, -me.rank, &part, nullptr));
  Leave(me);
  if (me.rank == 1) {
    EXPECT_EQ(part, nullptr);
    return p.Say("left");
  }
  p.Await("left");
  int rank = -1;
  NCCL_OK(ncclCommUserRank(part, &rank));
  EXPECT_EQ(rank, me.rank == 2 ? 0 : 1);
  Rank of_part{rank, 2, nullptr, part};
  CUDA_OK(cudaStreamCreate(&of_part.stream));
  AllCollectives(of_part, 2);
  Leave(of_part);
}

void NotBlocking(const Process& p) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  Rank me{p.number, p.of};
  CUDA_OK(cudaSetDevice(me.rank));
  CUDA_OK(cudaStreamCreate(&me.stream));
  if (me.rank == 1) p.Await("began");
  const ncclResult_t began = ncclCommInitRankConfig(&me.comm, me.size, p.id, me.rank, &config);
  if (me.rank == 0) {
    EXPECT_EQ(began, ncclInProgress);
    p.Say("began");
  }
  ncclResult_t state = ncclInProgress;
  for (int i = 0; state == ncclInProgress && i < 1000; ++i) {
    NCCL_OK(ncclCommGetAsyncError(me.comm, &state));
    Sleep(5);
  }
  EXPECT_EQ(state, ncclSuccess);
  AllCollectives(me, 1);
  Leave(me);
}

void Mismatch(const Process& p) {
  const Rank me = p.Join();
  CallWhatDoesNotFit(me);
  Leave(me);
}

// Rank 1 comes, and asks for nothing.
void NoCall(const Process& p) {
  const Rank me = p.Join();
  if (me.rank == 1) return p.Await("given up");
  int* const x = me.Put<int>({1});
  NCCL_OK(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, me.comm, me.stream));
  EXPECT_EQ(cudaStreamSynchronize(me.stream), cudaErrorLaunchTimeout);
  p.Say("given up");
}

// Each waits, on the host, for a message of the other first.
void EachAwaitsTheOther(const Process& p) {
  const Rank me = p.Join();
  int* const x = me.Put<int>({1});
  NCCL_OK(ncclRecv(x, 1, ncclInt32, 1 - me.rank, me.comm, me.stream));
  EXPECT_EQ(cudaStreamSynchronize(me.stream), cudaErrorLaunchTimeout);
}

void NobodyJoins(const Process& p) {
  Rank me;
  if (p.number == 0) {
    EXPECT_EQ(p.Join(&me, 0, 2, 0), ncclSystemError);
  }
}

void OtherSize(const Process& p) {
  Rank me;
  EXPECT_EQ(p.Join(&me, p.number, 2 + p.number, p.number), ncclInvalidArgument);
  EXPECT_EQ(me.comm, nullptr);
}

// One of them is refused; to the other nobody comes as rank 1.
void SameRank(const Process& p) {
  Rank me;
  const ncclResult_t result = p.Join(&me, 0, 2, p.number);
  EXPECT_TRUE(result == ncclInvalidUsage || result == ncclSystemError) << result;
}

void SameDevice(const Process& p) {
  Rank me;
  EXPECT_EQ(p.Join(&me, p.number, 2, 0), ncclInvalidUsage);
}

void SharedDevice(const Process& p) {
  Rank me;
  NCCL_OK(p.Join(&me, p.number, 2, 0));
  AllCollectives(me, 2);
  Leave(me);
}

ncclResult_t AwaitError(ncclComm_t comm) {
  ncclResult_t state = ncclSuccess;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while ((state == ncclSuccess || state == ncclInProgress) &&
         std::chrono::steady_clock::now() < end) {
    EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
    Sleep(1);
  }
  return state;
}

// The last rank is killed where others wait for it.
void Killed(const Process& p) {
  const Rank me = p.Join();
  int* const x = me.Put<int>({1});
  NCCL_OK(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, me.comm, me.stream));
  EXPECT_EQ(me.Take(x, 1)[0], 3);
  if (me.rank == 2) raise(SIGKILL);
  NCCL_OK(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, me.comm, me.stream));
  std::thread watchdog([&] {
    EXPECT_EQ(AwaitError(me.comm), ncclRemoteError);
    EXPECT_THAT(ncclGetLastError(me.comm), HasSubstr("rank 2: its process"));
    NCCL_OK(ncclCommAbort(me.comm));
  });
  CUDA_OK(cudaStreamSynchronize(me.stream));
  watchdog.join();
}

void KilledInInitialization(const Process& p) {
  if (p.number == 2) return;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  Rank me;
  CUDA_OK(cudaSetDevice(p.number));
  EXPECT_EQ(ncclCommInitRankConfig(&me.comm, 3, p.id, p.number, &config), ncclInProgress);
  if (p.number == 1) {
    p.Await("began");
    Sleep(300);  // so that they have met
    raise(SIGKILL);
  }
  p.Say("began");
  EXPECT_EQ(AwaitError(me.comm), ncclRemoteError);
  NCCL_OK(ncclCommAbort(me.comm));
}

// Rank 1 aborts: the others wait until they do.
void Aborted(const Process& p) {
  const Rank me = p.Join();
  if (me.rank == 1) {
    NCCL_OK(ncclCommAbort(me.comm));
    return;
  }
  int* const x = me.Put<int>({1});
  NCCL_OK(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, me.comm, me.stream));
  std::thread watchdog([&] {
    Sleep(300);
    NCCL_OK(ncclCommAbort(me.comm));
  });
  CUDA_OK(cudaStreamSynchronize(me.stream));
  watchdog.join();
}

using Body = void (*)(const Process&);
#define BODY(name) {#name, &name}
const std::map<std::string, Body> kBodies = {BODY(Collectives),
                                             BODY(Large),
                                             BODY(Messages),
                                             BODY(Threads),
                                             BODY(HostsThatDoNotWait),
                                             BODY(Captured),
                                             BODY(Split),
                                             BODY(NotBlocking),
                                             BODY(Mismatch),
                                             BODY(NoCall),
                                             BODY(EachAwaitsTheOther),
                                             BODY(NobodyJoins),
                                             BODY(OtherSize),
                                             BODY(SameRank),
                                             BODY(SameDevice),
                                             BODY(SharedDevice),
                                             BODY(Killed),
                                             BODY(KilledInInitialization),
                                             BODY(Aborted)};

TEST(ARankOfAnother, DISABLED_Runs) {
  const char* const what = std::getenv("NCCL_TEST_WHAT");
  if (what == nullptr) GTEST_SKIP() << "no process of another test";
  std::istringstream text(std::getenv("NCCL_TEST_PROCESS"));
  Process p;
  std::string id;
  text >> p.number >> p.of >> id >> p.folder;
  p.id = IdOf(id);
  kBodies.at(what)(p);
}

// ---- The tests. ----

extern "C" char** environ;

class NcclProcessesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/nccl_processes_XXXXXX";
    folder_ = mkdtemp(name);
    ASSERT_EQ(ncclGetUniqueId(&id_), ncclSuccess);
  }
  void TearDown() override {
    EXPECT_EQ(std::system(("rm -rf " + folder_).c_str()), 0);
    // Nothing is left: no address of the id is in use.
    EXPECT_THAT(TextIn("/proc/net/unix"), Not(HasSubstr(id_.internal)));
  }

  // What the processes said, one after the other; fails where one does not end as `expected` has
  // it.
  std::string Run(const std::string& what, std::vector<int> expected,
                  std::vector<std::string> more = {}) {
    std::vector<pid_t> processes;
    const int of = static_cast<int>(expected.size());
    for (int i = 0; i < of; ++i) processes.push_back(Start(what, i, of, more));
    std::string said;
    for (size_t i = 0; i < processes.size(); ++i) {
      int status = 0;
      waitpid(processes[i], &status, 0);
      const int number = static_cast<int>(i);
      said += TextIn(FileOf(number, 2));
      EXPECT_EQ(status, expected[i]) << "process " << i << ":\n"
                                     << TextIn(FileOf(number, 1)) << TextIn(FileOf(number, 2));
    }
    return said;
  }

 private:
  static std::string TextIn(const std::string& file) {
    std::stringstream text;
    text << std::ifstream(file).rdbuf();
    return text.str();
  }
  // What a process has written to its standard output, or error.
  std::string FileOf(int process, int output) const {
    return folder_ + "/" + std::to_string(process) + "." + std::to_string(output);
  }
  pid_t Start(const std::string& what, int number, int of, const std::vector<std::string>& more) {
    std::vector<std::string> variables = {"NCCL_TEST_WHAT=" + what, "DT_CUSIM_DEVICES=4",
                                          "NCCL_TEST_PROCESS=" + std::to_string(number) + " " +
                                              std::to_string(of) + " " + TextOf(id_) + " " +
                                              folder_};
    variables.insert(variables.end(), more.begin(), more.end());
    std::vector<char*> environment;
    for (std::string& v : variables) environment.push_back(v.data());
    for (char** v = environ; *v != nullptr; ++v) environment.push_back(*v);
    environment.push_back(nullptr);
    std::string program = "/proc/self/exe", filter = "--gtest_filter=ARankOfAnother.*",
                disabled = "--gtest_also_run_disabled_tests", brief = "--gtest_brief=1";
    char* arguments[] = {program.data(), filter.data(), disabled.data(), brief.data(), nullptr};
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    for (const int output : {1, 2}) {
      const std::string file = FileOf(number, output);
      posix_spawn_file_actions_addopen(&files, output, file.c_str(), O_CREAT | O_WRONLY, 0600);
    }
    pid_t pid = -1;
    EXPECT_EQ(posix_spawn(&pid, "/proc/self/exe", &files, nullptr, arguments, environment.data()),
              0);
    posix_spawn_file_actions_destroy(&files);
    return pid;
  }
  std::string folder_;
  ncclUniqueId id_;
};

constexpr int kKilled = SIGKILL;
const char kHurry[] = "DT_CUSIM_PATIENCE=1500";

TEST_F(NcclProcessesTest, Collectives) { EXPECT_EQ(Run("Collectives", {0, 0, 0}), ""); }
TEST_F(NcclProcessesTest, MoreThanSocketsHold) { EXPECT_EQ(Run("Large", {0, 0}), ""); }
TEST_F(NcclProcessesTest, Messages) { EXPECT_EQ(Run("Messages", {0, 0, 0}), ""); }
TEST_F(NcclProcessesTest, OfSeveralThreadsEach) { EXPECT_EQ(Run("Threads", {0, 0}), ""); }
TEST_F(NcclProcessesTest, HostsNeedNotWait) { EXPECT_EQ(Run("HostsThatDoNotWait", {0, 0}), ""); }
TEST_F(NcclProcessesTest, CapturedCollectives) { EXPECT_EQ(Run("Captured", {0, 0}), ""); }
TEST_F(NcclProcessesTest, SplitsOutliveTheirParent) { EXPECT_EQ(Run("Split", {0, 0, 0}), ""); }
TEST_F(NcclProcessesTest, WithoutBlocking) { EXPECT_EQ(Run("NotBlocking", {0, 0}), ""); }

TEST_F(NcclProcessesTest, CallsThatDoNotFitAreNamedInEach) {
  const std::string said = Run("Mismatch", {0, 0});
  const std::string one =
      "rank 0 calls ncclAllReduce(4 x int32, sum), rank 1 ncclAllReduce(8 x int32, sum)";
  const size_t first = said.find(one);
  ASSERT_NE(first, std::string::npos) << said;
  EXPECT_NE(said.find(one, first + 1), std::string::npos) << said;
  EXPECT_THAT(said, HasSubstr("rank 0 calls ncclAllGather(4 x int32), rank 1 "
                              "ncclBroadcast(4 x int32, root 0)"));
}

TEST_F(NcclProcessesTest, WhoDoesNotComeIsNamed) {
  std::string said = Run("NoCall", {0, 0}, {kHurry});
  EXPECT_THAT(said, HasSubstr("hang: given up after 1500 ms: ncclAllReduce, call 1 in communicator "
                              "#1 of rank 0 waits for rank 1\n"));
  EXPECT_THAT(said, Not(HasSubstr("deadlock")));
  said = Run("NobodyJoins", {0, 0}, {kHurry});
  EXPECT_THAT(said, HasSubstr("initialization of rank 0 of 2 in communicator #1 waits for rank 1"));
  said = Run("EachAwaitsTheOther", {0, 0}, {kHurry});
  EXPECT_THAT(
      said,
      HasSubstr("message 1 from rank 1 to rank 0 in communicator #1 of rank 0 waits for rank 1"));
}

TEST_F(NcclProcessesTest, RanksThatContradictEachOther) {
  std::string said = Run("OtherSize", {0, 0});
  EXPECT_THAT(said, HasSubstr("one rank says 2 ranks, rank 1 3"));
  EXPECT_THAT(said, HasSubstr("one rank says 3 ranks, rank 0 2"));
}
TEST_F(NcclProcessesTest, ARankThatIsThereAlready) {
  EXPECT_THAT(Run("SameRank", {0, 0}, {kHurry}),
              AllOf(HasSubstr("two ranks 0"), HasSubstr("waits for rank 1")));
}
TEST_F(NcclProcessesTest, ADeviceIsTheSameInAllProcesses) {
  EXPECT_THAT(Run("SameDevice", {0, 0}),
              HasSubstr("Duplicate GPU detected: ranks 0 and 1 both on device 0"));
}
TEST_F(NcclProcessesTest, AndMayBeShared) {
  EXPECT_EQ(Run("SharedDevice", {0, 0}, {"DT_CUSIM_NCCL_SHARED=1"}), "");
}

TEST_F(NcclProcessesTest, AProcessThatIsKilled) { EXPECT_EQ(Run("Killed", {0, 0, kKilled}), ""); }
TEST_F(NcclProcessesTest, AProcessThatIsKilledInInitialization) {
  EXPECT_EQ(Run("KilledInInitialization", {0, kKilled, 0}), "");
}
TEST_F(NcclProcessesTest, AbortIsOfOneRank) { EXPECT_EQ(Run("Aborted", {0, 0}), ""); }

}  // namespace

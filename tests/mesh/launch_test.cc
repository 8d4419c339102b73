#include "dtensor/mesh/launch.h"

#include <dlfcn.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <new>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/process/build_id.h"
#include "dtensor/mesh/program.h"
#include "dtensor/tensor/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/temp_folder.h"

namespace dtensor::launch_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(RunSpmd, GivesEveryRankItsContext) {
  std::vector<int64_t> seen(5, -1);
  absl::Status status = RunSpmd(5, [&](RankContext& context) {
    EXPECT_EQ(&context, &RankContext::Current());
    EXPECT_EQ(context.world_size(), 5);
    EXPECT_EQ(context.allocator(), CurrentAllocator());
    seen[context.rank()] = context.rank();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(seen, ::testing::ElementsAre(0, 1, 2, 3, 4));
}

// A rank that gave up is not forgotten because nobody happened to ask.
TEST(RunSpmd, AnAbortIsTheResultAlsoIfNobodyCommunicatesAnyMore) {
  for (const int64_t ranks : {1, 3}) {
    const absl::Status status = RunSpmd(ranks, [&](RankContext& context) {
      if (context.rank() == ranks - 1) context.AbortAll(absl::DataLossError("disk on fire"));
      return absl::OkStatus();
    });
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(status.message(), absl::StrCat("rank ", ranks - 1, ": disk on fire"));
    EXPECT_EQ(CulpritOf(status), ranks - 1);
  }
}

// Peers get the culprit as data, whoever passes the news on.
TEST(RunSpmd, PeersKnowTheCulprit) {
  std::vector<absl::Status> seen(3);
  const absl::Status all = RunSpmd(3, [&](RankContext& context) -> absl::Status {
    if (context.rank() == 1) throw std::bad_alloc();
    absl::Status& mine = seen[context.rank()];
    // Rank 2 meets rank 0 only, which learns it from rank 1.
    const DeviceMesh mesh = *DeviceMesh::FromRanks({2}, {0, context.rank() == 2 ? 2 : 1}, {"pair"});
    if (context.rank() == 0) {
      mine = ValueOrThrow(context.CommFor(mesh, {0}))->Barrier().Wait();
      context.AbortAll(mine);
      return mine;
    }
    return mine = ValueOrThrow(context.CommFor(mesh, {0}))->Barrier().Wait();
  });
  EXPECT_EQ(all.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(CulpritOf(all), 1);
  for (const int64_t rank : {0, 2}) {
    EXPECT_EQ(seen[rank].code(), absl::StatusCode::kAborted);
    EXPECT_TRUE(IsRankLocal(seen[rank]));
    EXPECT_EQ(CulpritOf(seen[rank]), 1) << seen[rank];
  }
}

// Rank 0 waits for a message of rank 2, which is alive and busy, when rank 1 fails.
TEST(RunSpmd, WhoWaitsForAMessageLearnsOfAFailureElsewhere) {
  std::atomic<bool> woken = false;
  const absl::Status all = RunSpmd(3, [&](RankContext& context) -> absl::Status {
    if (context.rank() == 1) return absl::DataLossError("disk on fire");
    if (context.rank() == 0) {
      const Tensor out = Tensor::Full({4}, DType::kF32, 0).value();
      const absl::Status seen = ValueOrThrow(context.WorldComm())->Recv(out, 2).Wait();
      EXPECT_EQ(CulpritOf(seen), 1) << seen;
      woken = true;
      return seen;
    }
    for (int i = 0; i < 2000 && !woken; ++i) absl::SleepFor(absl::Milliseconds(10));
    EXPECT_TRUE(woken);
    return absl::OkStatus();
  });
  EXPECT_EQ(CulpritOf(all), 1) << all;
}

// The C library of another host may differ, the program may not.
TEST(BuildId, IsOfTheProgramAndItsLibrariesAlone) {
  const std::string before = BuildId();
  EXPECT_NE(before, "none");
  void* const other = dlopen("libBrokenLocale.so.1", RTLD_NOW | RTLD_LOCAL);  // of libc6
  ASSERT_NE(other, nullptr) << dlerror();
  EXPECT_EQ(BuildId(), before);
  dlclose(other);
}

// What a rank posted may be waited for when its world is gone: what came in time is there, and who
// never came is named. (That the report is not asked of freed memory the address sanitizer sees.)
TEST(RunSpmd, WorksOutliveTheirWorld) {
  for (const bool late : {false, true}) {
    std::vector<Work> works(3);
    std::vector<Tensor> in(3), out(3);
    const absl::Status status = RunSpmd(3, [&](RankContext& context) {
      const int64_t rank = context.rank();
      if (late && rank == 1) return absl::OkStatus();
      in[rank] = Tensor::Full({4}, DType::kF32, static_cast<double>(rank + 1)).value();
      out[rank] = Tensor::Full({4}, DType::kF32, 0).value();
      works[rank] = ValueOrThrow(context.WorldComm())
                        ->AllReduce(in[rank], out[rank], ReduceOp::kSum, {.overlap = true});
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status;
    for (const int rank : {2, 0, 1}) {
      if (late && rank == 1) continue;
      const absl::Status seen = works[rank].Wait();
      if (late) {
        EXPECT_THAT(seen.message(), AllOf(HasSubstr("rank 1"), HasSubstr("flight report")));
      } else {
        EXPECT_TRUE(seen.ok()) << seen;
        EXPECT_EQ(out[rank].ToVector<float>(), std::vector<float>(4, 6));
      }
    }
  }
}

TEST(RunSpmd, RefusesNestingAndEmptyWorlds) {
  auto nothing = [](RankContext&) { return absl::OkStatus(); };
  EXPECT_EQ(RunSpmd(0, nothing).code(), absl::StatusCode::kInvalidArgument);
  RankContext::Current();  // a default context is no rank
  absl::Status status = RunSpmd(2, [&](RankContext&) { return RunSpmd(2, nothing); });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("RunSpmd inside a rank"));
}

TEST(RunSpmd, TimeoutFromTheEnvironment) {
  setenv("DTENSOR_TIMEOUT_S", "soon", 1);
  absl::Status status = RunSpmd(1, [](RankContext&) { return absl::OkStatus(); });
  unsetenv("DTENSOR_TIMEOUT_S");
  EXPECT_THAT(status.message(), HasSubstr("DTENSOR_TIMEOUT_S is \"soon\""));
}

// What links cost comes from the program, else from the file that the environment names; that
// threads share a machine is known.
TEST(RunSpmd, KnowsWhatLinksCost) {
  CostModel seen;
  const auto look = [&](RankContext& context) {
    if (context.rank() == 0) seen = context.cost_model();
    return absl::OkStatus();
  };
  EXPECT_TRUE(RunSpmd(9, look).ok());
  EXPECT_EQ(seen.intra_node.latency_us, CostModel().intra_node.latency_us);
  EXPECT_EQ(seen.ranks_per_node, 9);

  const testing::TempFolder folder;
  CostModel given;
  given.inter_node.latency_us = 77;
  folder.Write("cost.json", given.ToJson());
  setenv("DTENSOR_COST_MODEL", folder.Path("cost.json").c_str(), 1);
  EXPECT_TRUE(RunSpmd(2, look).ok());
  EXPECT_EQ(seen.inter_node.latency_us, 77);
  EXPECT_EQ(seen.ranks_per_node, 2);
  given.inter_node.latency_us = 78;
  SpmdOptions options;
  options.cost = given;
  EXPECT_TRUE(RunSpmd(2, look, options).ok());
  EXPECT_EQ(seen.inter_node.latency_us, 78);

  setenv("DTENSOR_COST_MODEL", "/nowhere/cost.json", 1);
  EXPECT_THAT(std::string(RunSpmd(1, look).message()),
              AllOf(HasSubstr("DTENSOR_COST_MODEL"), HasSubstr("/nowhere/cost.json")));
  unsetenv("DTENSOR_COST_MODEL");
  options.cost->intra_node.bytes_per_us = 0;
  EXPECT_THAT(std::string(RunSpmd(1, look, options).message()),
              HasSubstr("intra_node.bytes_per_us"));
}

TEST(RankContext, MeshesMustFitTheWorld) {
  absl::Status status = RunSpmd(4, [](RankContext& context) {
    absl::Status big = context.CommFor(DeviceMesh({2, 4}, {"dp", "tp"}), {0}).status();
    EXPECT_EQ(big.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(big.message(), "mesh dp=2 tp=4 has 8 ranks, the world has 4");
    DeviceMesh far = *DeviceMesh::FromRanks({2}, {0, 9}, {"dp"});
    EXPECT_EQ(context.CommFor(far, {0}).status().message(),
              "mesh dp=2 names rank 9, the world has 4 ranks");
    DeviceMesh pair = *DeviceMesh::FromRanks({2}, {1, 2});
    bool member = context.rank() == 1 || context.rank() == 2;
    EXPECT_EQ(context.CommFor(pair, {0}).status().code(),
              member ? absl::StatusCode::kOk : absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ((*context.CommFor(DeviceMesh::Self(), {}))->size(), 1);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

std::vector<int>* destroyed = nullptr;
template <int kId>
struct Layer {
  int value = 0;
  ~Layer() {
    if (destroyed) destroyed->push_back(kId);
  }
};

TEST(RankContext, SlotsDieInReverseOrder) {
  std::vector<int> order;
  destroyed = &order;
  absl::Status status = RunSpmd(1, [](RankContext& context) {
    context.Slot<Layer<1>>().value = 7;
    context.Slot<Layer<2>>();
    EXPECT_EQ(context.Slot<Layer<1>>().value, 7);
    return absl::OkStatus();
  });
  destroyed = nullptr;
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(order, ::testing::ElementsAre(2, 1));
}

int Start(std::vector<std::string> args, int64_t* world, std::vector<std::string>* rest) {
  args.insert(args.begin(), "program");
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);
  int argc = static_cast<int>(args.size());
  *world = 0;
  int code = Launch(&argc, argv.data(), [&](RankContext& context) {
    if (context.rank() == 0) *world = context.world_size();
    return absl::OkStatus();
  });
  rest->assign(argv.data() + 1, argv.data() + argc);
  EXPECT_EQ(argv[argc], nullptr);
  return code;
}

TEST(Launch, TakesItsOwnArguments) {
  int64_t world;
  std::vector<std::string> rest;
  EXPECT_EQ(Start({"-x", "--ranks=3", "y"}, &world, &rest), 0);
  EXPECT_EQ(world, 3);
  EXPECT_THAT(rest, ::testing::ElementsAre("-x", "y"));
  EXPECT_EQ(Start({"--ranks", "2", "--", "--ranks=5"}, &world, &rest), 0);
  EXPECT_EQ(world, 2);
  EXPECT_THAT(rest, ::testing::ElementsAre("--", "--ranks=5"));
  EXPECT_EQ(Start({}, &world, &rest), 0);
  EXPECT_EQ(world, 1);
}

TEST(Launch, Errors) {
  int64_t world;
  std::vector<std::string> rest;
  for (std::vector<std::string> args :
       {std::vector<std::string>{"--ranks"}, {"--ranks=0"}, {"--ranks=x"}}) {
    ::testing::internal::CaptureStderr();
    EXPECT_NE(Start(args, &world, &rest), 0);
    EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("--ranks"));
  }
  setenv("RANK", "0", 1);
  setenv("WORLD_SIZE", "4", 1);
  ::testing::internal::CaptureStderr();
  EXPECT_NE(Start({}, &world, &rest), 0);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("by torchrun"));
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
  EXPECT_EQ(world, 0);
}

// Whoever starts programs again knows by it whether that may help.
// Launchers end the others by a signal when one has failed.
TEST(RunProgram, ASignalTellsWhoHasFailed) {
  const auto run = [] {
    RunProgram([] {
      internal::TellAtSignal(absl::UnavailableError("rank 1: its process is gone"));
      raise(SIGTERM);
      return absl::OkStatus();
    });
  };
  EXPECT_EXIT(run(), ::testing::KilledBySignal(SIGTERM),
              "error: rank 1: its process is gone\nerror: ended by SIGTERM");
}

TEST(RunProgram, ExitCodesTellPeersFromMistakes) {
  const struct {
    absl::Status status;
    int code;
  } kEnds[] = {
      {absl::OkStatus(), 0},
      {absl::InvalidArgumentError("--x"), 1},
      {absl::DataLossError("a file"), 1},
      {absl::UnavailableError("a full disk"), 1},
      {absl::InternalError("an exception"), 70},
      {WithCulprit(absl::UnavailableError("rank 1's disk is full"), 1), 1},
      {WithCulprit(absl::AbortedError("it has left"), 1), 71},
      {WithCulprit(absl::DeadlineExceededError("it did not come"), 1), 72},
      {absl::ResourceExhaustedError("memory"), 75},
  };
  for (const auto& end : kEnds) {
    EXPECT_EQ(RunProgram([&] { return end.status; }), end.code) << end.status;
  }
  EXPECT_EQ(RunProgram([]() -> absl::Status { throw Error(absl::InternalError("thrown")); }), 70);
  EXPECT_EQ(RunProgram([]() -> absl::Status { throw std::bad_alloc(); }), 75);
  EXPECT_EQ(RunProgram([]() -> absl::Status { throw 42; }), 70);
}

}  // namespace
}  // namespace dtensor::launch_test

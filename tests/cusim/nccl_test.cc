// NCCL's stand-in: ranks as threads on devices of their own, against the host's arithmetic; and
// what is said of calls that do not fit, that come in orders that never meet, or not at all.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <nccl.h>

#include <barrier>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <thread>

#include "tests/cusim/nccl_rank.h"

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kRanks = 3;

// Read when the first function of CUDA is called.
const bool g_devices = setenv("DT_CUSIM_DEVICES", "3", 1) == 0;

// Runs `body` on each rank, a thread with a device of its own.
void OnRanks(int ranks, const std::function<void(Rank&)>& body) {
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Rank me{rank, ranks};
      CUDA_OK(cudaSetDevice(rank));
      CUDA_OK(cudaStreamCreateWithFlags(&me.stream, cudaStreamNonBlocking));
      NCCL_OK(ncclCommInitRank(&me.comm, ranks, id, rank));
      body(me);
      if (me.comm != nullptr) {
        NCCL_OK(ncclCommFinalize(me.comm));
        NCCL_OK(ncclCommDestroy(me.comm));
      }
      CUDA_OK(cudaStreamDestroy(me.stream));
    });
  }
  for (std::thread& t : threads) t.join();
}

template <class T>
T Reduced(ncclRedOp_t op, int ranks, size_t n, size_t i) {
  T all = Values<T>(0, n)[i];
  for (int r = 1; r < ranks; ++r) {
    const T x = Values<T>(r, n)[i];
    all = op == ncclProd  ? static_cast<T>(all * x)
          : op == ncclMax ? std::max(all, x)
          : op == ncclMin ? std::min(all, x)
                          : static_cast<T>(all + x);
  }
  return op == ncclAvg ? static_cast<T>(all / static_cast<T>(ranks)) : all;
}

template <class T>
void AllCollectives(ncclDataType_t type, size_t n) {
  OnRanks(kRanks, [&](Rank& me) {
    const size_t all = n * kRanks;
    T* const in = me.Put(Values<T>(me.rank, all));
    T* const out = me.Put(std::vector<T>(all));
    for (const ncclRedOp_t op : {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg}) {
      const auto near = [&](T got, size_t i) {
        const double want = static_cast<double>(Reduced<T>(op, kRanks, all, i));
        EXPECT_NEAR(static_cast<double>(got), want, op == ncclAvg ? 1e-6 * want : 0) << op << i;
      };
      NCCL_OK(ncclAllReduce(in, out, all, type, op, me.comm, me.stream));
      std::vector<T> got = me.Take(out, all);
      for (size_t i = 0; i < all; ++i) near(got[i], i);
      NCCL_OK(ncclReduceScatter(in, out, n, type, op, me.comm, me.stream));
      got = me.Take(out, n);
      for (size_t i = 0; i < n; ++i) near(got[i], i + n * static_cast<size_t>(me.rank));
      CUDA_OK(cudaMemsetAsync(out, 0, all * sizeof(T), me.stream));
      NCCL_OK(ncclReduce(in, out, all, type, op, 1, me.comm, me.stream));
      got = me.Take(out, all);
      for (size_t i = 0; i < all; ++i) {
        if (me.rank == 1) near(got[i], i);
        EXPECT_TRUE(me.rank == 1 || got[i] == T(0));
      }
    }
    NCCL_OK(ncclAllGather(in, out, n, type, me.comm, me.stream));
    std::vector<T> got = me.Take(out, all);
    for (size_t i = 0; i < all; ++i) {
      EXPECT_EQ(got[i], Values<T>(static_cast<int>(i / n), all)[i % n]);
    }
    NCCL_OK(ncclBroadcast(in, out, n, type, 2, me.comm, me.stream));
    got = me.Take(out, n);
    for (size_t i = 0; i < n; ++i) EXPECT_EQ(got[i], Values<T>(2, all)[i]);
    // In place.
    NCCL_OK(ncclAllReduce(in, in, all, type, ncclSum, me.comm, me.stream));
    got = me.Take(in, all);
    for (size_t i = 0; i < all; ++i) EXPECT_EQ(got[i], Reduced<T>(ncclSum, kRanks, all, i));
    CUDA_OK(cudaFree(in));
    CUDA_OK(cudaFree(out));
  });
}

class NcclTest : public ::testing::Test {
 protected:
  void SetUp() override { ::testing::internal::CaptureStderr(); }
  void TearDown() override {
    const std::string said = ::testing::internal::GetCapturedStderr();
    if (quiet_) {
      EXPECT_EQ(said, "");
    }
  }
  // What was said up to here.
  std::string Said() {
    const std::string said = ::testing::internal::GetCapturedStderr();
    ::testing::internal::CaptureStderr();
    return said;
  }
  bool quiet_ = true;
};

TEST_F(NcclTest, CollectivesOfAllTypes) {
  AllCollectives<float>(ncclFloat32, 5);
  AllCollectives<double>(ncclFloat64, 1);
  AllCollectives<int32_t>(ncclInt32, 300);
  AllCollectives<int64_t>(ncclInt64, 2);
  AllCollectives<uint8_t>(ncclUint8, 3);
}

TEST_F(NcclTest, NarrowTypesRoundEachSum) {
  OnRanks(kRanks, [](Rank& me) {
    // 256, 1 and 1 in bf16: each sum is 256 again. In f16 all is exact.
    const uint16_t bf16[] = {0x4380, 0x3f80, 0x3f80}, f16[] = {0x5c00, 0x3c00, 0x3c00};
    for (const bool half : {false, true}) {
      uint16_t* const p = me.Put<uint16_t>({(half ? f16 : bf16)[me.rank]});
      NCCL_OK(
          ncclAllReduce(p, p, 1, half ? ncclFloat16 : ncclBfloat16, ncclSum, me.comm, me.stream));
      EXPECT_EQ(me.Take(p, 1)[0], half ? 0x5c08 : 0x4380);
      CUDA_OK(cudaFree(p));
    }
  });
}

TEST_F(NcclTest, PreMulSumScalesEachRank) {
  OnRanks(kRanks, [](Rank& me) {
    float* const p = me.Put<float>({8, 16});
    float by = static_cast<float>(me.rank + 1) / 4;
    float* const device_by = me.Put<float>({by});
    for (const bool device : {false, true}) {
      ncclRedOp_t op;
      NCCL_OK(ncclRedOpCreatePreMulSum(&op, device ? device_by : &by, ncclFloat32,
                                       device ? ncclScalarDevice : ncclScalarHostImmediate,
                                       me.comm));
      NCCL_OK(ncclAllReduce(p, p, 2, ncclFloat32, op, me.comm, me.stream));
      NCCL_OK(ncclRedOpDestroy(op, me.comm));
      EXPECT_EQ(me.Take(p, 2)[1], device ? 36 : 24);
    }
    CUDA_OK(cudaFree(p));
    CUDA_OK(cudaFree(device_by));
  });
}

TEST_F(NcclTest, MessagesMeetInTheOrderOfEachPair) {
  OnRanks(kRanks, [](Rank& me) {
    // All to all, itself included, two messages to each: one group.
    std::vector<int> mine;
    for (int i = 0; i < 2 * kRanks; ++i) mine.push_back(100 * me.rank + i);
    int* const in = me.Put(mine);
    int* const out = me.Put(std::vector<int>(2 * kRanks));
    NCCL_OK(ncclGroupStart());
    for (int peer = 0; peer < kRanks; ++peer) {
      for (int k = 0; k < 2; ++k) {
        NCCL_OK(ncclRecv(out + 2 * peer + k, 1, ncclInt32, peer, me.comm, me.stream));
        NCCL_OK(ncclSend(in + 2 * peer + k, 1, ncclInt32, peer, me.comm, me.stream));
      }
    }
    NCCL_OK(ncclGroupEnd());
    const std::vector<int> got = me.Take(out, 2 * kRanks);
    for (int i = 0; i < 2 * kRanks; ++i) EXPECT_EQ(got[i], 100 * (i / 2) + 2 * me.rank + i % 2);
    // A chain, without groups: 0 to 1 to 2.
    if (me.rank > 0) {
      NCCL_OK(ncclRecv(out, 1, ncclInt32, me.rank - 1, me.comm, me.stream));
    }
    if (me.rank < 2) {
      NCCL_OK(ncclSend(me.rank == 0 ? in : out, 1, ncclInt32, me.rank + 1, me.comm, me.stream));
    }
    if (me.rank == 2) {
      EXPECT_EQ(me.Take(out, 1)[0], 0);
    }
    CUDA_OK(cudaStreamSynchronize(me.stream));
    CUDA_OK(cudaFree(in));
    CUDA_OK(cudaFree(out));
  });
}

TEST_F(NcclTest, OneThreadWithAllRanks) {
  ncclComm_t comms[2];
  NCCL_OK(ncclCommInitAll(comms, 2, nullptr));
  float* p[2];
  cudaStream_t streams[2];
  for (int i = 0; i < 2; ++i) {
    CUDA_OK(cudaSetDevice(i));
    CUDA_OK(cudaStreamCreate(&streams[i]));
    p[i] = Rank{i, 2, streams[i]}.Put<float>({1.f + static_cast<float>(i)});
  }
  NCCL_OK(ncclGroupStart());
  for (int i = 0; i < 2; ++i) {
    NCCL_OK(ncclAllReduce(p[i], p[i], 1, ncclFloat32, ncclSum, comms[i], streams[i]));
  }
  NCCL_OK(ncclGroupEnd());
  for (int i = 0; i < 2; ++i) {
    CUDA_OK(cudaSetDevice(i));
    EXPECT_EQ((Rank{i, 2, streams[i]}.Take(p[i], 1)[0]), 3);
    int device = -1, rank = -1, count = 0;
    NCCL_OK(ncclCommCuDevice(comms[i], &device));
    NCCL_OK(ncclCommUserRank(comms[i], &rank));
    NCCL_OK(ncclCommCount(comms[i], &count));
    EXPECT_EQ(device, i);
    EXPECT_EQ(rank, i);
    EXPECT_EQ(count, 2);
    CUDA_OK(cudaFree(p[i]));
    NCCL_OK(ncclCommDestroy(comms[i]));
    CUDA_OK(cudaStreamDestroy(streams[i]));
  }
  CUDA_OK(cudaSetDevice(0));
}

TEST_F(NcclTest, SplitsByColorInTheOrderOfKeys) {
  OnRanks(kRanks, [](Rank& me) {
    ncclComm_t part;
    const int color = me.rank == 1 ? NCCL_SPLIT_NOCOLOR : 4;
    NCCL_OK(ncclCommSplit(me.comm, color, -me.rank, &part, nullptr));
    if (me.rank == 1) {
      EXPECT_EQ(part, nullptr);
      return;
    }
    int rank = -1;
    NCCL_OK(ncclCommUserRank(part, &rank));
    EXPECT_EQ(rank, me.rank == 2 ? 0 : 1);
    int* const p = me.Put<int>({me.rank + 1, 0});
    NCCL_OK(ncclAllGather(p, p, 1, ncclInt32, part, me.stream));
    EXPECT_EQ(me.Take(p, 2), (std::vector<int>{3, 1}));
    CUDA_OK(cudaFree(p));
    NCCL_OK(ncclCommDestroy(part));
  });
}

TEST_F(NcclTest, ALateRankIsWaitedFor) {
  OnRanks(2, [](Rank& me) {
    if (me.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(150));
    int* const p = me.Put<int>({1});
    NCCL_OK(ncclAllReduce(p, p, 1, ncclInt32, ncclSum, me.comm, me.stream));
    EXPECT_EQ(me.Take(p, 1)[0], 2);
    CUDA_OK(cudaFree(p));
  });
}

TEST_F(NcclTest, CapturedCollectivesRunWithEachLaunch) {
  OnRanks(2, [](Rank& me) { SumThriceAsAGraph(me); });
}

TEST_F(NcclTest, WithoutBlockingInitializationIsInProgress) {
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comms[2];
  ncclResult_t state;
  EXPECT_EQ(ncclCommInitRankConfig(&comms[0], 2, id, 0, &config), ncclInProgress);
  NCCL_OK(ncclCommGetAsyncError(comms[0], &state));
  EXPECT_EQ(state, ncclInProgress);
  CUDA_OK(cudaSetDevice(1));
  NCCL_OK(ncclCommInitRankConfig(&comms[1], 2, id, 1, &config));
  CUDA_OK(cudaSetDevice(0));
  NCCL_OK(ncclCommGetAsyncError(comms[0], &state));
  EXPECT_EQ(state, ncclSuccess);
  for (ncclComm_t comm : comms) NCCL_OK(ncclCommDestroy(comm));
}

TEST_F(NcclTest, BuffersAreAccessesOfTheStream) {
  quiet_ = false;
  for (const bool fine : {true, false}) {
    // All is queued before a thread waits: what one has waited for counts as done for all.
    std::barrier queued(2);
    OnRanks(2, [fine, &queued](Rank& me) {
      cudaStream_t other;
      cudaEvent_t done;
      CUDA_OK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
      CUDA_OK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
      int* const p = me.Put<int>({1});
      CUDA_OK(cudaStreamSynchronize(me.stream));  // so that the collective alone is not ordered
      queued.arrive_and_wait();
      NCCL_OK(ncclAllReduce(p, p, 1, ncclInt32, ncclSum, me.comm, me.stream));
      CUDA_OK(cudaEventRecord(done, me.stream));
      if (fine || me.rank == 0) {
        CUDA_OK(cudaStreamWaitEvent(other, done, 0));
      }
      CUDA_OK(cudaMemsetAsync(p, 0, 4, other));
      queued.arrive_and_wait();
      CUDA_OK(cudaStreamSynchronize(other));
      CUDA_OK(cudaStreamSynchronize(me.stream));
      CUDA_OK(cudaEventDestroy(done));
      CUDA_OK(cudaFree(p));
      CUDA_OK(cudaStreamDestroy(other));
    });
    const std::string said = Said();
    if (fine) {
      EXPECT_EQ(said, "");
    } else {
      EXPECT_THAT(
          said, AllOf(HasSubstr("stream race: "), HasSubstr("of rank 1"), HasSubstr("cudaMemset")));
      EXPECT_THAT(said, ::testing::Not(HasSubstr("of rank 0 in")));
    }
  }
}

// Through rank 1's memory, which rank 0 reaches as a peer: ordered by the collective in between.
TEST_F(NcclTest, CollectivesOrderTheStreamsThatMeet) {
  int* shared = nullptr;
  OnRanks(2, [&shared](Rank& me) {
    int* const p = me.Put<int>({1});
    if (me.rank == 1) shared = me.Put<int>({0});
    NCCL_OK(ncclAllReduce(p, p, 1, ncclInt32, ncclSum, me.comm, me.stream));
    CUDA_OK(cudaStreamSynchronize(me.stream));
    if (me.rank == 1) {
      CUDA_OK(cudaMemsetAsync(shared, 7, 4, me.stream));
    }
    NCCL_OK(ncclAllReduce(p, p, 1, ncclInt32, ncclSum, me.comm, me.stream));
    if (me.rank == 0) {
      CUDA_OK(cudaMemsetAsync(shared, 8, 4, me.stream));
    }
    CUDA_OK(cudaStreamSynchronize(me.stream));
    CUDA_OK(cudaFree(p));
  });
  CUDA_OK(cudaFree(shared));
}

TEST_F(NcclTest, CallsThatDoNotFitAreNamed) {
  quiet_ = false;
  OnRanks(2, [](Rank& me) {
    CallWhatDoesNotFit(me);
    int* const p = me.Put<int>({1, 1});
    NCCL_OK(ncclGroupStart());
    NCCL_OK(
        ncclSend(p, 1, me.rank == 0 ? ncclInt32 : ncclFloat32, 1 - me.rank, me.comm, me.stream));
    NCCL_OK(ncclRecv(p + 1, 1, ncclInt32, 1 - me.rank, me.comm, me.stream));
    NCCL_OK(ncclGroupEnd());
    CUDA_OK(cudaStreamSynchronize(me.stream));
    CUDA_OK(cudaFree(p));
  });
  const std::string said = Said();
  EXPECT_THAT(said, HasSubstr("nccl mismatch: ncclAllReduce, call 1 in communicator"));
  EXPECT_THAT(said, HasSubstr("rank 0 calls ncclAllReduce(4 x int32, sum), rank 1 "
                              "ncclAllReduce(8 x int32, sum)"));
  EXPECT_THAT(said, HasSubstr("rank 0 calls ncclAllGather(4 x int32), rank 1 "
                              "ncclBroadcast(4 x int32, root 0)"));
  EXPECT_THAT(said, HasSubstr("rank 1 calls ncclSend(1 x float32, peer 0), rank 0 "
                              "ncclRecv(1 x int32, peer 1)"));
}

TEST_F(NcclTest, WrongArgumentsAreRefused) {
  quiet_ = false;
  OnRanks(2, [](Rank& me) {
    int* const p = me.Put<int>({1});
    int host = 0;
    const auto ask = [&](const void* from, void* to, ncclDataType_t type, ncclRedOp_t op,
                         cudaStream_t stream) {
      return ncclAllReduce(from, to, 1, type, op, me.comm, stream);
    };
    EXPECT_EQ(ask(nullptr, p, ncclInt32, ncclSum, me.stream), ncclInvalidArgument);
    EXPECT_EQ(ask(&host, p, ncclInt32, ncclSum, me.stream), ncclInvalidArgument);
    EXPECT_EQ(ask(p, p, ncclNumTypes, ncclSum, me.stream), ncclInvalidArgument);
    EXPECT_EQ(ask(p, p, ncclInt32, static_cast<ncclRedOp_t>(9), me.stream), ncclInvalidArgument);
    EXPECT_EQ(ncclBroadcast(p, p, 1, ncclInt32, 2, me.comm, me.stream), ncclInvalidArgument);
    EXPECT_EQ(ncclAllReduce(p, p, 1, ncclInt32, ncclSum, nullptr, me.stream), ncclInvalidArgument);
    CUDA_OK(cudaSetDevice(1 - me.rank));
    EXPECT_EQ(ask(p, p, ncclInt32, ncclSum, nullptr), ncclInvalidUsage);
    CUDA_OK(cudaSetDevice(me.rank));
    ncclComm_t other = me.comm;
    CUDA_OK(cudaFree(p));
    NCCL_OK(ncclCommDestroy(me.comm));
    me.comm = nullptr;
    int rank = 0;
    EXPECT_EQ(ncclCommUserRank(other, &rank), ncclInvalidArgument);
  });
  EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
  ncclUniqueId id{};
  ncclComm_t comm;
  EXPECT_EQ(ncclCommInitRank(&comm, 1, id, 0), ncclInvalidArgument);
  NCCL_OK(ncclGetUniqueId(&id));
  EXPECT_EQ(ncclCommInitRank(&comm, 2, id, 2), ncclInvalidArgument);
  const int same[] = {0, 0};
  ncclComm_t two[2];
  EXPECT_EQ(ncclCommInitAll(two, 2, same), ncclInvalidUsage);
  EXPECT_THAT(Said(), HasSubstr("Duplicate GPU detected: ranks 0 and 1 both on device 0"));
}

TEST_F(NcclTest, AbortFreesWhoWaits) {
  quiet_ = false;
  OnRanks(2, [](Rank& me) {
    int* const p = me.Put<int>({1});
    if (me.rank == 0) {
      NCCL_OK(ncclAllReduce(p, p, 1, ncclInt32, ncclSum, me.comm, me.stream));
      std::thread watchdog([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        NCCL_OK(ncclCommAbort(me.comm));
      });
      CUDA_OK(cudaStreamSynchronize(me.stream));
      watchdog.join();
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      NCCL_OK(ncclCommAbort(me.comm));
    }
    me.comm = nullptr;
    CUDA_OK(cudaFree(p));
  });
}

// ---- What never comes to an end: in processes of their own, whose device is lost. ----

int Lost(const std::function<void(Rank&)>& body) {
  setenv("DT_CUSIM_PATIENCE", "600", 1);
  OnRanks(2, [&](Rank& me) {
    body(me);
    std::_Exit(cudaDeviceSynchronize() == cudaErrorLaunchTimeout ? 7 : 1);
  });
  return 0;
}

TEST(NcclDeathTest, ARankThatNeverComesIsNamed) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(Lost([](Rank& me) {
                int* const p = me.Put<int>({1});
                if (me.rank == 1) std::this_thread::sleep_for(std::chrono::seconds(9));
                ncclAllReduce(p, p, 1, ncclInt32, ncclSum, me.comm, me.stream);
                cudaStreamSynchronize(me.stream);
              }),
              ::testing::ExitedWithCode(7),
              "hang: given up after 600 ms: ncclAllReduce, call 1 in communicator #1 of rank 0 "
              "waits for rank 1");
}

TEST(NcclDeathTest, RanksThatWaitForEachOtherAreNamed) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  // Each waits, on the host, for another message first.
  EXPECT_EXIT(Lost([](Rank& me) {
                int* const p = me.Put<int>({1});
                ncclRecv(p, 1, ncclInt32, 1 - me.rank, me.comm, me.stream);
                cudaStreamSynchronize(me.stream);
                ncclSend(p, 1, ncclInt32, 1 - me.rank, me.comm, me.stream);
              }),
              ::testing::ExitedWithCode(7),
              "deadlock: message 1 from rank [01] to rank [01] in communicator #1 of rank [01] "
              "waits for rank [01]: nobody is left who could come");
  // Two communicators, whose collectives are queued in opposite orders.
  EXPECT_EXIT(Lost([](Rank& me) {
                ncclComm_t other;
                ncclCommSplit(me.comm, 0, me.rank, &other, nullptr);
                int* const p = me.Put<int>({1});
                for (const bool first : {true, false}) {
                  ncclAllReduce(p, p, 1, ncclInt32, ncclSum,
                                first == (me.rank == 0) ? me.comm : other, me.stream);
                }
                std::this_thread::sleep_for(std::chrono::milliseconds(50));
                cudaStreamSynchronize(me.stream);
              }),
              ::testing::ExitedWithCode(7),
              "deadlock: streams wait for each other: ncclAllReduce.*of rank [01] in "
              "communicator #[12]");
}

}  // namespace

// What ranks with a GPU each are told when calls that are not compared go wrong, which only their
// devices see; and that our declarations of NCCL are those of its header.
#include <nccl.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <thread>

#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/nccl/communicator.h"
#include "dtensor/mesh/nccl/config.h"
#include "dtensor/mesh/store.h"
#include "dtensor/tensor/status.h"
#include "gmock/gmock.h"

namespace dtensor {
namespace {

using ::testing::HasSubstr;

// ---- Declarations. ----

static_assert(sizeof(nccl::UniqueId) == sizeof(ncclUniqueId));
static_assert(sizeof(nccl::Config) <= sizeof(ncclConfig_t));
#define SAME_PLACE(ours, theirs) \
  static_assert(offsetof(nccl::Config, ours) == offsetof(ncclConfig_t, theirs))
SAME_PLACE(size, size);
SAME_PLACE(magic, magic);
SAME_PLACE(version, version);
SAME_PLACE(blocking, blocking);
SAME_PLACE(cga_cluster_size, cgaClusterSize);
SAME_PLACE(min_ctas, minCTAs);
SAME_PLACE(max_ctas, maxCTAs);
SAME_PLACE(net_name, netName);
SAME_PLACE(split_share, splitShare);
static_assert(nccl::Config::kUndefined == NCCL_CONFIG_UNDEF_INT);
static_assert(nccl::kSuccess == ncclSuccess && nccl::kInProgress == ncclInProgress);
static_assert(nccl::kRemoteError == ncclRemoteError);
static_assert(nccl::kLeastVersion == NCCL_VERSION(2, 18, 0));

TEST(NcclAbi, TypesAndOperatorsAreThoseOfTheHeader) {
  EXPECT_EQ(nccl::TypeOf(DType::kU8), ncclUint8);
  EXPECT_EQ(nccl::TypeOf(DType::kBool), ncclUint8);
  EXPECT_EQ(nccl::TypeOf(DType::kI32), ncclInt32);
  EXPECT_EQ(nccl::TypeOf(DType::kI64), ncclInt64);
  EXPECT_EQ(nccl::TypeOf(DType::kF16), ncclFloat16);
  EXPECT_EQ(nccl::TypeOf(DType::kBF16), ncclBfloat16);
  EXPECT_EQ(nccl::TypeOf(DType::kF32), ncclFloat32);
  EXPECT_EQ(nccl::TypeOf(DType::kF64), ncclFloat64);
  EXPECT_EQ(nccl::OpOf(ReduceOp::kSum, DType::kF32), ncclSum);
  EXPECT_EQ(nccl::OpOf(ReduceOp::kProd, DType::kF32), ncclProd);
  EXPECT_EQ(nccl::OpOf(ReduceOp::kMax, DType::kF32), ncclMax);
  EXPECT_EQ(nccl::OpOf(ReduceOp::kMin, DType::kF32), ncclMin);
  EXPECT_EQ(nccl::OpOf(ReduceOp::kAvg, DType::kF32), ncclAvg);
  EXPECT_EQ(nccl::OpOf(ReduceOp::kSum, DType::kBool), ncclMax);
  EXPECT_EQ(nccl::OpOf(ReduceOp::kProd, DType::kBool), ncclMin);
}

// A library that takes every call, and finds `state`.
int state = nccl::kSuccess;
nccl::Api ApiThatFinds() {
  nccl::Api api;
  api.CommInitRankConfig = [](nccl::CommHandle* comm, int, nccl::UniqueId, int, nccl::Config*) {
    *comm = reinterpret_cast<nccl::CommHandle>(&state);
    return nccl::kSuccess;
  };
  api.CommGetAsyncError = [](nccl::CommHandle, int* error) {
    *error = state;
    return nccl::kSuccess;
  };
  api.GroupStart = api.GroupEnd = [] { return nccl::kSuccess; };
  api.CommAbort = [](nccl::CommHandle) { return nccl::kSuccess; };
  api.GetErrorString = [](int) { return "unhandled system error"; };
  api.GetLastError = [](nccl::CommHandle) { return "a cable is out"; };
  return api;
}
// What becomes of a call that is under way when the library finds `error`.
absl::Status Found(nccl::Communicator& communicator, int error,
                   absl::FunctionRef<absl::Status()> alive) {
  state = nccl::kSuccess;
  EXPECT_TRUE(communicator.Join({}, 2, 0, {}, alive).ok());
  return communicator.Queue(
      [&](nccl::CommHandle) {
        state = error;
        return nccl::kSuccess;
      },
      alive);
}

TEST(NcclCommunicator, AnErrorThatIsFoundLaterEndsTheCall) {
  const nccl::Api api = ApiThatFinds();
  nccl::Communicator communicator(api);
  int asked = 0;  // in vain: the rank lives, and would be asked for ever
  const absl::Status status = Found(communicator, ncclSystemError, [&asked] {
    return ++asked < 1000 ? absl::OkStatus() : absl::CancelledError("asked in vain");
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("a cable is out"));
}

// NCCL may see first that a process is gone, but not whose it was.
TEST(NcclCommunicator, WhoKnowsWhichPeerIsGoneMaySayIt) {
  const nccl::Api api = ApiThatFinds();
  int asked = 0;
  nccl::Communicator told(api);
  EXPECT_EQ(Found(told, ncclRemoteError,
                  [&asked] {
                    return ++asked < 50 ? absl::OkStatus() : absl::AbortedError("rank 1 is gone");
                  })
                .message(),
            "rank 1 is gone");
  nccl::Communicator alone(api);
  const absl::Status status = Found(alone, ncclRemoteError, [] { return absl::OkStatus(); });
  EXPECT_THAT(std::string(status.message()), HasSubstr("a cable is out"));
  EXPECT_THAT(std::string(alone.Fault().message()), HasSubstr("a cable is out"));
}

TEST(NcclConfig, IsReadByGroup) {
  setenv("DTENSOR_NCCL_CONFIG", "*:min_ctas=1; dp,tp:max_ctas=4,cga_cluster_size=2,net_name=IB", 1);
  const nccl::Config tp = *nccl::ConfigOf("tp"), both = *nccl::ConfigOf("dp,tp");
  EXPECT_EQ(tp.min_ctas, 1);
  EXPECT_EQ(tp.max_ctas, nccl::Config::kUndefined);
  EXPECT_EQ(both.min_ctas, 1);
  EXPECT_EQ(both.max_ctas, 4);
  EXPECT_EQ(both.cga_cluster_size, 2);
  EXPECT_STREQ(both.net_name, "IB");
  for (const char* bad : {"tp", "tp:", "tp:max_ctas=x", "tp:max_ctas=-1", "tp:maxctas=2"}) {
    setenv("DTENSOR_NCCL_CONFIG", bad, 1);
    const absl::Status status = nccl::ConfigOf("dp").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(status.message()), HasSubstr("cga_cluster_size, min_ctas, max_ctas"));
  }
  unsetenv("DTENSOR_NCCL_CONFIG");
}

// ---- What devices alone see. ----

constexpr int64_t kCompared = 64;  // a group's first calls

Tensor Ones(int64_t n) {
  const Tensor t = ValueOrThrow(Tensor::Empty({n}, DType::kI32, DeviceType::kCuda));
  Fill(t, 1);
  return t;
}

absl::Status Sum(Comm& comm, const Tensor& t, CommOptions options = {}) {
  return comm.AllReduce(t, t, ReduceOp::kMax, options).Wait();
}

// Two ranks, whose calls from here on are not compared.
absl::Status RunTwo(absl::FunctionRef<absl::Status(RankContext&, Comm&)> body,
                    absl::Duration timeout = absl::Seconds(60)) {
  return RunSpmd(2,
                 [&](RankContext& context) -> absl::Status {
                   DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
                   const Tensor t = Ones(4);
                   for (int64_t i = 0; i < kCompared; ++i) DT_RETURN_IF_ERROR(Sum(*comm, t));
                   return body(context, *comm);
                 },
                 {.timeout = timeout, .device = DeviceType::kCuda});
}

void SleepWhile(Comm& comm) {
  while (comm.Health().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

TEST(Nccl, NobodyWaitsForCallsThatAreNotCompared) {
  const absl::Status status = RunTwo([](RankContext& context, Comm& comm) -> absl::Status {
    RankDevice& device = *ValueOrThrow(context.devices().Get(DeviceType::kCuda));
    const int64_t before = device.stats().host_waits;
    const Tensor t = Ones(4);
    if (comm.index() == 1) {  // the peer has long gone on
      DT_RETURN_IF_ERROR(context.store().Get("queued", absl::Now() + absl::Seconds(60)).status());
    }
    for (int i = 0; i < 20; ++i) DT_RETURN_IF_ERROR(Sum(comm, t));
    EXPECT_EQ(device.stats().host_waits, before);
    if (comm.index() == 0) DT_RETURN_IF_ERROR(context.store().Set("queued", ""));
    EXPECT_EQ(t.ToVector<double>(), std::vector<double>(4, 1));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Nccl, AnAbsentRankIsNamedWhereTheHostWaits) {
  const absl::Status status = RunTwo(
      [](RankContext&, Comm& comm) -> absl::Status {
        const Tensor t = Ones(4);
        DT_RETURN_IF_ERROR(Sum(comm, t));
        DT_RETURN_IF_ERROR(Sum(comm, t));
        if (comm.index() == 1) {
          t.ToVector<double>();
          SleepWhile(comm);
          return absl::OkStatus();
        }
        DT_RETURN_IF_ERROR(Sum(comm, t));  // alone
        try {
          t.ToVector<double>();
          ADD_FAILURE() << "it is there";
        } catch (const Error& e) {
          const std::string text(e.status().message());
          EXPECT_THAT(text, HasSubstr("all_reduce(max, int32 [4]): rank 1 (last at #"));
          EXPECT_THAT(text, HasSubstr("did not queue it within 1s"));
          EXPECT_EQ(CulpritOf(e.status()), 1);
          return comm.Health();
        }
        return absl::OkStatus();
      },
      absl::Seconds(1));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
}

TEST(Nccl, ARankThatFailsFreesTheDevicesOfOthers) {
  const absl::Status status = RunTwo([](RankContext&, Comm& comm) -> absl::Status {
    const Tensor t = Ones(4);
    if (comm.index() == 1) return absl::DataLossError("gone");
    DT_RETURN_IF_ERROR(Sum(comm, t));
    t.ToVector<double>();
    ADD_FAILURE() << "it is there";
    return absl::OkStatus();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_EQ(status.message(), "rank 1: gone");
}

// Calls that differ where NCCL sees no difference are found when the hosts meet again.
TEST(Nccl, OtherCallsAreFoundAtTheNextThatIsCompared) {
  const absl::Status status = RunTwo([](RankContext&, Comm& comm) -> absl::Status {
    const Tensor t = Ones(4);
    DT_RETURN_IF_ERROR(Sum(comm, t, {.overlap = comm.index() == 1}));
    for (int64_t i = 1; i < kCompared - 1; ++i) DT_RETURN_IF_ERROR(Sum(comm, t));
    const absl::Status told = Sum(comm, t);
    EXPECT_EQ(told.code(), absl::StatusCode::kFailedPrecondition) << told;
    EXPECT_THAT(std::string(told.message()), HasSubstr("one of the 63 before"));
    EXPECT_THAT(std::string(told.message()), HasSubstr("DTENSOR_CHECK=each"));
    return Sum(comm, t);  // the group stays in step
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Messages of two ranks wait for no third one.
TEST(Nccl, MessagesNeedTheirTwoRanks) {
  const absl::Status status = RunSpmd(
      3,
      [](RankContext& context) -> absl::Status {
        DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
        if (comm->index() == 1) return absl::OkStatus();
        const Tensor t = Ones(4);
        if (comm->index() == 2) Fill(t, 7);
        for (int i = 0; i < 100; ++i) {
          DT_RETURN_IF_ERROR((comm->index() == 2 ? comm->Send(t, 0) : comm->Recv(t, 2)).Wait());
        }
        EXPECT_EQ(t.ToVector<double>(), std::vector<double>(4, 7));
        return absl::OkStatus();
      },
      {.device = DeviceType::kCuda});
  EXPECT_TRUE(status.ok()) << status;
}

// Tensors in host memory go by the ranks' memory.
TEST(Nccl, TensorsOfTheHost) {
  const absl::Status status = RunTwo([](RankContext&, Comm& comm) -> absl::Status {
    const Tensor t = ValueOrThrow(Tensor::Full({3}, DType::kF32, comm.index() + 1));
    DT_RETURN_IF_ERROR(comm.AllReduce(t, t, ReduceOp::kSum, {.overlap = true}).Wait());
    EXPECT_EQ(t.ToVector<double>(), std::vector<double>(3, 3));
    return Sum(comm, Ones(4));
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor

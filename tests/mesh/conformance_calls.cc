// What is asked of a call before it starts and written about it, with peers and without.
#include <string>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/comm_trace.h"
#include "dtensor/mesh/store.h"
#include "dtensor/tensor/status.h"
#include "gmock/gmock.h"
#include "tests/mesh/conformance.h"

namespace dtensor::conformance {
namespace {

using ::testing::HasSubstr;

class Calls : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Conformance, Calls,
                         ::testing::Combine(::testing::ValuesIn(Settings()),
                                            ::testing::Values(2, 3, 8)),
                         NameOf);

// The message of a call that is refused.
std::string Refused(Work work) {
  const absl::Status status = work.Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

TEST_P(Calls, CapabilitiesAreThoseOfTheSetting) {
  RunWell([&](RankContext&, Comm& comm) {
    EXPECT_EQ(ToString(comm.caps()), ToString(caps()));
    return absl::OkStatus();
  });
}

// A call that is refused is none: the group stays in step although only one rank made it.
TEST_P(Calls, Validation) {
  RunWell([&](RankContext&, Comm& comm) -> absl::Status {
    const auto make = [](IntSpan shape, DType t = DType::kF32) { return Full(shape, t, 1); };
    if (comm.index() == n() - 1) {
      EXPECT_EQ(Refused(comm.AllReduce(make({2}), make({3}), ReduceOp::kSum)),
                "[comm tp] all_reduce: shapes differ: in float32 [2], out float32 [3]");
      EXPECT_THAT(Refused(comm.AllReduce(make({2}), make({2}, DType::kI32), ReduceOp::kSum)),
                  HasSubstr("dtypes differ"));
      EXPECT_THAT(
          Refused(comm.AllReduce(make({2}, DType::kI32), make({2}, DType::kI32), ReduceOp::kAvg)),
          HasSubstr("avg needs a floating dtype, got int32 [2]"));
      EXPECT_THAT(Refused(comm.AllReduce(Tensor(), make({2}), ReduceOp::kSum)),
                  HasSubstr("null tensor"));
      EXPECT_THAT(Refused(comm.AllGather(make({2}), make({2 * n() + 1}))),
                  HasSubstr("rows do not divide"));
      EXPECT_THAT(Refused(comm.AllGather(make({2}), make({4}), {1})),
                  HasSubstr(absl::StrCat("1 counts for ", n(), " ranks")));
      std::vector<int64_t> counts(n(), 1);
      counts[0] = -1;
      EXPECT_THAT(Refused(comm.AllGather(make({2}), make({4}), counts)), HasSubstr("negative"));
      counts[0] = 9;
      EXPECT_THAT(Refused(comm.ReduceScatter(make({4}), make({2}), counts, ReduceOp::kSum)),
                  HasSubstr("do not fit rows 2 of 4"));
      EXPECT_THAT(Refused(comm.AllGather(make({2, 3}), make({2 * n(), 2}))),
                  HasSubstr("must agree but for the size of dim 0"));
      EXPECT_THAT(Refused(comm.Broadcast(make({2}), n())), HasSubstr(absl::StrCat("root ", n())));
      EXPECT_THAT(Refused(comm.Send(make({2}), comm.index())), HasSubstr("not another member"));
      EXPECT_THAT(Refused(comm.Exchange({{n(), make({2})}}, {})), HasSubstr("is not in the group"));
      EXPECT_THAT(Refused(comm.Exchange({{0, Tensor()}}, {})), HasSubstr("null tensor"));
    }
    return AllReduce(comm, 4);
  });
}

// So is one that asks for more than the communicator does.
TEST_P(Calls, BeyondTheCapabilities) {
  RunWell([&](RankContext&, Comm& comm) -> absl::Status {
    const Tensor strided = Full({2 * n(), 3}, DType::kF32, 1).Transpose(0, 1);
    const Tensor whole = Full({3, 2 * n()}, DType::kF32, 1);
    const bool last = comm.index() == n() - 1;
    if (last && !caps().strided) {
      const auto expect = [](Work work) {
        EXPECT_THAT(Refused(std::move(work)), HasSubstr("is not contiguous"));
      };
      expect(comm.AllReduce(strided, whole, ReduceOp::kSum));
      expect(comm.AllReduce(whole, strided, ReduceOp::kSum, {.overlap = true}));
      expect(comm.Broadcast(strided, 0));
      expect(comm.Send(strided, 0));
      expect(comm.Exchange({{0, strided}}, {}));
      expect(comm.Exchange({}, {{0, strided}}));
    }
    if (last && !caps().many_pieces) {
      EXPECT_THAT(Refused(comm.Exchange({{0, whole}, {1, whole}, {0, whole}}, {})),
                  HasSubstr("two pieces of group index 0"));
      EXPECT_THAT(Refused(comm.Exchange({}, {{1, whole}, {1, whole}})),
                  HasSubstr("two pieces of group index 1"));
    }
    Work work = comm.AllGather(Full({2}, DType::kF32, 1), Full({2 * n()}, DType::kF32, 1), {},
                               {.overlap = true});
    EXPECT_TRUE(caps().overlap || work.Done());
    DT_RETURN_IF_ERROR(work.Wait());
    return AllReduce(comm, 4);
  });
}

TEST_P(Calls, MetaTensorsMoveNothing) {
  RunWell([&](RankContext&, Comm& comm) -> absl::Status {
    if (comm.index() != n() - 1) return absl::OkStatus();  // nobody waits
    CommTrace trace;
    const Tensor x = ValueOrThrow(Tensor::Empty({8 * n()}, DType::kF32, DeviceType::kMeta));
    DT_RETURN_IF_ERROR(comm.AllReduce(x, x, ReduceOp::kSum).Wait());
    EXPECT_EQ(trace.TotalBytes(), 2 * 32 * (n() - 1));
    return absl::OkStatus();
  });
}

TEST_P(Calls, AGroupOfOneIsSilent) {
  RunWell([&](RankContext& context, Comm&) -> absl::Status {
    DT_ASSIGN_OR_RETURN(Comm * alone, context.CommFor(DeviceMesh::Self(), {}));
    EXPECT_EQ(alone->size(), 1);
    CommTrace trace;
    const Tensor x = Full({2}, DType::kF32, 3), y = Full({2}, DType::kF32, 0);
    DT_RETURN_IF_ERROR(alone->AllReduce(x, y, ReduceOp::kSum).Wait());
    ExpectValues(y, [](int64_t) { return 3; });
    EXPECT_FALSE(alone->Exchange({{0, x}}, {}).Wait().ok());  // sent to nobody
    EXPECT_EQ(trace.TotalCount(), 0);
    return absl::OkStatus();
  });
}

TEST_P(Calls, TraceOfCountsAndBytes) {
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    const int me = comm.index();
    const Tensor big = Full({2 * n(), 2}, DType::kF32, 1), part = Full({2, 2}, DType::kF32, 1);
    CommTrace outer;
    DT_RETURN_IF_ERROR(comm.AllReduce(big, big, ReduceOp::kSum).Wait());
    EXPECT_EQ(outer.TotalBytes(), 2 * 16 * (n() - 1));
    const int one = caps().same_bits ? 1 : 2;  // it may be made of two
    EXPECT_EQ(outer.TotalCount(), one);
    CommTrace trace;
    ScopedPhase phase(CommPhase::kBackward);
    DT_RETURN_IF_ERROR(comm.AllGather(part, big).Wait());
    EXPECT_EQ(trace.TotalBytes(), 16 * (n() - 1));
    DT_RETURN_IF_ERROR(comm.ReduceScatter(big, part, {}, ReduceOp::kSum).Wait());
    EXPECT_EQ(trace.TotalBytes(), 32 * (n() - 1));
    trace.Clear();
    DT_RETURN_IF_ERROR(comm.Exchange({{me, part}, {(me + 1) % n(), part}},
                                     {{me, part}, {(me + n() - 1) % n(), big.Slice(0, 0, 2)}})
                           .Wait());
    EXPECT_EQ(trace.TotalBytes(), 16);
    DT_RETURN_IF_ERROR(comm.Broadcast(part, 0).Wait());
    EXPECT_EQ(trace.TotalBytes(), me == 0 ? 16 : 32);
    DT_RETURN_IF_ERROR(context.Exchange(DeviceMesh({n()}, {"tp"}), {0}, "trace", "12345").status());
    EXPECT_EQ(trace.TotalBytes(), (me == 0 ? 16 : 32) + 5 * (n() - 1));
    EXPECT_EQ(trace.TotalCount(), 3);
    EXPECT_EQ(outer.TotalCount(), one + 5);
    EXPECT_EQ(outer.Count(CollectiveKind::kReduceScatter, CommPhase::kForward), one - 1);
    EXPECT_EQ(trace.Count(CollectiveKind::kBroadcast), 1);
    EXPECT_EQ(trace.MaxPayloadBytes(), 16);
    EXPECT_THAT(outer.ToString(), HasSubstr("all_gather      tp         backward"));
    return absl::OkStatus();
  });
}

TEST_P(Calls, FlightLog) {
  RunWell([&](RankContext&, Comm& comm) -> absl::Status {
    DT_RETURN_IF_ERROR(comm.Broadcast(Full({2, 2}, DType::kF32, 1), 0).Wait());
    EXPECT_EQ(comm.FlightLog(), "#1 broadcast(root 0, float32 [2, 2]): OK\n");
    DT_RETURN_IF_ERROR(AllReduce(comm, 7));
    EXPECT_EQ(comm.FlightLog(1), "#2 all_reduce(sum, int32 [7]): OK\n");
    const Tensor in = Full({2}, DType::kI64, 1), out = Full({2 * n()}, DType::kI64, 1);
    Work work = comm.AllGather(in, out, {}, {.overlap = true});
    const std::string log = comm.FlightLog(1);
    EXPECT_THAT(log, HasSubstr(caps().overlap ? "deferred all_gather(int64 [2])"
                                              : "#3 all_gather(int64 [2]): OK"));
    // A deferred pull is done, for its peers, when it is posted. What goes on by itself ends later,
    // and says so.
    if (caps().deferred_pull) {
      EXPECT_THAT(log, HasSubstr(": OK"));
    }
    DT_RETURN_IF_ERROR(work.Wait());
    EXPECT_THAT(comm.FlightLog(1), HasSubstr(": OK"));
    return absl::OkStatus();
  });
}

// While a peer keeps away, the call of who has no pull is still under way.
TEST_P(Calls, FlightLogOfWhatGoesOn) {
  if (!caps().overlap || caps().deferred_pull || !caps().peers) return;
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    const Tensor in = Full({2}, DType::kI64, 1), out = Full({2 * n()}, DType::kI64, 1);
    const bool last = comm.index() == n() - 1;
    DT_RETURN_IF_ERROR(comm.Barrier().Wait());  // the first use of a group may wait
    if (last) {
      DT_RETURN_IF_ERROR(context.store().Get("looked", absl::Now() + absl::Seconds(60)).status());
    }
    Work work = comm.AllGather(in, out, {}, {.overlap = true});
    if (comm.index() == 0) {
      EXPECT_FALSE(work.Done());
      EXPECT_THAT(comm.FlightLog(1),
                  HasSubstr(absl::StrCat("all_gather(int64 [2]): ",
                                         setting().done_when_queued ? "OK" : "started")));
      DT_RETURN_IF_ERROR(context.store().Set("looked", ""));
    }
    return work.Wait();
  });
}

}  // namespace
}  // namespace dtensor::conformance

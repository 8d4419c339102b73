// Which backend serves a group, what is said about it, and what a limited one does to a program.
#include "dtensor/mesh/backends.h"

#include <cstdlib>

#include "dtensor/mesh/comm_trace.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/limited.h"
#include "dtensor/tensor/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dtensor::backends_test {
namespace {

using ::testing::HasSubstr;

// What a program of two ranks prints to stderr when it first communicates.
std::string Said(const char* log, const DeviceMesh& mesh, WrapBackend wrap, absl::Status* status) {
  setenv("DTENSOR_LOG", log, 1);
  ::testing::internal::CaptureStderr();
  SpmdOptions options;
  options.wrap = std::move(wrap);
  *status = RunSpmd(
      2, [&](RankContext& context) { return context.CommFor(mesh, {0}).status(); }, options);
  unsetenv("DTENSOR_LOG");
  return ::testing::internal::GetCapturedStderr();
}

TEST(Backends, TheChoiceIsLoggedOnce) {
  const DeviceMesh mesh({2}, {"tp"});
  absl::Status status;
  EXPECT_EQ(Said("comm", mesh, nullptr, &status),
            "comm: ranks 0, 1 as tp: local (threads of one process, through each other's memory); "
            "peers, strided, many_pieces, overlap, deferred_pull, rank_order, same_bits\n");
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(Said("comm", mesh, Packed(), &status),
              HasSubstr("; peers, overlap, deferred_pull, rank_order, same_bits\n"));
  EXPECT_EQ(Said("", mesh, nullptr, &status), "");
  EXPECT_EQ(Said("all", mesh, nullptr, &status), "");
  EXPECT_THAT(std::string(status.message()), HasSubstr("DTENSOR_LOG is \"all\": give comm"));
}

TEST(Backends, APlanNeedsNobody) {
  absl::Status status;
  const DeviceMesh plan = *DeviceMesh::Create({1000}, {"dp"}, DeviceType::kMeta);
  EXPECT_THAT(Said("comm", plan, nullptr, &status),
              HasSubstr("and 992 more as dp: fake (nobody: there is no data, or there are no "
                        "peers); strided,"));
  EXPECT_TRUE(status.ok()) << status;
}

// An all-reduce whose backend gives ranks different bits is two calls; of integers it is one.
TEST(Limited, AllReduceInTwo) {
  SpmdOptions options;
  options.wrap = Limited({.peers = true});
  const absl::Status status = RunSpmd(
      3,
      [](RankContext& context) -> absl::Status {
        DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
        for (const DType t : {DType::kF32, DType::kI32}) {
          CommTrace trace;
          const Tensor x = ValueOrThrow(Tensor::Full({10}, t, 2));
          DT_RETURN_IF_ERROR(comm->AllReduce(x, x, ReduceOp::kSum).Wait());
          EXPECT_THAT(x.ToVector<double>(), ::testing::Each(6));
          const bool two = t == DType::kF32;
          EXPECT_EQ(trace.Count(CollectiveKind::kAllReduce), two ? 0 : 1);
          EXPECT_EQ(trace.Count(CollectiveKind::kReduceScatter), two ? 1 : 0);
          EXPECT_EQ(trace.Count(CollectiveKind::kAllGather), two ? 1 : 0);
        }
        return absl::OkStatus();
      },
      options);
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::backends_test

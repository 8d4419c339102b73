// Ten faults, injected into one rank of worlds of 2, 3 and 8 during every kind of collective:
// nobody hangs, no call that reports success has a wrong number, and every rank is told whose fault
// it was.
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/comm.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/watchdog.h"

namespace dtensor::fault_injection_test {
namespace {

using ::testing::HasSubstr;

enum Fault {
  kThrows,
  kSleeps,
  kExitsEarly,
  kOtherCollective,
  kOtherDtype,
  kOtherCounts,
  kOtherRoot,
  kOtherOrder,
  kAbortsInsideAWait,
  kRunsOutOfMemory,
};
constexpr const char* kFaultNames[] = {
    "Throws",      "Sleeps",    "ExitsEarly", "OtherCollective",   "OtherDtype",
    "OtherCounts", "OtherRoot", "OtherOrder", "AbortsInsideAWait", "RunsOutOfMemory"};

// Small calls are staged and meet once, large ones meet twice: two protocols.
enum Kind { kReduceSmall, kReduceLarge, kGather, kScatter, kExchangeRing, kBroadcastFrom0 };
constexpr const char* kKindNames[] = {"ReduceSmall", "ReduceLarge", "Gather",
                                      "Scatter",     "Exchange",    "Broadcast"};

constexpr int kSteps = 5, kFaultyStep = 2;

// What a rank does at a step. A culprit changes some of it.
struct Step {
  Kind kind;
  int64_t rows;  // per rank
  DType dtype = DType::kF32;
  int root = 0;
  bool moved_row = false;  // other counts, of the same sum
};

Step StepAt(Kind kind, int step) {
  const int64_t rows = kind == kReduceLarge || kind == kScatter ? 3000 : 20;
  return {kind, rows + step};
}

double Value(int64_t rank, int64_t i) { return static_cast<double>((rank + 1) * 10 + i % 7); }

absl::StatusOr<Tensor> Filled(const Step& s, int64_t rank, int64_t rows) {
  std::vector<double> values(rows);
  for (int64_t i = 0; i < rows; ++i) values[i] = Value(rank, i);
  DT_ASSIGN_OR_RETURN(Tensor wide, Tensor::FromVector(values, {rows}));
  DT_ASSIGN_OR_RETURN(Tensor t, Tensor::Empty({rows}, s.dtype));
  Copy(wide, t);
  return t;
}

// Calls `expect(i)` for every element; anything else than it gives is a wrong number.
template <class Expect>
void Check(const Tensor& t, Expect expect) {
  for (int64_t i = 0; i < t.numel(); ++i) {
    const double got = t.dtype() == DType::kF32 ? static_cast<const float*>(t.data())[i]
                                                : static_cast<const int32_t*>(t.data())[i];
    if (got != expect(i)) {
      ADD_FAILURE() << "wrong number " << got << ", expected " << expect(i) << " at " << i;
      return;
    }
  }
}

double SumOfRanks(int n, int64_t i) {
  double sum = 0;
  for (int r = 0; r < n; ++r) sum += Value(r, i);
  return sum;
}

std::vector<int64_t> Counts(const Step& s, int n) {
  std::vector<int64_t> counts(n, s.rows);
  if (s.moved_row) {
    --counts[0];
    ++counts[n - 1];
  }
  return counts;
}

absl::Status ReduceStep(Comm& comm, const Step& s) {
  DT_ASSIGN_OR_RETURN(Tensor in, Filled(s, comm.index(), s.rows + s.moved_row));
  DT_ASSIGN_OR_RETURN(Tensor out, Tensor::Empty(in.shape(), in.dtype()));
  DT_RETURN_IF_ERROR(comm.AllReduce(in, out, ReduceOp::kSum).Wait());
  Check(out, [&](int64_t i) { return SumOfRanks(comm.size(), i); });
  return absl::OkStatus();
}

absl::Status GatherStep(Comm& comm, const Step& s) {
  const std::vector<int64_t> counts = Counts(s, comm.size());
  DT_ASSIGN_OR_RETURN(Tensor in, Filled(s, comm.index(), counts[comm.index()]));
  DT_ASSIGN_OR_RETURN(Tensor out, Tensor::Empty({s.rows * comm.size()}, s.dtype));
  DT_RETURN_IF_ERROR(comm.AllGather(in, out, counts).Wait());
  Check(out, [&](int64_t i) { return Value(i / s.rows, i % s.rows); });
  return absl::OkStatus();
}

absl::Status ScatterStep(Comm& comm, const Step& s) {
  const std::vector<int64_t> counts = Counts(s, comm.size());
  DT_ASSIGN_OR_RETURN(Tensor in, Filled(s, comm.index(), s.rows * comm.size()));
  DT_ASSIGN_OR_RETURN(Tensor out, Tensor::Empty({counts[comm.index()]}, s.dtype));
  DT_RETURN_IF_ERROR(comm.ReduceScatter(in, out, counts, ReduceOp::kSum).Wait());
  Check(out, [&](int64_t i) { return SumOfRanks(comm.size(), comm.index() * s.rows + i); });
  return absl::OkStatus();
}

absl::Status ExchangeStep(Comm& comm, const Step& s) {
  const int n = comm.size(), next = (comm.index() + 1) % n, previous = (comm.index() + n - 1) % n;
  DT_ASSIGN_OR_RETURN(Tensor in, Filled(s, comm.index(), s.rows + s.moved_row));
  DT_ASSIGN_OR_RETURN(Tensor out, Tensor::Empty({s.rows}, s.dtype));
  DT_RETURN_IF_ERROR(comm.Exchange({{next, in}}, {{previous, out}}).Wait());
  Check(out, [&](int64_t i) { return Value(previous, i); });
  return absl::OkStatus();
}

absl::Status BroadcastStep(Comm& comm, const Step& s) {
  DT_ASSIGN_OR_RETURN(Tensor t, Filled(s, comm.index(), s.rows + s.moved_row));
  DT_RETURN_IF_ERROR(comm.Broadcast(t, s.root).Wait());
  Check(t, [&](int64_t i) { return Value(s.root, i); });
  return absl::OkStatus();
}

absl::Status RunStep(Comm& comm, const Step& s) {
  switch (s.kind) {
    case kReduceSmall:
    case kReduceLarge:
      return ReduceStep(comm, s);
    case kGather:
      return GatherStep(comm, s);
    case kScatter:
      return ScatterStep(comm, s);
    case kExchangeRing:
      return ExchangeStep(comm, s);
    case kBroadcastFrom0:
      return BroadcastStep(comm, s);
  }
  return absl::InternalError("no such kind");
}

// The culprit waits for a peer that does not come before a second thread of the culprit's (a signal
// handler, a watchdog) aborts the group.
absl::Status AbortInsideAWait(Comm& comm, const Step& s) {
  std::thread second([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    comm.Abort(absl::InternalError("stop"));
  });
  const absl::Status status = RunStep(comm, s);
  second.join();
  return status;
}

// What the culprit does instead of step `kFaultyStep`.
absl::Status Misbehave(Fault fault, RankContext& context, Comm& comm, Step s) {
  switch (fault) {
    case kThrows:
      throw std::runtime_error("boom");
    case kSleeps:
      while (comm.Health().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      break;
    case kExitsEarly:
      break;
    case kOtherCollective:
      s.kind = s.kind == kReduceSmall || s.kind == kReduceLarge ? kGather : kReduceSmall;
      break;
    case kOtherDtype:
      s.dtype = DType::kI32;
      break;
    case kOtherCounts:
      s.moved_row = true;
      break;
    case kOtherRoot:
      s.root = 1;
      break;
    case kOtherOrder:
      s = StepAt(s.kind, kFaultyStep + 1);
      break;
    case kAbortsInsideAWait:
      return AbortInsideAWait(comm, s);
    case kRunsOutOfMemory:
      context.allocator()->ReleaseCached();
      context.allocator()->SetLimit(context.allocator()->stats().in_use_bytes + 1);
      break;
  }
  return RunStep(comm, s);
}

// What every rank's message must hold.
std::string Blame(Fault fault, int64_t culprit) {
  switch (fault) {
    case kThrows:
      return absl::StrCat("rank ", culprit, " failed: boom");
    case kSleeps:
      return absl::StrCat("rank ", culprit, " (last at call #", kFaultyStep, ") did not arrive");
    case kExitsEarly:
      return absl::StrCat("rank ", culprit, " left the group before call #", kFaultyStep + 1);
    case kAbortsInsideAWait:
      return absl::StrCat("rank ", culprit, " failed: stop");
    case kRunsOutOfMemory:
      return absl::StrCat("rank ", culprit, " failed: ");
    default:
      return absl::StrCat("collectives differ at call #", kFaultyStep + 1, ": ");
  }
}

class FaultInjection : public ::testing::TestWithParam<std::tuple<Fault, int, Kind>> {};

void Inject(Fault fault, int n, Kind kind, int64_t culprit) {
  SCOPED_TRACE(absl::StrCat("culprit ", culprit));
  const Watchdog watchdog(absl::StrCat(kFaultNames[fault], " ", n, " ", kKindNames[kind]),
                          std::chrono::seconds(120));
  const absl::Duration timeout = fault == kSleeps ? absl::Milliseconds(200) : absl::Seconds(60);
  std::vector<absl::Status> seen(n);
  const absl::Status all = RunSpmd(
      n,
      [&](RankContext& context) -> absl::Status {
        const int64_t rank = context.rank();
        DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
        for (int step = 0; step < kSteps; ++step) {
          const Step s = StepAt(kind, step);
          if (step == kFaultyStep && rank == culprit) {
            if (fault == kExitsEarly) return absl::OkStatus();
            seen[rank] = Misbehave(fault, context, *comm, s);
          } else {
            if (step == kFaultyStep && fault == kAbortsInsideAWait && rank == (culprit + 1) % n) {
              while (comm->Health().ok()) std::this_thread::yield();
            }
            seen[rank] = RunStep(*comm, s);
          }
          DT_RETURN_IF_ERROR(seen[rank]);
        }
        return absl::OkStatus();
      },
      {timeout});
  EXPECT_FALSE(all.ok());
  const std::string blame = Blame(fault, culprit), name = absl::StrCat("rank ", culprit);
  for (int r = 0; r < n; ++r) {
    const bool said_by_itself = fault == kThrows || fault == kExitsEarly;
    if (r == culprit && said_by_itself) continue;  // its body ended without a status of its own
    const std::string text(seen[r].message());
    EXPECT_FALSE(seen[r].ok()) << "rank " << r;
    if (r == culprit && fault == kRunsOutOfMemory) {
      EXPECT_EQ(seen[r].code(), absl::StatusCode::kResourceExhausted) << text;
      continue;
    }
    EXPECT_THAT(text, HasSubstr(blame)) << "rank " << r;
    // In a pair that differs nobody can say who is right: both are named.
    EXPECT_THAT(text, HasSubstr(name)) << "rank " << r;
    if (n > 2 && blame[0] == 'c' && kind != kExchangeRing) {
      EXPECT_THAT(text, HasSubstr(name + " issued ")) << "rank " << r;
    }
    EXPECT_LT(text.size(), 8192u);
  }
  EXPECT_THAT(std::string(all.message()), HasSubstr(name));
}

TEST_P(FaultInjection, NoHangNoWrongNumberCulpritNamed) {
  const auto [fault, n, kind] = GetParam();
  for (int64_t culprit : {0, n - 1}) Inject(fault, n, kind, culprit);
}

std::string NameOf(const ::testing::TestParamInfo<std::tuple<Fault, int, Kind>>& info) {
  return absl::StrCat(kFaultNames[std::get<0>(info.param)], std::get<1>(info.param),
                      kKindNames[std::get<2>(info.param)]);
}

INSTANTIATE_TEST_SUITE_P(
    All, FaultInjection,
    ::testing::Combine(::testing::Values(kThrows, kSleeps, kExitsEarly, kOtherCollective,
                                         kOtherDtype, kOtherCounts, kOtherOrder, kAbortsInsideAWait,
                                         kRunsOutOfMemory),
                       ::testing::Values(2, 3, 8),
                       ::testing::Values(kReduceSmall, kReduceLarge, kGather, kScatter,
                                         kExchangeRing, kBroadcastFrom0)),
    NameOf);
INSTANTIATE_TEST_SUITE_P(Root, FaultInjection,
                         ::testing::Combine(::testing::Values(kOtherRoot),
                                            ::testing::Values(2, 3, 8),
                                            ::testing::Values(kBroadcastFrom0)),
                         NameOf);

}  // namespace
}  // namespace dtensor::fault_injection_test

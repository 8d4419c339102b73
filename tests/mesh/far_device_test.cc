// The floor on a device whose memory the host cannot read and whose streams are lazy.
#include "tests/common/far_device.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/status.h"

namespace dtensor::far_device_test {
namespace {

constexpr DeviceType kFar = DeviceType::kCustom;

RankDevice& Far() { return *RankDevices::Current().Get(kFar).value(); }

Tensor NumbersOn(IntSpan shape, DeviceType device = kFar) {
  std::vector<float> values;
  for (int64_t i = 0; i < Numel(shape); ++i) values.push_back(static_cast<float>(i));
  return Tensor::FromVector(values, shape).value().To(device).value();
}

TEST(FarDevice, TheHostCannotReadItsMemory) {
  const Tensor t = NumbersOn({4});
  EXPECT_THROW((void)t.data_as<float>(), Error);
  EXPECT_DEATH((void)*static_cast<volatile float*>(t.data()), "");
}

TEST(FarDevice, CopiesBothWaysAndConverts) {
  const Tensor t = NumbersOn({3, 4});
  EXPECT_EQ(t.ToVector<double>()[7], 7);
  const Tensor turned = t.Transpose(0, 1);
  EXPECT_EQ(turned.ToVector<int64_t>(),
            (std::vector<int64_t>{0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11}));
  const Tensor half = turned.To(DType::kBF16).value().Contiguous().value();
  EXPECT_EQ(half.ToVector<double>()[1], 4);
  const Tensor target = Tensor::Empty({4, 3}, DType::kF64, kFar).value();
  Fill(target, -1);
  Copy(NumbersOn({2, 3}, DeviceType::kCpu), target.Slice(0, 1, 2));
  EXPECT_EQ(target.ToVector<double>(),
            (std::vector<double>{-1, -1, -1, 0, 1, 2, 3, 4, 5, -1, -1, -1}));
  AddInPlace(target, target.Clone().value());
  EXPECT_EQ(target.ToVector<double>()[8], 10);
  Fill(target, -1);
  Copy(NumbersOn({4, 2}, DeviceType::kCpu), target.Slice(1, 1, 2));  // with gaps
  EXPECT_EQ(target.ToVector<double>(),
            (std::vector<double>{-1, 0, 1, -1, 2, 3, -1, 4, 5, -1, 6, 7}));
}

TEST(FarDevice, NothingWaitsButReading) {
  const int64_t before = Far().stats().host_waits;
  Tensor t = NumbersOn({1000});
  for (int i = 0; i < 5; ++i) AddInPlace(t, t.Clone().value());
  EXPECT_EQ(Far().stats().host_waits, before);
  EXPECT_EQ(t.ToVector<double>()[3], 96);
  EXPECT_EQ(Far().stats().host_waits, before + 1);
}

TEST(FarDevice, MemoryIsServedAgainInTheOrderOfTheStream) {
  const auto allocator = Far().memory();
  Tensor first = NumbersOn({1 << 16});
  const void* at = first.data();
  const Tensor sum = first.Clone().value();
  first = Tensor();
  const Tensor second = Tensor::Empty({1 << 16}, DType::kF32, kFar).value();
  EXPECT_EQ(second.data(), at);
  Fill(second, 5);
  EXPECT_EQ(sum.ToVector<double>()[65535], 65535);
  EXPECT_GE(allocator->stats().reserved_bytes, 2 << 18);
}

TEST(FarDevice, ScopesOfStreamsNest) {
  for (uint64_t seed : {0, 1, 2, 3}) {
    testing::SeedFarDevice(seed);
    const Tensor t = NumbersOn({64});
    Tensor doubled;
    {
      const StreamScope scope(Far());
      doubled = t.Clone().value();
      AddInPlace(doubled, t);
    }
    AddInPlace(doubled, doubled.Clone().value());
    EXPECT_EQ(doubled.ToVector<double>()[5], 20);
  }
}

TEST(FarDevice, MemoryThatAnotherStreamUsesIsHandedOutAfterIt) {
  for (uint64_t seed : {0, 1, 2, 3}) {
    testing::SeedFarDevice(seed);
    const testing::FarReports reports;
    const StreamHandle outer = Far().stream();
    const Tensor kept = Tensor::Empty({64}, DType::kF32, kFar).value();
    Event used;
    {
      Tensor t = NumbersOn({64});
      const Event ready = Far().Record();
      void* side = nullptr;
      ASSERT_EQ(Far().table().stream(Far().device()->handle(), &side), 0);
      ready.OrderBefore(side);
      const TensorRef from = t.ref(), to = kept.ref();
      ASSERT_EQ(Far().table().copy(side, &from, &to), 0);
      used = Event::Record(Far().device(), side);
      t.buffer().RecordUse(used);
      ASSERT_EQ(Far().table().stream_free(Far().device()->handle(), side), 0);
    }
    Fill(Tensor::Empty({64}, DType::kF32, kFar).value(), -1);
    used.OrderBefore(outer);
    EXPECT_EQ(kept.ToVector<double>()[9], 9);
    EXPECT_TRUE(const_cast<testing::FarReports&>(reports).Take().empty());
  }
}

TEST(FarDevice, ReportsWhatNothingOrders) {
  testing::FarReports reports;
  const Tensor t = NumbersOn({64});
  void* side = nullptr;
  ASSERT_EQ(Far().table().stream(Far().device()->handle(), &side), 0);
  const double one = 1;
  const TensorRef ref = t.ref();
  ASSERT_EQ(Far().table().fill(side, &ref, &one, DType::kF64), 0);
  const std::vector<std::string> found = reports.Take();
  ASSERT_FALSE(found.empty());
  EXPECT_EQ(found[0],
            "a fill writes memory that a move writes on another stream: nothing orders them");
  Event::Record(Far().device(), side).OrderBefore(Far().stream());
  ASSERT_EQ(Far().table().stream_free(Far().device()->handle(), side), 0);
  const double host[64] = {};
  const int64_t sizes[] = {64}, strides[] = {1};
  const TensorRef mine = {const_cast<double*>(host), sizes, strides, 1, DType::kF64};
  EXPECT_EQ(Far().table().fill(Far().stream(), &mine, &one, DType::kF64), 0);
  EXPECT_EQ(reports.Take().size(), 1u);
}

TEST(FarDevice, RefusedMemoryIsAnErrorAndNothingIsLost) {
  testing::FailFarSegment(0);
  // The cached segments are given back, and it is asked once more.
  EXPECT_TRUE(Tensor::Empty({1 << 24}, DType::kF32, kFar).ok());
  Far().memory()->SetLimit(1 << 20);
  const absl::Status status = Tensor::Empty({1 << 20}, DType::kF32, kFar).status();
  Far().memory()->SetLimit(0);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(absl::StrContains(status.message(), "on far")) << status;
}

TEST(FarDevice, AnUnknownDeviceIsRefusedByName) {
  const absl::Status cuda = DeviceMesh::Create({1}, {}, DeviceType::kCuda).status();
  EXPECT_EQ(cuda.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(absl::StrContains(cuda.message(), "device cuda: ")) << cuda;  // and the step
  EXPECT_EQ(DeviceMesh::FromRanks({1}, {0}, {}, DeviceType::kCuda).status(), cuda);
  EXPECT_EQ(ParseDevice("tpu").status().message(),
            "device \"tpu\": known are cpu, cuda, meta, far");
  DeviceTable old = *testing::FarDevice();
  old.abi = 7;
  EXPECT_TRUE(absl::StrContains(RegisterDevice(kFar, &old).message(), "abi 7"));
  DeviceTable part = *testing::FarDevice();
  part.reduce = nullptr;
  EXPECT_EQ(RegisterDevice(kFar, &part).message(), "RegisterDevice: the table has no reduce");
}

// One kernel adds up what all ranks have, and takes so many arrays.
TEST(FarDevice, MoreRanksThanOneReductionTakesAreCounted) {
  for (const int64_t ranks : {48, 49}) {
    const absl::Status status = RunSpmd(
        ranks,
        [&](RankContext& rank) -> absl::Status {
          DT_ASSIGN_OR_RETURN(Comm * comm, rank.WorldComm());
          DT_ASSIGN_OR_RETURN(const Tensor x, Tensor::Empty({ranks}, DType::kF32, kFar));
          Fill(x, 1);
          DT_RETURN_IF_ERROR(comm->AllReduce(x, x, ReduceOp::kSum).Wait());
          EXPECT_EQ(x.ToVector<double>(), std::vector<double>(static_cast<size_t>(ranks), ranks));
          return absl::OkStatus();
        },
        {.device = kFar});
    EXPECT_EQ(status.ok(), ranks == 48) << status;
    EXPECT_EQ(absl::StrContains(status.message(), "at most 48 ranks share a device"), ranks == 49)
        << status;
  }
}

// Collectives of ranks that share a device: each rank's part, without a host that waits for data.
TEST(FarDevice, CollectivesAreQueued) {
  for (uint64_t seed : {0, 1, 2}) {
    testing::SeedFarDevice(seed);
    const absl::Status status =
        RunSpmd(4,
                [](RankContext& rank) -> absl::Status {
                  DT_ASSIGN_OR_RETURN(Comm * comm, rank.WorldComm());
                  const auto me = static_cast<double>(rank.rank());
                  DT_ASSIGN_OR_RETURN(const Tensor x, Tensor::Empty({8, 3}, DType::kF32, kFar));
                  Fill(x, me + 1);
                  DT_RETURN_IF_ERROR(comm->AllReduce(x, x, ReduceOp::kSum).Wait());  // in place
                  DT_ASSIGN_OR_RETURN(const Tensor mine, Tensor::Empty({2, 3}, DType::kF32, kFar));
                  DT_RETURN_IF_ERROR(comm->ReduceScatter(x, mine, {}, ReduceOp::kMax).Wait());
                  AddInPlace(mine, mine.Clone().value());
                  DT_RETURN_IF_ERROR(comm->AllGather(mine, x).Wait());
                  DT_RETURN_IF_ERROR(comm->Broadcast(x, 2).Wait());
                  EXPECT_EQ(Far().stats().host_waits, 0);
                  EXPECT_EQ(x.ToVector<double>(), std::vector<double>(24, 20));
                  Fill(x, me);
                  const int next = static_cast<int>(rank.rank() + 1) % 4;
                  const int last = static_cast<int>(rank.rank() + 3) % 4;
                  DT_ASSIGN_OR_RETURN(const Tensor got, Tensor::Empty({8, 3}, DType::kF32, kFar));
                  DT_RETURN_IF_ERROR(comm->Exchange({{next, x}}, {{last, got}}).Wait());
                  Fill(x, -1);  // after the peer has read it
                  EXPECT_EQ(got.ToVector<double>()[0], last);
                  if (rank.rank() == 0) Fill(got, 42);  // just before it is read
                  if (rank.rank() == 0) DT_RETURN_IF_ERROR(comm->Send(got, 3).Wait());
                  if (rank.rank() == 3) DT_RETURN_IF_ERROR(comm->Recv(x, 0).Wait());
                  if (rank.rank() == 0) Fill(got, -1);
                  if (rank.rank() == 3) {
                    EXPECT_EQ(x.ToVector<double>()[5], 42);
                  }
                  return absl::OkStatus();
                },
                {.device = kFar});
    EXPECT_TRUE(status.ok()) << status;
  }
}

absl::StatusOr<Tensor> Filled(IntSpan shape, double value) {
  DT_ASSIGN_OR_RETURN(const Tensor t, Tensor::Empty(shape, DType::kF32, kFar));
  Fill(t, value);
  return t;
}

// A collective beside the rank's other work: it reads what was there when it was started, its
// result is there for who waits, and memory that it uses is not handed out before.
TEST(FarDevice, OverlappedCollectivesAreOrderedByEvents) {
  for (uint64_t seed : {0, 1, 2}) {
    testing::SeedFarDevice(seed);
    const absl::Status status = RunSpmd(
        4,
        [](RankContext& rank) -> absl::Status {
          DT_ASSIGN_OR_RETURN(Comm * comm, rank.WorldComm());
          EXPECT_TRUE(comm->caps().overlap);
          EXPECT_FALSE(comm->caps().deferred_pull);
          const auto me = static_cast<double>(rank.rank());
          const int64_t before = Far().stats().host_waits;
          for (int round = 0; round < 5; ++round) {
            DT_ASSIGN_OR_RETURN(Tensor x, Filled({4, 3}, me));
            DT_ASSIGN_OR_RETURN(const Tensor sum, Filled({4, 3}, -1));
            DT_ASSIGN_OR_RETURN(const Tensor rows, Filled({16, 3}, -1));
            Work reduced = comm->AllReduce(x, sum, ReduceOp::kSum, {.overlap = true});
            Work gathered = comm->AllGather(x, rows, {}, {.overlap = true});
            {
              Work dropped = comm->AllGather(x, *Filled({16, 3}, -2), {}, {.overlap = true});
            }
            AddInPlace(*Filled({4, 3}, 1), x);  // reads beside it
            if (round % 2 == 0) {               // now and then the owner writes
              DT_RETURN_IF_ERROR(rank.TakeBack(x.buffer()));
              Fill(x, 100);
            }
            x = Tensor();
            DT_ASSIGN_OR_RETURN(const Tensor other, Filled({4, 3}, 55));  // the memory serves again
            DT_RETURN_IF_ERROR(gathered.Wait());
            DT_RETURN_IF_ERROR(reduced.Wait());
            AddInPlace(sum, sum.Clone().value());
            EXPECT_EQ(Far().stats().host_waits, before + 2 * round);
            EXPECT_EQ(sum.ToVector<double>(), std::vector<double>(12, 12));
            EXPECT_EQ(rows.ToVector<double>()[3 * 4 * 2], 2);
          }
          return absl::OkStatus();
        },
        {.device = kFar});
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Much is queued before the collective, so asking whether it is done does not make it so.
TEST(FarDevice, OwnersWriteAfterAQueuedCollective) {
  testing::SeedFarDevice(0);
  const absl::Status status =
      RunSpmd(2,
              [](RankContext& rank) -> absl::Status {
                DT_ASSIGN_OR_RETURN(Comm * comm, rank.WorldComm());
                DT_ASSIGN_OR_RETURN(const Tensor x, Filled({4}, 0));
                DT_ASSIGN_OR_RETURN(const Tensor all, Filled({8}, -1));
                for (int i = 0; i < 300; ++i) Fill(x, i);
                Work work = comm->AllGather(x, all, {}, {.overlap = true});
                DT_RETURN_IF_ERROR(comm->Barrier().Wait());  // both have started it: it is queued
                DT_RETURN_IF_ERROR(rank.TakeBack(x.buffer()));
                Fill(x, -1);
                DT_RETURN_IF_ERROR(work.Wait());
                EXPECT_EQ(all.ToVector<double>(), std::vector<double>(8, 299));
                return absl::OkStatus();
              },
              {.device = kFar});
  EXPECT_TRUE(status.ok()) << status;
}

// Rank 0 lets go of a call before it is queued, rank 1 once it comes after it: the memory of rank 0
// serves again only after that.
TEST(FarDevice, MemoryOfACallThatAllHaveDroppedServesAfterIt) {
  testing::SeedFarDevice(0);
  std::atomic<int> step{0};
  const auto await = [&](int n) {
    while (step.load() < n) std::this_thread::yield();
  };
  const absl::Status status = RunSpmd(
      2,
      [&](RankContext& rank) -> absl::Status {
        DT_ASSIGN_OR_RETURN(Comm * comm, rank.WorldComm());
        DT_ASSIGN_OR_RETURN(const Tensor other, Filled({100}, 0));
        if (rank.rank() == 1) await(1);
        {
          DT_ASSIGN_OR_RETURN(const Tensor x, Filled({4}, 0));
          DT_ASSIGN_OR_RETURN(const Tensor all, Filled({8}, -1));
          for (int i = 0; i < 300 && rank.rank() == 1; ++i) Fill(x, i);
          const Work work = comm->AllGather(x, all, {}, {.overlap = true});
          DT_RETURN_IF_ERROR(rank.TakeBack(x.buffer()));
        }
        DT_RETURN_IF_ERROR(rank.TakeBack(other.buffer()));  // lets go of what was taken back
        ++step;
        await(2);
        std::vector<Tensor> again;
        for (int i = 0; i < 8; ++i) {
          DT_ASSIGN_OR_RETURN(Tensor t, Filled({8}, i));
          again.push_back(std::move(t));
        }
        EXPECT_EQ(again[7].ToVector<double>(), std::vector<double>(8, 7));
        return absl::OkStatus();
      },
      {.device = kFar});
  EXPECT_TRUE(status.ok()) << status;
}

// Who forgets to wait, or to take back what it lent, is told.
TEST(FarDevice, ReportsWhoDoesNotWaitForAnOverlappedCollective) {
  for (const bool reads : {true, false}) {
    testing::FarReports reports;
    const absl::Status status =
        RunSpmd(2,
                [&](RankContext& rank) -> absl::Status {
                  DT_ASSIGN_OR_RETURN(Comm * comm, rank.WorldComm());
                  DT_ASSIGN_OR_RETURN(const Tensor x, Filled({4}, 1));
                  DT_ASSIGN_OR_RETURN(const Tensor all, Filled({8}, -1));
                  Work work = comm->AllGather(x, all, {}, {.overlap = true});
                  DT_RETURN_IF_ERROR(comm->Barrier().Wait());  // both have started it
                  if (reads) (void)all.Clone().value();
                  if (!reads) Fill(x, 5);
                  return work.Wait();
                },
                {.device = kFar});
    EXPECT_TRUE(status.ok()) << status;
    const std::vector<std::string> found = reports.Take();
    ASSERT_FALSE(found.empty());
    EXPECT_EQ(found[0],
              absl::StrCat("a ", reads ? "copy reads" : "fill writes", " memory that a copy ",
                           reads ? "writes" : "reads", " on another stream: nothing orders them"));
  }
}

TEST(FarDevice, BarriersOrderWhatAllHaveQueued) {
  testing::SeedFarDevice(1);
  Tensor shared;  // of rank 0
  const absl::Status status =
      RunSpmd(3,
              [&](RankContext& rank) -> absl::Status {
                DT_ASSIGN_OR_RETURN(Comm * comm, rank.WorldComm());
                if (rank.rank() == 0) {
                  DT_ASSIGN_OR_RETURN(shared, Filled({4}, 7));
                }
                DT_RETURN_IF_ERROR(comm->Barrier().Wait());
                EXPECT_EQ(Far().stats().host_waits, 0);
                if (rank.rank() == 2) {
                  EXPECT_EQ(shared.ToVector<double>(), std::vector<double>(4, 7));
                }
                DT_RETURN_IF_ERROR(comm->Barrier().Wait());
                if (rank.rank() == 0) {
                  Fill(shared, 8);  // after it was read
                  shared = Tensor();
                }
                return absl::OkStatus();
              },
              {.device = kFar});
  EXPECT_TRUE(status.ok()) << status;
}

// Work beside other work: what is computed meanwhile is there although the collective is not done.
TEST(FarDevice, OverlappedCollectivesGoBesideOtherWork) {
  testing::SeedFarDevice(0);  // nothing runs before it must
  for (const bool overlap : {true, false}) {
    std::atomic<int64_t> left{0};
    std::atomic<int> through{0};
    const absl::Status status =
        RunSpmd(2,
                [&](RankContext& rank) -> absl::Status {
                  DT_ASSIGN_OR_RETURN(Comm * comm, rank.WorldComm());
                  DT_ASSIGN_OR_RETURN(const Tensor x, Filled({4}, 1));
                  DT_ASSIGN_OR_RETURN(const Tensor all, Filled({8}, -1));
                  auto meet = [&, times = 0]() mutable {
                    through.fetch_add(1);
                    for (times += 2; through.load() < times;) std::this_thread::yield();
                  };
                  Work work = comm->AllGather(x, all, {}, {.overlap = overlap});
                  meet();
                  EXPECT_EQ(Filled({1}, 3)->ToVector<double>()[0], 3);
                  meet();
                  left = testing::GetFarStats().left;
                  meet();
                  DT_RETURN_IF_ERROR(work.Wait());
                  EXPECT_EQ(all.ToVector<double>(), std::vector<double>(8, 1));
                  return absl::OkStatus();
                },
                {.device = kFar});
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(left.load() > 0, overlap) << left.load();
  }
}

}  // namespace
}  // namespace dtensor::far_device_test

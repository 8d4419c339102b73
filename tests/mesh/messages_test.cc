// Worlds of processes in one process (network.h), whose messages go wrong.
#include "dtensor/mesh/process/messages.h"

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"
#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "tests/common/temp_folder.h"
#include "tests/mesh/network.h"

namespace dtensor::messages_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Network;

constexpr int kRanks = 3;

class Messages : public ::testing::Test {
 protected:
  // What each rank is told. Rank 1, which causes the trouble, waits longer than the others.
  std::vector<absl::Status> Run(absl::FunctionRef<absl::Status(RankContext&)> body,
                                absl::Duration timeout = absl::Seconds(20)) {
    return processes_.Run(body, [&](int64_t r) {
      SpmdOptions options{r == 1 ? 10 * timeout : timeout};
      options.device = DeviceType();
      return options;
    });
  }
  // Of the first group that a world makes.
  bool OnChannel(const Network::Message& m, ProcessGroup::Channel which) const {
    return m.channel % ProcessGroup::kChannels == (1 + which) % ProcessGroup::kChannels &&
           m.channel >= 1;
  }

  testing::ThreadProcesses processes_{kRanks};
  Network& network_ = processes_.network;
  std::vector<std::unique_ptr<Endpoint>>& endpoints_ = processes_.endpoints;
};

absl::Status AllReduce(RankContext& context, int64_t size) {
  DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
  DT_ASSIGN_OR_RETURN(const Tensor x, Tensor::Full({size}, DType::kF32, 1));
  DT_RETURN_IF_ERROR(comm->AllReduce(x, x, ReduceOp::kSum).Wait());
  for (const double v : x.ToVector<double>()) {
    if (v != kRanks) return absl::DataLossError("another sum");
  }
  return absl::OkStatus();
}

TEST_F(Messages, CarryAWorld) {
  for (const absl::Status& told : Run([](RankContext& context) {
         for (const int64_t size : {3, 1000, 300000}) {
           DT_RETURN_IF_ERROR(AllReduce(context, size));
         }
         return absl::OkStatus();
       })) {
    EXPECT_TRUE(told.ok()) << told;
  }
  for (const auto& endpoint : endpoints_) EXPECT_EQ(endpoint->abandoned(), 0u);
}

// Rank 0's, whatever the others were given.
TEST_F(Messages, AllRanksHaveOneCostModel) {
  const auto body = [](RankContext& context) {
    EXPECT_EQ(context.cost_model().inter_node.latency_us, 1.0 / 3);
    EXPECT_EQ(context.cost_model().ranks_per_node, kRanks);  // they share this machine
    return absl::OkStatus();
  };
  const auto told = processes_.Run(body, [](int64_t r) {
    SpmdOptions options{absl::Seconds(20)};
    options.device = DeviceType();
    options.cost = CostModel();
    options.cost->inter_node.latency_us = 1.0 / static_cast<double>(3 + r);
    return options;
  });
  for (const absl::Status& status : told) EXPECT_TRUE(status.ok()) << status;
}

// Who looks after a process reads how it is, and whom it waits for.
TEST_F(Messages, AHealthFileSaysHowAProcessIs) {
  const testing::TempFolder folder;
  setenv("DTENSOR_HEALTH_FILE", folder.Path("health").c_str(), 1);
  const auto health = [&](int rank) {
    return nlohmann::json::parse(folder.Read(absl::StrCat("health.rank", rank)));
  };
  std::string seen;
  const auto late = [&](RankContext& context) {
    const absl::Time limit = absl::Now() + absl::Seconds(6);
    while (context.rank() == 1 && seen.empty() && absl::Now() < limit) {
      absl::SleepFor(absl::Milliseconds(10));
      if (folder.Read("health.rank0").empty()) continue;  // not yet
      const nlohmann::json calls = health(0).at("calls");
      const std::vector<int64_t> me = {1};
      if (calls.empty() || calls[0].at("waits_for") != me) continue;
      seen = calls[0].dump();
      EXPECT_LT(calls[0].at("seconds").get<double>(), 60);
    }
    return AllReduce(context, 3);
  };
  for (const absl::Status& told : Run(late, absl::Seconds(7))) EXPECT_TRUE(told.ok()) << told;
  for (const char* part : {"\"call\":\"#1 all_reduce(sum, float32 [3])\"", "\"group\":\"world\"",
                           "\"state\":\"waiting\""}) {
    EXPECT_THAT(seen, HasSubstr(part));
  }
  for (int r = 0; r < kRanks; ++r) {
    EXPECT_EQ(health(r).at("state"), "ended");
    EXPECT_EQ(health(r).at("rank"), r);
    EXPECT_EQ(health(r).at("size"), kRanks);
    EXPECT_EQ(health(r).at("calls"), nlohmann::json::array());
    EXPECT_LT(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()) -
                  health(r).at("unix_seconds").get<double>(),
              60);
  }
  Run([](RankContext& context) -> absl::Status {
    if (context.rank() == 1) return absl::DataLossError("disk on fire");
    return AllReduce(context, 3);
  });
  for (int r = 0; r < kRanks; ++r) {
    EXPECT_EQ(health(r).at("state"), "failed");
    EXPECT_EQ(health(r).at("error"), "rank 1: disk on fire");
  }
  // A file that cannot be written is said once, and harms nobody.
  setenv("DTENSOR_HEALTH_FILE", "/nowhere/health", 1);
  ::testing::internal::CaptureStderr();
  for (const absl::Status& told : Run([](RankContext& context) { return AllReduce(context, 3); })) {
    EXPECT_TRUE(told.ok()) << told;
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("DTENSOR_HEALTH_FILE: /nowhere/health.rank"));
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), kRanks) << said;
  unsetenv("DTENSOR_HEALTH_FILE");
}

// Worlds one after the other use channels one after the other, and begin again in time.
TEST_F(Messages, ChannelsBeginAgainWhereHalfOfThemAreUsed) {
  endpoints_[0]->next_channel = endpoints_[0]->channels() / 2 - 1;
  for (int world = 0; world < 2; ++world) {
    const auto body = [](RankContext& context) { return AllReduce(context, 3); };
    for (const absl::Status& told : Run(body)) EXPECT_TRUE(told.ok()) << told;
    if (world == 0) {
      EXPECT_EQ(endpoints_[0]->next_channel, 1);
    }
  }
  EXPECT_GT(endpoints_[0]->next_channel, 1);
}

template <size_t... kRank>
std::vector<const DtMessages*> Tables(std::index_sequence<kRank...>) {
  return {testing::TableOf<kRank>()...};
}

// Most messages that a rank of a world of so many sends to the store until the world stands, and
// until it has a group of all.
std::pair<int64_t, int64_t> StoreTraffic(int64_t ranks) {
  constexpr size_t kMost = 64;
  const std::vector<const DtMessages*> tables = Tables(std::make_index_sequence<kMost>());
  Network messages;
  testing::network = &messages;
  std::pair<int64_t, int64_t> most = {0, 0};
  std::barrier all(static_cast<ptrdiff_t>(ranks));
  std::vector<std::thread> threads;
  for (int64_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      ProcessPlace place;
      place.rank = place.local_rank = r;
      place.size = place.local_size = ranks;
      Endpoint endpoint(place, tables[static_cast<size_t>(r)]);
      const auto world = ProcessWorld::Meet(endpoint, ranks, {absl::Seconds(30)});
      EXPECT_TRUE(world.ok()) << world.status();
      const auto look = [&](int64_t* result) {
        all.arrive_and_wait();
        if (r == 0 && world.ok()) {
          const std::map<int64_t, int64_t> heard = (*world)->StoreMessages();
          EXPECT_EQ(static_cast<int64_t>(heard.size()), ranks);
          for (const auto& [rank, count] : heard) *result = std::max(*result, count);
        }
        all.arrive_and_wait();
      };
      look(&most.first);
      std::vector<int64_t> everybody(static_cast<size_t>(ranks));
      std::iota(everybody.begin(), everybody.end(), int64_t{0});
      if (world.ok()) {
        EXPECT_TRUE((*world)->GroupOf(everybody).ok());
      }
      look(&most.second);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return most;
}

TEST(StoreTraffic, OfAStartDoesNotGrowWithTheWorld) {
  const auto small = StoreTraffic(4), large = StoreTraffic(64);
  EXPECT_LE(large.first, small.first + 1);  // the last to come says that all are here
  EXPECT_LE(large.first, 8);
  EXPECT_LE(large.second, large.first + 3);
  printf("messages of a rank to the store: %d until the world stands, %d with a group\n",
         static_cast<int>(large.first), static_cast<int>(large.second));
}

// All have come to the call, and then rank 1 stops sending.
TEST_F(Messages, WhoseDataDoesNotComeIsNamed) {
  network_.passes = [&](const Network::Message& m) {
    return m.from != 1 || !OnChannel(m, ProcessGroup::kData);
  };
  const std::vector<absl::Status> told =
      Run([](RankContext& context) { return AllReduce(context, 100000); }, absl::Seconds(1));
  for (const int r : {0, 2}) {
    EXPECT_THAT(std::string(told[r].message()),
                HasSubstr("the data of rank 1 did not arrive within 1s"));
    EXPECT_EQ(CulpritOf(told[r]), 1) << told[r];
  }
}

// A message that nobody waits for any more comes when the world and its tensors are gone.
TEST_F(Messages, MemoryOfAbandonedMessagesIsKept) {
  network_.passes = [&](const Network::Message& m) {
    return m.from != 1 || !OnChannel(m, ProcessGroup::kData);
  };
  const std::function<absl::Status(RankContext&)> bodies[] = {
      [](RankContext& context) { return AllReduce(context, 100000); },
      [](RankContext& context) {
        const DeviceMesh mesh({kRanks}, {"tp"});
        return context.Exchange(mesh, {0}, "test", std::string(100000, 'x')).status();
      }};
  for (const auto& body : bodies) {
    const size_t before = endpoints_[0]->abandoned() + endpoints_[2]->abandoned();
    for (const absl::Status& told : Run(body, absl::Seconds(1))) EXPECT_FALSE(told.ok());
    EXPECT_GE(endpoints_[0]->abandoned() + endpoints_[2]->abandoned(), before + 2);
    EXPECT_GE(network_.ReleaseHeld(), 2);  // written to: under ASan it has to be there
  }
}

// A send that cannot start: what was started before it in the same call is abandoned too.
TEST_F(Messages, ASendThatFailsKeepsWhatWasStarted) {
  network_.fails = [&](const Network::Message& m) {
    return m.from == 1 && OnChannel(m, ProcessGroup::kData);
  };
  const std::vector<absl::Status> told =
      Run([](RankContext& context) { return AllReduce(context, 100000); }, absl::Seconds(5));
  for (const absl::Status& status : told) {
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("a message to rank"), HasSubstr("the cable is cut")));
    EXPECT_EQ(CulpritOf(status), 1);
  }
  EXPECT_GE(endpoints_[1]->abandoned(), 1u);
}

}  // namespace
}  // namespace dtensor::messages_test

#include "tests/mesh/store_contract.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "dtensor/tensor/status.h"
#include "gmock/gmock.h"

namespace dtensor {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

// Runs `body(rank, store)` on a thread per rank.
void OnRanks(const std::vector<std::unique_ptr<Store>>& stores,
             absl::FunctionRef<void(int, Store&)> body) {
  std::vector<std::thread> threads;
  for (size_t r = 0; r < stores.size(); ++r) {
    threads.emplace_back([&, r] { body(static_cast<int>(r), *stores[r]); });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(StoreContract, WhatOneSetsAllGet) {
  const auto stores = GetParam()(3);
  for (const std::string& key : {std::string("a"), std::string(), std::string("a\0b\n%\xff/", 8)}) {
    for (const std::string& value : {std::string("1"), std::string(), std::string(100000, '\0')}) {
      EXPECT_TRUE(stores[1]->Set(key, value).ok());
      for (const auto& store : stores) EXPECT_EQ(*store->Get(key, Soon()), value);
    }
  }
  EXPECT_EQ(stores[0]->Get("a\n", absl::Now()).status().code(), StatusCode::kDeadlineExceeded);
}

TEST_P(StoreContract, WhatIsThereNeedsNoTime) {
  const auto stores = GetParam()(1);
  ASSERT_TRUE(stores[0]->Set("here", "x").ok());
  EXPECT_EQ(*stores[0]->Get("here", absl::InfinitePast()), "x");
  EXPECT_TRUE(stores[0]->Wait({"here"}, absl::InfinitePast()).ok());
  EXPECT_TRUE(stores[0]->Wait({}, absl::InfinitePast()).ok());
}

TEST_P(StoreContract, GetWaitsUntilItIsSet) {
  const auto stores = GetParam()(4);
  std::atomic<int> waiting{0};
  OnRanks(stores, [&](int rank, Store& store) {
    if (rank == 3) {
      while (waiting.load() < 3) std::this_thread::yield();
      absl::SleepFor(absl::Milliseconds(20));
      EXPECT_TRUE(store.Set("other", "no").ok());  // wakes nobody for good
      absl::SleepFor(absl::Milliseconds(20));
      EXPECT_TRUE(store.Set("late", "yes").ok());
    } else {
      ++waiting;
      EXPECT_EQ(*store.Get("late", rank == 0 ? absl::InfiniteFuture() : Soon()), "yes");
    }
  });
}

TEST_P(StoreContract, WaitWaitsForAll) {
  const auto stores = GetParam()(4);
  OnRanks(stores, [&](int rank, Store& store) {
    std::vector<std::string> keys;
    for (int r = 0; r < 4; ++r) keys.push_back(absl::StrCat("here/", r));
    EXPECT_TRUE(store.Set(keys[rank], "").ok());
    EXPECT_TRUE(store.Wait(keys, Soon()).ok());
    for (const std::string& key : keys) EXPECT_EQ(*store.Get(key, absl::InfinitePast()), "");
  });
}

TEST_P(StoreContract, DeadlinesNameTheKeyTheTimeAndWhoAsks) {
  const auto stores = GetParam()(3);
  const absl::Time start = absl::Now(), deadline = start + absl::Milliseconds(60);
  const absl::Status late = stores[2]->Get("group/\x01 id", deadline).status();
  EXPECT_GE(absl::Now(), deadline);
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  EXPECT_EQ(late.code(), StatusCode::kDeadlineExceeded);
  const std::string text(late.message());
  EXPECT_THAT(text, HasSubstr("rank 2 waited for key \"group/\\x01 id\""));
  EXPECT_THAT(text, HasSubstr(absl::FormatTime(deadline)));
  ASSERT_TRUE(stores[0]->Set("b", "").ok());
  const absl::Status some = stores[1]->Wait({"a", "b", "c"}, absl::Now());
  EXPECT_EQ(some.code(), StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(some.message()), HasSubstr("rank 1 waited for keys \"a\", \"c\""));
}

TEST_P(StoreContract, AddCountsEveryCall) {
  const auto stores = GetParam()(4);
  std::vector<std::vector<int64_t>> seen(4);
  OnRanks(stores, [&](int rank, Store& store) {
    for (int i = 0; i < 200; ++i) seen[rank].push_back(*store.Add("count", 1));
  });
  std::vector<int64_t> all;
  for (const auto& some : seen) {
    EXPECT_TRUE(std::is_sorted(some.begin(), some.end()));
    all.insert(all.end(), some.begin(), some.end());
  }
  std::sort(all.begin(), all.end());
  for (int64_t i = 0; i < 800; ++i) EXPECT_EQ(all[i], i + 1);
  EXPECT_EQ(*stores[0]->Get("count", Soon()), "800");
  EXPECT_EQ(*stores[1]->Add("count", -1000), -200);
  EXPECT_EQ(*stores[1]->Add("count", 0), -200);
}

TEST_P(StoreContract, AddRefusesWhatIsNoNumber) {
  const auto stores = GetParam()(2);
  ASSERT_TRUE(stores[0]->Set("name", "tp").ok());
  const absl::Status bad = stores[1]->Add("name", 1).status();
  EXPECT_EQ(bad.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(bad.message()),
              HasSubstr("rank 1 adds to key \"name\", which is \"tp\""));
  EXPECT_EQ(*stores[0]->Get("name", Soon()), "tp");
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  ASSERT_TRUE(stores[0]->Set("most", absl::StrCat(kMost)).ok());
  EXPECT_EQ(stores[0]->Add("most", 1).status().code(), StatusCode::kOutOfRange);
  EXPECT_EQ(*stores[0]->Add("most", -1), kMost - 1);
}

TEST_P(StoreContract, CompareExchangeHasOneWinner) {
  const auto stores = GetParam()(4);
  std::vector<std::string> before(4);
  OnRanks(stores, [&](int rank, Store& store) {
    before[rank] = *store.CompareExchange("first", "", absl::StrCat("rank ", rank));
  });
  const std::string winner = *stores[0]->Get("first", Soon());
  EXPECT_EQ(std::count(before.begin(), before.end(), ""), 1);
  EXPECT_EQ(std::count(before.begin(), before.end(), winner), 3);
  EXPECT_EQ(*stores[1]->CompareExchange("first", "nobody", "x"), winner);
  EXPECT_EQ(*stores[1]->CompareExchange("first", winner, "x"), winner);
  EXPECT_EQ(*stores[2]->CompareExchange("first", winner, "y"), "x");
  EXPECT_EQ(*stores[3]->Get("first", Soon()), "x");
}

TEST_P(StoreContract, CompareExchangeWakesWhoWaits) {
  const auto stores = GetParam()(2);
  OnRanks(stores, [&](int rank, Store& store) {
    if (rank == 0) {
      EXPECT_EQ(*store.Get("token", Soon()), "t");
    } else {
      absl::SleepFor(absl::Milliseconds(20));
      EXPECT_EQ(*store.CompareExchange("token", "", "t"), "");
    }
  });
}

// Additions by compare-exchange lose none.
TEST_P(StoreContract, CompareExchangeIsAtomic) {
  const auto stores = GetParam()(3);
  OnRanks(stores, [&](int, Store& store) {
    for (int i = 0; i < 100; ++i) {
      std::string seen;
      while (true) {
        int64_t number = 0;
        EXPECT_TRUE(seen.empty() || absl::SimpleAtoi(seen, &number));
        const std::string found = *store.CompareExchange("n", seen, absl::StrCat(number + 1));
        if (found == seen) break;
        seen = found;
      }
    }
  });
  EXPECT_EQ(*stores[0]->Get("n", Soon()), "300");
}

}  // namespace
}  // namespace dtensor

// The store of ranks that are threads: the contract, and what a world adds to it.
#include "dtensor/mesh/store.h"

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/local/memory_store.h"
#include "dtensor/tensor/status.h"
#include "gmock/gmock.h"
#include "tests/mesh/store_contract.h"

namespace dtensor {
namespace {

using ::testing::HasSubstr;

std::vector<std::unique_ptr<Store>> MemoryStores(int ranks) {
  const auto shared = std::make_shared<SharedMemory>();
  std::vector<std::unique_ptr<Store>> stores;
  for (int r = 0; r < ranks; ++r) {
    stores.push_back(std::make_unique<MemoryStore>(shared, absl::StrCat("rank ", r)));
  }
  return stores;
}

INSTANTIATE_TEST_SUITE_P(Memory, StoreContract, ::testing::Values(&MemoryStores));

TEST(WorldStore, RanksMeetInIt) {
  const absl::Status status = RunSpmd(3, [](RankContext& context) -> absl::Status {
    Store& store = context.store();
    if (context.rank() == 1) DT_RETURN_IF_ERROR(store.Set("id", "42"));
    DT_ASSIGN_OR_RETURN(const std::string id, store.Get("id", absl::Now() + absl::Seconds(30)));
    EXPECT_EQ(id, "42");
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(WorldStore, WaitsEndWhenARankFails) {
  absl::Status seen;
  const absl::Status all = RunSpmd(2, [&](RankContext& context) -> absl::Status {
    if (context.rank() == 1) return absl::DataLossError("disk on fire");
    return seen = context.store().Get("never", absl::InfiniteFuture()).status();
  });
  EXPECT_EQ(seen.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(seen.message(), "store: rank 0 waited for key \"never\": rank 1 failed: disk on fire");
  EXPECT_EQ(CulpritOf(seen), 1);
  EXPECT_EQ(all.message(), "rank 1: disk on fire");
}

TEST(WorldStore, OfAWorldWithoutPeers) {
  const absl::Status status =
      RunFake({.world = 100000, .rank = 777}, [](RankContext& context) -> absl::Status {
        EXPECT_THAT(std::string(context.store().Get("x", absl::Now()).status().message()),
                    HasSubstr("rank 777 waited for key \"x\""));
        DT_ASSIGN_OR_RETURN(const int64_t n, context.store().Add("x", 3));
        EXPECT_EQ(n, 3);
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor

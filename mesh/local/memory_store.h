// MemoryStore: a Store for ranks that are threads of one process.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "dtensor/mesh/park.h"
#include "dtensor/mesh/store.h"

namespace dtensor {

// What all handles share.
class SharedMemory {
 public:
  // Waits end with `why` from now on, unless what they wait for is there.
  void Fail(const absl::Status& why);
  void Remove(Store::Key key);

 private:
  friend class MemoryStore;
  std::mutex mutex_;
  absl::flat_hash_map<std::string, std::string> values_;  // guarded by mutex_
  absl::Status failed_;                                   // guarded by mutex_
  std::atomic<uint64_t> changes_{0};
  ParkSpot spot_;
};

class MemoryStore : public Store {
 public:
  // `who` asks through this handle: "rank 2".
  MemoryStore(std::shared_ptr<SharedMemory> shared, std::string who)
      : shared_(std::move(shared)), who_(std::move(who)) {}

  absl::Status Set(Key key, absl::string_view value) override;
  absl::StatusOr<std::string> Get(Key key, absl::Time deadline) override;
  absl::Status Wait(absl::Span<const std::string> keys, absl::Time deadline) override;
  absl::StatusOr<int64_t> Add(Key key, int64_t n) override;
  absl::StatusOr<std::string> CompareExchange(Key key, absl::string_view expected,
                                              absl::string_view desired) override;

 private:
  // Until `there`, which is asked under the lock. `what` names what is missing.
  absl::Status Await(absl::FunctionRef<bool()> there, absl::FunctionRef<std::string()> what,
                     absl::Time deadline);
  void Changed();

  const std::shared_ptr<SharedMemory> shared_;
  const std::string who_;
};

}  // namespace dtensor

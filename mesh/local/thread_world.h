// ThreadWorld: what threads of one process share as ranks. Private to mesh/.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "dtensor/mesh/local/group.h"
#include "dtensor/mesh/local/memory_store.h"
#include "dtensor/mesh/world.h"

namespace dtensor {

struct ThreadWorldOptions {
  absl::Duration timeout = absl::InfiniteDuration();  // of every wait for peers
  bool spmd = true;
  bool spin = false;  // every rank has a core of its own
  WrapBackend wrap = nullptr;
  CostModel cost = {};
};

// Owned by shared pointers: its groups outlive it where a Work does.
class ThreadWorld : public World, public std::enable_shared_from_this<ThreadWorld> {
 public:
  ThreadWorld(int64_t size, ThreadWorldOptions options);

  int64_t size() const override { return size_; }
  Launcher launcher() const override { return Launcher::kThreads; }
  bool spmd() const override { return options_.spmd; }
  const CostModel& cost_model() const override { return options_.cost; }
  absl::Duration timeout() const override { return options_.timeout; }
  Store& StoreOf(int64_t rank) override { return stores_[rank]; }
  absl::StatusOr<std::unique_ptr<CommBackend>> MakeComm(const GroupRequest& group) override;
  absl::Status SetOptions(const GroupRequest& group, const GroupOptions& options) override;
  absl::StatusOr<std::vector<std::string>> Exchange(const GroupRequest& group,
                                                    absl::string_view what_for,
                                                    std::string mine) override;
  void Fail(int64_t rank, const absl::Status& why) override;
  void Leave(int64_t rank, const absl::Status& how) override;
  absl::Status FirstCause() override;
  FlightReport Report() override;
  FlightReport LastReport() override;

  // The group of these ranks, made by whichever member asks first.
  std::shared_ptr<LocalGroup> GroupOf(const std::vector<int64_t>& ranks);
  // Takes a report for call `number` at `where` and returns its summary as the end of a message
  // ("\nflight report:\n..."). Whoever asks again for the same call gets the same text.
  std::string ReportOnce(const void* where, uint64_t number);
  // The same for what ends groups. The first stays for good: later ones see what it brought down.
  std::string LastingReport();

 private:
  const int64_t size_;
  const ThreadWorldOptions options_;
  const std::shared_ptr<SharedMemory> memory_ = std::make_shared<SharedMemory>();
  std::vector<MemoryStore> stores_;  // by rank
  std::mutex mutex_;
  std::vector<bool> failed_, left_;
  absl::Status cause_;   // as RunSpmd returns it
  absl::Status notice_;  // as peers see it
  absl::flat_hash_map<std::vector<int64_t>, std::shared_ptr<LocalGroup>> groups_;
  std::mutex report_mutex_;  // taken before mutex_
  void TakeReport();         // under report_mutex_
  bool report_lasts_ = false;
  std::pair<const void*, uint64_t> report_key_;
  std::string report_text_;
  FlightReport report_;
};

}  // namespace dtensor

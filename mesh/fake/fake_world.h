// FakeWorld: one rank of a world that has no other. Private to mesh/.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/mesh/cost.h"
#include "dtensor/mesh/local/memory_store.h"
#include "dtensor/mesh/world.h"

namespace dtensor {

// Collectives are recorded and end at once, with times from `cost`.
class FakeWorld : public World {
 public:
  FakeWorld(int64_t size, int64_t rank, CostModel cost, WrapBackend wrap);

  int64_t size() const override { return size_; }
  Launcher launcher() const override { return Launcher::kFake; }
  bool spmd() const override { return true; }
  const CostModel& cost_model() const override { return cost_; }
  Store& StoreOf(int64_t) override { return store_; }
  absl::StatusOr<std::unique_ptr<CommBackend>> MakeComm(const GroupRequest& group) override;
  absl::Status SetOptions(const GroupRequest&, const GroupOptions&) override {
    return absl::OkStatus();  // nobody waits
  }
  absl::StatusOr<std::vector<std::string>> Exchange(const GroupRequest& group, absl::string_view,
                                                    std::string mine) override {
    return std::vector<std::string>(group.ranks.size(), mine);
  }
  void Fail(int64_t, const absl::Status&) override {}  // there is nobody to tell
  void Leave(int64_t rank, const absl::Status& how) override;
  absl::Status FirstCause() override { return cause_; }
  FlightReport Report() override { return {}; }
  FlightReport LastReport() override { return {}; }

 private:
  const int64_t size_;
  const CostModel cost_;
  const WrapBackend wrap_;
  MemoryStore store_;
  absl::Status cause_;
};

}  // namespace dtensor

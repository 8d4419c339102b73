#include "dtensor/mesh/fake/fake_world.h"

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/backends.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

FakeWorld::FakeWorld(int64_t size, int64_t rank, CostModel cost, WrapBackend wrap)
    : size_(size),
      cost_(std::move(cost)),
      wrap_(std::move(wrap)),
      store_(std::make_shared<SharedMemory>(), absl::StrCat("rank ", rank)) {}

absl::StatusOr<std::unique_ptr<CommBackend>> FakeWorld::MakeComm(const GroupRequest& group) {
  return MakeBackend(*this, group, wrap_);
}

void FakeWorld::Leave(int64_t rank, const absl::Status& how) {
  if (how.ok()) return;
  cause_ = WithCulprit(Prefixed(absl::StrCat("rank ", rank), how), CulpritOf(how).value_or(rank));
}

}  // namespace dtensor

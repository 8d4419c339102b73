#include "dtensor/mesh/limited.h"

#include <string>
#include <utility>

#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

class LimitedBackend : public CommBackend {
 public:
  LimitedBackend(std::unique_ptr<CommBackend> inner, const CommCaps& most)
      : inner_(std::move(inner)), caps_(inner_->caps() & most) {
    if (inner_->caps().deferred_pull) caps_.overlap &= caps_.deferred_pull;
    caps_.deferred_pull &= caps_.overlap;
  }

  const CommCaps& caps() const override { return caps_; }
  Work Start(const CollectiveCall& call, Record record) override {
    const std::string excess = Excess(call, caps_);
    DT_CHECK_MSG(excess.empty(), excess);
    DT_CHECK(!call.options.overlap || caps_.overlap);
    const bool sums = call.kind == CollectiveKind::kAllReduce && IsFloating(call.in.dtype());
    DT_CHECK(!sums || caps_.same_bits);
    return inner_->Start(call, record);
  }
  absl::Status Health() override { return inner_->Health(); }
  void Abort(absl::Status why) override { inner_->Abort(std::move(why)); }
  absl::Status Quiesce() override { return inner_->Quiesce(); }
  void Number(CollectiveCall* call) override { inner_->Number(call); }
  FlightRecorder& flight() override { return inner_->flight(); }

 private:
  const std::unique_ptr<CommBackend> inner_;
  CommCaps caps_;
};

}  // namespace

WrapBackend Limited(const CommCaps& most) {
  return [most](std::unique_ptr<CommBackend> inner) {
    return std::make_unique<LimitedBackend>(std::move(inner), most);
  };
}

WrapBackend Packed() {
  return Limited({.peers = true,
                  .overlap = true,
                  .deferred_pull = true,
                  .rank_order = true,
                  .same_bits = true});
}

}  // namespace dtensor

#include "tests/mesh/progress_backend.h"

#include <memory>
#include <utility>

#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/progress.h"

namespace dtensor {
namespace {

// All calls run on the thread, in the order in which they came: the inner backend sees plain ones.
class ProgressBackend : public CommBackend {
 public:
  explicit ProgressBackend(std::unique_ptr<CommBackend> inner)
      : inner_(std::move(inner)), caps_(inner_->caps()) {
    caps_.overlap = true;
    caps_.deferred_pull = false;
  }

  const CommCaps& caps() const override { return caps_; }
  void Number(CollectiveCall* call) override {
    const CommOptions options = std::exchange(call->options, {});
    inner_->Number(call);
    call->options = options;
  }
  Work Start(const CollectiveCall& call, Record record) override {
    CollectiveCall plain = call;
    plain.options.overlap = false;
    Work work = thread_.Post(plain, flight(), record(), [this](ProgressThread::Job& job) {
      return inner_->Start(job.BeginReading(), [] { return size_t{0}; }).Wait();
    });
    const bool message = call.kind == CollectiveKind::kSend || call.kind == CollectiveKind::kRecv;
    const bool waits = !call.options.overlap || message || call.kind == CollectiveKind::kBarrier ||
                       call.kind == CollectiveKind::kBroadcast;
    return waits ? Work(work.Wait()) : work;
  }
  absl::Status Health() override { return inner_->Health(); }
  void Abort(absl::Status why) override { inner_->Abort(std::move(why)); }
  absl::Status Quiesce() override { return thread_.Quiesce(); }
  FlightRecorder& flight() override { return inner_->flight(); }

 private:
  const std::unique_ptr<CommBackend> inner_;
  CommCaps caps_;
  ProgressThread thread_;  // last: it uses the rest
};

}  // namespace

WrapBackend WithProgress() {
  return [](std::unique_ptr<CommBackend> inner) {
    return std::make_unique<ProgressBackend>(std::move(inner));
  };
}

}  // namespace dtensor

#include "tests/mesh/progress_backend.h"

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "dtensor/mesh/comm_work.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/kept_call.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// A call on its way: the rank waits for it, the thread ends it.
class Job : public Work::State, public Loan {
 public:
  Job(const CollectiveCall& call, size_t place) : call_(call), place_(place) {}
  const CollectiveCall& call() const { return *call_; }
  size_t place() const { return place_; }
  void End(absl::Status status) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      status_ = std::move(status);
      done_ = true;
    }
    ended_.notify_all();
  }

  bool Done() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }
  absl::Status Wait(absl::Duration) override {  // the call has a deadline of its own
    std::unique_lock<std::mutex> lock(mutex_);
    ended_.wait(lock, [&] { return done_; });
    // One that shares nothing: the thread sanitizer does not see how absl counts.
    return status_.ok() ? absl::OkStatus() : Recoded(status_, status_.code());
  }
  std::shared_ptr<Loan> TheLoan() override { return self.lock(); }
  bool Returned() override { return Done(); }
  bool Holds(const Buffer& buffer) override { return call_.Reads(buffer); }
  absl::Status TakeBack() override {
    (void)Wait(absl::InfiniteDuration());  // however it ends, nobody reads any more
    return absl::OkStatus();
  }
  std::weak_ptr<Job> self;

 private:
  const KeptCall call_;
  const size_t place_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  absl::Status status_;
};

// All calls run on the thread, in the order in which they came: the inner backend sees plain ones.
class ProgressBackend : public CommBackend {
 public:
  explicit ProgressBackend(std::unique_ptr<CommBackend> inner)
      : inner_(std::move(inner)), caps_(inner_->caps()), thread_([this] { Loop(); }) {
    caps_.overlap = true;
    caps_.deferred_pull = false;
  }
  ~ProgressBackend() override {
    Queue(nullptr);
    thread_.join();
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
    auto job = std::make_shared<Job>(plain, record());
    job->self = job;
    Queue(job);
    Work work(job);
    const bool message = call.kind == CollectiveKind::kSend || call.kind == CollectiveKind::kRecv;
    const bool waits = !call.options.overlap || message || call.kind == CollectiveKind::kBarrier ||
                       call.kind == CollectiveKind::kBroadcast;
    return waits ? Work(work.Wait()) : work;
  }
  absl::Status Health() override { return inner_->Health(); }
  void Abort(absl::Status why) override { inner_->Abort(std::move(why)); }
  void Quiesce() override {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [&] { return unfinished_ == 0; });
  }
  FlightRecorder& flight() override { return inner_->flight(); }

 private:
  void Queue(std::shared_ptr<Job> job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (job) ++unfinished_;
      jobs_.push_back(std::move(job));
    }
    posted_.notify_one();
  }
  std::shared_ptr<Job> Next() {
    std::unique_lock<std::mutex> lock(mutex_);
    posted_.wait(lock, [&] { return !jobs_.empty(); });
    std::shared_ptr<Job> job = std::move(jobs_.front());
    jobs_.pop_front();
    return job;
  }
  void Loop() {
    while (const std::shared_ptr<Job> job = Next()) {
      absl::Status status = inner_->Start(job->call(), [&] { return job->place(); }).Wait();
      inner_->flight().End(job->place(), status.code());
      job->End(std::move(status));
      const std::lock_guard<std::mutex> lock(mutex_);
      if (--unfinished_ == 0) idle_.notify_all();
    }
  }

  const std::unique_ptr<CommBackend> inner_;
  CommCaps caps_;
  std::mutex mutex_;
  std::condition_variable posted_, idle_;
  int unfinished_ = 0;  // jobs in the queue or under way
  std::deque<std::shared_ptr<Job>> jobs_;
  std::thread thread_;  // last: it uses the rest
};

}  // namespace

WrapBackend WithProgress() {
  return [](std::unique_ptr<CommBackend> inner) {
    return std::make_unique<ProgressBackend>(std::move(inner));
  };
}

}  // namespace dtensor

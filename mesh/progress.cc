#include "dtensor/mesh/progress.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "dtensor/mesh/comm_work.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/kept_call.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/trace.h"

namespace dtensor {

namespace {

// One that shares nothing: the thread sanitizer does not see how absl counts.
absl::Status Apart(const absl::Status& status) {
  return status.ok() ? absl::OkStatus() : Recoded(status, status.code());
}

}  // namespace

// A call on its way: the rank waits for it, the thread ends it.
class ProgressThread::Lent : public Job,
                             public Work::State,
                             public Loan,
                             public std::enable_shared_from_this<Lent> {
 public:
  Lent(ProgressThread& thread, const CollectiveCall& call, FlightRecorder& flight, size_t place,
       Run run)
      : thread_(thread),
        call_(call),
        flight_(flight),
        place_(place),
        run_(std::move(run)),
        lane_(TimelineLane::OfCurrent(&thread)) {
    if (lane_.records()) group_ = flight.LabelAt(place);
  }
  void set_number(uint64_t number) { number_ = number; }

  const CollectiveCall& call() const override { return *call_; }
  std::string Describe(absl::Span<const int64_t> ranks) const override {
    return call_.Describe(ranks);
  }
  const CollectiveCall& BeginReading() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    reading_ = !copy_;
    return copy_ ? **copy_ : *call_;
  }
  void EndReading() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      reading_ = false;
      read_ = true;
    }
    changed_.notify_all();
  }
  bool wanted() const override { return thread_.wanted_.load() >= number_; }
  absl::Status Carry() {
    std::optional<TimelineTrack> track;
    if (lane_.records()) track.emplace(lane_);
    absl::Status status;
    try {
      const auto kind = Name(call_->kind);
      const Span span(SpanKind::kCollective, {kind.data(), kind.size()}, [&] { return group_; });
      status = run_(*this);
    } catch (...) {
      status = CurrentException();
    }
    track.reset();  // whoever waits for the call may write the timeline next
    absl::Status copy = Apart(status);
    End(std::move(status));
    return copy;
  }
  void End(absl::Status status) {
    flight_.End(place_, status.code());
    run_ = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      status_ = std::move(status);
      done_ = true;
    }
    changed_.notify_all();
  }

  bool Done() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }
  absl::Status Wait(absl::Duration) override {  // the call has a deadline of its own
    std::unique_lock<std::mutex> lock(mutex_);
    if (!done_) {
      const Span span(SpanKind::kWait, "wait for peers");
      thread_.Want(number_);
      changed_.wait(lock, [&] { return done_; });
    }
    return Apart(status_);
  }
  std::shared_ptr<Loan> TheLoan() override { return shared_from_this(); }
  bool Returned() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return done_ || read_ || copy_ != nullptr;
  }
  bool Holds(const Buffer& buffer) override { return call_.Reads(buffer); }
  absl::Status TakeBack() override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (reading_) thread_.Want(number_);
    changed_.wait(lock, [&] { return !reading_ || done_; });
    if (done_ || read_ || copy_ != nullptr) return absl::OkStatus();
    auto copy = std::make_unique<KeptCall>(*call_);
    DT_RETURN_IF_ERROR(copy->CopyInputs());
    copy_ = std::move(copy);
    return absl::OkStatus();
  }

 private:
  ProgressThread& thread_;
  const KeptCall call_;
  FlightRecorder& flight_;
  const size_t place_;
  Run run_;
  const TimelineLane lane_;
  std::string group_;  // its label, for the timeline
  uint64_t number_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  // What follows is guarded by mutex_.
  std::unique_ptr<KeptCall> copy_;  // of what the owner has written to since
  bool reading_ = false, read_ = false, done_ = false;
  absl::Status status_;
};

ProgressThread::~ProgressThread() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  posted_.notify_one();
  if (thread_.joinable()) thread_.join();
  for (const std::shared_ptr<Lent>& job : jobs_) {
    job->End(RankLocal(absl::AbortedError("the group ended before the call began")));
  }
}

Work ProgressThread::Post(const CollectiveCall& call, FlightRecorder& flight, size_t place,
                          Run run) {
  auto job = std::make_shared<Lent>(*this, call, flight, place, std::move(run));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    job->set_number(++count_);
    jobs_.push_back(job);
    if (!thread_.joinable()) thread_ = std::thread([this] { Loop(); });
  }
  posted_.notify_one();
  return Work(std::move(job));
}

void ProgressThread::Want(uint64_t number) {
  uint64_t before = wanted_.load();
  while (before < number && !wanted_.compare_exchange_weak(before, number)) {
  }
}

absl::Status ProgressThread::Quiesce() {
  std::unique_lock<std::mutex> lock(mutex_);
  Want(count_);
  idle_.wait(lock, [&] { return jobs_.empty(); });
  return Apart(failed_);
}

// A job leaves the queue when it has ended.
void ProgressThread::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    posted_.wait(lock, [&] { return ends_ || !jobs_.empty(); });
    if (ends_) return;
    const std::shared_ptr<Lent> job = jobs_.front();
    lock.unlock();
    absl::Status end = job->Carry();
    lock.lock();
    if (failed_.ok()) failed_ = std::move(end);
    jobs_.pop_front();
    if (jobs_.empty()) idle_.notify_all();
  }
}

}  // namespace dtensor

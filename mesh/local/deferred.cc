#include "dtensor/mesh/local/deferred.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/local/move.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

using Part = DeferredCall::Part;

class PartLoan : public Loan {
 public:
  PartLoan(std::shared_ptr<LocalGroup> group, std::shared_ptr<DeferredCall> shared, int me,
           DeviceType device)
      : group_(std::move(group)),
        shared_(std::move(shared)),
        part_(shared_->parts[me]),
        device_(device) {}

  bool Returned() override {
    if (IsRemote(device_) && !taken_back_) {
      if (!shared_->decided.load()) return false;
      if (shared_->queued) return shared_->done.Done();
    }
    if (taken_back_ || (part_.readers_left.load() == 0 && part_.reading.load() == 0)) return true;
    return (*part_.call)->kind == CollectiveKind::kAllReduce &&
           shared_->slices_done.load() == group_->size();
  }
  bool Holds(const Buffer& buffer) override { return part_.call->Reads(buffer); }
  absl::Status TakeBack() override {
    if (IsRemote(device_)) {
      const std::lock_guard<std::mutex> lock(shared_->deciding);
      if (shared_->queued) {
        ThisDevice(device_).OrderAfter(shared_->done);
        taken_back_ = true;
      } else if (!shared_->decided.load()) {
        DT_RETURN_IF_ERROR(part_.call->CopyInputs());
        part_.ready = ThisDevice(device_).Record();
        taken_back_ = true;
      }
      if (taken_back_) return absl::OkStatus();
    }
    const std::lock_guard<std::mutex> lock(part_.mutex);  // nobody begins to read
    group_->WaitUntil([&] { return part_.reading.load() == 0; });
    if (Returned()) return absl::OkStatus();
    DT_RETURN_IF_ERROR(part_.call->CopyInputs());
    taken_back_ = true;
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<LocalGroup> group_;
  const std::shared_ptr<DeferredCall> shared_;
  Part& part_;
  const DeviceType device_;
  bool taken_back_ = false;  // nothing of this rank's is read any more: copies are
};

class DeferredWork : public Work::State {
 public:
  DeferredWork(std::shared_ptr<LocalGroup> group, std::shared_ptr<DeferredCall> shared, int me,
               std::string label, DeviceType device)
      : group_(std::move(group)),
        shared_(std::move(shared)),
        me_(me),
        label_(std::move(label)),
        device_(device) {}
  ~DeferredWork() override {
    if (!done_) Leave();
  }
  bool Done() override { return done_; }
  absl::Status Wait(absl::Duration timeout) override {
    if (done_) return status_;
    status_ = Read(timeout);
    done_ = true;
    Leave();
    return status_;
  }
  std::shared_ptr<Loan> TheLoan() override {
    return std::make_shared<PartLoan>(group_, shared_, me_, device_);
  }

  // For the last one that posts, on a device: queues the call of all.
  void Conduct() {
    const std::lock_guard<std::mutex> lock(shared_->deciding);
    std::vector<const CollectiveCall*> calls;
    bool remote = false;
    for (const Part& part : shared_->parts) {
      calls.push_back(&**part.call);
      part.call->ForEachTensor([&](const Tensor& t) { remote |= IsRemote(t.device()); });
    }
    if (remote && CheckAgreement(calls).ok()) {
      RankDevice& device = ThisDevice(device_);
      const SideStream scope(device);
      for (const Part& part : shared_->parts) device.OrderAfter(part.ready);
      QueueData(calls);
      shared_->done = device.Record();
      for (const Part& part : shared_->parts) {
        part.call->ForEachTensor([&](const Tensor& t) { t.buffer().RecordUse(shared_->done); });
      }
      shared_->queued = true;
    }
    shared_->decided.store(true);
  }

 private:
  // This rank comes for no memory any more. Its own counts as that of peers: what it keeps of its
  // own tensor is copied when it reads, too.
  void Leave() {
    for (Part& part : shared_->parts) part.readers_left.fetch_sub(1);
  }

  absl::Status Read(absl::Duration timeout) {
    DT_RETURN_IF_ERROR(group_->AwaitPosts(*shared_, me_, label_, timeout));
    if (IsRemote(device_)) {  // it is queued by now, or will be in a moment
      group_->WaitUntil([&] { return shared_->decided.load() || group_->aborted(); });
      if (!shared_->decided.load()) return group_->Health();
      if (shared_->queued) {
        ThisDevice(device_).OrderAfter(shared_->done);
        return absl::OkStatus();
      }
    }
    try {
      DT_RETURN_IF_ERROR(MoveAll());
    } catch (const std::exception& e) {  // no memory for a list
      const absl::Status why =
          RankLocal(absl::InternalError(absl::StrCat(Text(me_), ": ", e.what())));
      group_->Abort(WithReport(FailureOf(group_->ranks()[me_], why), group_->LastingReport()));
      return why;
    }
    if (Mine()->kind != CollectiveKind::kAllReduce) return absl::OkStatus();
    // Slices that other readers took.
    const auto reduced = [&] { return shared_->slices_done.load() == group_->size(); };
    group_->WaitUntil([&] { return reduced() || group_->aborted(); });
    return reduced() ? absl::OkStatus() : group_->Health();
  }

  // All calls as they are now (an owner may have put a copy in place of what it wrote to), which
  // nobody touches until this goes.
  class Snapshot {
   public:
    Snapshot(LocalGroup& group, DeferredCall& shared) : group_(group), shared_(shared) {
      calls_.reserve(shared.parts.size());
      try {
        for (Part& part : shared.parts) {
          const std::lock_guard<std::mutex> lock(part.mutex);
          calls_.push_back(&**part.call);
          part.reading.fetch_add(1);
        }
      } catch (...) {
        Release();
        throw;
      }
    }
    ~Snapshot() { Release(); }
    Snapshot(const Snapshot&) = delete;
    const std::vector<const CollectiveCall*>& calls() const { return calls_; }

   private:
    void Release() {
      for (size_t r = 0; r < calls_.size(); ++r) shared_.parts[r].reading.fetch_sub(1);
      group_.Wake();
    }
    LocalGroup& group_;
    DeferredCall& shared_;
    std::vector<const CollectiveCall*> calls_;
  };

  absl::Status MoveAll() {
    const Snapshot snapshot(*group_, *shared_);
    const std::vector<const CollectiveCall*>& calls = snapshot.calls();
    DT_RETURN_IF_ERROR(CheckAgreement(calls));
    if (calls[me_]->kind != CollectiveKind::kAllReduce) {
      MoveData(calls, me_);
      return absl::OkStatus();
    }
    while (true) {
      const int slice = shared_->next_slice.fetch_add(1);
      if (slice >= group_->size()) return absl::OkStatus();
      MoveData(calls, slice);
      shared_->slices_done.fetch_add(1);
    }
  }

  const KeptCall& Mine() const { return *shared_->parts[me_].call; }
  // "deferred all_gather(...) for ..."
  std::string Text(int r) const { return shared_->parts[r].call->Describe(group_->ranks()); }

  // The same answer on every rank: it comes from what all posted. Nothing was moved then, and the
  // group stays in step.
  absl::Status CheckAgreement(absl::Span<const CollectiveCall* const> calls) const {
    const std::vector<int64_t>& ranks = group_->ranks();
    uint64_t balance = 0;
    for (size_t r = 0; r < calls.size(); ++r) {
      balance += shared_->parts[r].balance;
      if (calls[r]->fingerprint == calls[0]->fingerprint) continue;
      const auto side = [&](size_t i) {
        return absl::StrCat("rank ", ranks[i], " issued ", Text(static_cast<int>(i)),
                            calls[r]->before == calls[0]->before
                                ? ""
                                : absl::StrCat(" after ", calls[i]->before, " plain calls"));
      };
      return Differ(absl::StrCat(side(0), ", ", side(r)));
    }
    for (int r = 0; balance != 0 && r < static_cast<int>(calls.size()); ++r) {
      const std::string text = ExchangeMismatch(calls, r, ranks);
      if (!text.empty()) return Differ(absl::StrCat(Text(me_), ": ", text));
    }
    return absl::OkStatus();
  }
  absl::Status Differ(const std::string& how) const {
    constexpr uint64_t kDeferred = uint64_t{1} << 63;  // not a plain call of that number
    const uint64_t number = Mine()->sequence;
    return WithReport(
        absl::FailedPreconditionError(absl::StrCat(
            "[comm ", label_, "] deferred collectives differ at call #", number, ": ", how)),
        group_->ReportOnce(group_.get(), kDeferred | number));
  }

  const std::shared_ptr<LocalGroup> group_;
  const std::shared_ptr<DeferredCall> shared_;
  const int me_;
  const std::string label_;
  const DeviceType device_;
  bool done_ = false;
  absl::Status status_;
};

}  // namespace

Work PostDeferred(const std::shared_ptr<LocalGroup>& group, int me, const std::string& label,
                  const CollectiveCall& call, uint64_t balance, DeviceType device) {
  std::shared_ptr<DeferredCall> shared = group->DeferredOf(call.sequence);
  Part& part = shared->parts[me];
  part.call.emplace(call);
  part.balance = balance;
  if (IsRemote(device)) part.ready = ThisDevice(device).Record();
  auto work = std::make_shared<DeferredWork>(group, shared, me, label, device);
  part.posted.store(true);
  const bool last = shared->posted.fetch_add(1) + 1 == group->size();
  if (last && IsRemote(device)) work->Conduct();
  group->slot(me).posted.store(call.sequence);
  group->Wake();
  return Work(std::move(work));
}

}  // namespace dtensor

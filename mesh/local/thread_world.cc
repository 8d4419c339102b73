#include "dtensor/mesh/local/thread_world.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/backends.h"
#include "dtensor/mesh/local/backend.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

ThreadWorld::ThreadWorld(int64_t size, ThreadWorldOptions options)
    : size_(size), options_(std::move(options)), failed_(size), left_(size) {
  stores_.reserve(size);
  for (int64_t r = 0; r < size; ++r) stores_.emplace_back(memory_, absl::StrCat("rank ", r));
}

absl::StatusOr<std::unique_ptr<CommBackend>> ThreadWorld::MakeComm(const GroupRequest& group) {
  return MakeBackend(*this, group, options_.wrap);
}

absl::Status ThreadWorld::SetOptions(const GroupRequest& group, const GroupOptions& options) {
  if (options.timeout > absl::ZeroDuration()) {
    GroupOf(group.ranks)->set_timeout(options.timeout);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ThreadWorld::Exchange(const GroupRequest& group,
                                                               absl::string_view what_for,
                                                               std::string mine) {
  if (group.device == DeviceType::kMeta) {  // a plan: nobody else knows of it
    return std::vector<std::string>(group.ranks.size(), mine);
  }
  return ExchangeBytes(GroupOf(group.ranks), group.index, group.label, what_for, std::move(mine));
}

std::shared_ptr<LocalGroup> ThreadWorld::GroupOf(const std::vector<int64_t>& ranks) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<LocalGroup>& group = groups_[ranks];
  if (!group) {
    group = std::make_shared<LocalGroup>(weak_from_this(), ranks, options_.timeout, options_.spin);
    for (int64_t rank : ranks) {
      if (left_[rank]) group->MemberLeft(rank);
      if (failed_[rank]) group->Abort(notice_);
    }
  }
  return group;
}

void ThreadWorld::Fail(int64_t rank, const absl::Status& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (cause_.ok()) {
    // What a peer told this rank stays the peer's failure.
    cause_ = WithCulprit(Prefixed(absl::StrCat("rank ", rank), why), CulpritOf(why).value_or(rank));
    notice_ = FailureOf(rank, why);
  }
  failed_[rank] = true;
  for (auto& [ranks, group] : groups_) {
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) group->Abort(notice_);
  }
  memory_->Fail(notice_);
}

void ThreadWorld::Leave(int64_t rank, const absl::Status& how) {
  if (!how.ok()) return Fail(rank, how);
  std::lock_guard<std::mutex> lock(mutex_);
  left_[rank] = true;
  for (auto& [ranks, group] : groups_) {
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) group->MemberLeft(rank);
  }
}

FlightReport ThreadWorld::Report() {
  std::vector<std::shared_ptr<LocalGroup>> groups;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [ranks, group] : groups_) groups.push_back(group);
  }
  std::sort(groups.begin(), groups.end(),
            [](const auto& a, const auto& b) { return a->ranks() < b->ranks(); });
  // All that is kept of a small world; of a large one less, so that this stays a matter of
  // milliseconds.
  const auto calls = static_cast<size_t>(
      std::clamp<int64_t>(8192 / size_, 4, static_cast<int64_t>(FlightRecorder::kEntries)));
  FlightReport report;
  for (const auto& group : groups) report.groups.push_back(group->Report(calls));
  return report;
}

std::string ThreadWorld::ReportOnce(const void* where, uint64_t number) {
  std::lock_guard<std::mutex> lock(report_mutex_);
  if (!report_lasts_ && report_key_ != std::pair(where, number)) TakeReport();
  report_key_ = {where, number};
  return report_text_;
}

std::string ThreadWorld::LastingReport() {
  std::lock_guard<std::mutex> lock(report_mutex_);
  if (!report_lasts_) TakeReport();
  report_lasts_ = true;
  return report_text_;
}

void ThreadWorld::TakeReport() {
  report_ = Report();
  report_text_ = absl::StrCat("\nflight report:\n", report_.Summary());
}

FlightReport ThreadWorld::LastReport() {
  std::lock_guard<std::mutex> lock(report_mutex_);
  return report_;
}

absl::Status ThreadWorld::FirstCause() {
  std::lock_guard<std::mutex> lock(mutex_);
  return cause_;
}

}  // namespace dtensor

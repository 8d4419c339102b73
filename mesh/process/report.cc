// Flight reports of a world of processes.
#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "dtensor/mesh/process/event.h"
#include "dtensor/mesh/process/process_world.h"
#include "dtensor/mesh/process/text.h"

namespace dtensor {

using nlohmann::json;

namespace {

// For ranks to say what they do; who is stopped never does, and all are to end in a second.
constexpr absl::Duration kReportLimit = absl::Milliseconds(400);

std::string Key(const std::string& id, int64_t rank) {
  return absl::StrCat("dtensor/report/", id, "/", rank);
}

}  // namespace

// Every rank that lives says what it does on its groups; its watcher does, whatever else it waits
// for.
FlightReport ProcessWorld::Report() {
  const absl::StatusOr<int64_t> number = store_->Add("dtensor/reports", 1);
  if (!number.ok()) return {};
  const std::string id = absl::StrCat(*number);
  int64_t after;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    after = seen_;
  }
  const Event asked{"report", rank(), id, absl::OkStatus(), json::object()};
  if (!asked.Append(*store_, after).ok()) return {};
  const absl::Time deadline = absl::Now() + kReportLimit;
  std::map<std::vector<int64_t>, std::vector<FlightDump>> dumps;
  std::vector<bool> answered(static_cast<size_t>(size_), false);
  for (int64_t r = 0; r < size_; ++r) {
    const auto text = store_->GetAlways(Key(id, r), deadline);
    if (!text.ok()) continue;
    answered[static_cast<size_t>(r)] = true;
    (void)store_->Remove(Key(id, r)).ok();  // else reports of every step would fill the store
    for (const json& group : process::Parse(*text)) {
      const auto ranks = group.at("ranks").get<std::vector<int64_t>>();
      std::vector<FlightDump>& of_group = dumps[ranks];
      for (size_t i = of_group.size(); i < ranks.size(); ++i)
        of_group.push_back({ranks[i], false, {}});
      const auto at = std::find(ranks.begin(), ranks.end(), r) - ranks.begin();
      of_group[static_cast<size_t>(at)] = process::DumpOf(group.at("dump"));
    }
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    silent_ = answered;
    silent_.flip();
  }
  FlightReport report;
  for (auto& [ranks, of_group] : dumps) {
    std::string label;
    for (FlightDump& dump : of_group) {
      dump.silent = !answered[static_cast<size_t>(dump.rank)];
      if (label.empty() && !dump.calls.empty()) label = dump.calls.back().group;
    }
    report.groups.push_back(MergeDumps(std::move(label), std::move(of_group)));
  }
  return report;
}

void ProcessWorld::AnswerReport(const std::string& id) {
  if (rank() >= size_) return;
  const auto calls = static_cast<size_t>(std::clamp<int64_t>(8192 / size_, 4, 64));
  json groups = json::array();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [key, group] : groups_) {
      groups.push_back({{"ranks", group->ranks()},
                        {"dump", process::ToJson(group->Dump(calls, left_[rank()]))}});
    }
  }
  // Whoever asked does without if it cannot be told.
  (void)store_->Set(Key(id, rank()), process::Dump(groups)).ok();
}

std::string ProcessWorld::ReportText() {
  FlightReport report = Report();
  const std::string text = report.groups.empty()
                               ? "\nflight report: none, the ranks' store did not answer"
                               : absl::StrCat("\nflight report:\n", report.Summary());
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!report_lasts_) {
    report_ = std::move(report);
    report_text_ = text;
  }
  return text;
}

std::string ProcessWorld::LastingReport() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (report_lasts_) return report_text_;
  }
  store_->Hurry();  // this rank's wait has failed, perhaps because of who serves the store
  const std::string text = ReportText();
  const std::lock_guard<std::mutex> lock(mutex_);
  report_lasts_ = true;
  return text;
}

FlightReport ProcessWorld::LastReport() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return report_;
}

}  // namespace dtensor

#include "dtensor/mesh/process/process_world.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/backends.h"
#include "dtensor/mesh/process/backend.h"
#include "dtensor/mesh/process/text.h"
#include "dtensor/mesh/run_rank.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

using nlohmann::json;
using process::Dump;
using process::Parse;

namespace {

constexpr int64_t kRendezvous = 0;                   // channel
constexpr absl::Duration kGrace = absl::Seconds(5);  // of the others once a rank has failed
constexpr absl::Duration kShortGrace = absl::Milliseconds(300);  // where a process is gone
constexpr absl::Duration kReportLimit = absl::Seconds(1);        // for ranks to say what they do

std::string EventKey(int64_t n) { return absl::StrCat("dtensor/event/", n); }

std::string HereKey(int64_t rank) { return absl::StrCat("dtensor/rank ", rank, " is here"); }

absl::Status GoneStatus() {
  return absl::UnavailableError("its process is gone: it was killed, or ended without a word");
}

}  // namespace

// What every rank hears of, in one order.
struct ProcessWorld::Event {
  std::string kind;  // left, failed, lost, abort, report
  int64_t rank = 0;
  std::string what;  // of an abort the group, of a report its number
  absl::Status status;
  json farewells = json::object();  // of a rank that leaves, by group

  std::string ToText() const {
    return Dump({{"kind", kind},
                 {"rank", rank},
                 {"what", what},
                 {"status", process::ToJson(status)},
                 {"farewells", farewells}});
  }
  static Event Of(const std::string& text) {
    const json from = Parse(text);
    return {from.at("kind").get<std::string>(), from.at("rank").get<int64_t>(),
            from.at("what").get<std::string>(), process::StatusOf(from.at("status")),
            from.at("farewells")};
  }
  // Returns its number; numbers above `after` are tried.
  absl::StatusOr<int64_t> Append(Store& store, int64_t after) const {
    const std::string text = ToText();
    for (int64_t n = after + 1;; ++n) {
      DT_ASSIGN_OR_RETURN(const std::string before, store.CompareExchange(EventKey(n), "", text));
      if (before.empty()) return n;
    }
  }
};

// What rank 0 tells the others before there is a store; a message of this size.
struct ProcessWorld::Invitation {
  int64_t world = 0, size = 0, first_channel = 0;
  char address[64] = "", token[store::kTokenBytes + 1] = "";
};

ProcessWorld::ProcessWorld(Endpoint& endpoint, int64_t size, ProcessWorldOptions options)
    : endpoint_(endpoint), size_(size), options_(std::move(options)), failed_(size), left_(size) {
  ++endpoint_.open_worlds;
}

absl::Status ProcessWorld::Invite(Endpoint& endpoint, const Invitation& mine,
                                  absl::Duration timeout) {
  const auto kept = std::make_shared<Invitation>(mine);
  Transfers transfers(endpoint, kept);
  for (int64_t r = 1; r < endpoint.size(); ++r) {
    DT_RETURN_IF_ERROR(transfers.Send(r, kRendezvous, kept.get(), sizeof(*kept)));
  }
  const absl::Time deadline = absl::Now() + timeout;
  while (true) {
    DT_ASSIGN_OR_RETURN(const bool done, transfers.Done());
    if (done) return absl::OkStatus();
    if (absl::Now() > deadline) break;
    absl::SleepFor(absl::Microseconds(50));
  }
  DT_RETURN_IF_ERROR(transfers.Sweep());
  std::vector<int64_t> absent;
  for (int64_t r = 1; r < endpoint.size(); ++r) {
    if (!transfers.done(static_cast<size_t>(r - 1))) absent.push_back(r);
  }
  return absl::DeadlineExceededError(absl::StrCat(RankNames(absent), " did not come to world #",
                                                  mine.world, " of the program within ",
                                                  absl::FormatDuration(timeout)));
}

absl::StatusOr<ProcessWorld::Invitation> ProcessWorld::AwaitInvitation(Endpoint& endpoint,
                                                                       absl::Duration timeout) {
  const auto kept = std::make_shared<Invitation>();
  Transfers transfers(endpoint, kept);
  DT_RETURN_IF_ERROR(transfers.Recv(0, kRendezvous, kept.get(), sizeof(*kept)));
  const absl::Time deadline = absl::Now() + timeout;
  while (true) {
    DT_ASSIGN_OR_RETURN(const bool done, transfers.Done());
    if (done) return *kept;
    if (absl::Now() > deadline) break;
    absl::SleepFor(absl::Microseconds(50));
  }
  return WithCulprit(absl::DeadlineExceededError(
                         absl::StrCat("rank 0 did not come to world #", endpoint.worlds,
                                      " of the program within ", absl::FormatDuration(timeout))),
                     0);
}

// On the loopback where all ranks are on this machine, else where DTENSOR_ADDRESS says.
absl::Status ProcessWorld::ServeStore(Invitation* invitation) {
  TcpServerOptions options;
  DT_ASSIGN_OR_RETURN(options.token, store::NewToken());
  const char* address = std::getenv("DTENSOR_ADDRESS");
  if (address != nullptr) {
    options.address = address;
  } else if (!endpoint_.address().empty()) {
    options.address = endpoint_.address();
  } else if (endpoint_.place().local_size < endpoint_.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        endpoint_.place().ToString(),
        ": set DTENSOR_ADDRESS to an IPv4 address of rank 0's machine that the others reach"));
  }
  options.lost = [](Store& store, int64_t rank) {
    // In a store that is the server's own nothing fails.
    (void)Event{"lost", rank, "", GoneStatus(), json::object()}.Append(store, 0).ok();
  };
  DT_ASSIGN_OR_RETURN(server_, TcpStoreServer::Start(options));
  snprintf(invitation->address, sizeof(invitation->address), "%s", server_->address().c_str());
  std::memcpy(invitation->token, options.token.data(), options.token.size());
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<ProcessWorld>> ProcessWorld::Meet(Endpoint& endpoint, int64_t size,
                                                                 ProcessWorldOptions options) {
  if (size < 1 || size > endpoint.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a world of ", size, " ranks among ", endpoint.size(), " processes"));
  }
  std::shared_ptr<ProcessWorld> world(new ProcessWorld(endpoint, size, std::move(options)));
  const absl::Duration limit = std::max(world->timeout(), absl::Seconds(20));
  Invitation invitation{++endpoint.worlds, size, endpoint.next_channel, "", ""};
  if (endpoint.rank() == 0) {
    DT_RETURN_IF_ERROR(world->ServeStore(&invitation));
    DT_RETURN_IF_ERROR(Invite(endpoint, invitation, limit));
  } else {
    DT_ASSIGN_OR_RETURN(invitation, AwaitInvitation(endpoint, limit));
  }
  if (invitation.size != size || invitation.world != endpoint.worlds) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", endpoint.rank(), " runs world #", endpoint.worlds, " of its program with ", size,
        " ranks, rank 0 world #", invitation.world, " with ", invitation.size));
  }
  world->first_channel_ = invitation.first_channel;
  DT_ASSIGN_OR_RETURN(
      world->store_,
      TcpStore::Connect(invitation.address, invitation.token, endpoint.rank(),
                        absl::StrCat("rank ", endpoint.rank()), absl::Now() + limit));
  DT_RETURN_IF_ERROR(world->store_->Set(HereKey(endpoint.rank()), ""));
  if (endpoint.rank() == 0) {  // it serves until all have said goodbye
    std::vector<std::string> all;
    for (int64_t r = 0; r < endpoint.size(); ++r) all.push_back(HereKey(r));
    DT_RETURN_IF_ERROR(world->store_->Wait(all, absl::Now() + limit));
  }
  world->watcher_ = std::thread([w = world.get()] { w->Watch(); });
  return world;
}

ProcessWorld::~ProcessWorld() {
  if (watcher_.joinable()) {
    store_->Interrupt();
    watcher_.join();
  }
  for (const auto& [key, group] : groups_) group->StopProgress();
  if (server_ != nullptr && store_ != nullptr) {
    const absl::StatusOr<int64_t> groups = store_->Add("dtensor/groups", 0);
    endpoint_.next_channel += groups.value_or(0) * ProcessGroup::kChannels;
    if (endpoint_.next_channel > endpoint_.channels() / 2) endpoint_.next_channel = 1;
  }
  store_.reset();  // says goodbye
  const absl::Duration grace = endpoint_.broken() ? kShortGrace : kGrace;
  if (server_ != nullptr) server_->AwaitGoodbyes(absl::Now() + grace);
  --endpoint_.open_worlds;
}

void ProcessWorld::Watch() {
  for (int64_t n = 1;; ++n) {
    const absl::StatusOr<std::string> text = store_->GetAlways(EventKey(n), absl::InfiniteFuture());
    if (absl::IsCancelled(text.status())) return;
    if (!text.ok()) return LoseStore(text.status());
    Handle(Event::Of(*text));
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      seen_ = n;
    }
    heard_.notify_all();
  }
}

void ProcessWorld::Handle(const Event& event) {
  if (event.kind == "left") return HandleLeft(event);
  if (event.kind == "failed") return HandleFailed(event.rank, event.status);
  if (event.kind == "report") return AnswerReport(event.what);
  if (event.kind == "lost") {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (event.rank >= size_ || left_[event.rank] || failed_[event.rank]) return;
    }
    endpoint_.MarkBroken();
    return HandleFailed(event.rank, event.status);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  aborted_.emplace(event.what, event.status);
  const auto it = groups_.find(event.what);
  if (it != groups_.end()) it->second->Aborted(event.status);
}

void ProcessWorld::HandleLeft(const Event& event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  left_[event.rank] = true;
  std::map<std::string, FarewellOfGroup>& farewells = farewells_[event.rank];
  for (const auto& [key, farewell] : event.farewells.items()) {
    farewells[key] = process::FarewellOf(farewell);
  }
  for (const auto& [key, group] : groups_) group->MemberLeft(event.rank, farewells[key]);
}

void ProcessWorld::HandleFailed(int64_t rank, const absl::Status& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (cause_.ok()) {
    // What a peer told this rank stays the peer's failure.
    cause_ = WithCulprit(Prefixed(absl::StrCat("rank ", rank), why), CulpritOf(why).value_or(rank));
    notice_ = FailureOf(rank, why);
  }
  failed_[rank] = true;
  for (const auto& [key, group] : groups_) {
    const std::vector<int64_t>& ranks = group->ranks();
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) group->Aborted(notice_);
  }
  store_->Fail(notice_);
}

void ProcessWorld::LoseStore(const absl::Status& why) {
  endpoint_.MarkBroken();
  if (rank() != 0) {
    HandleFailed(0, absl::UnavailableError(absl::StrCat(
                        "its process, which serves the store, is gone (", why.message(), ")")));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  lost_store_ = true;
  for (const auto& [key, group] : groups_) group->Aborted(notice_.ok() ? why : notice_);
  heard_.notify_all();
}

void ProcessWorld::Post(const Event& event) {
  int64_t after;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    after = seen_;
  }
  const absl::StatusOr<int64_t> number = event.Append(*store_, after);
  std::unique_lock<std::mutex> lock(mutex_);
  // Without a number the watcher finds the store gone as well, soon.
  heard_.wait_for(lock, std::chrono::seconds(30),
                  [&] { return lost_store_ || (number.ok() && seen_ >= *number); });
}

void ProcessWorld::Fail(int64_t rank, const absl::Status& why) {
  Post({"failed", rank, "", why, json::object()});
}

void ProcessWorld::Leave(int64_t rank, const absl::Status& how) {
  if (!how.ok()) return Fail(rank, how);
  json farewells = json::object();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [key, group] : groups_) farewells[key] = process::ToJson(group->Farewell());
  }
  Post({"left", rank, "", absl::OkStatus(), std::move(farewells)});
}

void ProcessWorld::AbortGroup(ProcessGroup& group, const absl::Status& why) {
  Post({"abort", rank(), group.Key(), why, json::object()});
  if (!group.aborted()) group.Aborted(why);  // nobody could be told
}

bool ProcessWorld::AllAccounted() const {
  for (int64_t r = 0; r < size_; ++r) {
    if (!left_[r] && !failed_[r]) return false;
  }
  return true;
}

void ProcessWorld::AwaitAll() {
  std::unique_lock<std::mutex> lock(mutex_);
  heard_.wait(lock, [&] { return lost_store_ || !cause_.ok() || AllAccounted(); });
  const bool all = heard_.wait_for(lock, absl::ToChronoMilliseconds(kGrace),
                                   [&] { return lost_store_ || AllAccounted(); });
  if (!all || lost_store_) endpoint_.MarkBroken();
}

absl::Status ProcessWorld::FirstCause() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return cause_;
}

absl::StatusOr<std::shared_ptr<ProcessGroup>> ProcessWorld::GroupOf(
    const std::vector<int64_t>& ranks) {
  const std::string key = absl::StrJoin(ranks, ",");
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto it = groups_.find(key);
    if (it != groups_.end()) return it->second;
  }
  const auto me = std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin();
  int64_t number = 1;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (lost_store_) return notice_;
  }
  // Whoever comes first numbers it.
  DT_ASSIGN_OR_RETURN(const int64_t mine, store_->Add("dtensor/groups", 1));
  DT_ASSIGN_OR_RETURN(const std::string first,
                      store_->CompareExchange("dtensor/group/" + key, "", absl::StrCat(mine)));
  if (first.empty()) {
    number = mine;
  } else if (!absl::SimpleAtoi(first, &number)) {
    return absl::InternalError(absl::StrCat("the store says group ", first, " of ", key));
  }
  const int64_t channel = first_channel_ + (number - 1) * ProcessGroup::kChannels;
  if (channel + ProcessGroup::kChannels > endpoint_.channels()) {
    return absl::ResourceExhaustedError(absl::StrCat("group ", number, ": there are channels for ",
                                                     endpoint_.channels() / ProcessGroup::kChannels,
                                                     " groups"));
  }
  auto group = std::make_shared<ProcessGroup>(this, ranks, static_cast<int>(me), channel);
  const std::lock_guard<std::mutex> lock(mutex_);
  groups_[key] = group;
  const auto aborted = aborted_.find(key);
  if (aborted != aborted_.end()) group->Aborted(aborted->second);
  for (const int64_t r : ranks) {
    if (left_[r]) group->MemberLeft(r, farewells_[r][key]);
    if (failed_[r]) group->Aborted(notice_);
  }
  return group;
}

absl::StatusOr<std::unique_ptr<CommBackend>> ProcessWorld::MakeComm(const GroupRequest& group) {
  if (group.device != DeviceType::kMeta) DT_RETURN_IF_ERROR(GroupOf(group.ranks).status());
  return MakeBackend(*this, group, options_.wrap);
}

absl::StatusOr<std::vector<std::string>> ProcessWorld::Exchange(const GroupRequest& group,
                                                                absl::string_view what_for,
                                                                std::string mine) {
  if (group.device == DeviceType::kMeta) {  // a plan: nobody else knows of it
    return std::vector<std::string>(group.ranks.size(), mine);
  }
  DT_ASSIGN_OR_RETURN(const std::shared_ptr<ProcessGroup> members, GroupOf(group.ranks));
  return ExchangeBytes(members, group.label, what_for, std::move(mine));
}

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
  for (int64_t r = 0; r < size_; ++r) {
    const auto text = store_->GetAlways(absl::StrCat("dtensor/report/", id, "/", r), deadline);
    if (!text.ok()) continue;
    for (const json& group : Parse(*text)) {
      const auto ranks = group.at("ranks").get<std::vector<int64_t>>();
      std::vector<FlightDump>& of_group = dumps[ranks];
      for (size_t i = of_group.size(); i < ranks.size(); ++i)
        of_group.push_back({ranks[i], false, {}});
      const auto at = std::find(ranks.begin(), ranks.end(), r) - ranks.begin();
      of_group[static_cast<size_t>(at)] = process::DumpOf(group.at("dump"));
    }
  }
  FlightReport report;
  for (auto& [ranks, of_group] : dumps) {
    std::string label;
    for (const FlightDump& dump : of_group) {
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
  (void)store_->Set(absl::StrCat("dtensor/report/", id, "/", rank()), Dump(groups)).ok();
}

std::string ProcessWorld::ReportText() {
  FlightReport report = Report();
  const std::string text = absl::StrCat("\nflight report:\n", report.Summary());
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
  const std::string text = ReportText();
  const std::lock_guard<std::mutex> lock(mutex_);
  report_lasts_ = true;
  return text;
}

FlightReport ProcessWorld::LastReport() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return report_;
}

absl::Status RunOnProcesses(Endpoint& endpoint, int64_t ranks,
                            absl::FunctionRef<absl::Status(RankContext&)> body,
                            const SpmdOptions& options) {
  DT_ASSIGN_OR_RETURN(const std::shared_ptr<ProcessWorld> world,
                      ProcessWorld::Meet(endpoint, ranks, {options.timeout, options.wrap}));
  if (endpoint.rank() < ranks) RunRank(world, endpoint.rank(), *options.device, body);
  world->AwaitAll();
  if (options.flight_report != nullptr) {
    FlightReport report = world->LastReport();
    if (!report.groups.empty()) *options.flight_report = std::move(report);
  }
  return world->FirstCause();
}

}  // namespace dtensor

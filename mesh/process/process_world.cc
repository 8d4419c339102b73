#include "dtensor/mesh/process/process_world.h"

#include <algorithm>
#include <cerrno>
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
#include "dtensor/mesh/process/event.h"
#include "dtensor/mesh/process/text.h"
#include "dtensor/mesh/program.h"
#include "dtensor/mesh/run_rank.h"
#include "dtensor/mesh/store/deadline.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

using nlohmann::json;

namespace {

constexpr absl::Duration kMeetLimit = absl::Seconds(20);
constexpr absl::Duration kGrace = absl::Seconds(5);  // of the others once a rank has failed
// Where a deadline has passed they had their time, and at least one may never come.
constexpr absl::Duration kLateGrace = absl::Milliseconds(500);
constexpr absl::Duration kShortGrace = absl::Milliseconds(200);  // where a process is gone

// A rank whose watcher has said nothing for as long as peers wait does not live. A little longer:
// those who wait for it in a call shall say what for, with a report.
constexpr absl::Duration kLongestBeat = absl::Seconds(5);
constexpr absl::Duration kShortestSilence = absl::Seconds(1);
constexpr int64_t kMoreBeats = 2;
constexpr absl::Duration kMoreSilence = absl::Seconds(1);

constexpr char kAllHere[] = "dtensor/all are here";
constexpr char kCost[] = "dtensor/cost model";

std::string HereKey(int64_t rank) { return absl::StrCat("dtensor/rank ", rank, " is here"); }

// Of a connection that ended without goodbye; `error` is the system's number.
absl::Status GoneStatus(int error) {
  if (error == 0 || error == ECONNRESET || error == EPIPE) {
    return absl::UnavailableError("its process is gone: it was killed, or ended without a word");
  }
  return absl::UnavailableError(absl::StrCat("its machine cannot be reached: ", strerror(error)));
}

}  // namespace

static ProcessWorldOptions Finite(ProcessWorldOptions options) {
  options.timeout = std::min(options.timeout, kLongestWait);
  return options;
}

ProcessWorld::ProcessWorld(Endpoint& endpoint, int64_t size, ProcessWorldOptions options)
    : endpoint_(endpoint),
      size_(size),
      options_(Finite(std::move(options))),
      beat_(std::min(std::max(options_.timeout, kShortestSilence) / 4, kLongestBeat)),
      silence_(std::max(options_.timeout, kShortestSilence) + kMoreBeats * beat_ + kMoreSilence),
      failed_(size),
      left_(size),
      silent_(size) {
  ++endpoint_.open_worlds;
  health_path_ = HealthPath();
}

// On the loopback where all ranks are on this machine, else where DTENSOR_ADDRESS says.
absl::StatusOr<Invitation> ProcessWorld::ServeStore(const Machines& machines) {
  TcpServerOptions options;
  DT_ASSIGN_OR_RETURN(options.token, store::NewToken());
  const char* address = std::getenv("DTENSOR_ADDRESS");
  if (address != nullptr) {
    options.address = address;
  } else if (!endpoint_.address().empty()) {
    options.address = endpoint_.address();
  } else if (!machines.far.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        machines.far,
        " is on another machine: set DTENSOR_ADDRESS to an IPv4 address of rank 0's machine "
        "that the others reach"));
  }
  options.silence = silence_;
  options.lost = [&endpoint = endpoint_](Store& store, int64_t rank, int error) {
    endpoint.MarkBroken();  // also where that rank had returned: it will not come to the end
    // In a store that is the server's own nothing fails.
    (void)Event{"lost", rank, "", GoneStatus(error), json::object()}.Append(store, 0).ok();
  };
  DT_ASSIGN_OR_RETURN(server_, TcpStoreServer::Start(options));
  cost_ = options_.cost;
  cost_.ranks_per_node = machines.ranks_each;
  return Invitation{endpoint_.next_channel, server_->address(), options.token};
}

absl::StatusOr<std::shared_ptr<ProcessWorld>> ProcessWorld::Meet(Endpoint& endpoint, int64_t size,
                                                                 ProcessWorldOptions options) {
  if (size < 1 || size > endpoint.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a world of ", size, " ranks among ", endpoint.size(), " processes"));
  }
  std::shared_ptr<ProcessWorld> world(new ProcessWorld(endpoint, size, std::move(options)));
  const absl::Duration limit = std::max(world->timeout(), kMeetLimit);
  DT_ASSIGN_OR_RETURN(const Invitation invitation,
                      MeetForWorld(endpoint, size, limit, [&](const Machines& machines) {
                        return world->ServeStore(machines);
                      }));
  world->first_channel_ = invitation.first_channel;
  absl::Status met = world->MeetInStore(invitation);
  if (met.ok()) met = world->LogStart();
  if (!met.ok()) {
    endpoint.parted = met;
    endpoint.MarkBroken();
    return met;
  }
  world->watcher_ = std::thread([w = world.get()] { w->Watch(); });
  return world;
}

// The last to come says that all are here; where somebody does not, rank 0 says who.
absl::Status ProcessWorld::MeetInStore(const Invitation& invitation) {
  const std::string who = absl::StrCat("rank ", rank());
  DT_ASSIGN_OR_RETURN(store_, TcpStore::Connect(invitation.address, invitation.token, rank(), who,
                                                absl::Now() + kMeetLimit));
  store_->SetPatience(silence_);
  if (rank() == 0) DT_RETURN_IF_ERROR(store_->Set(kCost, cost_.ToJson()));
  DT_RETURN_IF_ERROR(store_->Set(HereKey(rank()), ""));
  DT_ASSIGN_OR_RETURN(const int64_t here, store_->Add("dtensor/here", 1));
  if (here == endpoint_.size()) DT_RETURN_IF_ERROR(store_->Set(kAllHere, ""));
  // The others wait a little longer, to be told.
  const absl::Duration limit = rank() == 0 ? kMeetLimit : kMeetLimit + absl::Seconds(2);
  absl::StatusOr<std::string> told = store_->Get(kAllHere, absl::Now() + limit);
  if (rank() == 0 && !told.ok()) {
    std::vector<int64_t> absent;
    for (int64_t r = 0; r < endpoint_.size(); ++r) {
      if (!store_->Get(HereKey(r), absl::InfinitePast()).ok()) absent.push_back(r);
    }
    told = absl::StrCat(RankNames(absent), " did not reach rank 0's store at ", invitation.address,
                        " within ", absl::FormatDuration(limit));
    DT_RETURN_IF_ERROR(store_->Set(kAllHere, *told));
  }
  DT_RETURN_IF_ERROR(told.status());
  if (!told->empty()) return RankLocal(absl::DeadlineExceededError(*told));
  if (rank() == 0) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(const std::string cost, store_->Get(kCost, absl::Now() + limit));
  DT_ASSIGN_OR_RETURN(cost_, CostModel::FromJson(cost));
  return absl::OkStatus();
}

absl::Status ProcessWorld::LogStart() const {
  DT_ASSIGN_OR_RETURN(const bool logs, LogsComm());
  if (!logs) return absl::OkStatus();
  const std::string line = absl::StrCat("comm: rank ", rank(), " asked stores ",
                                        endpoint_.store_requests + store_->requests(),
                                        " times before world #", endpoint_.worlds, " began\n");
  std::fputs(line.c_str(), stderr);
  return absl::OkStatus();
}

ProcessWorld::~ProcessWorld() {
  if (watcher_.joinable()) {
    store_->Interrupt();
    watcher_.join();
    WriteHealth(/*ended=*/true);
  }
  for (const auto& [key, group] : groups_) group->StopProgress();
  if (server_ != nullptr && store_ != nullptr) {
    const absl::StatusOr<int64_t> groups = store_->Add("dtensor/groups", 0);
    endpoint_.next_channel += groups.value_or(0) * ProcessGroup::kChannels;
    if (endpoint_.next_channel > endpoint_.channels() / 2) endpoint_.next_channel = 1;
  }
  store_.reset();  // says goodbye
  // Others may take their time to clean up, and need the store as long as they live.
  const bool broken = endpoint_.broken();
  if (server_ != nullptr &&
      !server_->AwaitGoodbyes(broken ? kShortGrace : silence_,
                              broken ? kShortGrace : absl::InfiniteDuration())) {
    endpoint_.MarkBroken();
  }
  --endpoint_.open_worlds;
}

void ProcessWorld::Watch() {
  WriteHealth();
  Deadline beat = Deadline::In(beat_);
  for (int64_t n = 1;;) {
    // By asking at every beat a rank says that it lives.
    const absl::StatusOr<std::string> text = store_->Watch(Event::Key(n), beat.left());
    if (absl::IsCancelled(text.status())) return;
    if (beat.passed()) {
      if (server_ != nullptr) LookForSilent();
      WriteHealth();
      beat = Deadline::In(beat_);
    }
    if (absl::IsDeadlineExceeded(text.status())) continue;
    if (!text.ok()) {
      LoseStore(text.status());
      return WriteHealth();
    }
    if (const std::optional<Event> event = Event::Of(*text)) {
      Handle(*event);
      if (event->kind != "report") WriteHealth();
    } else {
      fprintf(stderr,
              "processes: \"%s\" in the store is no event: keys of a program begin otherwise\n",
              Event::Key(n).c_str());
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      seen_ = n++;
    }
    heard_.notify_all();
  }
}

// In beats of this rank: one that was stopped itself, and goes on, finds nobody silent.
void ProcessWorld::LookForSilent() {
  const std::map<int64_t, int64_t> heard = server_->Heard();
  for (const auto& [r, messages] : heard) {
    Silence& of_rank = silences_[r];
    of_rank.beats = of_rank.messages == messages ? of_rank.beats + 1 : 0;
    of_rank.messages = messages;
    if (of_rank.beats != static_cast<int64_t>(silence_ / beat_)) continue;
    const absl::Status silent = absl::UnavailableError(
        absl::StrCat("nothing was heard of its process for ", absl::FormatDuration(silence_),
                     ": it is stopped, or its machine cannot be reached"));
    // This process's own store; without it there is nobody to tell.
    (void)Event{"lost", r, "", silent, json::object()}.Append(*store_, seen_).ok();
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
    // Launchers end the others when one has failed, maybe before they say so.
    if (rank != this->rank()) internal::TellAtSignal(cause_);
  }
  failed_[rank] = true;
  for (const auto& [key, group] : groups_) {
    const std::vector<int64_t>& ranks = group->ranks();
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) group->Aborted(notice_);
  }
  store_->Fail(notice_);
}

void ProcessWorld::LoseStore(const absl::Status& why) {
  store_->Hurry();
  bool over;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    over = AllAccounted();
  }
  if (!over) {
    endpoint_.MarkBroken();
    HandleFailed(0, absl::UnavailableError(absl::StrCat(
                        "its process, which serves the store, ",
                        store_->mute() ? "does not answer" : "is gone", " (", why.message(), ")")));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  lost_store_ = true;
  for (const auto& [key, group] : groups_) group->Aborted(notice_.ok() ? why : notice_);
  heard_.notify_all();
}

void ProcessWorld::Post(const Event& event) {
  int64_t after;
  bool lost;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    after = seen_;
    lost = lost_store_;
  }
  if (!lost) {
    const absl::StatusOr<int64_t> number = event.Append(*store_, after);
    std::unique_lock<std::mutex> lock(mutex_);
    const auto heard = [&] { return seen_ >= *number; };
    if (number.ok()) {
      heard_.wait_for(lock, absl::ToChronoMilliseconds(silence_),
                      [&] { return lost_store_ || heard(); });
      if (heard()) return;
    }
  }
  // Nobody else can be told; this rank shall end all the same.
  endpoint_.MarkBroken();
  Handle(event);
  heard_.notify_all();
}

void ProcessWorld::Fail(int64_t rank, const absl::Status& why) {
  store_->Hurry();
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
  store_->Hurry();
  Post({"abort", rank(), group.Key(), why, json::object()});
  if (!group.aborted()) group.Aborted(why);  // nobody could be told
}

bool ProcessWorld::AllAccounted(bool but_silent) const {
  for (int64_t r = 0; r < size_; ++r) {
    if (!left_[r] && !failed_[r] && !(but_silent && silent_[r])) return false;
  }
  return true;
}

void ProcessWorld::AwaitAll() {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto over = [&] { return lost_store_ || !cause_.ok() || AllAccounted(); };
  // Peers that live may take as long as they like; whoever looks at this rank shall know.
  if (!heard_.wait_for(lock, absl::ToChronoMilliseconds(timeout()), over)) {
    if (rank() == std::find(left_.begin(), left_.end(), true) - left_.begin()) TellWhoIsAwaited();
    heard_.wait(lock, over);
  }
  const absl::Duration grace = absl::IsDeadlineExceeded(cause_) ? kLateGrace : kGrace;
  // Who said nothing when a report was asked for will not say that it ends.
  (void)heard_.wait_for(lock, absl::ToChronoMilliseconds(grace), [&] {
    return lost_store_ || store_->mute() || AllAccounted(/*but_silent=*/true);
  });
  if (!AllAccounted()) endpoint_.MarkBroken();
}

void ProcessWorld::TellWhoIsAwaited() const {
  std::vector<int64_t> awaited;
  for (int64_t r = 0; r < size_; ++r) {
    if (!left_[r] && !failed_[r]) awaited.push_back(r);
  }
  fprintf(stderr, "processes: rank %d is through and waits for %s\n", static_cast<int>(rank()),
          RankNames(awaited).c_str());
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

absl::Status ProcessWorld::SetOptions(const GroupRequest& group, const GroupOptions& options) {
  if (group.device == DeviceType::kMeta || options.timeout <= absl::ZeroDuration()) {
    return absl::OkStatus();
  }
  DT_ASSIGN_OR_RETURN(const std::shared_ptr<ProcessGroup> members, GroupOf(group.ranks));
  members->set_timeout(std::min(options.timeout, kLongestWait));
  return absl::OkStatus();
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

namespace {

// A thread that runs a world of this process, or would.
class RunningScope {
 public:
  explicit RunningScope(Endpoint& endpoint) : endpoint_(endpoint) {
    std::shared_ptr<ProcessWorld> world;
    {
      const std::lock_guard<std::mutex> lock(endpoint_.running.mutex);
      first_ = !endpoint_.running.one;
      endpoint_.running.one = true;
      endpoint_.running.another = !first_;
      world = endpoint_.running.world;
    }
    if (!first_ && world != nullptr) FailHere(*world, Alone());
  }
  ~RunningScope() {
    if (!first_) return;
    internal::TellAtSignal(absl::OkStatus());
    std::shared_ptr<ProcessWorld> world;  // takes its time to end, after the lock
    const std::lock_guard<std::mutex> lock(endpoint_.running.mutex);
    endpoint_.running.one = false;
    world = std::move(endpoint_.running.world);
  }
  RunningScope(const RunningScope&) = delete;

  // Of the world that this thread is in, once there is one.
  absl::Status Alone(const std::shared_ptr<ProcessWorld>& world = nullptr) {
    const std::lock_guard<std::mutex> lock(endpoint_.running.mutex);
    if (first_) endpoint_.running.world = world;
    if (!endpoint_.running.another) return absl::OkStatus();
    return absl::FailedPreconditionError(
        "two threads of this process called RunSpmd at a time: where ranks are processes, a "
        "program runs one world after the other");
  }

  static void FailHere(ProcessWorld& world, const absl::Status& why) {
    if (world.rank() < world.size()) world.Fail(world.rank(), why);
  }

 private:
  Endpoint& endpoint_;
  bool first_;
};

}  // namespace

absl::Status RunOnProcesses(Endpoint& endpoint, int64_t ranks,
                            absl::FunctionRef<absl::Status(RankContext&)> body,
                            const SpmdOptions& options) {
  RunningScope running(endpoint);
  DT_RETURN_IF_ERROR(running.Alone());
  DT_ASSIGN_OR_RETURN(
      const std::shared_ptr<ProcessWorld> world,
      ProcessWorld::Meet(endpoint, ranks,
                         {options.timeout, options.wrap, options.cost.value_or(CostModel())}));
  if (const absl::Status alone = running.Alone(world); !alone.ok()) {
    RunningScope::FailHere(*world, alone);
  } else if (endpoint.rank() < ranks) {
    RunRank(world, endpoint.rank(), *options.device, body);
  }
  world->AwaitAll();
  return HowItEnded(*world, options.flight_report);
}

}  // namespace dtensor

#include "dtensor/mesh/run/nodes.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "dtensor/mesh/process/meeting.h"
#include "dtensor/mesh/store/frame.h"
#include "dtensor/mesh/timeout.h"
#include "dtensor/tensor/status.h"
#include "nlohmann/json.hpp"

namespace dtensor::run {
namespace {

using nlohmann::json;

// For all nodes to come; machines are started by hand. DTENSOR_TIMEOUT_S goes before it.
absl::StatusOr<absl::Duration> Limit() {
  const char* text = std::getenv("DTENSOR_TIMEOUT_S");
  return TimeoutFrom(text == nullptr ? "" : text, absl::Minutes(10));
}

constexpr absl::Duration kSlice = absl::Milliseconds(200);
constexpr int64_t kBeats = 8;  // without a word, in the time after which a launcher is lost
// Much longer than a launcher that lives says nothing: its slices of waiting, and starting
// processes.
constexpr absl::Duration kShortestSilence = absl::Seconds(2);
constexpr char kLost[] = "lost";
constexpr char kLoopback[] = "127.0.0.1";

// What node 0 and the others agree on beforehand.
absl::StatusOr<std::string> NodesToken(const LaunchOptions& options, const std::string& host) {
  if (options.nodes == 1) return store::NewToken();
  const char* secret = std::getenv("DTENSOR_TOKEN");
  if (secret == nullptr && host != kLoopback) {
    return absl::InvalidArgumentError(
        "--nnodes: launchers of several machines know each other by DTENSOR_TOKEN: set it to the "
        "same secret on all of them (openssl rand -hex 16 makes one)");
  }
  return LaunchToken(secret != nullptr ? secret : options.endpoint, "of nodes");
}

absl::StatusOr<std::pair<std::string, int>> Endpoint(const LaunchOptions& options) {
  if (options.endpoint.empty()) return std::pair<std::string, int>(kLoopback, 0);
  const std::pair<std::string, std::string> parts =
      absl::StrSplit(options.endpoint, absl::MaxSplits(':', 1));
  int port = 0;
  if (parts.first.empty() || !absl::SimpleAtoi(parts.second, &port) || port < 0 || port > 65535 ||
      (port == 0 && options.nodes > 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--rdzv-endpoint is \"", options.endpoint,
                     "\": give a machine and a port, as node1:29400"));
  }
  DT_ASSIGN_OR_RETURN(const std::string host, ResolveHost(parts.first));
  return std::pair<std::string, int>(host, port);
}

// The processes' connections come to it; its port does not matter.
absl::Status CheckLocalAddress(const std::string& name, const std::string& address) {
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const bool here = inet_pton(AF_INET, address.c_str(), &at.sin_addr) == 1 &&
                    bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0;
  if (fd >= 0) close(fd);
  if (here) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is \"", address, "\": give an IPv4 address of this machine"));
}

// Of an object that anybody may have written; `otherwise` where it is not there or something else.
int64_t IntegerIn(const json& object, const char* name, int64_t otherwise) {
  const auto at = object.find(name);
  return at != object.end() && at->is_number_integer() ? at->get<int64_t>() : otherwise;
}

std::string TextIn(const json& object, const char* name) {
  const auto at = object.find(name);
  return at != object.end() && at->is_string() ? at->get<std::string>() : "";
}

}  // namespace

int Failure::code() const {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

std::string Failure::How() const {
  if (status == 0) return "ended with exit code 0 before the others";
  if (!WIFSIGNALED(status)) return absl::StrCat("exit code ", WEXITSTATUS(status));
  return absl::StrCat("killed by signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)),
                      ")");
}

std::string Failure::Who() const {
  return absl::StrCat("rank ", rank, " (local rank ", local_rank, ", pid ", pid, ") on ", host);
}

std::string Failure::ToText() const {
  return json({{"rank", rank},
               {"local_rank", local_rank},
               {"pid", pid},
               {"host", host},
               {"status", status},
               {"told", told},
               {"culprit", culprit},
               {"last_lines", last_lines},
               {"report", report}})
      .dump(-1, ' ', false, json::error_handler_t::replace);
}

absl::StatusOr<Failure> Failure::Of(const std::string& text) {
  const json from = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!from.is_object()) return absl::DataLossError("a failure that makes no sense");
  Failure failure;
  failure.rank = IntegerIn(from, "rank", 0);
  failure.local_rank = IntegerIn(from, "local_rank", 0);
  failure.pid = IntegerIn(from, "pid", 0);
  failure.host = TextIn(from, "host");
  failure.status = static_cast<int>(IntegerIn(from, "status", 0));
  const auto told = from.find("told");
  failure.told = told != from.end() && told->is_boolean() && told->get<bool>();
  failure.culprit = IntegerIn(from, "culprit", -1);
  failure.last_lines = TextIn(from, "last_lines");
  failure.report = TextIn(from, "report");
  return failure;
}

int64_t Failure::CulpritIn(const std::string& error_file) {
  const json error = json::parse(error_file, nullptr, /*allow_exceptions=*/false);
  return error.is_object() ? IntegerIn(error, "culprit", -1) : -1;
}

absl::StatusOr<std::unique_ptr<Nodes>> Nodes::Join(const LaunchOptions& options, Console& console) {
  DT_ASSIGN_OR_RETURN(const auto endpoint, Endpoint(options));
  const auto& [host, port] = endpoint;
  DT_ASSIGN_OR_RETURN(const std::string token, NodesToken(options, host));
  DT_ASSIGN_OR_RETURN(const absl::Duration limit, Limit());
  const absl::Time deadline = absl::Now() + limit;
  // Without a word for so long another launcher is out of reach: as processes wait for each other.
  const absl::Duration silence = std::min(limit, absl::Seconds(60));
  std::unique_ptr<Nodes> nodes(new Nodes(console));
  nodes->nodes_ = options.nodes;
  nodes->node_ = options.node;
  nodes->processes_ = options.processes;
  char name[HOST_NAME_MAX + 1] = "?";
  (void)gethostname(name, sizeof(name));
  nodes->host_ = name;
  const char* const set = std::getenv("DTENSOR_LOCAL_ADDRESS");
  const bool given = !options.local_address.empty();
  nodes->address_ = given || set == nullptr ? options.local_address : set;
  if (nodes->address_.empty()) {
    DT_ASSIGN_OR_RETURN(nodes->address_, AddressTowards(host));
  } else {
    DT_RETURN_IF_ERROR(
        CheckLocalAddress(given ? "--local-addr" : "DTENSOR_LOCAL_ADDRESS", nodes->address_));
  }
  std::string where = absl::StrCat(host, ":", port);
  if (options.node == 0) {
    TcpServerOptions server = {
        token, host, port, [](Store& store, int64_t node, int) {
          // In a store that is the server's own nothing fails.
          (void)store.Set(kLost, absl::StrCat("the launcher of node ", node, " is gone")).ok();
        }};
    server.silence = silence;
    DT_ASSIGN_OR_RETURN(nodes->server_, TcpStoreServer::Start(std::move(server)));
    where = nodes->server_->address();
  }
  const std::string who = absl::StrCat("node ", options.node);
  auto store = TcpStore::Connect(where, token, options.node, who, deadline);
  if (!store.ok()) return Prefixed("--rdzv-endpoint: node 0 does not answer", store.status());
  nodes->store_ = *std::move(store);
  nodes->store_->SetPatience(silence);
  nodes->silence_ = std::max(silence, kShortestSilence);
  DT_ASSIGN_OR_RETURN(
      const std::string before,
      nodes->store_->CompareExchange(
          absl::StrCat("node/", options.node), "",
          absl::StrCat(options.processes, "/", options.nodes, "/", options.max_restarts)));
  if (!before.empty()) {
    return absl::AlreadyExistsError(
        absl::StrCat("--node-rank ", options.node, ": another launcher has it already"));
  }
  const absl::Status met = nodes->Meet(options, where, deadline);
  if (!met.ok()) {
    nodes->Stop(absl::StrCat("has given up: ", met.message()));
    return met;
  }
  return nodes;
}

absl::Status Nodes::Meet(const LaunchOptions& options, const std::string& where,
                         absl::Time deadline) {
  int64_t first = 0;
  for (int64_t n = 0; n < options.nodes; ++n) {
    const std::string key = absl::StrCat("node/", n);
    const absl::Status there = Await(key, deadline);
    if (absl::IsDeadlineExceeded(there)) {
      return absl::DeadlineExceededError(absl::StrCat("node ", n, " did not come to the launch of ",
                                                      options.nodes, " nodes at ", where));
    }
    DT_RETURN_IF_ERROR(there);
    DT_ASSIGN_OR_RETURN(const std::string text, store_->Get(key, deadline));
    const std::vector<std::string> parts = absl::StrSplit(text, '/');
    int64_t processes = 0;
    if (parts.size() != 3 || !absl::SimpleAtoi(parts[0], &processes)) {
      return absl::InvalidArgumentError(
          absl::StrCat("node ", n, " has the launcher of another version"));
    }
    const auto same = [n](const char* flag, int64_t here, const std::string& there) {
      if (there == absl::StrCat(here)) return absl::OkStatus();
      return absl::InvalidArgumentError(
          absl::StrCat(flag, " is ", here, " here and ", there, " on node ", n));
    };
    DT_RETURN_IF_ERROR(same("--nnodes", options.nodes, parts[1]));
    DT_RETURN_IF_ERROR(same("--max-restarts", options.max_restarts, parts[2]));
    if (n == options.node) attempt_.first_rank = first;
    first += processes;
  }
  attempt_.world_size = first;
  return absl::OkStatus();
}

Nodes::~Nodes() {
  store_.reset();  // says goodbye
  process_server_.reset();
  if (server_ != nullptr) server_->AwaitGoodbyes(absl::Seconds(5), absl::Seconds(5));
}

std::string Nodes::Key(absl::string_view what) const {
  return absl::StrCat("attempt/", attempt_.number, "/", what);
}

// In beats of this launcher: one that was stopped itself, and goes on, finds nobody silent.
void Nodes::LookForSilent() {
  if (server_ == nullptr || !beat_.passed()) return;
  beat_ = Deadline::In(silence_ / kBeats);
  for (const auto& [n, messages] : server_->Heard()) {
    Silence& of_node = silences_[n];
    of_node.beats = of_node.messages == messages ? of_node.beats + 1 : 0;
    of_node.messages = messages;
    if (of_node.beats != kBeats) continue;
    Lose(absl::StrCat("nothing was heard of the launcher of node ", n, " for ",
                      absl::FormatDuration(silence_),
                      ": it is stopped, or its machine cannot be reached"));
  }
}

// The first cause stays. Where nobody can be told nobody waits.
void Nodes::Lose(const std::string& why) { (void)store_->CompareExchange(kLost, "", why).ok(); }

absl::Status Nodes::Lost() {
  LookForSilent();
  const absl::StatusOr<std::string> lost = store_->Get(kLost, absl::InfinitePast());
  if (absl::IsDeadlineExceeded(lost.status())) return absl::OkStatus();
  if (!lost.ok()) {
    return absl::UnavailableError(
        absl::StrCat("the launcher of node 0 is gone (", lost.status().message(), ")"));
  }
  return absl::UnavailableError(*lost);
}

void Nodes::Stop(absl::string_view why) {
  if (nodes_ > 1) Lose(absl::StrCat("node ", node_, " ", why));
}

absl::Status Nodes::Await(const std::string& key, absl::Time deadline) {
  while (true) {
    console_.Write();
    const absl::Status there = store_->Wait({key}, absl::Now() + kSlice);
    if (there.ok()) return there;
    DT_RETURN_IF_ERROR(Lost());
    if (!absl::IsDeadlineExceeded(there) || absl::Now() > deadline) return there;
  }
}

absl::StatusOr<Attempt> Nodes::Begin(int64_t number) {
  attempt_.number = number;
  if (node_ == 0) {
    process_server_.reset();
    DT_ASSIGN_OR_RETURN(attempt_.secret, store::NewToken());
    DT_ASSIGN_OR_RETURN(
        process_server_,
        TcpStoreServer::Start({LaunchToken(attempt_.secret, absl::StrCat(number)), address_}));
    DT_RETURN_IF_ERROR(
        store_->Set(Key("store"), absl::StrCat(process_server_->address(), " ", attempt_.secret)));
  }
  DT_RETURN_IF_ERROR(Await(Key("store"), absl::InfiniteFuture()));
  DT_ASSIGN_OR_RETURN(const std::string text, store_->Get(Key("store"), absl::Now() + kSlice));
  const std::pair<std::string, std::string> parts = absl::StrSplit(text, ' ');
  attempt_.store = parts.first;
  attempt_.secret = parts.second;
  return attempt_;
}

absl::Status Nodes::Tell(const Failure& failure) {
  DT_ASSIGN_OR_RETURN(const int64_t order, store_->Add(Key("failures"), 1));
  return store_->Set(Key(absl::StrCat("failure/", order)), failure.ToText());
}

absl::Status Nodes::TellEndOf(const Failure& well) {
  return store_->Set(Key(absl::StrCat("well/", well.rank)), well.ToText());
}

absl::StatusOr<bool> Nodes::AnyFailed() {
  DT_RETURN_IF_ERROR(Lost());
  DT_ASSIGN_OR_RETURN(const int64_t count, store_->Add(Key("failures"), 0));
  return count > 0;
}

absl::StatusOr<std::vector<Failure>> Nodes::End() {
  DT_RETURN_IF_ERROR(store_->Set(Key(absl::StrCat("ended/", node_)), ""));
  for (int64_t n = 0; n < nodes_; ++n) {
    DT_RETURN_IF_ERROR(Await(Key(absl::StrCat("ended/", n)), absl::InfiniteFuture()));
  }
  DT_ASSIGN_OR_RETURN(const int64_t count, store_->Add(Key("failures"), 0));
  std::vector<Failure> failures;
  for (int64_t i = 1; i <= count; ++i) {
    DT_ASSIGN_OR_RETURN(const std::string text, store_->Get(Key(absl::StrCat("failure/", i)),
                                                            absl::Now() + absl::Seconds(5)));
    DT_ASSIGN_OR_RETURN(Failure failure, Failure::Of(text));
    failures.push_back(std::move(failure));
  }
  std::set<int64_t> known = {-1};
  for (const Failure& failure : failures) known.insert(failure.rank);
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    if (!known.insert(failures[i].culprit).second) continue;
    const auto text =
        store_->Get(Key(absl::StrCat("well/", failures[i].culprit)), absl::InfinitePast());
    if (!text.ok()) continue;  // it ended otherwise, or is no rank
    DT_ASSIGN_OR_RETURN(Failure well, Failure::Of(*text));
    failures.push_back(std::move(well));
  }
  return failures;
}

}  // namespace dtensor::run

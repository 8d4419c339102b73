#include "dtensor/mesh/process/meeting.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/hash.h"
#include "dtensor/mesh/store/frame.h"
#include "dtensor/mesh/timeout.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

constexpr int kPorts = 8;  // after the launcher's
constexpr char kLoopback[] = "127.0.0.1";
constexpr char kVerdict[] = "meeting/verdict";  // what is wrong, or Go() of rank 0's size
constexpr char kNews[] = "meeting/news";        // what rank 0 waits for: kAllCame, or kOdd
constexpr char kAllCame[] = "all came", kOdd[] = "odd";
constexpr char kSize[] = "meeting/size";                           // of the first to come
constexpr char kCame[] = "meeting/came/", kMet[] = "meeting/met";  // how many
constexpr char kAllMet[] = "meeting/all met";
constexpr absl::Duration kSlice = absl::Milliseconds(500);
constexpr absl::Duration kAnswer = absl::Seconds(2);      // of who listens at a port
constexpr absl::Duration kAskingTime = absl::Seconds(2);  // after the deadline, who is not there
constexpr absl::Duration kGivingUp = absl::Seconds(2);    // of all who wait, one after the other
constexpr absl::Duration kVerdictLag = absl::Seconds(5);  // rank 0 says who did not come

std::string CameKey(int64_t rank) { return absl::StrCat("meeting/here/", rank); }
std::string MetKey(int64_t rank) { return absl::StrCat("meeting/met/", rank); }
std::string GaveUpKey(int64_t rank) { return absl::StrCat("meeting/gave up/", rank); }
std::string TextKey(const char* key) { return absl::StrCat("meeting/text/", key); }
std::string Go(absl::string_view size) { return absl::StrCat("go ", size); }
std::string OtherSizes(int64_t rank, absl::string_view size, absl::string_view size_of_0) {
  return absl::StrCat("rank ", rank, " is of ", size, " processes, rank 0 of ", size_of_0);
}

absl::string_view TextOf(const Environment& environment, const char* name) {
  const char* text = environment(name);
  return text == nullptr ? absl::string_view() : absl::string_view(text);
}

absl::StatusOr<int> Port(absl::string_view name, absl::string_view text, int most = 65535) {
  int port = 0;
  if (absl::SimpleAtoi(text, &port) && port >= 1 && port <= most) return port;
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is \"", text, "\": give a port from 1 to ", most));
}

// Of the first interface of this machine that leads to others; the loopback where there is none.
std::string OwnAddress() {
  ifaddrs* all = nullptr;
  std::string found = kLoopback;
  if (getifaddrs(&all) != 0) return found;
  for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_INET) continue;
    if ((i->ifa_flags & IFF_UP) == 0 || (i->ifa_flags & IFF_LOOPBACK) != 0) continue;
    sockaddr_in address;
    std::memcpy(&address, i->ifa_addr, sizeof(address));
    char text[INET_ADDRSTRLEN] = "";
    found = inet_ntop(AF_INET, &address.sin_addr, text, sizeof(text));
    break;
  }
  freeifaddrs(all);
  return found;
}

// The first of these addresses at which somebody with the launch's token answers. Of those who do
// not take this rank the error is of who said why.
absl::StatusOr<std::unique_ptr<TcpStore>> TryAddresses(const std::vector<std::string>& addresses,
                                                       const std::string& token, int64_t rank,
                                                       absl::Time deadline) {
  absl::Status last = absl::UnavailableError("nobody has said where it is");
  for (const std::string& address : addresses) {
    const absl::Time now = absl::Now();
    if (now >= deadline && &address != &addresses.front()) break;
    auto store = TcpStore::Try(address, token, rank, absl::StrCat("rank ", rank),
                               std::min(deadline, now + kAnswer));
    if (store.ok() || absl::IsAlreadyExists(store.status())) return store;
    if (!absl::IsPermissionDenied(last)) last = store.status();
  }
  return last;
}

}  // namespace

std::string LaunchToken(absl::string_view secret, absl::string_view attempt) {
  const std::string text = absl::StrCat(secret, ", attempt ", attempt);
  return absl::StrCat(absl::Hex(HashRange(1, text), absl::kZeroPad16),
                      absl::Hex(HashRange(2, text), absl::kZeroPad16));
}

absl::StatusOr<MeetingPlace> FindMeeting(const ProcessPlace& place,
                                         const Environment& environment) {
  MeetingPlace where;
  absl::string_view store = TextOf(environment, "DTENSOR_STORE");
  const bool folder = absl::ConsumePrefix(&store, "file://") || absl::StartsWith(store, "/");
  std::string secret;
  for (const char* name : {"DTENSOR_TOKEN", "TORCHELASTIC_RUN_ID", "MASTER_ADDR"}) {
    if (secret.empty()) secret = std::string(TextOf(environment, name));
  }
  // The ports of launches of neighbouring MASTER_PORTs overlap, and their run ids may all be
  // "none".
  if (store.empty() || folder) {
    absl::StrAppend(&secret, ", port ", TextOf(environment, "MASTER_PORT"));
  }
  where.token = LaunchToken(secret, TextOf(environment, "TORCHELASTIC_RESTART_COUNT"));
  DT_ASSIGN_OR_RETURN(where.limit,
                      TimeoutFrom(TextOf(environment, "DTENSOR_TIMEOUT_S"), where.limit));
  if (folder) {
    where.file = absl::StrCat(store, "/dtensor-", where.token.substr(0, 16));
    where.token.clear();
    where.ports = {0};
    where.host = std::string(TextOf(environment, "DTENSOR_ADDRESS"));
    if (place.local_size == place.size) where.host = kLoopback;
    return where;
  }
  if (!store.empty()) {
    const size_t colon = std::min(store.rfind(':'), store.size());
    DT_ASSIGN_OR_RETURN(const int port, Port("DTENSOR_STORE, after its colon,",
                                             store.substr(std::min(colon + 1, store.size()))));
    where.host = std::string(store.substr(0, colon));
    where.ports = {port};
    where.served = true;
    return where;
  }
  where.host = std::string(TextOf(environment, "DTENSOR_ADDRESS"));
  if (where.host.empty()) where.host = std::string(TextOf(environment, "MASTER_ADDR"));
  if (place.local_size == place.size) where.host = kLoopback;
  if (where.host.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(place.ToString(),
                     ": MASTER_ADDR is not set; it is the machine of rank 0, where the "
                     "others find it. dtensor-run, torchrun and mpirun set what is needed"));
  }
  const absl::string_view own = TextOf(environment, "DTENSOR_PORT");
  if (!own.empty()) {
    DT_ASSIGN_OR_RETURN(const int port, Port("DTENSOR_PORT", own));
    where.ports = {port};
    return where;
  }
  const absl::string_view master = TextOf(environment, "MASTER_PORT");
  if (master.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(place.ToString(),
                     ": MASTER_PORT is not set; rank 0 listens at one of the eight ports after it. "
                     "dtensor-run, torchrun and mpirun set what is needed"));
  }
  DT_ASSIGN_OR_RETURN(const int port, Port("MASTER_PORT", master, 65535 - kPorts));
  for (int i = 1; i <= kPorts; ++i) where.ports.push_back(port + i);
  return where;
}

absl::StatusOr<std::string> ResolveHost(const std::string& host) {
  addrinfo wanted = {}, *found = nullptr;
  wanted.ai_family = AF_INET;
  wanted.ai_socktype = SOCK_STREAM;
  const int code = getaddrinfo(host.c_str(), nullptr, &wanted, &found);
  if (code != 0) {
    return absl::UnavailableError(
        absl::StrCat("\"", host, "\" is no machine with an IPv4 address: ", gai_strerror(code)));
  }
  char text[INET_ADDRSTRLEN] = "";
  sockaddr_in address;
  std::memcpy(&address, found->ai_addr, sizeof(address));
  inet_ntop(AF_INET, &address.sin_addr, text, sizeof(text));
  freeaddrinfo(found);
  return std::string(text);
}

absl::StatusOr<std::string> AddressTowards(const std::string& address) {
  sockaddr_in to = {}, from = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(9);  // any: nothing is sent
  socklen_t size = sizeof(from);
  char text[INET_ADDRSTRLEN] = "";
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const bool found = fd >= 0 && inet_pton(AF_INET, address.c_str(), &to.sin_addr) == 1 &&
                     connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&from), &size) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  if (!found) {
    return absl::UnavailableError(absl::StrCat("no way to ", address, ": ", strerror(error)));
  }
  inet_ntop(AF_INET, &from.sin_addr, text, sizeof(text));
  return std::string(text);
}

absl::Status Meeting::Serve(const MeetingPlace& where, const std::string& host) {
  absl::Status last;
  for (const int port : where.ports) {
    absl::StatusOr<std::unique_ptr<TcpStoreServer>> server = TcpStoreServer::Start(
        {where.token, host, port, [](Store& store, int64_t rank, int) {
           // Unless the verdict is known; in a store that is the server's own nothing fails.
           (void)store
               .CompareExchange(kVerdict, "", absl::StrCat("rank ", rank, ": its process is gone"))
               .ok();
           (void)store.CompareExchange(kNews, "", kOdd).ok();
         }});
    if (server.ok()) {
      server_ = *std::move(server);
      return absl::OkStatus();
    }
    last = server.status();
  }
  return Prefixed(absl::StrCat("rank 0 serves the launch's store at ", where.host, ", ports ",
                               where.ports.front(), " to ", where.ports.back(),
                               "; none is free (DTENSOR_PORT names another)"),
                  last);
}

// Nobody else may read it, whatever was there before; who looks for it finds it whole.
absl::Status Meeting::Publish(const MeetingPlace& where) {
  (void)unlink(where.file.c_str());
  const int fd = open(where.file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) {
    return absl::UnavailableError(absl::StrCat(
        where.file, ": ", strerror(errno), "; DTENSOR_STORE names a folder that all ranks see"));
  }
  close(fd);
  published_ = where.file;
  return WriteFile(where.file, absl::StrCat(server_->address(), " ", where.token, "\n"));
}

absl::Status Meeting::Connect(const MeetingPlace& where, std::string* host) {
  std::vector<std::string> addresses;
  std::string token = where.token;
  const std::string there =
      where.file.empty()
          ? absl::StrCat(where.host, ", ports ", where.ports.front(), " to ", where.ports.back(),
                         where.served ? ", where its launcher said" : ", where rank 0 is")
          : absl::StrCat("the address in ", where.file, ", which rank 0 writes");
  if (server_ != nullptr) {
    addresses = {server_->address()};
  } else if (where.file.empty()) {
    for (const int port : where.ports) addresses.push_back(absl::StrCat(*host, ":", port));
  }
  absl::Status refused;  // by whom it met last, who may be gone by now
  while (true) {
    if (server_ == nullptr && !where.file.empty()) {  // it may be that of an earlier launch
      const std::vector<std::string> words = absl::StrSplit(
          ReadFile(where.file).value_or(""), absl::ByAnyChar(" \n"), absl::SkipEmpty());
      addresses.clear();
      if (words.size() == 2) {
        addresses = {words[0]};
        *host = words[0].substr(0, words[0].rfind(':'));
        token = words[1];
      }
    }
    absl::StatusOr<std::unique_ptr<TcpStore>> store =
        TryAddresses(addresses, token, rank_, deadline_);
    if (store.ok()) {
      store_ = *std::move(store);
      return absl::OkStatus();
    }
    if (absl::IsAlreadyExists(store.status())) return store.status();
    if (absl::IsPermissionDenied(store.status())) refused = store.status();
    if (absl::Now() >= deadline_) {
      return Prefixed(absl::StrCat("rank ", rank_, " found no store of this launch at ", there,
                                   " (another launch may listen there)"),
                      refused.ok() ? store.status() : refused);
    }
    absl::SleepFor(absl::Milliseconds(refused.ok() ? 20 : 500));  // nobody is asked all the time
  }
}

// Counts this rank among those that came; the last one tells rank 0. Where the first to come is of
// another size than this rank, rank 0 is told that. So each asks the store a few times, however
// many they are.
absl::Status Meeting::Come() {
  const std::string size = absl::StrCat(size_);
  DT_ASSIGN_OR_RETURN(const std::string before, store_->CompareExchange(CameKey(rank_), "", size));
  if (!before.empty()) {
    return absl::AlreadyExistsError(absl::StrCat(
        "another process is rank ", rank_, " of this launch already: each has a rank of its own"));
  }
  DT_ASSIGN_OR_RETURN(const std::string first, store_->CompareExchange(kSize, "", size));
  if (!first.empty() && first != size) return store_->CompareExchange(kNews, "", kOdd).status();
  DT_ASSIGN_OR_RETURN(const int64_t came, store_->Add(absl::StrCat(kCame, size), 1));
  return came == size_ ? store_->CompareExchange(kNews, "", kAllCame).status() : absl::OkStatus();
}

// Of rank 0: waits until all are here, or one says that something is odd, or the deadline. Then it
// asks after each.
absl::StatusOr<std::string> Meeting::Verdict() {
  const absl::StatusOr<std::string> news = store_->Get(kNews, deadline_);
  if (news.ok() && *news == kAllCame) return Go(absl::StrCat(size_));
  if (!news.ok() && !absl::IsDeadlineExceeded(news.status())) return news;
  std::vector<int64_t> absent;
  bool more = false;
  for (int64_t r = 0; r < size_; ++r) {
    more = absl::Now() > deadline_ + kAskingTime;  // of a size that nobody meant
    if (more) break;
    absl::StatusOr<std::string> size;
    do {  // once at least: at the deadline it is asked who is there
      size = store_->Get(CameKey(r), std::min(deadline_, absl::Now() + kSlice));
      const absl::StatusOr<std::string> verdict = store_->Get(kVerdict, absl::InfinitePast());
      if (verdict.ok()) return verdict;
    } while (absl::IsDeadlineExceeded(size.status()) && absl::Now() < deadline_);
    if (absl::IsDeadlineExceeded(size.status())) {
      absent.push_back(r);
    } else if (!size.ok()) {
      return size.status();
    } else if (*size != absl::StrCat(size_)) {
      return OtherSizes(r, *size, absl::StrCat(size_));
    }
  }
  if (absent.empty() && !more) return Go(absl::StrCat(size_));
  return absl::StrCat(RankNames(absent), more ? " and others" : "",
                      " did not come to the launch of ", size_, " processes",
                      server_ == nullptr ? "" : " at " + server_->address());
}

absl::Status Meeting::AwaitAll() {
  DT_RETURN_IF_ERROR(Come());
  if (rank_ == 0) {
    DT_ASSIGN_OR_RETURN(const std::string verdict, Verdict());
    DT_RETURN_IF_ERROR(store_->CompareExchange(kVerdict, "", verdict).status());
  }
  const absl::StatusOr<std::string> verdict = store_->Get(kVerdict, deadline_ + kVerdictLag);
  if (absl::IsDeadlineExceeded(verdict.status())) {
    return absl::DeadlineExceededError(
        absl::StrCat("rank 0 did not come to the launch of ", size_, " processes"));
  }
  if (!verdict.ok()) return verdict.status();
  if (*verdict == Go(absl::StrCat(size_))) return absl::OkStatus();
  if (server_ != nullptr) Close();
  absl::string_view size = *verdict;
  return absl::UnavailableError(
      absl::ConsumePrefix(&size, Go("")) ? OtherSizes(rank_, absl::StrCat(size_), size) : *verdict);
}

// Those who are connected still read.
void Meeting::Close() {
  if (!published_.empty()) (void)unlink(published_.c_str());  // who is late finds nobody
  store_.reset();
  (void)server_->AwaitGoodbyes(kVerdictLag, kVerdictLag);
}

absl::Status Meeting::End() {
  DT_RETURN_IF_ERROR(store_->Set(MetKey(rank_), ""));
  DT_ASSIGN_OR_RETURN(const int64_t met, store_->Add(kMet, 1));
  if (met == size_) DT_RETURN_IF_ERROR(store_->Set(kAllMet, ""));
  requests_ = store_->requests();
  if (server_ == nullptr) return absl::OkStatus();
  const absl::Status all = store_->Get(kAllMet, deadline_ + kVerdictLag).status();
  if (absl::IsDeadlineExceeded(all)) {
    std::vector<int64_t> absent;
    for (int64_t r = 0; r < size_; ++r) {
      if (!store_->Get(MetKey(r), absl::InfinitePast()).ok()) absent.push_back(r);
    }
    return absl::DeadlineExceededError(
        absl::StrCat(RankNames(absent), " did not reach the others"));
  }
  DT_RETURN_IF_ERROR(all);
  requests_ = store_->requests();
  Close();
  return absl::OkStatus();
}

// Who waits for another one gives up at the deadline, as the others do; a cause of one's own comes
// before.
absl::Status Meeting::Failed(const std::string& why) {
  const absl::Status status = absl::UnavailableError(why);
  const bool waited = absl::Now() >= deadline_;
  if (!store_->Set(GaveUpKey(rank_), waited ? "" : why).ok() || !waited) return status;
  const absl::Time until = absl::Now() + kGivingUp;
  std::vector<int64_t> silent;
  for (int64_t r = 0; r < size_; ++r) {
    const absl::StatusOr<std::string> said = store_->Get(GaveUpKey(r), until);
    if (absl::IsDeadlineExceeded(said.status())) {
      silent.push_back(r);
    } else if (!said.ok()) {
      return status;  // rank 0 has ended
    } else if (!said->empty()) {
      return WithCulprit(absl::UnavailableError(absl::StrCat("rank ", r, ": ", *said)), r);
    }
  }
  if (server_ != nullptr) Close();
  if (silent.empty()) return status;
  const absl::Status late = absl::DeadlineExceededError(
      absl::StrCat(RankNames(silent), " did not meet the others while they connect (", why, ")"));
  return silent.size() == 1 ? WithCulprit(late, silent[0]) : late;
}

int Meeting::SetText(void* meeting, const char* key, const void* data, int64_t bytes, char* why,
                     size_t why_size) {
  const absl::string_view value(static_cast<const char*>(data), static_cast<size_t>(bytes));
  const absl::Status set = static_cast<Meeting*>(meeting)->store_->Set(TextKey(key), value);
  snprintf(why, why_size, "%s", std::string(set.message()).c_str());
  return set.ok() ? 0 : 1;
}

int Meeting::GetText(void* meeting, const char* key, void* data, int64_t most, int64_t* bytes,
                     char* why, size_t why_size) {
  const auto* self = static_cast<Meeting*>(meeting);
  const absl::StatusOr<std::string> value = self->store_->Get(TextKey(key), self->deadline_);
  if (!value.ok()) {
    snprintf(why, why_size, "%s", std::string(value.status().message()).c_str());
    return 1;
  }
  *bytes = static_cast<int64_t>(value->size());
  std::memcpy(data, value->data(), static_cast<size_t>(std::min(*bytes, most)));
  return 0;
}

absl::StatusOr<std::unique_ptr<Meeting>> Meeting::Join(const ProcessPlace& place,
                                                       const Environment& environment) {
  DT_ASSIGN_OR_RETURN(MeetingPlace where, FindMeeting(place, environment));
  std::string host = where.host.empty() ? OwnAddress() : "";
  if (host.empty()) {
    DT_ASSIGN_OR_RETURN(host, ResolveHost(where.host));
  }
  std::unique_ptr<Meeting> meeting(new Meeting(place, absl::Now() + where.limit));
  if (place.rank == 0 && !where.file.empty()) {
    DT_ASSIGN_OR_RETURN(where.token, store::NewToken());
  }
  if (place.rank == 0 && !where.served) DT_RETURN_IF_ERROR(meeting->Serve(where, host));
  if (place.rank == 0 && !where.file.empty()) DT_RETURN_IF_ERROR(meeting->Publish(where));
  DT_RETURN_IF_ERROR(meeting->Connect(where, &host));
  meeting->address_ = std::string(TextOf(environment, "DTENSOR_LOCAL_ADDRESS"));
  if (meeting->address_.empty()) {
    DT_ASSIGN_OR_RETURN(meeting->address_, AddressTowards(host));
  }
  DT_RETURN_IF_ERROR(meeting->AwaitAll());
  meeting->table_ = {place.rank,
                     place.size,
                     meeting->address_.c_str(),
                     absl::ToInt64Milliseconds(where.limit),
                     meeting.get(),
                     SetText,
                     GetText};
  return meeting;
}

}  // namespace dtensor

#include "dtensor/mesh/store/tcp_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "dtensor/mesh/local/memory_store.h"
#include "dtensor/mesh/store/deadline.h"
#include "dtensor/mesh/store/frame.h"
#include "dtensor/mesh/store/socket.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

using store::Message;
using store::Op;

namespace {

constexpr absl::Duration kHelloLimit = absl::Seconds(3);
constexpr absl::Duration kPause = absl::Milliseconds(100);  // where the system has no connection
constexpr int64_t kMostStrangers = 256;                     // connected at once
constexpr int64_t kLogged = 16;                             // lines about strangers

absl::Status Unavailable(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat("store: ", what, ": ", strerror(errno)));
}

struct Peer {
  int fd = -1;
  std::string name;                    // where it comes from
  Deadline hello = Deadline::Never();  // until when it says who it is
  bool known = false, bye = false;
  int64_t rank = -1;
  std::string process;                 // of the rank: no other may say that it is this one
  int error = 0;                       // with which it ended
  std::unique_ptr<MemoryStore> store;  // as this rank asks
  std::string in, out;
  bool closed = false;
};

// Who waits for keys.
struct Waiter {
  Peer* peer;
  uint64_t id;
  bool get;  // and wants the value of the only one
  std::vector<std::string> keys;
  Deadline expiry;
};

std::string NameOf(const sockaddr_in& from) {
  char text[INET_ADDRSTRLEN] = "?";
  inet_ntop(AF_INET, &from.sin_addr, text, sizeof(text));
  return absl::StrCat(text, ":", ntohs(from.sin_port));
}

// Two connections of each of many ranks are more than a shell allows at first.
void AllowManyFiles() {
  rlimit files;
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == files.rlim_max) return;
  files.rlim_cur = files.rlim_max;
  (void)setrlimit(RLIMIT_NOFILE, &files);
}

}  // namespace

// Everything in one thread, which only ever waits in poll().
class TcpStoreServer::Loop {
 public:
  Loop(int listener, int wake, TcpServerOptions options)
      : listener_(listener),
        wake_(wake),
        options_(std::move(options)),
        own_(memory_, "the server"),
        thread_([this] { Run(); }) {}
  ~Loop() {
    const uint64_t one = 1;
    (void)!write(wake_, &one, sizeof(one));
    thread_.join();
    for (const auto& peer : peers_) close(peer->fd);
    close(listener_);
    close(wake_);
  }
  int64_t strangers() const { return strangers_.load(); }
  std::map<int64_t, int64_t> Heard() const {
    const std::lock_guard<std::mutex> lock(heard_mutex_);
    return heard_;
  }

 private:
  void Run();
  void Accept();
  void Read(Peer& peer);
  void Parse(Peer& peer);
  void Handle(Peer& peer, const Message& request);
  void Hello(Peer& peer, const Message& request);
  // To who has another token, in a frame without ours.
  void Refuse(Peer& peer);
  // Another connection of the same rank.
  Peer* Twin(const Peer& peer) const;
  void Change(Peer& peer, const Message& request);
  void Await(Peer& peer, const Message& request);
  // Answers who waits for what is there now, or has waited long enough.
  void Serve();
  bool Serve(const Waiter& waiter);
  std::vector<std::string> Missing(const std::vector<std::string>& keys);
  void Reply(Peer& peer, uint64_t id, const absl::Status& status,
             std::vector<std::string> texts = {});
  void Flush(Peer& peer);
  void Drop(Peer& peer, const absl::Status& why);
  void Log(const std::string& text);
  void Bury();
  int Timeout() const;

  const int listener_, wake_;
  const TcpServerOptions options_;
  const std::shared_ptr<SharedMemory> memory_ = std::make_shared<SharedMemory>();
  MemoryStore own_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<Waiter> waiters_;
  bool again_ = false;  // somebody was dropped: look at everything once more
  Deadline accepts_ = Deadline::In(absl::ZeroDuration());  // not before
  bool told_full_ = false;
  std::atomic<int64_t> strangers_{0};
  mutable std::mutex heard_mutex_;
  std::map<int64_t, int64_t> heard_;  // messages by rank, guarded by heard_mutex_
  std::thread thread_;                // last: it uses the others
};

void TcpStoreServer::Loop::Run() {
  while (true) {
    const int listener = accepts_.passed() ? listener_ : -1;  // -1: poll passes over it
    std::vector<pollfd> fds = {{wake_, POLLIN, 0}, {listener, POLLIN, 0}};
    for (const auto& peer : peers_) {
      const int events = peer->out.empty() ? POLLIN : POLLIN | POLLOUT;
      fds.push_back({peer->fd, static_cast<short>(events), 0});
    }
    if (poll(fds.data(), fds.size(), Timeout()) < 0 && errno != EINTR) return;
    if (fds[0].revents != 0) return;
    again_ = false;
    const size_t known = peers_.size();
    for (size_t i = 0; i < known; ++i) {
      if ((fds[i + 2].revents & POLLOUT) != 0) Flush(*peers_[i]);
      if ((fds[i + 2].revents & ~POLLOUT) != 0) Read(*peers_[i]);
    }
    if (fds[1].revents != 0) Accept();
    for (const auto& peer : peers_) {
      if (!peer->known && peer->hello.passed()) {
        Drop(*peer, absl::DeadlineExceededError("it said nothing that makes sense"));
      }
    }
    Bury();
    Serve();
  }
}

// Milliseconds until somebody has waited long enough; -1: nobody waits.
int TcpStoreServer::Loop::Timeout() const {
  if (again_) return 0;
  Deadline next = accepts_.passed() ? Deadline::Never() : accepts_;
  for (const Waiter& waiter : waiters_) next = std::min(next, waiter.expiry);
  for (const auto& peer : peers_) {
    if (!peer->known) next = std::min(next, peer->hello);
  }
  return next.Milliseconds();
}

void TcpStoreServer::Loop::Accept() {
  sockaddr_in from = {};
  socklen_t size = sizeof(from);
  const int fd =
      accept4(listener_, reinterpret_cast<sockaddr*>(&from), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {
    if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) return;
    if (!told_full_) Log(absl::StrCat("cannot take a connection: ", strerror(errno)));
    told_full_ = true;
    accepts_ = Deadline::In(kPause);
    return;
  }
  const auto unknown = [](const auto& peer) { return !peer->known && !peer->closed; };
  if (std::count_if(peers_.begin(), peers_.end(), unknown) >= kMostStrangers) {
    const auto oldest = std::find_if(peers_.begin(), peers_.end(), unknown);
    Drop(**oldest, absl::ResourceExhaustedError("too many connect at once"));
  }
  store::SetOptions(fd, options_.silence);
  auto peer = std::make_unique<Peer>();
  peer->fd = fd;
  peer->name = NameOf(from);
  peer->hello = Deadline::In(kHelloLimit);
  peers_.push_back(std::move(peer));
}

void TcpStoreServer::Loop::Read(Peer& peer) {
  char bytes[1 << 16];
  while (!peer.closed) {
    const ssize_t n = recv(peer.fd, bytes, sizeof(bytes), 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
      peer.error = n == 0 ? 0 : errno;
      return Drop(peer,
                  absl::UnavailableError(n == 0 ? "it closed the connection" : strerror(errno)));
    }
    peer.in.append(bytes, static_cast<size_t>(n));
    Parse(peer);
  }
}

void TcpStoreServer::Loop::Parse(Peer& peer) {
  size_t at = 0;
  while (!peer.closed && peer.in.size() - at >= store::kHeadBytes) {
    const absl::string_view rest = absl::string_view(peer.in).substr(at);
    const size_t most = peer.known ? store::kMostBytes : store::kMostHello;
    const auto size = store::ParseHead(rest, options_.token, most);
    if (absl::IsPermissionDenied(size.status())) Refuse(peer);
    if (!size.ok()) return Drop(peer, size.status());
    if (rest.size() < store::kHeadBytes + *size) break;
    const auto request = store::ParseBody(rest.substr(store::kHeadBytes, *size));
    if (!request.ok()) return Drop(peer, request.status());
    Handle(peer, *request);
    at += store::kHeadBytes + *size;
  }
  peer.in.erase(0, at);
}

void TcpStoreServer::Loop::Handle(Peer& peer, const Message& request) {
  if (peer.known) {
    const std::lock_guard<std::mutex> lock(heard_mutex_);
    ++heard_[peer.rank];
  }
  const auto op = static_cast<Op>(request.code);
  const auto has = [&](size_t texts) { return request.texts.size() == texts; };
  if (!peer.known) {
    if (op == Op::kHello && has(3)) return Hello(peer, request);
  } else if (op == Op::kGet ? has(2) : op == Op::kWait && !request.texts.empty()) {
    return Await(peer, request);
  } else if (op == Op::kSet || op == Op::kAdd
                 ? has(2)
                 : (op == Op::kExchange && has(3)) || (op == Op::kRemove && has(1))) {
    return Change(peer, request);
  } else if (op == Op::kBye) {
    peer.bye = true;
    return;
  }
  Drop(peer, absl::InvalidArgumentError("a message that makes no sense"));
}

Peer* TcpStoreServer::Loop::Twin(const Peer& peer) const {
  for (const auto& other : peers_) {
    if (other.get() != &peer && other->known && !other->closed && other->rank == peer.rank) {
      return other.get();
    }
  }
  return nullptr;
}

void TcpStoreServer::Loop::Refuse(Peer& peer) {
  const std::string nobody(store::kTokenBytes, '\0');
  peer.out +=
      store::Encode({static_cast<uint8_t>(absl::StatusCode::kPermissionDenied), 0, {}}, nobody);
  Flush(peer);
}

// Who asks, as which rank, and which process that is.
void TcpStoreServer::Loop::Hello(Peer& peer, const Message& request) {
  if (!absl::SimpleAtoi(request.texts[1], &peer.rank) || peer.rank < 0) {
    return Drop(peer, absl::InvalidArgumentError("a rank that is no number"));
  }
  peer.process = request.texts[2];
  const Peer* twin = Twin(peer);
  if (twin != nullptr && twin->process != peer.process) {
    const absl::Status taken = absl::AlreadyExistsError(
        absl::StrCat("rank ", peer.rank, " is another process already, at ", twin->name));
    Reply(peer, request.id, taken);
    return Drop(peer, taken);
  }
  peer.known = true;
  {
    const std::lock_guard<std::mutex> lock(heard_mutex_);
    ++heard_[peer.rank];
  }
  peer.store = std::make_unique<MemoryStore>(memory_, request.texts[0]);
  Reply(peer, request.id, absl::OkStatus());
}

void TcpStoreServer::Loop::Change(Peer& peer, const Message& request) {
  const std::vector<std::string>& texts = request.texts;
  absl::StatusOr<std::string> result = "";
  switch (static_cast<Op>(request.code)) {
    case Op::kSet:
      if (absl::Status set = peer.store->Set(texts[0], texts[1]); !set.ok()) result = set;
      break;
    case Op::kAdd: {
      int64_t n = 0;
      if (!absl::SimpleAtoi(texts[1], &n)) {
        return Drop(peer, absl::InvalidArgumentError("a number that is none"));
      }
      const absl::StatusOr<int64_t> sum = peer.store->Add(texts[0], n);
      result = sum.ok() ? absl::StatusOr<std::string>(absl::StrCat(*sum)) : sum.status();
      break;
    }
    case Op::kRemove:
      memory_->Remove(texts[0]);
      break;
    default:
      result = peer.store->CompareExchange(texts[0], texts[1], texts[2]);
  }
  if (!result.ok()) return Reply(peer, request.id, result.status());
  Reply(peer, request.id, absl::OkStatus(), {*result});
}

// Texts: how many milliseconds to wait, and the keys.
void TcpStoreServer::Loop::Await(Peer& peer, const Message& request) {
  int64_t ms = 0;
  if (!absl::SimpleAtoi(request.texts[0], &ms)) {
    return Drop(peer, absl::InvalidArgumentError("a number that is none"));
  }
  const Deadline expiry = ms < 0 ? Deadline::Never() : Deadline::In(absl::Milliseconds(ms));
  Waiter waiter = {&peer,
                   request.id,
                   static_cast<Op>(request.code) == Op::kGet,
                   {request.texts.begin() + 1, request.texts.end()},
                   expiry};
  if (!Serve(waiter)) waiters_.push_back(std::move(waiter));
}

std::vector<std::string> TcpStoreServer::Loop::Missing(const std::vector<std::string>& keys) {
  std::vector<std::string> missing;
  for (const std::string& key : keys) {
    if (!own_.Get(key, absl::InfinitePast()).ok()) missing.push_back(key);
  }
  return missing;
}

bool TcpStoreServer::Loop::Serve(const Waiter& waiter) {
  std::vector<std::string> missing = Missing(waiter.keys);
  if (missing.empty()) {
    std::vector<std::string> texts;
    if (waiter.get) texts.push_back(*own_.Get(waiter.keys[0], absl::InfinitePast()));
    Reply(*waiter.peer, waiter.id, absl::OkStatus(), std::move(texts));
    return true;
  }
  if (!waiter.expiry.passed()) return false;
  Reply(*waiter.peer, waiter.id, absl::DeadlineExceededError("late"), std::move(missing));
  return true;
}

void TcpStoreServer::Loop::Serve() {
  std::erase_if(waiters_, [this](const Waiter& waiter) { return Serve(waiter); });
}

// A reply's first text is the message of its status.
void TcpStoreServer::Loop::Reply(Peer& peer, uint64_t id, const absl::Status& status,
                                 std::vector<std::string> texts) {
  texts.insert(texts.begin(), std::string(status.message()));
  peer.out +=
      store::Encode({static_cast<uint8_t>(status.code()), id, std::move(texts)}, options_.token);
  Flush(peer);
}

void TcpStoreServer::Loop::Flush(Peer& peer) {
  while (!peer.closed && !peer.out.empty()) {
    const ssize_t n = send(peer.fd, peer.out.data(), peer.out.size(), MSG_NOSIGNAL);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n < 0) {
      peer.error = errno;
      return Drop(peer, absl::UnavailableError(strerror(errno)));
    }
    peer.out.erase(0, static_cast<size_t>(n));
  }
}

// Its place stays until Bury: others may be looking at it.
void TcpStoreServer::Loop::Drop(Peer& peer, const absl::Status& why) {
  if (peer.closed) return;
  peer.closed = again_ = true;
  shutdown(peer.fd, SHUT_RDWR);
  if (peer.known && Twin(peer) == nullptr) {
    const std::lock_guard<std::mutex> lock(heard_mutex_);
    heard_.erase(peer.rank);
  }
  if (peer.known && peer.bye) return;
  if (peer.known && absl::IsUnavailable(why)) {
    // While others of its connections are open its process lives.
    if (options_.lost && Twin(peer) == nullptr) options_.lost(own_, peer.rank, peer.error);
    return;
  }
  Log(absl::StrCat("dropped a connection from ", peer.name, ": ", why.message()));
}

void TcpStoreServer::Loop::Log(const std::string& text) {
  const int64_t count = strangers_.fetch_add(1) + 1;
  const std::string line = "store: " + text;
  if (options_.log) {
    options_.log(line);
  } else if (count <= kLogged) {
    fprintf(stderr, "%s%s\n", line.c_str(), count == kLogged ? "; no more are logged" : "");
  }
}

void TcpStoreServer::Loop::Bury() {
  std::erase_if(waiters_, [](const Waiter& waiter) { return waiter.peer->closed; });
  std::erase_if(peers_, [this](const std::unique_ptr<Peer>& peer) {
    if (!peer->closed) return false;
    close(peer->fd);
    return true;
  });
}

TcpStoreServer::TcpStoreServer(std::string address, std::unique_ptr<Loop> loop)
    : address_(std::move(address)), loop_(std::move(loop)) {}
TcpStoreServer::~TcpStoreServer() = default;
int64_t TcpStoreServer::strangers() const { return loop_->strangers(); }

std::map<int64_t, int64_t> TcpStoreServer::Heard() const { return loop_->Heard(); }

bool TcpStoreServer::AwaitGoodbyes(absl::Duration silence, absl::Duration most) const {
  const Deadline end = Deadline::In(most);
  Deadline quiet = Deadline::In(silence);
  std::map<int64_t, int64_t> before = Heard();
  while (!before.empty() && !quiet.passed() && !end.passed()) {
    absl::SleepFor(absl::Milliseconds(1));
    std::map<int64_t, int64_t> now = Heard();
    if (now == before) continue;
    before = std::move(now);
    quiet = Deadline::In(silence);
  }
  return before.empty();
}

absl::StatusOr<std::unique_ptr<TcpStoreServer>> TcpStoreServer::Start(TcpServerOptions options) {
  if (options.token.size() != store::kTokenBytes) {
    return absl::InvalidArgumentError(absl::StrCat("store: a token of ", options.token.size(),
                                                   " bytes; it has ", store::kTokenBytes));
  }
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_port = htons(static_cast<uint16_t>(options.port));
  if (inet_pton(AF_INET, options.address.c_str(), &at.sin_addr) != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("store: \"", options.address, "\" is no IPv4 address"));
  }
  if (at.sin_addr.s_addr == INADDR_ANY) {
    return absl::InvalidArgumentError(
        absl::StrCat("store: ", options.address,
                     " is every address of this machine: give that of "
                     "the interface by which the others reach it"));
  }
  AllowManyFiles();
  const std::string where = absl::StrCat("cannot listen on ", options.address, ":", options.port);
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (listener < 0) return Unavailable(where);
  const int on = 1;
  (void)setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  socklen_t size = sizeof(at);
  const int wake = eventfd(0, EFD_CLOEXEC);
  if (wake < 0 || bind(listener, reinterpret_cast<sockaddr*>(&at), size) != 0 ||
      listen(listener, 1024) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&at), &size) != 0) {
    const absl::Status why = Unavailable(where);
    close(listener);
    if (wake >= 0) close(wake);
    return why;
  }
  const std::string address = absl::StrCat(options.address, ":", ntohs(at.sin_port));
  return std::unique_ptr<TcpStoreServer>(
      new TcpStoreServer(address, std::make_unique<Loop>(listener, wake, std::move(options))));
}

}  // namespace dtensor

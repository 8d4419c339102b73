#include "dtensor/mesh/store/tcp_store.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "dtensor/mesh/store/socket.h"
#include "dtensor/mesh/store/text.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

using store::Message;
using store::Op;

namespace {

constexpr absl::Duration kHurry = absl::Milliseconds(800);
constexpr absl::Duration kRedial = absl::Seconds(5);  // strangers may be in the way

// Until the socket is ready: more than 0, 0 at the deadline.
int Poll(int fd, int16_t events, Deadline deadline) {
  pollfd one = {fd, events, 0};
  int ready;
  do {
    ready = poll(&one, 1, deadline.Milliseconds());
  } while (ready < 0 && errno == EINTR);
  return ready;
}

void Raise(int event) {
  const uint64_t one = 1;
  (void)!write(event, &one, sizeof(one));
}

}  // namespace

struct TcpStore::Connection {
  int fd = -1;
  uint64_t last = 0;  // id of its last request
  std::string in;
  ~Connection() {
    if (fd >= 0) close(fd);
  }
};

TcpStore::TcpStore(std::string address, std::string token, int64_t rank, std::string who,
                   std::string process)
    : address_(std::move(address)),
      token_(std::move(token)),
      who_(std::move(who)),
      process_(std::move(process)),
      rank_(rank),
      fail_event_(eventfd(0, EFD_CLOEXEC)),
      interrupt_event_(eventfd(0, EFD_CLOEXEC)) {}

TcpStore::~TcpStore() {
  for (const auto& connection : idle_) {
    const std::string bye = store::Encode({static_cast<uint8_t>(Op::kBye), 0, {}}, token_);
    (void)!send(connection->fd, bye.data(), bye.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  idle_.clear();
  close(fail_event_);
  close(interrupt_event_);
}

absl::Status TcpStore::Broken(absl::string_view what) const {
  return RankLocal(absl::UnavailableError(
      absl::StrCat("store: ", who_, " and the store at ", address_, ": ", what)));
}

absl::StatusOr<std::unique_ptr<TcpStore>> TcpStore::Try(std::string address, std::string token,
                                                        int64_t rank, std::string who,
                                                        absl::Time deadline) {
  DT_ASSIGN_OR_RETURN(std::string process, store::NewToken());  // no other has it
  std::unique_ptr<TcpStore> store(
      new TcpStore(std::move(address), std::move(token), rank, std::move(who), std::move(process)));
  DT_ASSIGN_OR_RETURN(std::unique_ptr<Connection> first, store->Open(Deadline::At(deadline)));
  store->GiveBack(std::move(first));
  return store;
}

absl::StatusOr<std::unique_ptr<TcpStore>> TcpStore::Connect(std::string address, std::string token,
                                                            int64_t rank, std::string who,
                                                            absl::Time deadline) {
  const Deadline until = Deadline::At(deadline);
  absl::StatusOr<std::unique_ptr<TcpStore>> store = Try(address, token, rank, who, deadline);
  while (absl::IsUnavailable(store.status()) && !until.passed()) {
    absl::SleepFor(std::min(absl::Milliseconds(20), until.left()));
    store = Try(address, token, rank, who, deadline);
  }
  DT_RETURN_IF_ERROR(store.status());
  // The second at once: what this rank has to say when it runs out of files it can say.
  DT_ASSIGN_OR_RETURN(auto second, (*store)->Dial(until));
  (*store)->GiveBack(std::move(second));
  return store;
}

absl::StatusOr<std::unique_ptr<TcpStore::Connection>> TcpStore::Dial(Deadline deadline) {
  while (true) {
    absl::StatusOr<std::unique_ptr<Connection>> connection = Open(deadline);
    if (connection.ok() || deadline.passed() || !absl::IsUnavailable(connection.status())) {
      return connection;
    }
    if (hurries_.load()) deadline = std::min(deadline, Deadline::In(kHurry));
    absl::SleepFor(std::min(absl::Milliseconds(20), deadline.left()));
  }
}

absl::Status TcpStore::Reach(Connection& connection, Deadline deadline) const {
  int error = errno;
  if (error == EINPROGRESS) {
    if (Poll(connection.fd, POLLOUT, deadline) <= 0) return Broken("it cannot be reached in time");
    socklen_t size = sizeof(error);
    getsockopt(connection.fd, SOL_SOCKET, SO_ERROR, &error, &size);
  }
  return error == 0 ? absl::OkStatus() : Broken(strerror(error));
}

absl::StatusOr<std::unique_ptr<TcpStore::Connection>> TcpStore::Open(Deadline deadline) {
  const std::vector<std::string> parts = absl::StrSplit(address_, ':');
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  int port = 0;
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[1], &port) || port < 1 || port > 65535 ||
      inet_pton(AF_INET, parts[0].c_str(), &at.sin_addr) != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("store: \"", address_, "\" is no address; one is 127.0.0.1:40123"));
  }
  at.sin_port = htons(static_cast<uint16_t>(port));
  auto connection = std::make_unique<Connection>();
  connection->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (connection->fd < 0) return Broken(strerror(errno));
  store::SetOptions(connection->fd, absl::Milliseconds(patience_ms_.load()));
  if (connect(connection->fd, reinterpret_cast<sockaddr*>(&at), sizeof(at)) != 0) {
    DT_RETURN_IF_ERROR(Reach(*connection, deadline));
  }
  DT_ASSIGN_OR_RETURN(const Message hello,
                      Ask(*connection, Op::kHello, {who_, absl::StrCat(rank_), process_},
                          Ends::kNever, std::min(deadline, Deadline::In(Patience()))));
  if (hello.code != 0 && !hello.texts.empty()) {
    return absl::Status(static_cast<absl::StatusCode>(hello.code),
                        Broken(hello.texts[0]).message());
  }
  return connection;
}

void TcpStore::SetPatience(absl::Duration patience) {
  patience_ms_.store(absl::ToInt64Milliseconds(patience));
}

absl::Duration TcpStore::Patience() const {
  const absl::Duration patience = absl::Milliseconds(patience_ms_.load());
  return hurries_.load() ? std::min(patience, kHurry) : patience;
}

absl::Status TcpStore::NoAnswer() {
  mute_.store(true);
  return Broken("no reply in time");
}

absl::Status TcpStore::CheckSize(const std::vector<std::string>& texts) const {
  size_t bytes = store::kHeadBytes;
  for (const std::string& text : texts) bytes += text.size() + sizeof(uint64_t);
  if (bytes <= store::kMostBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("store: ", who_, " says ", bytes,
                                                 " bytes at once; at most ", store::kMostBytes));
}

absl::StatusOr<std::unique_ptr<TcpStore::Connection>> TcpStore::Borrow() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      std::unique_ptr<Connection> connection = std::move(idle_.back());
      idle_.pop_back();
      return connection;
    }
  }
  return Dial(Deadline::In(std::min(Patience(), kRedial)));
}

void TcpStore::GiveBack(std::unique_ptr<Connection> connection) {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_.push_back(std::move(connection));
}

absl::Status TcpStore::Send(Connection& connection, absl::string_view frame, Deadline deadline) {
  while (!frame.empty()) {
    const ssize_t n = send(connection.fd, frame.data(), frame.size(), MSG_NOSIGNAL);
    if (n >= 0) {
      frame.remove_prefix(static_cast<size_t>(n));
    } else if (errno == EAGAIN) {
      if (Poll(connection.fd, POLLOUT, deadline) == 0) return NoAnswer();
    } else if (errno != EINTR) {
      return Broken(strerror(errno));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<Message>> TcpStore::TakeReply(Connection& connection, uint64_t id) {
  while (connection.in.size() >= store::kHeadBytes) {
    const auto size = store::ParseHead(connection.in, token_, 2 * store::kMostBytes);
    if (absl::IsPermissionDenied(size.status())) {
      return absl::PermissionDeniedError(
          Broken("it belongs to another launch, with another token").message());
    }
    if (!size.ok()) return Prefixed(Broken("its reply").message(), size.status());
    const size_t whole = store::kHeadBytes + *size;
    if (connection.in.size() < whole) break;
    auto reply =
        store::ParseBody(absl::string_view(connection.in).substr(store::kHeadBytes, *size));
    connection.in.erase(0, whole);
    if (!reply.ok()) return reply.status();
    // Others answer what was asked before and given up.
    if (reply->id == id) return std::optional<Message>(*std::move(reply));
  }
  return std::optional<Message>();
}

absl::StatusOr<Message> TcpStore::Ask(Connection& connection, Op op, std::vector<std::string> texts,
                                      Ends ends, Deadline deadline) {
  const uint64_t id = ++connection.last;
  ++requests_;
  const std::string frame = store::Encode({static_cast<uint8_t>(op), id, std::move(texts)}, token_);
  DT_RETURN_IF_ERROR(Send(connection, frame, std::min(deadline, Deadline::In(Patience()))));
  const int event = ends == Ends::kOnFail ? fail_event_ : interrupt_event_;
  while (true) {
    DT_ASSIGN_OR_RETURN(std::optional<Message> reply, TakeReply(connection, id));
    if (reply) {
      mute_.store(false);
      return *std::move(reply);
    }
    pollfd fds[] = {{connection.fd, POLLIN, 0}, {event, POLLIN, 0}};
    const int ready = poll(fds, ends == Ends::kNever ? 1 : 2, deadline.Milliseconds());
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) return NoAnswer();
    if (fds[0].revents == 0) return absl::CancelledError();
    char bytes[1 << 16];
    const ssize_t n = recv(connection.fd, bytes, sizeof(bytes), 0);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) return Broken(n == 0 ? "it closed the connection" : strerror(errno));
    connection.in.append(bytes, static_cast<size_t>(n));
  }
}

absl::StatusOr<std::vector<std::string>> TcpStore::Call(Op op, std::vector<std::string> texts) {
  DT_RETURN_IF_ERROR(CheckSize(texts));
  if (hurries_.load() && mute()) return NoAnswer();
  DT_ASSIGN_OR_RETURN(std::unique_ptr<Connection> connection, Borrow());
  DT_ASSIGN_OR_RETURN(Message reply, Ask(*connection, op, std::move(texts), Ends::kNever,
                                         Deadline::In(Patience())));
  GiveBack(std::move(connection));
  if (reply.texts.empty()) return Broken("a reply that makes no sense");
  if (reply.code != 0) {
    return absl::Status(static_cast<absl::StatusCode>(reply.code), reply.texts[0]);
  }
  reply.texts.erase(reply.texts.begin());
  return std::move(reply.texts);
}

absl::Status TcpStore::Failed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failed_;
}

absl::StatusOr<std::vector<std::string>> TcpStore::Await(Op op, std::vector<std::string> keys,
                                                         absl::Time deadline, Ends ends) {
  const absl::Time start = absl::Now();
  const Deadline end = Deadline::At(deadline);
  DT_RETURN_IF_ERROR(CheckSize(keys));
  if (ends != Ends::kOnInterrupt && hurries_.load() && mute()) return NoAnswer();
  DT_ASSIGN_OR_RETURN(std::unique_ptr<Connection> connection, Borrow());
  while (true) {
    const absl::Status failed = ends == Ends::kOnFail ? Failed() : absl::OkStatus();
    const Deadline until = failed.ok() ? end : Deadline::In(absl::ZeroDuration());
    std::vector<std::string> texts = keys;
    texts.insert(texts.begin(), absl::StrCat(until.Milliseconds()));
    const Deadline limit = Deadline::In(
        until.left() +
        (ends == Ends::kOnInterrupt ? absl::Milliseconds(patience_ms_.load()) : Patience()));
    auto reply = Ask(*connection, op, std::move(texts), failed.ok() ? ends : Ends::kNever, limit);
    if (absl::IsCancelled(reply.status()) && ends == Ends::kOnFail) continue;  // once more
    if (absl::IsCancelled(reply.status())) {
      GiveBack(std::move(connection));
      return reply.status();
    }
    if (!reply.ok()) return reply.status();
    GiveBack(std::move(connection));
    std::vector<std::string> rest = std::move(reply->texts);
    if (rest.empty()) return Broken("a reply that makes no sense");
    rest.erase(rest.begin());
    if (reply->code == 0) return rest;
    const std::string what = store::KeyNames(rest);
    if (failed.ok()) return store::Late(who_, what, start, deadline);
    return Prefixed(absl::StrCat("store: ", who_, " waited for ", what), failed);
  }
}

absl::Status TcpStore::Set(Key key, absl::string_view value) {
  return Call(Op::kSet, {std::string(key), std::string(value)}).status();
}

absl::StatusOr<std::string> TcpStore::Get(Key key, absl::Time deadline) {
  return AwaitOne(key, deadline, Ends::kOnFail);
}

absl::StatusOr<std::string> TcpStore::GetAlways(Key key, absl::Time deadline) {
  return AwaitOne(key, deadline, Ends::kNever);
}

absl::StatusOr<std::string> TcpStore::Watch(Key key, absl::Duration at_most) {
  return AwaitOne(key, absl::Now() + at_most, Ends::kOnInterrupt);
}

absl::StatusOr<std::string> TcpStore::AwaitOne(Key key, absl::Time deadline, Ends ends) {
  DT_ASSIGN_OR_RETURN(std::vector<std::string> texts,
                      Await(Op::kGet, {std::string(key)}, deadline, ends));
  return texts.empty() ? absl::StatusOr<std::string>(Broken("a reply that makes no sense"))
                       : std::move(texts[0]);
}

absl::Status TcpStore::Wait(absl::Span<const std::string> keys, absl::Time deadline) {
  return Await(Op::kWait, {keys.begin(), keys.end()}, deadline, Ends::kOnFail).status();
}

absl::Status TcpStore::Remove(Key key) { return Call(Op::kRemove, {std::string(key)}).status(); }

absl::StatusOr<int64_t> TcpStore::Add(Key key, int64_t n) {
  DT_ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                      Call(Op::kAdd, {std::string(key), absl::StrCat(n)}));
  int64_t sum = 0;
  if (texts.empty() || !absl::SimpleAtoi(texts[0], &sum)) {
    return Broken("a reply that makes no sense");
  }
  return sum;
}

absl::StatusOr<std::string> TcpStore::CompareExchange(Key key, absl::string_view expected,
                                                      absl::string_view desired) {
  DT_ASSIGN_OR_RETURN(
      std::vector<std::string> texts,
      Call(Op::kExchange, {std::string(key), std::string(expected), std::string(desired)}));
  return texts.empty() ? absl::StatusOr<std::string>(Broken("a reply that makes no sense"))
                       : std::move(texts[0]);
}

void TcpStore::Interrupt() { Raise(interrupt_event_); }

void TcpStore::Fail(const absl::Status& why) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_.ok()) failed_ = why;
  }
  Raise(fail_event_);
}

}  // namespace dtensor

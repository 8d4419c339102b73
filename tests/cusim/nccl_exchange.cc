#include "tests/cusim/nccl_exchange.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <random>
#include <type_traits>

namespace cusim::nccl {
namespace {

static_assert(std::is_trivially_copyable_v<Note>);

// In the abstract namespace: it begins with a null byte.
struct Address {
  sockaddr_un name = {};
  socklen_t bytes = 0;
  Address(const std::string& exchange, int rank) {
    const std::string text = exchange + "/" + std::to_string(rank);
    if (text.size() >= sizeof name.sun_path) return;
    name.sun_family = AF_UNIX;
    std::memcpy(name.sun_path + 1, text.data(), text.size());
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

int NewSocket() { return socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }

uint64_t TokenOfThis() {
  static const uint64_t token = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random() | 1;
  }();
  return token;
}

}  // namespace

Exchange::~Exchange() {
  for (const auto& [rank, socket] : listeners_) close(socket);
  for (const Link& link : links_) close(link.socket);
}

bool Exchange::Listen(int rank) {
  const Address address(name_, rank);
  const int socket = NewSocket();
  if (bind(socket, address.get(), address.bytes) != 0 || listen(socket, 128) != 0) {
    close(socket);
    return false;
  }
  listeners_[rank] = socket;
  return true;
}

void Exchange::Seek(int rank) {
  for (const Link& link : links_) {
    if (link.sought == rank) return;
  }
  const Address address(name_, rank);
  const int socket = NewSocket();
  if (connect(socket, address.get(), address.bytes) != 0) {
    close(socket);
    return;
  }
  Begin(socket, rank);
}

void Exchange::Begin(int socket, int sought) {
  links_.emplace_back();
  links_.back().socket = socket;
  links_.back().sought = sought;
  for (const Note& join : joined_) {
    links_.back().out.append(reinterpret_cast<const char*>(&join), sizeof join);
  }
  Write(&links_.back());
}

void Exchange::Tell(Note note, const void* data, int to) {
  note.token = TokenOfThis();
  const auto tell = [&](Link* link) {
    link->out.append(reinterpret_cast<const char*>(&note), sizeof note);
    if (note.bytes != 0) link->out.append(static_cast<const char*>(data), note.bytes);
    Write(link);
  };
  if (note.what == Note::kJoin) {  // on every connection: some have not said whose they are
    joined_.push_back(note);
    for (Link& link : links_) tell(&link);
    return;
  }
  if (to == kAll) {
    for (const auto& [token, link] : ways_) tell(link);
    return;
  }
  const auto peer = peers_.find(to);
  const auto way = peer == peers_.end() ? ways_.end() : ways_.find(peer->second.token);
  if (way != ways_.end()) tell(way->second);
}

void Exchange::Write(Link* link) {
  size_t& sent = link->sent;
  while (sent < link->out.size()) {
    const ssize_t n =
        send(link->socket, link->out.data() + sent, link->out.size() - sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    sent = n < 0 ? link->out.size() : sent + static_cast<size_t>(n);  // nobody reads it any more
  }
  link->out.clear();
  sent = 0;
}

bool Exchange::Read(Link* link) {
  char buffer[1 << 16];
  for (;;) {
    const ssize_t n = recv(link->socket, buffer, sizeof buffer, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return true;
    if (n <= 0) return false;
    link->in.append(buffer, static_cast<size_t>(n));
  }
}

void Exchange::Take(Link* link, const Hear& hear) {
  size_t at = 0;
  for (Note note; link->in.size() - at >= sizeof note;) {
    std::memcpy(&note, link->in.data() + at, sizeof note);
    if (link->in.size() - at - sizeof note < note.bytes) break;
    link->token = note.token;
    ways_.emplace(note.token, link);
    if (note.what == Note::kJoin) peers_[note.rank] = {note.token, note.process};
    if (note.what == Note::kLeave) peers_.erase(note.rank);
    hear(note, link->in.data() + at + sizeof note);
    at += sizeof note + note.bytes;
  }
  link->in.erase(0, at);
}

void Exchange::Lose(uint64_t token, const Hear& hear) {
  for (auto it = peers_.begin(); it != peers_.end();) {
    if (it->second.token != token) {
      ++it;
      continue;
    }
    Note gone{Note::kLeave, it->first};
    gone.gone = true;
    std::snprintf(gone.left, sizeof gone.left, "its process %d is gone", it->second.process);
    it = peers_.erase(it);
    hear(gone, nullptr);
  }
}

void Exchange::Pump(const Hear& hear) {
  for (const auto& [rank, listener] : listeners_) {
    for (int socket;
         (socket = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
      Begin(socket, -1);
    }
  }
  for (auto it = links_.begin(); it != links_.end();) {
    Link* const link = &*it++;
    Write(link);
    const bool lives = Read(link);
    Take(link, hear);
    if (lives) continue;
    const uint64_t token = link->token;
    const auto way = ways_.find(token);
    if (way != ways_.end() && way->second == link) ways_.erase(way);
    close(link->socket);
    links_.remove_if([&](const Link& other) { return &other == link; });
    const bool last = std::none_of(links_.begin(), links_.end(),
                                   [&](const Link& other) { return other.token == token; });
    if (token != 0 && last) Lose(token, hear);
  }
}

bool Exchange::told() const {
  return std::all_of(links_.begin(), links_.end(), [](const Link& l) { return l.out.empty(); });
}

void Exchange::AddTo(std::vector<pollfd>* polls) const {
  for (const auto& [rank, socket] : listeners_) polls->push_back({socket, POLLIN, 0});
  for (const Link& link : links_) {
    const int wanted = link.out.empty() ? POLLIN : POLLIN | POLLOUT;
    polls->push_back({link.socket, static_cast<short>(wanted), 0});
  }
}

}  // namespace cusim::nccl

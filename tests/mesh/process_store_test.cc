// The store of ranks that are processes: the contract; strangers, garbage and ranks that vanish.
#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "dtensor/mesh/store/frame.h"
#include "dtensor/mesh/store/socket.h"
#include "dtensor/mesh/store/tcp_server.h"
#include "dtensor/mesh/store/tcp_store.h"
#include "dtensor/tensor/status.h"
#include "gmock/gmock.h"
#include "tests/common/thin.h"
#include "tests/mesh/store_contract.h"

namespace dtensor {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

struct Served {
  std::string token;
  std::unique_ptr<TcpStoreServer> server;
  std::unique_ptr<TcpStore> Connect(int64_t rank) const {
    return ValueOrThrow(
        TcpStore::Connect(server->address(), token, rank, absl::StrCat("rank ", rank), Soon()));
  }
};

// Lines about strangers come to `log`, ranks that vanish are set as "lost/<rank>".
Served Serve(std::function<void(const std::string&)> log = nullptr) {
  Served served{ValueOrThrow(store::NewToken()), nullptr};
  TcpServerOptions options{.token = served.token};
  options.lost = [](Store& store, int64_t rank, int) {
    EXPECT_TRUE(store.Set(absl::StrCat("lost/", rank), "").ok());
  };
  options.log = std::move(log);
  served.server = ValueOrThrow(TcpStoreServer::Start(std::move(options)));
  return served;
}

// A handle that keeps its server.
class ServedStore : public Store {
 public:
  ServedStore(std::shared_ptr<Served> served, int rank)
      : served_(std::move(served)), store_(served_->Connect(rank)) {}
  absl::Status Set(Key key, absl::string_view value) override { return store_->Set(key, value); }
  absl::StatusOr<std::string> Get(Key key, absl::Time t) override { return store_->Get(key, t); }
  absl::Status Wait(absl::Span<const std::string> keys, absl::Time t) override {
    return store_->Wait(keys, t);
  }
  absl::StatusOr<int64_t> Add(Key key, int64_t n) override { return store_->Add(key, n); }
  absl::StatusOr<std::string> CompareExchange(Key key, absl::string_view expected,
                                              absl::string_view desired) override {
    return store_->CompareExchange(key, expected, desired);
  }

 private:
  const std::shared_ptr<Served> served_;
  const std::unique_ptr<TcpStore> store_;
};

std::vector<std::unique_ptr<Store>> TcpStores(int ranks) {
  const auto served = std::make_shared<Served>(Serve());
  std::vector<std::unique_ptr<Store>> stores;
  for (int r = 0; r < ranks; ++r) stores.push_back(std::make_unique<ServedStore>(served, r));
  return stores;
}

INSTANTIATE_TEST_SUITE_P(Tcp, StoreContract, ::testing::Values(&TcpStores));

TEST(TcpStore, RefusesAnAddressThatIsNone) {
  const std::string token(store::kTokenBytes, 't');
  for (const std::string address : {"", "here", "127.0.0.1", "127.0.0.1:x", "1.2.3:4", ":80"}) {
    EXPECT_EQ(TcpStore::Connect(address, token, 0, "rank 0", Soon()).status().code(),
              StatusCode::kInvalidArgument)
        << address;
  }
  const absl::Status nobody =
      TcpStore::Connect("127.0.0.1:1", token, 3, "rank 3", absl::Now()).status();
  EXPECT_EQ(nobody.code(), StatusCode::kUnavailable);
  EXPECT_THAT(std::string(nobody.message()), HasSubstr("rank 3 and the store at 127.0.0.1:1"));
  EXPECT_EQ(TcpStoreServer::Start({.token = token, .address = "nowhere"}).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(TcpStoreServer::Start({.token = "short"}).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_THAT(
      std::string(
          TcpStoreServer::Start({.token = token, .address = "192.0.2.1"}).status().message()),
      HasSubstr("cannot listen on 192.0.2.1:0"));
}

TEST(TcpStore, StrangersAreDroppedAndLogged) {
  std::mutex mutex;
  std::string log;
  const Served served = Serve([&](const std::string& line) {
    const std::lock_guard<std::mutex> lock(mutex);
    log += line;
  });
  const auto store = served.Connect(0);
  const std::string other(store::kTokenBytes, 'x');
  const absl::Time start = absl::Now();
  const absl::Status refused =
      TcpStore::Connect(served.server->address(), other, 1, "rank 1", start + absl::Seconds(10))
          .status();
  EXPECT_EQ(refused.code(), StatusCode::kPermissionDenied) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("another launch, with another token"));
  EXPECT_LT(absl::Now() - start, absl::Seconds(1));  // it is not tried again
  while (served.server->strangers() < 1) absl::SleepFor(absl::Milliseconds(1));
  const std::lock_guard<std::mutex> lock(mutex);
  EXPECT_THAT(log, HasSubstr("dropped a connection from 127.0.0.1:"));
  EXPECT_THAT(log, HasSubstr("it has another token"));
  EXPECT_TRUE(store->Set("a", "b").ok());
}

// A connection of whoever, at the address of the server.
void Connect(int fd, const std::string& address) {
  const std::vector<std::string> parts = absl::StrSplit(address, ':');
  sockaddr_in at = {};
  int port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(parts[1], &port));
  at.sin_family = AF_INET;
  at.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, parts[0].c_str(), &at.sin_addr);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&at), sizeof(at)), 0);
}
int ConnectTo(const std::string& address) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  Connect(fd, address);
  return fd;
}

// One of a process that says it is rank 5.
int ConnectAsRank5(const Served& served, const std::string& process) {
  const int fd = ConnectTo(served.server->address());
  const std::string hello = store::Encode(
      {static_cast<uint8_t>(store::Op::kHello), 1, {"rank 5", "5", process}}, served.token);
  EXPECT_EQ(send(fd, hello.data(), hello.size(), 0), static_cast<ssize_t>(hello.size()));
  char reply[8];
  EXPECT_GT(recv(fd, reply, sizeof(reply), 0), 0);
  return fd;
}

TEST(TcpStore, ARankIsLostWithItsLastConnection) {
  const Served served = Serve();
  const auto store = served.Connect(0);
  const int first = ConnectAsRank5(served, "a"), second = ConnectAsRank5(served, "a");
  EXPECT_TRUE(served.server->Heard().contains(5));
  close(first);
  EXPECT_FALSE(store->Get("lost/5", absl::Now() + absl::Milliseconds(100)).ok());
  EXPECT_TRUE(served.server->Heard().contains(5));
  close(second);
  EXPECT_TRUE(store->Get("lost/5", Soon()).ok());
  EXPECT_FALSE(served.server->Heard().contains(5));
}

TEST(TcpStore, ARankIsOneProcess) {
  const Served served = Serve([](const std::string&) {});
  const int fd = ConnectAsRank5(served, "a");
  const absl::Status taken =
      TcpStore::Connect(served.server->address(), served.token, 5, "rank 5", Soon()).status();
  EXPECT_EQ(taken.code(), StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(taken.message()),
              HasSubstr("rank 5 is another process already, at 127."));
  close(fd);
}

// It is refused before a byte is said, and harms nobody.
TEST(TcpStore, AValueThatIsTooLargeIsAnErrorOfTheCall) {
  const Served served = Serve();
  const auto store = served.Connect(1), other = served.Connect(0);
  const absl::Status refused = store->Set("x", std::string(65 << 20, 'a'));
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("at most 67108864"));
  EXPECT_FALSE(other->Get("lost/1", absl::Now() + absl::Milliseconds(50)).ok());
  EXPECT_TRUE(store->Set("x", std::string(60 << 20, 'a')).ok());
  EXPECT_TRUE(store->Remove("x").ok());
  EXPECT_FALSE(other->Get("x", absl::Now()).ok());
}

// As many strangers as there may be, and more, who say nothing.
TEST(TcpStore, SilentStrangersKeepNobodyOut) {
  const Served served = Serve([](const std::string&) {});
  std::vector<int> silent;
  for (int i = 0; i < 300; ++i) silent.push_back(ConnectTo(served.server->address()));
  for (int r = 0; r < 20; ++r) {
    const auto store = served.Connect(r);
    EXPECT_EQ(*store->Add("count", 1), r + 1);
  }
  for (const int fd : silent) close(fd);
}

// Where the process has no files left it says so once, does not spin, and goes on later.
TEST(TcpStore, WithoutFilesTheServerWaits) {
  std::mutex mutex;
  std::string log;
  const Served served = Serve([&](const std::string& line) {
    const std::lock_guard<std::mutex> lock(mutex);
    log += line + "\n";
  });
  // All that may be open is, so that the server cannot take who knocks.
  const int client = socket(AF_INET, SOCK_STREAM, 0);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few = {static_cast<rlim_t>(client) + 1, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<int> fds = {client};
  for (int fd = dup(0); fd >= 0; fd = dup(0)) fds.push_back(fd);
  Connect(client, served.server->address());
  const auto said = [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    return !log.empty();
  };
  for (int i = 0; i < 1000 && !said(); ++i) absl::SleepFor(absl::Milliseconds(10));
  const clock_t start = clock();
  absl::SleepFor(absl::Milliseconds(400));
  EXPECT_LT(clock() - start, CLOCKS_PER_SEC / 5);
  for (const int fd : fds) close(fd);
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_TRUE(served.Connect(0)->Set("a", "b").ok());
  const std::lock_guard<std::mutex> lock(mutex);
  const std::vector<std::string> told = absl::StrSplit(log, "cannot take a connection: Too many");
  EXPECT_EQ(told.size(), 2u) << log;
}

// Ranks have two connections each: what a shell allows at first would not do for many.
TEST(TcpStore, MoreRanksThanFilesAreAllowedAtFirst) {
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few = {64, before.rlim_max};
  if (before.rlim_max < 400) GTEST_SKIP() << "may open " << before.rlim_max << " files, needs 400";
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  {
    const Served served = Serve();
    std::vector<std::unique_ptr<TcpStore>> ranks;
    for (int r = 0; r < 80; ++r) {
      ranks.push_back(served.Connect(r));
      EXPECT_EQ(*ranks.back()->Add("count", 1), r + 1);
    }
  }
  setrlimit(RLIMIT_NOFILE, &before);
}

TEST(TcpStore, ConnectKeepsItsDeadline) {
  const std::string token(store::kTokenBytes, 't');
  const int silent = socket(AF_INET, SOCK_STREAM, 0);  // takes connections and says nothing
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(at);
  ASSERT_EQ(bind(silent, reinterpret_cast<sockaddr*>(&at), size), 0);
  ASSERT_EQ(listen(silent, 8), 0);
  ASSERT_EQ(getsockname(silent, reinterpret_cast<sockaddr*>(&at), &size), 0);
  for (const std::string& address :
       {absl::StrCat("127.0.0.1:", ntohs(at.sin_port)), std::string("192.0.2.1:80")}) {
    const absl::Time start = absl::Now();
    EXPECT_EQ(TcpStore::Connect(address, token, 0, "rank 0", start + absl::Milliseconds(300))
                  .status()
                  .code(),
              StatusCode::kUnavailable);
    EXPECT_LT(absl::Now() - start, absl::Seconds(2)) << address;
  }
  close(silent);
}

TEST(TcpStore, ARankThatVanishesIsNoticedAtOnce) {
  const Served served = Serve();
  const auto store = served.Connect(0);
  {
    const auto leaves = served.Connect(1);
  }  // says goodbye
  const auto stays = served.Connect(2);
  // The connection of a process that is killed: closed without a word.
  close(ConnectAsRank5(served, "a process"));
  const absl::Time start = absl::Now();
  EXPECT_TRUE(store->Get("lost/5", Soon()).ok());
  EXPECT_LT(absl::Now() - start, absl::Seconds(1));
  EXPECT_FALSE(store->Get("lost/1", absl::Now()).ok());
  EXPECT_FALSE(store->Get("lost/2", absl::Now()).ok());
}

// A machine that answers nothing cannot be made here: what the system is asked to do about it.
TEST(TcpStore, SilenceIsWhatTheSystemIsAskedFor) {
  const auto asked = [](absl::Duration silence) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    store::SetOptions(fd, silence);
    std::vector<int> got;
    for (const auto& [level, name] :
         std::vector<std::pair<int, int>>{{SOL_SOCKET, SO_KEEPALIVE},
                                          {IPPROTO_TCP, TCP_KEEPIDLE},
                                          {IPPROTO_TCP, TCP_KEEPINTVL},
                                          {IPPROTO_TCP, TCP_KEEPCNT},
                                          {IPPROTO_TCP, TCP_USER_TIMEOUT},
                                          {IPPROTO_TCP, TCP_NODELAY}}) {
      int value = -1;
      socklen_t size = sizeof(value);
      getsockopt(fd, level, name, &value, &size);
      got.push_back(value);
    }
    close(fd);
    return got;
  };
  EXPECT_EQ(asked(absl::Seconds(20)), (std::vector<int>{1, 5, 5, 3, 20000, 1}));
  EXPECT_EQ(asked(absl::Milliseconds(1)), (std::vector<int>{1, 1, 1, 3, 1000, 1}));
  EXPECT_EQ(asked(absl::InfiniteDuration()), (std::vector<int>{1, 30000, 30000, 3, 1 << 30, 1}));
}

TEST(TcpStore, WaitsEndWhenItFails) {
  const Served served = Serve();
  const auto store = served.Connect(4);
  std::thread failing([&] {
    absl::SleepFor(absl::Milliseconds(20));
    store->Fail(absl::AbortedError("rank 1 failed: disk on fire"));
  });
  const absl::Status ended = store->Get("never", absl::InfiniteFuture()).status();
  failing.join();
  EXPECT_EQ(ended.code(), StatusCode::kAborted);
  EXPECT_EQ(ended.message(), "store: rank 4 waited for key \"never\": rank 1 failed: disk on fire");
  EXPECT_TRUE(store->Set("there", "x").ok());  // what waits for nobody goes on
  EXPECT_EQ(*store->Get("there", Soon()), "x");
  std::thread interrupting([&] {
    absl::SleepFor(absl::Milliseconds(20));
    store->Interrupt();
  });
  EXPECT_EQ(store->Watch("never", absl::InfiniteDuration()).status().code(),
            StatusCode::kCancelled);
  interrupting.join();
  EXPECT_EQ(*store->Get("there", Soon()), "x");
}

TEST(TcpStore, TheEndOfTheServerIsAnError) {
  Served served = Serve();
  const auto store = served.Connect(4);
  std::thread ending([&] {
    absl::SleepFor(absl::Milliseconds(20));
    served.server.reset();
  });
  const absl::Status ended = store->Get("never", absl::InfiniteFuture()).status();
  ending.join();
  EXPECT_EQ(ended.code(), StatusCode::kUnavailable) << ended;
  EXPECT_THAT(std::string(ended.message()), HasSubstr("rank 4 and the store at 127.0.0.1:"));
}

// Takes one connection to another address and passes on what either side says, as long as it lives;
// then it ends the connection as a machine does that goes down: the end first, and that nobody is
// there any more.
class Relay {
 public:
  explicit Relay(int to_port)
      : listening_(socket(AF_INET, SOCK_STREAM, 0)), there_(socket(AF_INET, SOCK_STREAM, 0)) {
    const sockaddr_in to = Loopback(to_port);
    EXPECT_EQ(connect(there_, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
    sockaddr_in at = Loopback(0);
    socklen_t size = sizeof(at);
    EXPECT_EQ(bind(listening_, reinterpret_cast<sockaddr*>(&at), size), 0);
    EXPECT_EQ(listen(listening_, 1), 0);
    EXPECT_EQ(getsockname(listening_, reinterpret_cast<sockaddr*>(&at), &size), 0);
    address_ = absl::StrCat("127.0.0.1:", ntohs(at.sin_port));
    passing_ = std::thread([this] { Pass(); });
  }
  ~Relay() {
    shutdown(there_, SHUT_RDWR);
    passing_.join();
    shutdown(here_, SHUT_WR);
    const linger reset = {1, 0};
    setsockopt(here_, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    for (const int fd : {here_, there_, listening_}) close(fd);
  }
  const std::string& address() const { return address_; }

 private:
  static sockaddr_in Loopback(int port) {
    sockaddr_in at = {};
    at.sin_family = AF_INET;
    at.sin_port = htons(static_cast<uint16_t>(port));
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return at;
  }
  void Pass() {
    here_ = accept(listening_, nullptr, nullptr);
    pollfd sides[2] = {{here_, POLLIN, 0}, {there_, POLLIN, 0}};
    while (poll(sides, 2, -1) > 0) {
      for (int side : {0, 1}) {
        if (sides[side].revents == 0) continue;
        char bytes[4096];
        const ssize_t n = recv(sides[side].fd, bytes, sizeof(bytes), 0);
        if (n <= 0) return;
        EXPECT_EQ(send(sides[1 - side].fd, bytes, static_cast<size_t>(n), MSG_NOSIGNAL), n);
      }
    }
  }

  const int listening_, there_;
  int here_ = -1;
  std::string address_;
  std::thread passing_;
};

// Nobody hears the last word of a client whose server's machine went down: no signal either, which
// would end the process.
TEST(TcpStore, TheLastWordToOneThatIsGoneEndsNobody) {
  const Served served = Serve();
  int port = 0;
  ASSERT_TRUE(absl::SimpleAtoi(served.server->address().substr(10), &port));
  auto relay = std::make_unique<Relay>(port);
  auto store = ValueOrThrow(TcpStore::Try(relay->address(), served.token, 0, "rank 0", Soon()));
  EXPECT_TRUE(store->Set("heard", "yes").ok());
  relay.reset();
  store.reset();
  const auto other = served.Connect(1);
  EXPECT_EQ(*other->Get("heard", Soon()), "yes");
}

// Connections that say anything at all: random bytes, frames of another token, frames that are cut
// or longer than they say, with the right token too. The ranks' calls go on and are right.
TEST(TcpStore, GarbageIsNoDanger) {
  const int messages = testing::Thorough() ? 1000000 : 10000;
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  const Served served = Serve([](const std::string&) {});
  const auto store = served.Connect(0);
  std::atomic<bool> done{false};
  std::thread worker([&] {
    for (int64_t i = 1; !done.load(); ++i) ASSERT_EQ(*store->Add("count", 1), i);
  });
  int port = 0;
  ASSERT_TRUE(absl::SimpleAtoi(served.server->address().substr(10), &port));
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_port = htons(static_cast<uint16_t>(port));
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::mt19937 random(seed);
  for (int said = 0; said < messages;) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&at), sizeof(at)), 0);
    const linger reset = {1, 0};  // else thousands of ports would be kept for a minute
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    for (int k = 0; k < 8 && said < messages; ++k, ++said) {
      store::Message message{static_cast<uint8_t>(random() % 9), random(), {}};
      for (uint32_t t = random() % 4; t > 0; --t) {
        message.texts.emplace_back(random() % 40, static_cast<char>(random()));
      }
      std::string bytes =
          store::Encode(message, random() % 2 ? served.token : std::string(32, 'q'));
      for (uint32_t flips = random() % 3; flips > 0; --flips) {
        bytes[random() % bytes.size()] = static_cast<char>(random());
      }
      if (random() % 4 == 0) bytes.resize(random() % bytes.size());
      if (random() % 8 == 0) {
        for (char& c : bytes) c = static_cast<char>(random());
      }
      if (send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) break;  // dropped already
    }
    close(fd);
    ++said;
  }
  done = true;
  worker.join();
  EXPECT_GT(served.server->strangers(), 0);
  EXPECT_TRUE(store->Set("still", "here").ok());
}

}  // namespace
}  // namespace dtensor

// DtMessages over gloo's TCP transport.
#include "dtensor/mesh/process/messages.h"

#include <gloo/config.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/unbound_buffer.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using gloo::transport::tcp::UnboundBuffer;
using Clock = std::chrono::steady_clock;

// A connection that ends says only that; the store, which hears of every process's end, says whose
// process is gone and why. It has the first word, for so long.
constexpr std::chrono::seconds kFirstWord(5);

// Never destroyed: a program may end in the middle of messages.
gloo::rendezvous::Context* context = nullptr;

int Failed(const std::exception& error, char* why, size_t why_size) {
  snprintf(why, why_size, "%s", error.what());
  return 1;
}

// All that is asked of gloo about a message under way. Its own functions wait, and close every
// connection when they have waited for long enough.
struct Look : UnboundBuffer {
  static bool Done(UnboundBuffer& buffer, bool receives) {
    const std::lock_guard<std::mutex> lock(buffer.*&Look::m_);
    (buffer.*&Look::throwIfException)();
    return buffer.*(receives ? &Look::recvCompletions_ : &Look::sendCompletions_) > 0;
  }
  static void Wait(UnboundBuffer& buffer, bool receives, std::chrono::microseconds most) {
    std::unique_lock<std::mutex> lock(buffer.*&Look::m_);
    (buffer.*(receives ? &Look::recvCv_ : &Look::sendCv_)).wait_for(lock, most, [&] {
      return buffer.*(receives ? &Look::recvCompletions_ : &Look::sendCompletions_) > 0 ||
             buffer.*&Look::ex_ != nullptr;
    });
  }
};

struct Request {
  std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
  bool receives = false;
  std::string failed;  // why it will never be done
  Clock::time_point since{};

  void Fail(const std::exception& error) {
    if (!failed.empty()) return;
    failed = error.what();
    since = Clock::now();
  }
  bool Done() {
    if (!failed.empty()) return false;
    try {
      return Look::Done(static_cast<UnboundBuffer&>(*buffer), receives);
    } catch (const std::exception& error) {
      Fail(error);
      return false;
    }
  }
};

// gloo's store, of texts in that of the launch. Its processes set texts of their own, the same
// number of them in the same order, and then ask for those of all others. So what they set is
// exchanged at once, along a tree of processes: each asks the launch's store a few times, and not
// once for every other.
class Texts : public gloo::rendezvous::Store {
 public:
  explicit Texts(const DtMeeting& meeting) : meeting_(meeting) {}

  // Every Get has the meeting's deadline.
  void set(const std::string& key, const std::vector<char>& data) override {
    Known all = {{key, data}};
    const std::string round = std::to_string(round_++) + "/";
    const int64_t rank = meeting_.rank;
    for (const int64_t below : {2 * rank + 1, 2 * rank + 2}) {
      if (below < meeting_.size) all.merge(Parted(Get(round + std::to_string(below))));
    }
    Set(round + (rank == 0 ? "all" : std::to_string(rank)), Joined(all));
    known_.merge(rank == 0 ? std::move(all) : Parted(Get(round + "all")));
  }

  std::vector<char> get(const std::string& key) override {
    const auto it = known_.find(key);
    if (it == known_.end()) throw std::runtime_error("no process has set " + key);
    return it->second;
  }

  void wait(const std::vector<std::string>&) override {}
  void wait(const std::vector<std::string>&, const std::chrono::milliseconds&) override {}

 private:
  using Known = std::map<std::string, std::vector<char>>;

  // Sizes and bytes of keys and texts, one after the other.
  static std::string Joined(const Known& known) {
    std::string all;
    const auto add = [&](const char* bytes, uint64_t size) {
      all.append(reinterpret_cast<const char*>(&size), sizeof(size)).append(bytes, size);
    };
    for (const auto& [key, data] : known) {
      add(key.data(), key.size());
      add(data.data(), data.size());
    }
    return all;
  }
  static Known Parted(const std::string& all) {
    Known known;
    size_t at = 0;
    const auto take = [&] {
      uint64_t size = 0;
      std::memcpy(&size, &all.at(at), sizeof(size));
      std::string bytes = all.substr(at + sizeof(size), size);
      at += sizeof(size) + size;
      return bytes;
    };
    while (at < all.size()) {
      const std::string key = take(), data = take();
      known[key] = {data.begin(), data.end()};
    }
    return known;
  }

  // Its size, then itself, in pieces: the launch's store takes no text of any size.
  static constexpr size_t kPiece = size_t{16} << 20;
  static std::string PieceKey(const std::string& key, size_t piece) {
    return piece == 0 ? key : key + "+" + std::to_string(piece);
  }
  void Set(const std::string& key, const std::string& text) {
    const uint64_t size = text.size();
    const std::string whole =
        std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + text;
    char why[512] = "";
    for (size_t at = 0; at < whole.size(); at += kPiece) {
      if (meeting_.set(meeting_.store, PieceKey(key, at / kPiece).c_str(), whole.data() + at,
                       static_cast<int64_t>(std::min(kPiece, whole.size() - at)), why,
                       sizeof(why)) != 0) {
        throw std::runtime_error(why);
      }
    }
  }
  std::string Get(const std::string& key) {
    std::string whole = GetPiece(key);
    uint64_t size = 0;
    std::memcpy(&size, &whole.at(0), sizeof(size));
    for (size_t piece = 1; whole.size() < sizeof(size) + size; ++piece) {
      whole += GetPiece(PieceKey(key, piece));
    }
    return whole.substr(sizeof(size));
  }
  std::string GetPiece(const std::string& key) {
    char why[512] = "";
    std::string text(kPiece, '\0');
    int64_t bytes = 0;
    if (meeting_.get(meeting_.store, key.c_str(), text.data(), static_cast<int64_t>(text.size()),
                     &bytes, why, sizeof(why)) != 0) {
      throw std::runtime_error(why);
    }
    text.resize(static_cast<size_t>(bytes));
    return text;
  }

  const DtMeeting& meeting_;
  int64_t round_ = 0;
  Known known_;
};

const char* Library() {
  static char text[64] = "";
  snprintf(text, sizeof(text), "gloo %d.%d.%d over TCP", GLOO_VERSION_MAJOR, GLOO_VERSION_MINOR,
           GLOO_VERSION_PATCH);
  return text;
}

int Open(int64_t*, int64_t*, char* why, size_t why_size) {
  snprintf(why, why_size, "gloo's processes have to be brought together");
  return 1;
}

// gloo writes to connections whose other end may have gone. That is an error, which the peers' wait
// is told of, not the end of this process by a signal.
void IgnoreBrokenPipes() {
  struct sigaction now = {};
  if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
}

int Meet(const DtMeeting* meeting, char* why, size_t why_size) {
  IgnoreBrokenPipes();
  try {
    gloo::transport::tcp::attr attributes(meeting->address);
    attributes.ai_family = AF_INET;
    auto device = gloo::transport::tcp::CreateDevice(attributes);
    auto mesh = std::make_unique<gloo::rendezvous::Context>(static_cast<int>(meeting->rank),
                                                            static_cast<int>(meeting->size));
    mesh->setTimeout(std::chrono::milliseconds(meeting->timeout_ms));
    Texts texts(*meeting);
    mesh->connectFullMesh(texts, device);
    context = mesh.release();
    return 0;
  } catch (const std::exception& error) {
    return Failed(error, why, why_size);
  }
}

// Calls start(buffer), which fails where the connection has ended.
template <class Start>
int Begin(void* data, int64_t bytes, bool receives, void** request, char* why, size_t why_size,
          Start start) {
  auto message = std::make_unique<Request>();
  message->receives = receives;
  try {
    message->buffer = context->createUnboundBuffer(data, static_cast<size_t>(bytes));
  } catch (const std::exception& error) {
    return Failed(error, why, why_size);
  }
  try {
    start(*message->buffer);
  } catch (const std::exception& error) {
    message->Fail(error);
  }
  *request = message.release();
  return 0;
}

int Send(int64_t peer, int64_t channel, const void* data, int64_t bytes, void** request, char* why,
         size_t why_size) {
  return Begin(const_cast<void*>(data), bytes, /*receives=*/false, request, why, why_size,
               [&](gloo::transport::UnboundBuffer& buffer) {
                 buffer.send(static_cast<int>(peer), static_cast<uint64_t>(channel));
               });
}

int Recv(int64_t peer, int64_t channel, void* data, int64_t bytes, void** request, char* why,
         size_t why_size) {
  return Begin(data, bytes, /*receives=*/true, request, why, why_size,
               [&](gloo::transport::UnboundBuffer& buffer) {
                 buffer.recv(static_cast<int>(peer), static_cast<uint64_t>(channel));
               });
}

int Test(void** request, int* done, char* why, size_t why_size) {
  auto* message = static_cast<Request*>(*request);
  *done = message->Done() ? 1 : 0;
  if (*done) {
    delete message;
    *request = nullptr;
  } else if (!message->failed.empty() && Clock::now() - message->since > kFirstWord) {
    snprintf(why, why_size, "%s", message->failed.c_str());
    return 1;
  }
  return 0;
}

// A thread of gloo's moves the data: whoever asked all the time would keep it from doing so where
// every core has a rank.
void Wait(void* request, int64_t microseconds) {
  auto* message = static_cast<Request*>(request);
  const std::chrono::microseconds most(microseconds);
  if (message->failed.empty()) {
    Look::Wait(static_cast<UnboundBuffer&>(*message->buffer), message->receives, most);
  } else {
    std::this_thread::sleep_for(most);
  }
}

// gloo cannot take a message back: what a peer sends late still finds its place. Those that have
// come to an end go.
void Forget(void** request) {
  static auto* forgotten = new std::vector<std::unique_ptr<Request>>;
  std::erase_if(*forgotten, [](const std::unique_ptr<Request>& message) {
    return message->Done() || !message->failed.empty();
  });
  forgotten->emplace_back(static_cast<Request*>(*request));
  *request = nullptr;
}

void Close() {
  delete context;
  context = nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const DtMessages* dtensor_messages(void) {
  static const DtMessages table = {sizeof(DtMessages),
                                   DT_MESSAGES_ABI,
                                   Library,
                                   Open,
                                   int64_t{1} << 40,
                                   Send,
                                   Recv,
                                   Test,
                                   Forget,
                                   Close,
                                   Meet,
                                   Wait};
  return &table;
}

// Worlds of processes whose processes are threads of one test: endpoints over a table of messages
// that is memory, and that goes wrong where a test says so.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/process/endpoint.h"
#include "dtensor/mesh/process/messages.h"
#include "dtensor/mesh/process/process_world.h"

namespace dtensor::testing {

// What carries messages between the endpoints of a test.
class Network {
 public:
  struct Message {
    int64_t from, to, channel;
    std::string bytes;
  };
  struct Receive {
    int64_t from, to, channel;
    char* data;
    int64_t bytes;
    bool done = false, forgotten = false;
  };

  // Whether the message goes on its way; asked of every one.
  std::function<bool(const Message&)> passes = [](const Message&) { return true; };
  // Whether the start of a send fails.
  std::function<bool(const Message&)> fails = [](const Message&) { return false; };

  bool Send(Message message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (fails(message)) return false;
    (passes(message) ? under_way_ : held_).push_back(std::move(message));
    Deliver();
    return true;
  }
  Receive* Post(int64_t from, int64_t to, int64_t channel, void* data, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    receives_.push_back({from, to, channel, static_cast<char*>(data), bytes});
    Receive* const receive = &receives_.back();
    Deliver();
    return receive;
  }
  // One that is done is gone.
  bool Done(const Receive* receive) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!receive->done) return false;
    receives_.remove_if([&](const Receive& r) { return &r == receive; });
    return true;
  }
  // As MPI: what has met a message already is still written to.
  void Forget(Receive* receive) {
    const std::lock_guard<std::mutex> lock(mutex_);
    receive->forgotten = true;
  }
  // What was held back comes after all, also to those who have stopped to wait.
  int64_t ReleaseHeld() {
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t forgotten = 0;
    for (const Receive& r : receives_) forgotten += r.forgotten && !r.done;
    for (Message& message : held_) under_way_.push_back(std::move(message));
    held_.clear();
    Deliver();
    for (const Receive& r : receives_) forgotten -= r.forgotten && !r.done;
    return forgotten;
  }

 private:
  void Deliver() {
    for (auto m = under_way_.begin(); m != under_way_.end();) {
      const auto meets = [&](const Receive& r) {
        return !r.done && std::tie(r.from, r.to, r.channel) == std::tie(m->from, m->to, m->channel);
      };
      const auto r = std::find_if(receives_.begin(), receives_.end(), meets);
      if (r == receives_.end()) {
        ++m;
        continue;
      }
      const size_t bytes = std::min<size_t>(m->bytes.size(), static_cast<size_t>(r->bytes));
      if (bytes > 0) std::memcpy(r->data, m->bytes.data(), bytes);
      r->done = true;
      m = under_way_.erase(m);
    }
  }
  std::mutex mutex_;
  std::deque<Message> under_way_, held_;
  std::list<Receive> receives_;
};

// A table knows no context: there is one for each rank.
inline Network* network = nullptr;

template <int64_t kRank>
const DtMessages* TableOf() {
  static const DtMessages table = {
      sizeof(DtMessages),
      DT_MESSAGES_ABI,
      [] { return "a test"; },
      [](int64_t*, int64_t*, char*, size_t) { return 1; },
      /*most_channels=*/1 << 20,
      [](int64_t peer, int64_t channel, const void* data, int64_t bytes, void** request, char* why,
         size_t why_size) {
        *request = nullptr;  // it is kept elsewhere: done
        const std::string copy(static_cast<const char*>(data), static_cast<size_t>(bytes));
        if (network->Send({kRank, peer, channel, copy})) return 0;
        snprintf(why, why_size, "the cable is cut");
        return 1;
      },
      [](int64_t peer, int64_t channel, void* data, int64_t bytes, void** request, char*, size_t) {
        *request = network->Post(peer, kRank, channel, data, bytes);
        return 0;
      },
      [](void** request, int* done, char*, size_t) {
        *done = network->Done(static_cast<Network::Receive*>(*request)) ? 1 : 0;
        if (*done != 0) *request = nullptr;
        return 0;
      },
      [](void** request) {
        network->Forget(static_cast<Network::Receive*>(*request));
        *request = nullptr;
      },
      [] {},
      /*meet=*/nullptr,
      kRank % 2 == 0 ? nullptr : +[](void*, int64_t most) {  // the others ask again and again
        std::this_thread::sleep_for(std::chrono::microseconds(std::min<int64_t>(most, 50)));
      }};
  return &table;
}

// The processes of a launch of at most 12. One object at a time.
class ThreadProcesses {
 public:
  // node_of(r): what rank r's DTENSOR_NODE is.
  explicit ThreadProcesses(
      int64_t ranks, absl::FunctionRef<std::string(int64_t)> node_of = [](int64_t) { return ""; }) {
    testing::network = &network;
    const DtMessages* const tables[] = {TableOf<0>(), TableOf<1>(), TableOf<2>(),  TableOf<3>(),
                                        TableOf<4>(), TableOf<5>(), TableOf<6>(),  TableOf<7>(),
                                        TableOf<8>(), TableOf<9>(), TableOf<10>(), TableOf<11>()};
    for (int64_t r = 0; r < ranks; ++r) {
      ProcessPlace place;
      place.rank = place.local_rank = r;
      place.size = place.local_size = ranks;
      place.node = node_of(r);
      endpoints.push_back(std::make_unique<Endpoint>(place, tables[r]));
    }
  }
  // What each rank is told. options(r): of rank r.
  std::vector<absl::Status> Run(absl::FunctionRef<absl::Status(RankContext&)> body,
                                absl::FunctionRef<SpmdOptions(int64_t)> options) {
    std::vector<absl::Status> told(endpoints.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < endpoints.size(); ++r) {
      threads.emplace_back([&, r] {
        told[r] = RunOnProcesses(*endpoints[r], static_cast<int64_t>(endpoints.size()), body,
                                 options(static_cast<int64_t>(r)));
      });
    }
    for (std::thread& thread : threads) thread.join();
    return told;
  }

  Network network;
  std::vector<std::unique_ptr<Endpoint>> endpoints;
};

}  // namespace dtensor::testing

// Endpoint: this process among those of its launch, and the messages between them. Private to
// mesh/.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dtensor/mesh/process/launcher.h"
#include "dtensor/mesh/process/messages.h"

namespace dtensor {

struct CollectiveCall;
class ProcessWorld;

class Endpoint {
 public:
  // That of this launch; null where the program was started as one process. Opens it on first use:
  // loads the plugin, prints what was found once (rank 0).
  //   Errors: those of FindPlace; Unimplemented where no plugin serves the launcher, or the plugin
  //   cannot be loaded, with what was tried; FailedPrecondition where the plugin's library was not
  //   started by this launcher.
  // When the process ends so does it (End).
  static absl::StatusOr<Endpoint*> OfLaunch();
  // One over any table, which is opened already: of tests.
  Endpoint(ProcessPlace place, const DtMessages* table) : place_(std::move(place)), table_(table) {}
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;

  const ProcessPlace& place() const { return place_; }
  int64_t rank() const { return place_.rank; }
  int64_t size() const { return place_.size; }
  // This process's, as the others reach it; empty where the library of messages keeps it to itself.
  const std::string& address() const { return address_; }
  int64_t channels() const { return table_->most_channels; }
  // Where the next world's channels begin; of rank 0.
  int64_t next_channel = 1;
  int64_t worlds = 0;  // that were made
  int64_t open_worlds = 0;
  // Whose world runs here. RunSpmd of another thread meanwhile ends both: of worlds beside each
  // other nobody can say which of another process's each one belongs to.
  struct Running {
    std::mutex mutex;
    bool one = false, another = false;    // a world, and one beside it
    std::shared_ptr<ProcessWorld> world;  // once all have met
  } running;
  int64_t store_requests = 0;  // until the library of messages had met

  // A peer is gone, or stuck: the library of messages cannot be ended in order.
  void MarkBroken() { broken_.store(true); }
  bool broken() const { return broken_.load(); }
  // Why there are no more worlds of these processes, if so (mesh/process/rendezvous.h).
  absl::Status parted;
  // What the program ends with.
  absl::Status ends_with;
  // This process ends. In order that is with all others, so that their library of messages can be
  // ended; else, in the middle of a world, after a failure or with an error, they are told and not
  // waited for.
  void End();
  // How many times memory of abandoned messages had to be kept.
  size_t abandoned();

 private:
  friend class Transfers;
  static absl::StatusOr<std::unique_ptr<Endpoint>> Open(ProcessPlace place);

  const ProcessPlace place_;
  const DtMessages* const table_;
  std::string address_;
  std::atomic<bool> broken_{false};
  std::mutex mutex_;                         // around every call of the table
  std::vector<std::shared_ptr<void>> kept_;  // memory that abandoned messages may use; by mutex_
};

// Messages under way. Those that are not done when this goes, nobody waits for any more; but they
// may still use their memory: `memory`, and the tensors of `call` if there is one, are kept then.
class Transfers {
 public:
  Transfers(Endpoint& endpoint, std::shared_ptr<void> memory, const CollectiveCall* call = nullptr)
      : endpoint_(endpoint), memory_(std::move(memory)), call_(call) {}
  ~Transfers();
  Transfers(const Transfers&) = delete;

  // Start; nothing for 0 bytes unless `always`. Errors: Internal with the library's words.
  absl::Status Send(int64_t peer, int64_t channel, const void* data, int64_t bytes,
                    bool always = false);
  absl::Status Recv(int64_t peer, int64_t channel, void* data, int64_t bytes, bool always = false);
  // Whether all are done; waits for nobody. Asks as far as the first that is not.
  absl::StatusOr<bool> Done();
  // After Done() said no: sleeps until it may say something else, at most for so long; false where
  // one has to ask again and again.
  bool Sleep(absl::Duration most);
  // Asks all.
  absl::Status Sweep();
  // Whether the i-th that was started is.
  bool done(size_t i) const { return requests_[i].handle == nullptr; }
  // Peers whose messages are not here, ascending; with `receives` false those that have not taken
  // this rank's.
  std::vector<int64_t> Open(bool receives) const;

 private:
  struct Request {
    void* handle;  // null: done
    int64_t peer;
    bool receives;
  };
  absl::Status Test(Request& request);
  template <class Start>
  absl::Status Begin(bool receives, int64_t peer, int64_t bytes, bool always, Start start);

  Endpoint& endpoint_;
  const std::shared_ptr<void> memory_;
  const CollectiveCall* const call_;
  absl::InlinedVector<Request, 8> requests_;
  size_t first_ = 0;  // those before are done
};

}  // namespace dtensor

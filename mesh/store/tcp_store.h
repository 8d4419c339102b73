// TcpStore: one process's handle of a store that another serves. Private to mesh/.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dtensor/mesh/store.h"
#include "dtensor/mesh/store/deadline.h"
#include "dtensor/mesh/store/frame.h"

namespace dtensor {

// Each call that goes on at the same time as others has a connection of its own; two are there from
// the start. Keys and values of one call are 64 MiB at most together (InvalidArgument).
class TcpStore : public Store {
 public:
  // `address` is "127.0.0.1:40123". Errors: Unavailable if nobody serves there until the deadline;
  // PermissionDenied if who does has another token; AlreadyExists if another process is this rank.
  static absl::StatusOr<std::unique_ptr<TcpStore>> Connect(std::string address, std::string token,
                                                           int64_t rank, std::string who,
                                                           absl::Time deadline);
  // The same, once: it does not wait for a server.
  static absl::StatusOr<std::unique_ptr<TcpStore>> Try(std::string address, std::string token,
                                                       int64_t rank, std::string who,
                                                       absl::Time deadline);
  ~TcpStore() override;  // says goodbye: this rank is not lost

  absl::Status Set(Key key, absl::string_view value) override;
  absl::StatusOr<std::string> Get(Key key, absl::Time deadline) override;
  absl::Status Wait(absl::Span<const std::string> keys, absl::Time deadline) override;
  absl::StatusOr<int64_t> Add(Key key, int64_t n) override;
  absl::StatusOr<std::string> CompareExchange(Key key, absl::string_view expected,
                                              absl::string_view desired) override;
  absl::Status Remove(Key key);
  // As Get, but goes on waiting after Fail.
  absl::StatusOr<std::string> GetAlways(Key key, absl::Time deadline);
  // The same for the thread that waits for news: only Interrupt hurries it.
  absl::StatusOr<std::string> Watch(Key key, absl::Duration at_most);
  void Interrupt();

  // How long the store may take to answer what waits for nobody; 60 s unless told.
  void SetPatience(absl::Duration patience);
  // Something went wrong and this rank is ending: from now on that is 0.8 s, and where once
  // nothing came, nothing is tried. Not for Watch.
  void Hurry() { hurries_.store(true); }
  int64_t requests() const { return requests_.load(); }  // so far
  // The last call had no answer in time.
  bool mute() const { return mute_.load(); }

  // Waits end with `why` from now on, unless what they wait for is there.
  void Fail(const absl::Status& why);

 private:
  enum class Ends { kNever, kOnFail, kOnInterrupt };
  struct Connection;
  TcpStore(std::string address, std::string token, int64_t rank, std::string who,
           std::string process);
  absl::StatusOr<std::unique_ptr<Connection>> Open(Deadline deadline);
  // Tries until the deadline.
  absl::StatusOr<std::unique_ptr<Connection>> Dial(Deadline deadline);
  absl::Status Reach(Connection& connection, Deadline deadline) const;
  absl::Status Send(Connection& connection, absl::string_view frame, Deadline deadline);
  absl::StatusOr<std::unique_ptr<Connection>> Borrow();
  void GiveBack(std::unique_ptr<Connection> connection);
  // Sends the request and waits for its reply; Cancelled when `ends` comes first.
  absl::StatusOr<store::Message> Ask(Connection& connection, store::Op op,
                                     std::vector<std::string> texts, Ends ends, Deadline deadline);
  // The reply if it has come whole.
  absl::StatusOr<std::optional<store::Message>> TakeReply(Connection& connection, uint64_t id);
  absl::StatusOr<std::vector<std::string>> Call(store::Op op, std::vector<std::string> texts);
  absl::StatusOr<std::vector<std::string>> Await(store::Op op, std::vector<std::string> keys,
                                                 absl::Time deadline, Ends ends);
  absl::StatusOr<std::string> AwaitOne(Key key, absl::Time deadline, Ends ends);
  absl::Duration Patience() const;
  absl::Status CheckSize(const std::vector<std::string>& texts) const;
  absl::Status Failed() const;
  absl::Status Broken(absl::string_view what) const;
  absl::Status NoAnswer();

  const std::string address_, token_, who_, process_;
  const int64_t rank_;
  const int fail_event_, interrupt_event_;
  std::atomic<int64_t> patience_ms_{60000}, requests_{0};
  std::atomic<bool> hurries_{false}, mute_{false};
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Connection>> idle_;  // guarded by mutex_
  absl::Status failed_;                            // guarded by mutex_
};

}  // namespace dtensor

// TcpStore: one process's handle of a store that another serves. Private to mesh/.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dtensor/mesh/store.h"
#include "dtensor/mesh/store/frame.h"

namespace dtensor {

// Each call that goes on at the same time as others has a connection of its own.
class TcpStore : public Store {
 public:
  // `address` is "127.0.0.1:40123". Errors: Unavailable if nobody serves there until the deadline;
  // PermissionDenied if who does has another token.
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
  // As Get, but goes on waiting after Fail; Interrupt ends it.
  absl::StatusOr<std::string> GetAlways(Key key, absl::Time deadline);
  void Interrupt();

  // Waits end with `why` from now on, unless what they wait for is there.
  void Fail(const absl::Status& why);

 private:
  enum class Ends { kNever, kOnFail, kOnInterrupt };
  struct Connection;
  TcpStore(std::string address, std::string token, int64_t rank, std::string who);
  absl::StatusOr<std::unique_ptr<Connection>> Open(absl::Time deadline);
  absl::StatusOr<std::unique_ptr<Connection>> Borrow();
  void GiveBack(std::unique_ptr<Connection> connection);
  // Sends the request and waits for its reply; Cancelled when `ends` comes first.
  absl::StatusOr<store::Message> Ask(Connection& connection, store::Op op,
                                     std::vector<std::string> texts, Ends ends,
                                     absl::Time deadline);
  absl::StatusOr<std::vector<std::string>> Call(store::Op op, std::vector<std::string> texts);
  absl::StatusOr<std::vector<std::string>> Await(store::Op op, std::vector<std::string> keys,
                                                 absl::Time deadline, Ends ends);
  absl::Status Failed() const;
  absl::Status Broken(absl::string_view what) const;

  const std::string address_, token_, who_;
  const int64_t rank_;
  const int fail_event_, interrupt_event_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Connection>> idle_;  // guarded by mutex_
  absl::Status failed_;                            // guarded by mutex_
};

}  // namespace dtensor

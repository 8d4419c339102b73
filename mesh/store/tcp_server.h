// TcpStoreServer: serves a Store to the processes of one launch. Private to mesh/.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dtensor/mesh/store.h"

namespace dtensor {

struct TcpServerOptions {
  std::string token;                  // store::NewToken
  std::string address = "127.0.0.1";  // of the interface to listen on; IPv4
  int port = 0;                       // 0: any that is free
  // Called in the server's thread when the last connection of a rank ends that did not say that it
  // would: its process is gone, or its machine does not answer. `error`: the system's number, 0
  // where it was closed. The store is the server's own and waits for nobody.
  std::function<void(Store& store, int64_t rank, int error)> lost = nullptr;
  // After how long without an answer the system gives up a machine.
  absl::Duration silence = absl::Seconds(60);
  // What strangers did; default: stderr, the first few.
  std::function<void(const std::string& line)> log = nullptr;
};

// Strangers (another token, another protocol, a message beyond the bounds, nothing said for three
// seconds) are dropped and logged; each can make it hold one read (64 KiB) at most, and where they
// are more than 256 the oldest goes. Who has another token is told so, and so is a second process
// that says it is a rank that is connected.
class TcpStoreServer {
 public:
  // Errors: Unavailable if it cannot listen there, with the address and the system's reason.
  static absl::StatusOr<std::unique_ptr<TcpStoreServer>> Start(TcpServerOptions options);
  ~TcpStoreServer();
  TcpStoreServer(const TcpStoreServer&) = delete;

  const std::string& address() const { return address_; }  // "127.0.0.1:40123"
  int64_t strangers() const;
  // Of every rank that is connected how many messages it has sent.
  std::map<int64_t, int64_t> Heard() const;
  // Until no rank is connected any more, none has said anything for `silence`, or for `most`.
  // Whether all have gone.
  bool AwaitGoodbyes(absl::Duration silence, absl::Duration most) const;

 private:
  class Loop;
  TcpStoreServer(std::string address, std::unique_ptr<Loop> loop);
  const std::string address_;
  const std::unique_ptr<Loop> loop_;
};

}  // namespace dtensor

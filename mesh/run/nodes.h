// Nodes: the launchers of all machines of a launch, which meet at a store that the first serves.
// Private to mesh/.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dtensor/mesh/run/console.h"
#include "dtensor/mesh/run/launcher.h"
#include "dtensor/mesh/store/deadline.h"
#include "dtensor/mesh/store/tcp_server.h"
#include "dtensor/mesh/store/tcp_store.h"

namespace dtensor::run {

// One process that did not end well; or that ended with 0, and others blame it for that.
struct Failure {
  int64_t rank = 0, local_rank = 0, pid = 0;
  std::string host;
  int status = 0;          // as waitpid gives it
  bool told = false;       // by the launcher, to end
  int64_t culprit = -1;    // the rank that it blames; -1: none
  std::string last_lines;  // of stderr
  std::string report;      // path of its flight report, if there is one

  int code() const;         // exit code; 128 and the number of a signal
  std::string How() const;  // "exit code 3", "killed by signal 9 (Killed)"
  std::string Who() const;  // "rank 1 (local rank 1, pid 123) on host"
  std::string ToText() const;
  static absl::StatusOr<Failure> Of(const std::string& text);
  // Of what a process wrote of its error; -1: it blames nobody, or makes no sense.
  static int64_t CulpritIn(const std::string& error_file);
};

// What a node needs to know to start its processes.
struct Attempt {
  int64_t number = 0;
  int64_t first_rank = 0, world_size = 0;
  std::string store, secret;  // of the processes: DTENSOR_STORE, DTENSOR_TOKEN
};

class Nodes {
 public:
  // Returns when all are here.
  static absl::StatusOr<std::unique_ptr<Nodes>> Join(const LaunchOptions& options,
                                                     Console& console);
  ~Nodes();

  const std::string& address() const { return address_; }  // of this machine
  const std::string& host() const { return host_; }        // its name
  // All nodes go on together. A store of its own serves the processes of each attempt.
  absl::StatusOr<Attempt> Begin(int64_t number);
  // In the order in which they are told.
  absl::Status Tell(const Failure& failure);
  // Of a process that ended with 0, which is a failure if another one blames it.
  absl::Status TellEndOf(const Failure& well);
  // Whether a process has failed anywhere in this attempt, or a node is gone (an error).
  absl::StatusOr<bool> AnyFailed();
  // This node goes, and so must the others.
  void Stop(absl::string_view why);
  // Waits until the processes of all nodes have ended, and returns all failures; last who ended
  // with 0 and is blamed.
  absl::StatusOr<std::vector<Failure>> End();

 private:
  explicit Nodes(Console& console) : console_(console) {}
  std::string Key(absl::string_view what) const;
  // All come, and were started alike.
  absl::Status Meet(const LaunchOptions& options, const std::string& where, absl::Time deadline);
  // Node 0: of a launcher that is stopped no connection ends.
  void LookForSilent();
  void Lose(const std::string& why);
  absl::Status Lost();
  absl::Status Await(const std::string& key, absl::Time deadline);

  Console& console_;  // goes on meanwhile
  int64_t nodes_ = 1, node_ = 0, processes_ = 1;
  std::string address_, host_;
  Attempt attempt_;
  struct Silence {
    int64_t messages = 0, beats = 0;
  };
  absl::Duration silence_;
  Deadline beat_ = Deadline::In(absl::ZeroDuration());
  std::map<int64_t, Silence> silences_;                      // by node
  std::unique_ptr<TcpStoreServer> server_, process_server_;  // of node 0
  std::unique_ptr<TcpStore> store_;
};

}  // namespace dtensor::run

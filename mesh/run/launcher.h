// RunLauncher: starts the processes of a program on this machine, and ends them together. It is
// what dtensor-run does.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace dtensor::run {

// Streams of a process, as bits.
enum Streams : int { kNone = 0, kStdout = 1, kStderr = 2, kBoth = 3 };

struct LaunchOptions {
  int64_t processes = 1;  // on this machine ("node")
  int64_t nodes = 1, node = 0;
  std::string endpoint;  // "host:port", where node 0 is found; may be empty for one node
  int64_t max_restarts = 0;
  std::string log_dir;  // for files of what processes print; empty: none
  // By local rank, those that are not there have the last: what goes to files instead of the
  // console, and what to both.
  std::vector<int> redirects = {kNone}, tee = {kNone};
  // Of this machine; empty: that of DTENSOR_LOCAL_ADDRESS, else that on the way to the endpoint.
  std::string local_address;
  std::vector<std::string> command;
};

// Runs the program on all nodes until it has ended everywhere, anew after a failure while there are
// restarts left. Prints what the processes print with their ranks before it, and of a failure the
// first first; who does not read that holds up nothing. Children never outlive it.
//   Returns the exit code: 0, that of the first failure (128 and the signal's number where one
//   ended it), or 128 and the number of the signal that ended the launcher: SIGPIPE where nobody
//   reads what is printed any more. 1 where all went well but for what could not be printed.
//   Errors: InvalidArgument for options that make no sense, naming the flag; Unavailable where the
//   program cannot be started or nodes do not meet.
absl::StatusOr<int> RunLauncher(const LaunchOptions& options);

}  // namespace dtensor::run

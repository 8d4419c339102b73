// Child: one process that the launcher has started, with what it prints. Private to mesh/.
#pragma once

#include <sys/types.h>

#include <cstdio>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dtensor::run {

// Where one of its streams goes.
struct StreamPlan {
  bool console = true;
  std::string file;  // empty: none
};

struct ChildPlan {
  std::vector<std::string> command;
  std::vector<std::string> environment;  // "NAME=value"
  std::string prefix;                    // of its lines on the console: "[rank 1] "
  StreamPlan out, err;
};

// Leads a process group of its own, and is killed if the launcher is.
class Child {
 public:
  // Errors: Unavailable with the command or the file and the system's reason.
  static absl::StatusOr<std::unique_ptr<Child>> Start(const ChildPlan& plan);
  ~Child();
  Child(const Child&) = delete;

  pid_t pid() const { return pid_; }
  // Descriptors to poll, -1 once they have ended.
  int out() const { return out_.fd; }
  int err() const { return err_.fd; }
  // Takes what is there; waits for nothing.
  void Drain();
  // It has ended: what is there is all there is.
  void Finish();
  // The last lines that it wrote to stderr.
  const std::deque<std::string>& last_lines() const { return last_lines_; }
  // To all of its process group.
  void Signal(int number) const;

 private:
  struct Stream {
    int fd = -1;
    FILE* console = nullptr;
    FILE* file = nullptr;
    std::string path;  // of it
    std::string line;  // that has not ended
  };
  Child() = default;
  void Drain(Stream& stream);
  // To the console; a file has all bytes as they come.
  void Print(Stream& stream, absl::string_view line);
  void LeaveFile(Stream& stream);  // that cannot be written, as errno says

  pid_t pid_ = -1;
  std::string prefix_;
  Stream out_, err_;
  std::deque<std::string> last_lines_;
};

}  // namespace dtensor::run

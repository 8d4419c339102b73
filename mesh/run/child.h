// Child: one process that the launcher has started, with what it prints. Private to mesh/.
#pragma once

#include <sys/types.h>

#include <cstdio>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/mesh/run/console.h"
#include "dtensor/mesh/run/guard.h"

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

// Leads a process group of its own, which is killed if the launcher is.
class Child {
 public:
  // Errors: Unavailable with the command or the file and the system's reason.
  static absl::StatusOr<std::unique_ptr<Child>> Start(const ChildPlan& plan, Console& console,
                                                      const Guard& guard);
  ~Child();
  Child(const Child&) = delete;

  pid_t pid() const { return pid_; }
  // Descriptors to poll, -1 once they have ended or while the console has no room for more.
  int out() const { return Waits(out_) ? -1 : out_.fd; }
  int err() const { return Waits(err_) ? -1 : err_.fd; }
  // Takes what is there, if the console has room for it; waits for nothing.
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
    bool to_console = false;
    FILE* file = nullptr;
    std::string path;  // of it
    std::string line;  // that has not ended
  };
  Child(Console& console, const Guard& guard) : console_(console), guard_(guard) {}
  Console::Stream To(const Stream& stream) const {
    return &stream == &out_ ? Console::kOut : Console::kErr;
  }
  bool Waits(const Stream& stream) const;
  void Drain(Stream& stream, absl::FunctionRef<bool()> enough);
  // To the console; a file has all bytes as they come.
  void Print(Stream& stream, absl::string_view line);
  void LeaveFile(Stream& stream);  // that cannot be written, as errno says

  Console& console_;
  const Guard& guard_;
  pid_t pid_ = -1;
  std::string prefix_;
  Stream out_, err_;
  std::deque<std::string> last_lines_;
};

}  // namespace dtensor::run

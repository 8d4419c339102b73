// Guard: a small process that kills what the launcher has started where the launcher is gone and
// could not: who is killed kills nobody. Private to mesh/.
#pragma once

#include <sys/types.h>

#include <memory>

#include "absl/status/statusor.h"

namespace dtensor::run {

// The system kills the launcher's own children with it (PR_SET_PDEATHSIG), but not what these have
// started, as a script does its program. The guard kills their process groups. It is no child that
// wait() finds, has no terminal and holds none of the launcher's files.
class Guard {
 public:
  // While the launcher has no threads.
  static absl::StatusOr<std::unique_ptr<Guard>> Start();
  ~Guard();  // it is gone then
  Guard(const Guard&) = delete;

  pid_t pid() const { return pid_; }
  // Where a new process, which leads a group, writes its number before it becomes its program: so
  // there is none that the guard does not know.
  int fd() const { return fd_; }
  // The group has ended: its number may be another's.
  void Forget(pid_t group) const;

 private:
  Guard() = default;
  pid_t pid_ = -1;
  int fd_ = -1;
};

}  // namespace dtensor::run

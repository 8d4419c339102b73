#include "dtensor/mesh/run/guard.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <set>

#include "absl/strings/str_cat.h"

namespace dtensor::run {
namespace {

// Numbers of groups come, negative ones to forget, until the launcher is gone.
[[noreturn]] void StandGuard(int numbers) {
  setsid();
  for (int number = 1; number < NSIG; ++number) signal(number, SIG_IGN);
  prctl(PR_SET_NAME, "dtensor-guard");
  dup2(numbers, STDIN_FILENO);
  close_range(STDOUT_FILENO, ~0U, 0);
  (void)!chdir("/");
  std::set<pid_t> groups;
  pid_t number = 0;
  while (read(STDIN_FILENO, &number, sizeof(number)) == sizeof(number)) {
    if (number > 0) groups.insert(number);
    if (number < 0) groups.erase(-number);
  }
  for (const pid_t group : groups) kill(-group, SIGKILL);
  _exit(0);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Guard>> Guard::Start() {
  std::unique_ptr<Guard> guard(new Guard);
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) {
    return absl::UnavailableError(absl::StrCat("pipes for a process: ", strerror(errno)));
  }
  // As fork(), but the launcher gets no SIGCHLD of it, and its waiting for any child is not for it.
  guard->pid_ = static_cast<pid_t>(syscall(SYS_clone, 0, 0, 0, 0, 0));
  if (guard->pid_ == 0) StandGuard(fds[0]);
  const int error = errno;
  close(fds[0]);
  guard->fd_ = fds[1];
  if (guard->pid_ > 0) return guard;
  return absl::UnavailableError(absl::StrCat("cannot start a process: ", strerror(error)));
}

Guard::~Guard() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, __WCLONE);
  }
  close(fd_);
}

void Guard::Forget(pid_t group) const {
  const pid_t number = -group;
  (void)!write(fd_, &number, sizeof(number));
}

}  // namespace dtensor::run

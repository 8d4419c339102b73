#include "dtensor/mesh/run/child.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace dtensor::run {
namespace {

constexpr size_t kLastLines = 12;
constexpr size_t kLongestLine = 1 << 16;  // longer ones come to the console in parts
constexpr int kReads = 64;  // at one time: a full pipe; who never stops printing holds up nobody

absl::Status Failed(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", strerror(errno)));
}

std::vector<char*> Pointers(const std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (const std::string& text : texts) pointers.push_back(const_cast<char*>(text.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

// In the new process: only what is allowed between fork and exec. Writes errno where it fails.
[[noreturn]] void Become(char* const* command, char* const* environment, int in, int out, int err,
                         int report, int guard, pid_t launcher) {
  setpgid(0, 0);
  const pid_t group = getpid();
  (void)!write(guard, &group, sizeof(group));
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(127);  // it died in between
  for (const int number : {SIGPIPE, SIGINT, SIGTERM, SIGCHLD, SIGQUIT, SIGUSR1, SIGUSR2}) {
    signal(number, SIG_DFL);
  }
  if (signal(SIGHUP, SIG_DFL) == SIG_IGN) signal(SIGHUP, SIG_IGN);  // nohup
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  if (dup2(in, STDIN_FILENO) >= 0 && dup2(out, STDOUT_FILENO) >= 0 &&
      dup2(err, STDERR_FILENO) >= 0) {
    execvpe(command[0], command, environment);
  }
  const int error = errno;
  (void)!write(report, &error, sizeof(error));
  _exit(127);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Child>> Child::Start(const ChildPlan& plan, Console& console,
                                                    const Guard& guard) {
  std::unique_ptr<Child> child(new Child(console, guard));
  child->prefix_ = plan.prefix;
  const auto open_file = [](const StreamPlan& to, Stream* stream) -> absl::Status {
    stream->to_console = to.console;
    if (to.file.empty()) return absl::OkStatus();
    stream->path = to.file;
    stream->file = fopen(to.file.c_str(), "we");
    return stream->file != nullptr ? absl::OkStatus() : Failed(to.file);
  };
  if (absl::Status status = open_file(plan.out, &child->out_); !status.ok()) return status;
  if (absl::Status status = open_file(plan.err, &child->err_); !status.ok()) return status;
  int fds[7] = {-1, -1, -1, -1,
                -1, -1, -1};  // pipes of out, err and of what fails; nothing to read
  const auto close_all = absl::MakeCleanup([&fds] {
    for (const int fd : fds) {
      if (fd >= 0) close(fd);
    }
  });
  if (pipe2(fds, O_CLOEXEC) != 0 || pipe2(fds + 2, O_CLOEXEC) != 0 ||
      pipe2(fds + 4, O_CLOEXEC) != 0 || (fds[6] = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0) {
    return Failed("pipes for a process");
  }
  const std::vector<char*> command = Pointers(plan.command);
  const std::vector<char*> environment = Pointers(plan.environment);
  const pid_t launcher = getpid();
  child->pid_ = fork();
  if (child->pid_ < 0) return Failed("cannot start a process");
  if (child->pid_ == 0) {
    Become(command.data(), environment.data(), fds[6], fds[1], fds[3], fds[5], guard.fd(),
           launcher);
  }
  setpgid(child->pid_, child->pid_);  // whoever comes first
  close(std::exchange(fds[5], -1));
  int error = 0;
  if (read(fds[4], &error, sizeof(error)) == sizeof(error)) {
    errno = error;
    return Failed(absl::StrCat("cannot run \"", plan.command[0], "\""));
  }
  child->out_.fd = std::exchange(fds[0], -1);
  child->err_.fd = std::exchange(fds[2], -1);
  for (const int fd : {child->out_.fd, child->err_.fd}) fcntl(fd, F_SETFL, O_NONBLOCK);
  return child;
}

Child::~Child() {
  for (Stream* stream : {&out_, &err_}) {
    if (stream->fd >= 0) close(stream->fd);
    if (stream->file != nullptr) fclose(stream->file);
  }
  if (pid_ > 0) guard_.Forget(pid_);
}

bool Child::Waits(const Stream& stream) const {
  return stream.fd < 0 || (stream.to_console && console_.Full(To(stream)));
}

void Child::Drain() {
  for (Stream* stream : {&out_, &err_}) {
    Drain(*stream, [&] { return Waits(*stream); });
  }
}

void Child::Drain(Stream& stream, absl::FunctionRef<bool()> enough) {
  char bytes[1 << 14];
  for (int i = 0; i < kReads && stream.fd >= 0 && !enough(); ++i) {
    const ssize_t n = read(stream.fd, bytes, sizeof(bytes));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) {
      close(std::exchange(stream.fd, -1));
      break;
    }
    const auto size_read = static_cast<size_t>(n);
    if (stream.file != nullptr && fwrite(bytes, 1, size_read, stream.file) != size_read) {
      LeaveFile(stream);
    }
    stream.line.append(bytes, size_read);
    size_t start = 0;
    while (true) {
      const size_t end = stream.line.find('\n', start);
      if (end == std::string::npos && stream.line.size() - start < kLongestLine) break;
      const size_t size = std::min(end, stream.line.size()) - start;
      Print(stream, absl::string_view(stream.line).substr(start, size));
      start += size + (end == std::string::npos ? 0 : 1);
    }
    stream.line.erase(0, start);
  }
  if (stream.file != nullptr && fflush(stream.file) != 0) LeaveFile(stream);
}

// Once: a full disk is no reason to end, and says the same of every line.
void Child::LeaveFile(Stream& stream) {
  console_.Print(Console::kErr, absl::StrCat("dtensor-run: warning: ", stream.path,
                                             " cannot be written: ", strerror(errno),
                                             "; no more lines go there\n"));
  fclose(std::exchange(stream.file, nullptr));
}

void Child::Print(Stream& stream, absl::string_view line) {
  if (stream.to_console) console_.Print(To(stream), absl::StrCat(prefix_, line, "\n"));
  if (&stream != &err_) return;
  last_lines_.emplace_back(line);
  if (last_lines_.size() > kLastLines) last_lines_.pop_front();
}

void Child::Finish() {
  for (Stream* stream : {&out_, &err_}) {
    Drain(*stream, [] { return false; });
    if (!stream->line.empty()) Print(*stream, stream->line);
    stream->line.clear();
  }
}

// Its own number may be another process's once it has ended; that of its group is not as long as it
// has members.
void Child::Signal(int number) const { kill(-pid_, number); }

}  // namespace dtensor::run

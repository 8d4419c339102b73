#include "dtensor/mesh/run/console.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace dtensor::run {
namespace {

constexpr size_t kMost = 1 << 20;  // that waits
constexpr absl::Duration kLastWords = absl::Seconds(3);

// A closed stream is held by what cannot be used as it would be: to write there is the same error.
void HoldClosed() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(fd, F_GETFL) >= 0) continue;
    (void)open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);  // takes the lowest number
  }
}

bool Writable(int fd) { return (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY; }

// O_NONBLOCK belongs to what all who were given this terminal or pipe share: so it is opened anew
// for that. Files never block, and have their place in what is shared. `fd` where it cannot be.
int OpenedAnew(int fd) {
  struct stat is = {};
  if (fstat(fd, &is) != 0 || !(S_ISCHR(is.st_mode) || S_ISFIFO(is.st_mode)) || !Writable(fd)) {
    return fd;
  }
  const int anew = open(absl::StrCat("/proc/self/fd/", fd).c_str(),
                        O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
  return anew >= 0 ? anew : fd;
}

bool SameFile(int a, int b) {
  struct stat of_a = {}, of_b = {};
  return fstat(a, &of_a) == 0 && fstat(b, &of_b) == 0 && of_a.st_dev == of_b.st_dev &&
         of_a.st_ino == of_b.st_ino && Writable(a) && Writable(b);
}

}  // namespace

Console::Console() {
  HoldClosed();
  one_ = SameFile(STDOUT_FILENO, STDERR_FILENO);
  ways_[kOut].fd = OpenedAnew(STDOUT_FILENO);
  ways_[kOut].name = "stdout";
  ways_[kErr].fd = one_ ? -1 : OpenedAnew(STDERR_FILENO);
  ways_[kErr].name = "stderr";
}

Console::~Console() {
  for (const Way& way : ways_) {
    if (way.fd > STDERR_FILENO) close(way.fd);
  }
}

void Console::Print(Stream to, absl::string_view text) {
  Way& way = To(to);
  if (way.lost || (hurry_ && way.text.size() - way.begin > kMost)) return;
  way.text.append(text.data(), text.size());
}

bool Console::Full(Stream to) const {
  const Way& way = To(to);
  return !hurry_ && way.text.size() - way.begin > kMost;
}

void Console::AddTo(std::vector<pollfd>* fds) const {
  for (const Way& way : ways_) {
    if (way.waits()) fds->push_back({way.fd, POLLOUT, 0});
  }
}

void Console::Write() {
  for (Way& way : ways_) Write(way);
}

// Where poll says so a pipe takes PIPE_BUF bytes at once, and does not tear them apart: of whole
// lines, as others may write there too.
void Console::Write(Way& way) {
  while (way.waits()) {
    pollfd ready = {way.fd, POLLOUT, 0};
    if (poll(&ready, 1, 0) <= 0) break;
    size_t size = std::min<size_t>(PIPE_BUF, way.text.size() - way.begin);
    const size_t line_end = way.text.rfind('\n', way.begin + size - 1);
    if (line_end != std::string::npos && line_end >= way.begin) size = line_end + 1 - way.begin;
    const ssize_t n = write(way.fd, way.text.data() + way.begin, size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n < 0) return Lose(way, errno);
    way.begin += static_cast<size_t>(n);
  }
  if (way.waits() && way.begin < kMost) return;  // not moved for every line
  way.text.erase(0, way.begin);
  way.begin = 0;
}

void Console::Lose(Way& way, int error) {
  way.lost = true;
  way.text.clear();
  way.begin = 0;
  if (error == EPIPE || error == ECONNRESET) {
    reader_gone_ = true;
    Print(kErr, absl::StrCat("dtensor-run: nobody reads ", way.name,
                             " any more: the processes are told to end\n"));
  } else {
    failed_ = true;
    Print(kErr, absl::StrCat("dtensor-run: warning: ", way.name, " cannot be written: ",
                             strerror(error), "; no more lines go there\n"));
  }
}

void Console::Flush() {
  const absl::Time end = hurry_ ? absl::Now() + kLastWords : absl::InfiniteFuture();
  while (absl::Now() < end) {
    Write();
    std::vector<pollfd> fds;
    AddTo(&fds);
    if (fds.empty()) return;
    (void)poll(fds.data(), fds.size(), 100);
  }
}

}  // namespace dtensor::run

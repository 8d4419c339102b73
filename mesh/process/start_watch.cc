#include "dtensor/mesh/process/start_watch.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <string>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "dtensor/mesh/store/deadline.h"
#include "dtensor/mesh/timeout.h"
#include "dtensor/tensor/file.h"

namespace dtensor {
namespace {

constexpr absl::Duration kLeast = absl::Seconds(20);
constexpr absl::Duration kDefault = absl::Seconds(120);
constexpr absl::Duration kLook = absl::Milliseconds(200);
// A launcher starts its processes one after the other: who is not there yet may come.
constexpr absl::Duration kStarting = absl::Seconds(2);
constexpr int kAncestors = 8;

// What starts the processes of a launch on a machine.
constexpr absl::string_view kLaunchers[] = {"mpirun",  "orterun", "mpiexec",         "orted",
                                            "prterun", "prted",   "hydra_pmi_proxy", "slurmstepd"};

// The fields of /proc/PID/stat: the name, which may hold anything, is between the first and the
// last parenthesis.
struct Stat {
  std::string name;
  char state = '?';
  int parent = 0;
};
Stat StatOf(int pid) {
  const std::string text = ReadFile(absl::StrCat("/proc/", pid, "/stat")).value_or("");
  const size_t open = text.find('('), close = text.rfind(')');
  if (open == std::string::npos || close == std::string::npos) return {};
  Stat stat{text.substr(open + 1, close - open - 1)};
  const std::vector<absl::string_view> rest =
      absl::StrSplit(absl::string_view(text).substr(close + 1), ' ', absl::SkipEmpty());
  if (rest.size() < 2 || !absl::SimpleAtoi(rest[1], &stat.parent)) return {};
  stat.state = rest[0][0];
  return stat;
}

// The launcher above this process, also above scripts that it has started; 0 where there is none.
int LauncherAbove() {
  int pid = getppid();
  for (int i = 0; i < kAncestors && pid > 1; ++i) {
    const Stat stat = StatOf(pid);
    if (std::find(std::begin(kLaunchers), std::end(kLaunchers), stat.name) !=
        std::end(kLaunchers)) {
      return pid;
    }
    pid = stat.parent;
  }
  return 0;
}

// How many children of it live; -1 where the system does not say.
int64_t LivingChildren(int pid) {
  namespace fs = std::filesystem;
  int64_t living = 0;
  std::error_code error;
  for (const auto& task : fs::directory_iterator(absl::StrCat("/proc/", pid, "/task"), error)) {
    const absl::StatusOr<std::string> children = ReadFile(task.path().string() + "/children");
    if (!children.ok()) return -1;
    for (const absl::string_view text : absl::StrSplit(*children, ' ', absl::SkipEmpty())) {
      int child = 0;
      if (absl::SimpleAtoi(text, &child) && StatOf(child).state != 'Z') ++living;
    }
  }
  return error ? -1 : living;
}

}  // namespace

absl::Duration StartWatch::Limit(const Environment& environment) {
  const char* text = environment("DTENSOR_TIMEOUT_S");
  if (text == nullptr) return kDefault;
  // What is no number is refused by name once this rank has started.
  return std::max(TimeoutFrom(text, kDefault).value_or(kDefault), kLeast);
}

StartWatch::StartWatch(const ProcessPlace& place, const char* library,
                       const Environment& environment)
    : place_(place), library_(library), limit_(Limit(environment)), thread_([this] { Watch(); }) {}

StartWatch::~StartWatch() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    started_ = true;
  }
  over_.notify_one();
  thread_.join();
}

void StartWatch::End(int code, const std::string& why) const {
  fprintf(stderr, "error: rank %d: %s cannot start: %s\n", static_cast<int>(place_.rank), library_,
          why.c_str());
  _exit(code);  // in order it cannot: the library is in the middle of its start
}

void StartWatch::Watch() {
  const Deadline limit = Deadline::In(limit_);
  const int launcher = LauncherAbove();
  Deadline patience = Deadline::In(kStarting);  // with those who are not there
  std::unique_lock<std::mutex> lock(mutex_);
  while (!over_.wait_for(lock, absl::ToChronoMilliseconds(kLook), [&] { return started_; })) {
    if (limit.passed()) {
      End(72, absl::StrCat("not all ", place_.size, " processes of the launch came within ",
                           absl::FormatDuration(limit_)));
    }
    const int64_t living = launcher == 0 ? -1 : LivingChildren(launcher);
    if (living < 0 || living >= place_.local_size) {
      patience = Deadline::In(kStarting);
    } else if (patience.passed()) {
      End(71, absl::StrCat(place_.local_size - living, " of the ", place_.local_size,
                           " processes of this machine ended before it"));
    }
  }
}

}  // namespace dtensor

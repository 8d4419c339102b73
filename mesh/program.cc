#include "dtensor/mesh/program.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "dtensor/mesh/process/endpoint.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"
#include "nlohmann/json.hpp"

namespace dtensor {
namespace {

// What a handler of signals tells, too.
std::atomic<bool> has_cause{false};
char cause[1024];
size_t cause_size = 0;

// Says which signal ends the program, with nothing that a handler may not call, and lets it.
void TellSignal(int number) {
  if (has_cause.load()) (void)!write(STDERR_FILENO, cause, cause_size);
  const char* text = number == SIGINT    ? "error: ended by SIGINT\n"
                     : number == SIGTERM ? "error: ended by SIGTERM\n"
                                         : "error: ended by SIGHUP\n";
  (void)!write(STDERR_FILENO, text, strlen(text));
  raise(number);  // SA_RESETHAND: the default
}

// A write beyond RLIMIT_FSIZE shall be an error of that write, not the end without a word.
void HandleSignals() {
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGXFSZ}) {
    struct sigaction action = {};
    if (sigaction(number, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) continue;
    action.sa_handler = number == SIGXFSZ ? SIG_IGN : TellSignal;
    action.sa_flags = static_cast<int>(SA_RESETHAND | SA_NODEFER);
    sigaction(number, &action, nullptr);
  }
}

absl::Status Guarded(absl::FunctionRef<absl::Status()> work) {
  try {
    DT_RETURN_IF_ERROR(CheckLaunch());
    DT_RETURN_IF_ERROR(work());
  } catch (...) {
    return CurrentException();
  }
  if (fflush(stdout) == 0 && !ferror(stdout)) return absl::OkStatus();
  return absl::UnavailableError("the output cannot be written");
}

// "123" or "123 kB" after `name` in a file of the kernel; the largest number where there is none.
int64_t KernelNumber(const char* path, absl::string_view name) {
  const absl::StatusOr<std::string> text = ReadFile(path);
  int64_t number;
  const size_t at = text.ok() ? text->find(std::string(name)) : std::string::npos;
  if (at == std::string::npos) return std::numeric_limits<int64_t>::max();
  absl::string_view rest = absl::string_view(*text).substr(at + name.size());
  rest = absl::StripLeadingAsciiWhitespace(rest);
  const bool kilobytes = absl::StrContains(rest.substr(0, rest.find('\n')), " kB");
  rest = rest.substr(0, rest.find_first_not_of("0123456789"));
  if (!absl::SimpleAtoi(rest, &number)) return std::numeric_limits<int64_t>::max();
  return kilobytes ? number * 1024 : number;
}

// For the launcher: which rank this one blames.
void WriteErrorFile(const absl::Status& status) {
  const char* path = std::getenv("DTENSOR_ERROR_FILE");
  if (path == nullptr || *path == '\0') return;
  const nlohmann::json error = {{"message", std::string(status.message())},
                                {"culprit", CulpritOf(status).value_or(-1)}};
  const absl::Status written =
      WriteFile(path, error.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  if (!written.ok()) fprintf(stderr, "%s\n", std::string(written.message()).c_str());
}

// What may go well when it is tried again is told from what will not. `lost`: a process is.
int ExitCode(const absl::Status& status, bool lost) {
  const bool of_peer = CulpritOf(status).has_value();
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return 0;
    case absl::StatusCode::kInternal:
      return 70;
    case absl::StatusCode::kUnavailable:  // else it is of a file, which a rank may name too
      return of_peer && lost ? 71 : 1;
    case absl::StatusCode::kAborted:
      return of_peer ? 71 : 1;
    case absl::StatusCode::kDeadlineExceeded:
      return of_peer ? 72 : 1;
    case absl::StatusCode::kResourceExhausted:
      return 75;
    default:
      return 1;
  }
}

}  // namespace

void internal::TellAtSignal(const absl::Status& why) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  has_cause.store(false);
  const std::string text = absl::StrCat("error: ", why.message());
  cause_size = std::min(text.size(), sizeof(cause) - 1);
  std::copy_n(text.data(), cause_size, cause);
  cause[cause_size++] = '\n';
  has_cause.store(!why.ok());
}

absl::Status CheckLaunch() { return Endpoint::OfLaunch().status(); }

int64_t LaunchedProcesses() {
  const absl::StatusOr<Endpoint*> endpoint = Endpoint::OfLaunch();
  return endpoint.ok() && *endpoint != nullptr ? (*endpoint)->size() : 1;
}

int64_t ThisProcess() {
  const absl::StatusOr<Endpoint*> endpoint = Endpoint::OfLaunch();
  return endpoint.ok() && *endpoint != nullptr ? (*endpoint)->rank() : 0;
}

int64_t AvailableMemory() {
  int64_t bytes = KernelNumber("/proc/meminfo", "MemAvailable:");
  const int64_t most = KernelNumber("/sys/fs/cgroup/memory.max", "");
  if (most != std::numeric_limits<int64_t>::max()) {
    bytes = std::min(bytes, most - KernelNumber("/sys/fs/cgroup/memory.current", ""));
  }
  rlimit space;
  if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
    bytes = std::min(
        bytes, static_cast<int64_t>(space.rlim_cur) - KernelNumber("/proc/self/status", "VmSize:"));
  }
  return std::max<int64_t>(bytes, 0);
}

int RunProgram(absl::FunctionRef<absl::Status()> work) {
  HandleSignals();
  const absl::Status status = Guarded(work);
  if (status.ok()) return 0;
  fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  WriteErrorFile(status);
  const absl::StatusOr<Endpoint*> endpoint = Endpoint::OfLaunch();
  if (!endpoint.ok() || *endpoint == nullptr) return ExitCode(status, /*lost=*/false);
  (*endpoint)->ends_with = status;
  return ExitCode(status, (*endpoint)->broken());
}

}  // namespace dtensor

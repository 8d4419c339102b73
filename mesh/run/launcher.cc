#include "dtensor/mesh/run/launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "dtensor/mesh/run/child.h"
#include "dtensor/mesh/run/console.h"
#include "dtensor/mesh/run/guard.h"
#include "dtensor/mesh/run/nodes.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

extern char** environ;

namespace dtensor::run {
namespace {

namespace fs = std::filesystem;

// After a failure the others are told by their runtime, and end with errors that say more than a
// signal would. Whoever does not is told to; and then killed.
constexpr absl::Duration kSettle = absl::Seconds(3);
constexpr absl::Duration kGrace = absl::Seconds(5);
constexpr absl::Duration kGoodOrder =
    absl::Seconds(30);  // to save, when the launcher is told to end
constexpr int kTickMs = 100;

// Where temporary files go, as the system has it.
absl::StatusOr<std::string> TemporaryFolder() {
  std::error_code error;
  const fs::path path = fs::temp_directory_path(error);
  if (!error) return path.string();
  for (const char* name : {"TMPDIR", "TMP", "TEMP", "TEMPDIR"}) {
    const char* const value = std::getenv(name);
    if (value == nullptr) continue;
    return absl::InvalidArgumentError(absl::StrCat(name, " ", value, ": ", error.message()));
  }
  return absl::UnavailableError(absl::StrCat("/tmp: ", error.message()));
}

// A folder for what processes leave: --log-dir, or a temporary one.
class Folder {
 public:
  static absl::StatusOr<std::unique_ptr<Folder>> Make(const std::string& log_dir) {
    std::unique_ptr<Folder> folder(new Folder);
    folder->temporary_ = log_dir.empty();
    std::error_code error;
    folder->path_ = fs::absolute(log_dir, error).string();  // also of who goes elsewhere
    if (log_dir.empty()) {
      DT_ASSIGN_OR_RETURN(const std::string where, TemporaryFolder());
      std::string path = fs::absolute(where, error).string() + "/dtensor-run-XXXXXX";
      if (mkdtemp(path.data()) == nullptr) {
        return absl::UnavailableError(absl::StrCat(path, ": ", strerror(errno)));
      }
      folder->path_ = path;
    }
    return folder;
  }
  ~Folder() {
    std::error_code error;
    if (temporary_ && !keep) fs::remove_all(path_, error);
  }
  // Of one process: log-dir/attempt_0/rank.
  absl::StatusOr<std::string> Of(int64_t attempt, int64_t rank) const {
    const std::string path = absl::StrCat(path_, "/attempt_", attempt, "/", rank);
    std::error_code error;
    fs::create_directories(path, error);
    if (error) return absl::UnavailableError(absl::StrCat(path, ": ", error.message()));
    return path;
  }
  bool keep = false;  // something in it was named to the user

 private:
  Folder() = default;
  std::string path_;
  bool temporary_ = false;
};

int64_t Cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

// Where a process leaves its flight report, ".rank3" added if it is not alone.
std::string ReportFile(const std::string& folder) {
  const char* const asked = std::getenv("DTENSOR_FLIGHT_REPORT");
  return asked != nullptr ? asked : folder + "/flight_report.json";
}

// torchrun's variables and ours.
std::vector<std::string> EnvironmentOf(const LaunchOptions& o, const Attempt& attempt,
                                       const std::string& address, int64_t local,
                                       const std::string& folder) {
  const int64_t rank = attempt.first_rank + local;
  const std::pair<std::string, std::string> store = absl::StrSplit(attempt.store, ':');
  std::vector<std::pair<std::string, std::string>> set = {
      {"GROUP_RANK", absl::StrCat(o.node)},
      {"GROUP_WORLD_SIZE", absl::StrCat(o.nodes)},
      {"ROLE_RANK", absl::StrCat(rank)},
      {"ROLE_NAME", "default"},
      {"ROLE_WORLD_SIZE", absl::StrCat(attempt.world_size)},
      {"MASTER_ADDR", store.first},
      {"MASTER_PORT", store.second},
      {"TORCHELASTIC_RESTART_COUNT", absl::StrCat(attempt.number)},
      {"TORCHELASTIC_MAX_RESTARTS", absl::StrCat(o.max_restarts)},
      {"TORCHELASTIC_RUN_ID", o.endpoint.empty() ? "none" : o.endpoint},
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
      {"DTENSOR_STORE", attempt.store},
      {"DTENSOR_TOKEN", attempt.secret},
      {"DTENSOR_LOCAL_ADDRESS", address},
      {"DTENSOR_ERROR_FILE", folder + "/error.json"},
  };
  for (const char* prefix : {"", "DTENSOR_"}) {
    set.emplace_back(absl::StrCat(prefix, "RANK"), absl::StrCat(rank));
    set.emplace_back(absl::StrCat(prefix, "WORLD_SIZE"), absl::StrCat(attempt.world_size));
    set.emplace_back(absl::StrCat(prefix, "LOCAL_RANK"), absl::StrCat(local));
    set.emplace_back(absl::StrCat(prefix, "LOCAL_WORLD_SIZE"), absl::StrCat(o.processes));
  }
  const auto unless_there = [&](const char* name, std::string value) {
    if (std::getenv(name) == nullptr) set.emplace_back(name, std::move(value));
  };
  unless_there("DTENSOR_FLIGHT_REPORT", ReportFile(folder));
  unless_there("OMP_NUM_THREADS", absl::StrCat(std::max<int64_t>(1, Cores() / o.processes)));
  std::vector<std::string> all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string name(*entry, strcspn(*entry, "="));
    const auto same = [&](const auto& mine) { return mine.first == name; };
    if (std::none_of(set.begin(), set.end(), same)) all.emplace_back(*entry);
  }
  for (const auto& [name, value] : set) all.push_back(absl::StrCat(name, "=", value));
  return all;
}

int OfRank(const std::vector<int>& by_local_rank, int64_t local) {
  const auto last = static_cast<int64_t>(by_local_rank.size()) - 1;
  return by_local_rank[static_cast<size_t>(std::min(local, last))];
}

// What started processes left behind when they ended: killed. (They are this process's children
// now, as the guard is.)
void EndOrphans(const Guard& guard) {
  for (int turn = 0; turn < 100; ++turn) {
    std::error_code error;
    for (const auto& task : fs::directory_iterator("/proc/self/task", error)) {
      const absl::StatusOr<std::string> children = ReadFile(task.path().string() + "/children");
      if (!children.ok()) continue;
      for (const absl::string_view text : absl::StrSplit(*children, ' ', absl::SkipEmpty())) {
        int pid = 0;
        if (absl::SimpleAtoi(text, &pid) && pid != guard.pid()) kill(pid, SIGKILL);
      }
    }
    pid_t ended;
    while ((ended = waitpid(-1, nullptr, WNOHANG)) > 0) {
    }
    if (ended < 0) return;  // there are none
    absl::SleepFor(absl::Milliseconds(10));
  }
}

// Signals come by a descriptor while there are children: whichever thread of the launcher gets one,
// and whether or not it was started with them ignored, as what a shell runs in the background is;
// but for SIGHUP, which nohup ignores for a reason.
class SignalScope {
 public:
  SignalScope() {
    if (pipe2(pipe_, O_NONBLOCK | O_CLOEXEC) != 0) pipe_[0] = pipe_[1] = -1;
    pid_.store(getpid());
    to_.store(pipe_[1]);
    struct sigaction action = {};
    action.sa_handler = &SignalScope::Note;
    action.sa_flags = SA_RESTART;
    for (size_t i = 0; i < std::size(kNumbers); ++i) {
      sigaction(kNumbers[i], nullptr, &before_[i]);
      if (kNumbers[i] == SIGHUP && before_[i].sa_handler == SIG_IGN) continue;
      sigaction(kNumbers[i], &action, nullptr);
    }
  }
  ~SignalScope() {
    for (size_t i = 0; i < std::size(kNumbers); ++i) sigaction(kNumbers[i], &before_[i], nullptr);
    to_.store(-1);
    close(pipe_[0]);
    close(pipe_[1]);
  }
  SignalScope(const SignalScope&) = delete;
  int fd() const { return pipe_[0]; }
  // The next that says something; 0: none.
  int Take() const {
    unsigned char number;
    while (read(pipe_[0], &number, 1) == 1) {
      if (number != SIGCHLD) return number;
    }
    return 0;
  }

 private:
  static constexpr int kNumbers[] = {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
  static void Note(int number) {
    const int error = errno;
    const auto byte = static_cast<unsigned char>(number);
    // Not in a child that has not yet become its program.
    if (getpid() == pid_.load()) (void)!write(to_.load(), &byte, 1);
    errno = error;
  }

  static inline std::atomic<int> to_{-1}, pid_{0};
  int pipe_[2];
  struct sigaction before_[std::size(kNumbers)];
};

// The processes of this node in one attempt.
class Processes {
 public:
  Processes(const LaunchOptions& options, Nodes& nodes, const Attempt& attempt, Console& console,
            const Guard& guard)
      : o_(options), nodes_(nodes), attempt_(attempt), console_(console), guard_(guard) {}
  ~Processes();
  absl::Status Start();
  // Until all have ended. Returns the signal that ended the launcher, or 0.
  absl::StatusOr<int> Run();
  // Path of a flight report of a process here; empty: there is none.
  const std::string& report() const { return report_; }

 private:
  struct Process {
    std::unique_ptr<Child> child;
    std::string folder;
    bool ended = false, told = false;
  };
  void Wait();
  absl::Status Reap();
  std::string ReportOf(const Process& process, int64_t rank) const;
  absl::Status Ended(int64_t local, int status);
  void HandleSignal(int number);
  void SignalAll(int number);
  absl::Status Watch();
  // The other launchers are out of reach: what is here ends as after a failure, and is heard.
  void Lose(const absl::Status& status) {
    if (status.ok() || !lost_.ok()) return;
    lost_ = status;
    failed_ = true;
  }

  const LaunchOptions& o_;
  Nodes& nodes_;
  const Attempt& attempt_;
  Console& console_;
  const Guard& guard_;
  const SignalScope signals_;
  // Gone before signals are not waited for any more: one that ends the launcher leaves none.
  std::unique_ptr<Folder> folder_;
  // By the clock of files, which runs some milliseconds behind.
  const fs::file_time_type began_ =
      fs::file_time_type::clock::now() - std::chrono::milliseconds(20);
  std::vector<Process> processes_;
  std::string report_;
  int told_ = 0;         // signal that ended the launcher
  bool failed_ = false;  // a process, anywhere
  absl::Status lost_;
  absl::Time end_at_ = absl::InfiniteFuture(), kill_at_ = absl::InfiniteFuture();
};

Processes::~Processes() {
  SignalAll(SIGKILL);
  for (Process& process : processes_) {
    if (!process.ended) waitpid(process.child->pid(), nullptr, 0);
    process.child->Signal(SIGKILL);  // the rest of its group
  }
  EndOrphans(guard_);
}

absl::Status Processes::Start() {
  DT_ASSIGN_OR_RETURN(folder_, Folder::Make(o_.log_dir));
  for (int64_t local = 0; local < o_.processes; ++local) {
    const int64_t rank = attempt_.first_rank + local;
    Process process;
    DT_ASSIGN_OR_RETURN(process.folder, folder_->Of(attempt_.number, rank));
    ChildPlan plan;
    plan.command = o_.command;
    plan.prefix = absl::StrCat("[rank ", rank, "] ");
    plan.environment = EnvironmentOf(o_, attempt_, nodes_.address(), local, process.folder);
    const int redirect = OfRank(o_.redirects, local), tee = OfRank(o_.tee, local);
    const auto stream = [&](int bit, const char* name) {
      const bool to_file = ((redirect | tee) & bit) != 0;
      return StreamPlan{(redirect & bit) == 0 || (tee & bit) != 0,
                        to_file ? absl::StrCat(process.folder, "/", name, ".log") : ""};
    };
    plan.out = stream(kStdout, "stdout");
    plan.err = stream(kStderr, "stderr");
    DT_ASSIGN_OR_RETURN(process.child, Child::Start(plan, console_, guard_));
    processes_.push_back(std::move(process));
  }
  return absl::OkStatus();
}

void Processes::SignalAll(int number) {
  for (Process& process : processes_) {
    if (process.ended) continue;
    process.told = true;
    process.child->Signal(number);
  }
}

void Processes::HandleSignal(int number) {
  if (number == SIGUSR1 || number == SIGUSR2) {  // a word to the program
    for (const Process& process : processes_) {
      if (!process.ended) process.child->Signal(number);
    }
    return;
  }
  const bool again = told_ != 0;
  told_ = number;
  console_.Hurry();
  if (number != SIGPIPE) {
    console_.Print(Console::kErr,
                   absl::StrCat("dtensor-run: ", strsignal(number), ": the processes are ",
                                again ? "killed" : "told to end; once more kills them", "\n"));
  }
  SignalAll(again ? SIGKILL : number == SIGPIPE ? SIGTERM : number);
  end_at_ = absl::InfiniteFuture();
  kill_at_ = absl::Now() + kGoodOrder;
}

// Until something happens, or for a moment.
void Processes::Wait() {
  std::vector<pollfd> fds = {{signals_.fd(), POLLIN, 0}};
  for (const Process& process : processes_) {
    for (const int fd : {process.child->out(), process.child->err()}) {
      if (fd >= 0) fds.push_back({fd, POLLIN, 0});
    }
  }
  console_.AddTo(&fds);
  (void)poll(fds.data(), fds.size(), kTickMs);
}

std::string Processes::ReportOf(const Process& process, int64_t rank) const {
  std::string report = ReportFile(process.folder);
  if (attempt_.world_size > 1) absl::StrAppend(&report, ".rank", rank);
  std::error_code none;
  const fs::file_time_type written = fs::last_write_time(report, none);
  return !none && written >= began_ ? report : "";  // not one that was there before
}

absl::Status Processes::Ended(int64_t local, int status) {
  Process& process = processes_[static_cast<size_t>(local)];
  process.ended = true;
  process.child->Finish();
  const std::string report = ReportOf(process, attempt_.first_rank + local);
  if (report_.empty()) report_ = report;
  if (absl::StartsWith(report, process.folder)) folder_->keep = true;
  if (told_ != 0 || (status == 0 && process.told)) return absl::OkStatus();
  Failure failure;
  failure.rank = attempt_.first_rank + local;
  failure.local_rank = local;
  failure.pid = process.child->pid();
  failure.host = nodes_.host();
  failure.status = status;
  failure.told = process.told;
  failure.report = report;
  if (status == 0) return lost_.ok() ? nodes_.TellEndOf(failure) : absl::OkStatus();
  failure.last_lines = absl::StrJoin(process.child->last_lines(), "\n");
  if (const auto text = ReadFile(process.folder + "/error.json"); text.ok()) {
    failure.culprit = Failure::CulpritIn(*text);
  }
  return lost_.ok() ? nodes_.Tell(failure) : absl::OkStatus();
}

absl::Status Processes::Reap() {
  for (size_t i = 0; i < processes_.size(); ++i) {
    processes_[i].child->Drain();  // also what those say that it has started
    if (processes_[i].ended) continue;
    int status = 0;
    if (waitpid(processes_[i].child->pid(), &status, WNOHANG) > 0) {
      DT_RETURN_IF_ERROR(Ended(static_cast<int64_t>(i), status));
      failed_ = failed_ || (status != 0 && told_ == 0);
    }
  }
  return absl::OkStatus();
}

absl::Status Processes::Watch() {
  const absl::Time now = absl::Now();
  // Also after a failure, which may take long to end: who asks is heard, and not taken for stopped.
  if (lost_.ok() && o_.nodes > 1) {
    DT_ASSIGN_OR_RETURN(const bool any, nodes_.AnyFailed());
    failed_ = failed_ || any;
  }
  if (failed_ && told_ == 0 && end_at_ == absl::InfiniteFuture() &&
      kill_at_ == absl::InfiniteFuture()) {
    end_at_ = now + kSettle;
  }
  if (now >= end_at_) {
    SignalAll(SIGTERM);
    end_at_ = absl::InfiniteFuture();
    kill_at_ = now + kGrace;
  }
  if (now >= kill_at_) SignalAll(SIGKILL);
  return absl::OkStatus();
}

absl::StatusOr<int> Processes::Run() {
  const auto all_ended = [&] {
    return std::all_of(processes_.begin(), processes_.end(),
                       [](const Process& process) { return process.ended; });
  };
  while (!all_ended()) {
    Wait();
    if (const int number = signals_.Take(); number != 0) HandleSignal(number);
    Lose(Reap());
    Lose(Watch());
    console_.Write();
    if (console_.reader_gone() && told_ == 0) HandleSignal(SIGPIPE);
  }
  DT_RETURN_IF_ERROR(lost_);
  return told_;
}

// The first that was not told to end.
const Failure& ByItself(const std::vector<Failure>& failures) {
  const auto by_itself = std::find_if(failures.begin(), failures.end(), [](const Failure& failure) {
    return failure.status != 0 && !failure.told;
  });
  return by_itself == failures.end() ? failures.front() : *by_itself;
}

// Not whoever ended first, but whom that one blames.
const Failure& FirstOf(const std::vector<Failure>& failures) {
  const Failure& first = ByItself(failures);
  const auto blamed = std::find_if(failures.begin(), failures.end(), [&](const Failure& failure) {
    return failure.rank == first.culprit;
  });
  return blamed == failures.end() ? first : *blamed;
}

int CodeOf(const std::vector<Failure>& failures) {
  const int code = FirstOf(failures).code();
  return code != 0 ? code : ByItself(failures).code();
}

std::string ReportLine(const std::string& report) {
  return report.empty() ? "" : absl::StrCat("dtensor-run: flight report: ", report, "\n");
}

// `report`: of a process here, where those that failed left none.
std::string Summary(const std::vector<Failure>& failures, std::string report,
                    const LaunchOptions& o, int64_t attempt) {
  const Failure& first = FirstOf(failures);
  std::string text =
      absl::StrCat("dtensor-run: attempt ", attempt, " failed; first ", first.Who(), ": ",
                   first.How(), first.told ? ", as it did not end by itself\n" : "\n");
  if (!first.last_lines.empty()) {
    absl::StrAppend(&text, "dtensor-run: its last lines:\n");
    for (const absl::string_view line : absl::StrSplit(first.last_lines, '\n')) {
      absl::StrAppend(&text, "    ", line, "\n");
    }
  }
  std::vector<std::string> others;
  for (auto failure = failures.rbegin(); failure != failures.rend(); ++failure) {
    if (!failure->report.empty()) report = failure->report;
  }
  if (!first.report.empty()) report = first.report;
  for (const Failure& failure : failures) {
    if (&failure != &first)
      others.push_back(absl::StrCat("rank ", failure.rank, ": ", failure.How()));
  }
  absl::StrAppend(&text, ReportLine(report));
  if (!others.empty()) {
    absl::StrAppend(&text, "dtensor-run: then ", absl::StrJoin(others, "; "), "\n");
  }
  if (attempt < o.max_restarts) {
    absl::StrAppend(&text, "dtensor-run: all start again: restart ", attempt + 1, " of ",
                    o.max_restarts, "\n");
  }
  return text;
}

absl::Status Check(const LaunchOptions& o) {
  const auto in_range = [](const char* flag, int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(flag, " is ", value, ": give a number from ", least, " to ", most));
  };
  DT_RETURN_IF_ERROR(in_range("--nproc-per-node", o.processes, 1, 4096));
  DT_RETURN_IF_ERROR(in_range("--nnodes", o.nodes, 1, 65536));
  DT_RETURN_IF_ERROR(in_range("--node-rank", o.node, 0, o.nodes - 1));
  DT_RETURN_IF_ERROR(in_range("--max-restarts", o.max_restarts, 0, 1000000));
  if (o.nodes > 1 && o.endpoint.empty()) {
    return absl::InvalidArgumentError(
        "--nnodes: several machines need --rdzv-endpoint, where node 0 is, as node1:29400");
  }
  if (o.command.empty()) {
    return absl::InvalidArgumentError(
        "no program: dtensor-run --nproc-per-node 2 -- program arguments");
  }
  const auto any = [](const std::vector<int>& streams) {
    return std::any_of(streams.begin(), streams.end(), [](int bits) { return bits != kNone; });
  };
  if (o.log_dir.empty() && (any(o.redirects) || any(o.tee))) {
    return absl::InvalidArgumentError("--redirects and --tee need --log-dir, the folder for files");
  }
  return o.log_dir.empty() ? TemporaryFolder().status() : absl::OkStatus();
}

// Attempt after attempt. Returns the exit code.
absl::StatusOr<int> RunAttempts(const LaunchOptions& o, Nodes& nodes, Console& console,
                                const Guard& guard) {
  for (int64_t number = 0;; ++number) {
    DT_ASSIGN_OR_RETURN(const Attempt attempt, nodes.Begin(number));
    std::string report;
    {
      Processes processes(o, nodes, attempt, console, guard);
      DT_RETURN_IF_ERROR(processes.Start());
      const absl::StatusOr<int> told = processes.Run();
      report = processes.report();
      if (!told.ok() || *told != 0) console.Print(Console::kErr, ReportLine(report));
      DT_RETURN_IF_ERROR(told.status());
      if (*told != 0) {
        nodes.Stop(absl::StrCat("was ended by a signal: ", strsignal(*told)));
        return 128 + *told;
      }
    }
    DT_ASSIGN_OR_RETURN(std::vector<Failure> failures, nodes.End());
    if (failures.empty()) {
      console.Print(Console::kErr, ReportLine(report));
      return 0;
    }
    console.Print(Console::kErr, Summary(failures, std::move(report), o, number));
    if (number == o.max_restarts) return CodeOf(failures);
  }
}

absl::StatusOr<int> RunNodes(const LaunchOptions& o, Console& console, const Guard& guard) {
  DT_ASSIGN_OR_RETURN(const std::unique_ptr<Nodes> nodes, Nodes::Join(o, console));
  absl::StatusOr<int> code = RunAttempts(o, *nodes, console, guard);
  if (!code.ok()) nodes->Stop(absl::StrCat("has given up: ", code.status().message()));
  return code;
}

}  // namespace

absl::StatusOr<int> RunLauncher(const LaunchOptions& options) {
  DT_RETURN_IF_ERROR(Check(options));
  // The last two are for processes, also where there are none yet.
  for (const int number : {SIGPIPE, SIGUSR1, SIGUSR2}) signal(number, SIG_IGN);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  Console console;
  DT_ASSIGN_OR_RETURN(const std::unique_ptr<Guard> guard, Guard::Start());
  absl::StatusOr<int> code = RunNodes(options, console, *guard);
  console.Flush();
  if (code.ok() && *code == 0 && console.reader_gone()) return 128 + SIGPIPE;
  if (code.ok() && *code == 0 && console.failed()) return 1;
  return code;
}

}  // namespace dtensor::run

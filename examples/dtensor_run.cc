// dtensor-run: starts a program as several processes, each a rank, on one machine or on several.
//
//   dtensor-run --nproc-per-node 4 -- train_gpt --mesh dp=2,tp=2
//   dtensor-run --nnodes 2 --node-rank 0 --rdzv-endpoint node1:29400 --nproc-per-node 8 -- program
#include <algorithm>
#include <cstdio>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "dtensor/mesh/run/launcher.h"
#include "dtensor/tensor/status.h"
#include "examples/flags.h"
#include "examples/output_files.h"

ABSL_FLAG(std::string, nproc_per_node, "1", "processes on this machine; auto: one per core");
ABSL_FLAG(int64_t, nnodes, 1, "machines, each with a launcher of its own");
ABSL_FLAG(int64_t, node_rank, 0, "which of them this is");
ABSL_FLAG(std::string, rdzv_endpoint, "",
          "machine and port where node 0 is found, as node1:29400; its launcher listens there");
ABSL_FLAG(int64_t, max_restarts, 0, "how often all start again after a failure");
ABSL_FLAG(std::string, log_dir, "", "folder for what processes print: attempt_N/RANK/stdout.log");
ABSL_FLAG(std::string, redirects, "0",
          "what goes to files instead of here: 0 nothing, 1 stdout, 2 stderr, 3 both; or by local "
          "rank: 0:1,1:3");
ABSL_FLAG(std::string, tee, "0", "what goes to files and here, as --redirects");
ABSL_FLAG(std::string, local_addr, "",
          "IPv4 address of this machine, where the others reach it; that of DTENSOR_LOCAL_ADDRESS");

namespace dtensor {
namespace {

absl::StatusOr<int64_t> Processes() {
  const std::string text = absl::GetFlag(FLAGS_nproc_per_node);
  if (text == "auto") return std::max(1u, std::thread::hardware_concurrency());
  int64_t number = 0;
  if (absl::SimpleAtoi(text, &number)) return number;
  return absl::InvalidArgumentError(
      absl::StrCat("--nproc-per-node is \"", text, "\": give a number, or auto"));
}

// "3", or "0:1,1:3" by local rank, where others have none.
absl::StatusOr<std::vector<int>> StreamsOf(const char* flag, const std::string& text,
                                           int64_t processes) {
  const absl::Status bad = absl::InvalidArgumentError(
      absl::StrCat("--", flag, " is \"", text,
                   "\": give 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), or these by local "
                   "rank: 0:1,1:3"));
  int all = 0;
  if (absl::SimpleAtoi(text, &all)) {
    return all < 0 || all > run::kBoth ? absl::StatusOr<std::vector<int>>(bad)
                                       : std::vector<int>{all};
  }
  std::vector<int> streams;
  std::set<size_t> ranks;
  for (const absl::string_view item : absl::StrSplit(text, ',')) {
    const std::vector<std::string> parts = absl::StrSplit(item, ':');
    size_t local = 0;
    int bits = 0;
    if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &local) || local > 4096 ||
        !absl::SimpleAtoi(parts[1], &bits) || bits < 0 || bits > run::kBoth) {
      return bad;
    }
    const auto refused = [&](absl::string_view why) {
      return absl::InvalidArgumentError(absl::StrCat("--", flag, " is \"", text, "\": ", why));
    };
    if (processes > 0 && static_cast<int64_t>(local) >= processes) {
      return refused(
          absl::StrCat("there is no local rank ", local, ": give ranks from 0 to ", processes - 1));
    }
    if (!ranks.insert(local).second) {
      return refused(absl::StrCat("local rank ", local, " is there twice: give each once"));
    }
    streams.resize(std::max(streams.size(), local + 2));  // the last is that of all others
    streams[local] = bits;
  }
  return streams;
}

absl::StatusOr<run::LaunchOptions> Options(std::vector<std::string> command) {
  run::LaunchOptions o;
  DT_ASSIGN_OR_RETURN(o.processes, Processes());
  o.nodes = absl::GetFlag(FLAGS_nnodes);
  o.node = absl::GetFlag(FLAGS_node_rank);
  o.endpoint = absl::GetFlag(FLAGS_rdzv_endpoint);
  o.max_restarts = absl::GetFlag(FLAGS_max_restarts);
  o.log_dir = absl::GetFlag(FLAGS_log_dir);
  DT_RETURN_IF_ERROR(CheckOutputs({.folders = {{"--log-dir", o.log_dir}}}));
  DT_ASSIGN_OR_RETURN(o.redirects,
                      StreamsOf("redirects", absl::GetFlag(FLAGS_redirects), o.processes));
  DT_ASSIGN_OR_RETURN(o.tee, StreamsOf("tee", absl::GetFlag(FLAGS_tee), o.processes));
  o.local_address = absl::GetFlag(FLAGS_local_addr);
  o.command = std::move(command);
  return o;
}

// Where the program begins: after "--", or at the first that is no flag and no flag's value.
int ProgramAt(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const absl::string_view arg = argv[i];
    if (arg == "--" || arg.substr(0, 2) != "--") return i;
    if (arg.find('=') == arg.npos && arg.substr(0, 6) != "--help") ++i;
  }
  return argc;
}

absl::StatusOr<int> Run(int argc, char** argv) {
  const int at = ProgramAt(argc, argv);
  const bool marked = at < argc && absl::string_view(argv[at]) == "--";
  std::vector<std::string> command(argv + std::min(argc, at + (marked ? 1 : 0)), argv + argc);
  std::vector<char*> mine(argv, argv + std::min(at, argc));
  mine.push_back(nullptr);
  const int count = static_cast<int>(mine.size()) - 1;
  DT_RETURN_IF_ERROR(CheckFlagNames(count, mine.data(), "dtensor_run.cc"));
  absl::ParseCommandLine(count, mine.data());
  DT_ASSIGN_OR_RETURN(const run::LaunchOptions options, Options(std::move(command)));
  return run::RunLauncher(options);
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "starts a program as several processes: dtensor-run --nproc-per-node 4 -- program arguments");
  const absl::StatusOr<int> code = dtensor::Run(argc, argv);
  if (code.ok()) return *code;
  fprintf(stderr, "dtensor-run: %s\n", std::string(code.status().message()).c_str());
  return 1;
}

// Launch: from main()'s arguments and the environment to RunSpmd.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "mesh/launch.h"

namespace dtensor {
namespace {

// Takes argv[at .. at + n) out.
void Remove(int* argc, char** argv, int at, int n) {
  for (int i = at; i + n <= *argc; ++i) argv[i] = argv[i + n];  // the closing null too
  *argc -= n;
}

// Value of --ranks, or 0 where it is absent.
absl::StatusOr<int64_t> TakeRanks(int* argc, char** argv) {
  int64_t ranks = 0;
  for (int i = 1; i < *argc;) {
    absl::string_view arg = argv[i];
    if (arg == "--") break;  // what follows belongs to the program
    const bool joined = absl::StartsWith(arg, "--ranks=");
    if (!joined && arg != "--ranks") {
      ++i;
      continue;
    }
    if (!joined && i + 1 >= *argc) return absl::InvalidArgumentError("--ranks needs a number");
    absl::string_view value = joined ? arg.substr(strlen("--ranks=")) : argv[i + 1];
    if (!absl::SimpleAtoi(value, &ranks) || ranks < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("--ranks is \"", value, "\": give a number of at least 1"));
    }
    Remove(argc, argv, i, joined ? 1 : 2);
  }
  return ranks;
}

// Refuses to run as one of several processes: each would be a world of its own, silently.
absl::Status CheckEnvironment() {
  for (const char* name : {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    const char* text = std::getenv(name);
    int64_t size;
    if (!text || !absl::SimpleAtoi(text, &size) || size <= 1) continue;
    if (strcmp(name, "WORLD_SIZE") == 0 && !std::getenv("RANK")) continue;
    return absl::UnimplementedError(absl::StrCat(
        "started as one of ", size, " processes (", name,
        " is set), which needs the MPI plugin; start one process and give --ranks=", size,
        " to run the ranks as threads"));
  }
  return absl::OkStatus();
}

void WriteFlightReport(const FlightReport& report) {
  const char* path = std::getenv("DTENSOR_FLIGHT_REPORT");
  if (path == nullptr || *path == '\0' || report.groups.empty()) return;
  std::ofstream file(path);
  file << report.ToJson() << "\n";
  file.close();
  fprintf(stderr, file ? "flight report: %s\n" : "cannot write the flight report to %s\n", path);
}

}  // namespace

int Launch(int* argc, char** argv, absl::FunctionRef<absl::Status(RankContext&)> body,
           SpmdOptions options) {
  absl::StatusOr<int64_t> ranks = TakeRanks(argc, argv);
  absl::Status status = ranks.status();
  if (status.ok()) status = CheckEnvironment();
  FlightReport report;
  if (options.flight_report == nullptr) options.flight_report = &report;
  if (status.ok()) status = RunSpmd(*ranks > 0 ? *ranks : 1, body, options);
  if (status.ok()) return 0;
  fprintf(stderr, "error: %s\n", status.ToString().c_str());
  WriteFlightReport(*options.flight_report);
  return 1;
}

}  // namespace dtensor

// Launch: from main()'s arguments and the environment to RunSpmd.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "mesh/launch.h"
#include "mesh/program.h"
#include "tensor/file.h"
#include "tensor/status.h"

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

void WriteFlightReport(const FlightReport& report) {
  const char* path = std::getenv("DTENSOR_FLIGHT_REPORT");
  if (path == nullptr || *path == '\0' || report.groups.empty()) return;
  const absl::Status written = WriteFile(path, report.ToJson() + "\n");
  fprintf(stderr, "flight report: %s\n", written.ok() ? path : written.ToString().c_str());
}

}  // namespace

int Launch(int* argc, char** argv, absl::FunctionRef<absl::Status(RankContext&)> body,
           SpmdOptions options) {
  FlightReport report;
  if (options.flight_report == nullptr) options.flight_report = &report;
  const int code = RunProgram([&]() -> absl::Status {
    DT_ASSIGN_OR_RETURN(const int64_t ranks, TakeRanks(argc, argv));
    return RunSpmd(ranks > 0 ? ranks : 1, body, options);
  });
  if (code != 0) WriteFlightReport(*options.flight_report);
  return code;
}

}  // namespace dtensor

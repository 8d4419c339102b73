// Launch: from main()'s arguments and the environment to RunSpmd.
#include <cstring>
#include <optional>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/program.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// Takes argv[at .. at + n) out.
void Remove(int* argc, char** argv, int at, int n) {
  for (int i = at; i + n <= *argc; ++i) argv[i] = argv[i + n];  // the closing null too
  *argc -= n;
}

// The last value of a flag, or null where it is absent; takes all of them out. `wants` says what
// its value is.
absl::StatusOr<std::optional<std::string>> TakeFlag(absl::string_view flag, absl::string_view wants,
                                                    int* argc, char** argv) {
  std::optional<std::string> last;
  for (int i = 1; i < *argc;) {
    absl::string_view arg = argv[i];
    if (arg == "--") break;  // what follows belongs to the program
    const bool joined = absl::ConsumePrefix(&arg, flag) && absl::ConsumePrefix(&arg, "=");
    if (!joined && absl::string_view(argv[i]) != flag) {
      ++i;
      continue;
    }
    if (!joined && i + 1 >= *argc) {
      return absl::InvalidArgumentError(absl::StrCat(flag, " needs ", wants));
    }
    last = std::string(joined ? arg : absl::string_view(argv[i + 1]));
    Remove(argc, argv, i, joined ? 1 : 2);
  }
  return last;
}

// Value of --ranks; where it is absent one for each process.
absl::StatusOr<int64_t> TakeRanks(int* argc, char** argv) {
  DT_ASSIGN_OR_RETURN(const std::optional<std::string> value,
                      TakeFlag("--ranks", "a number", argc, argv));
  int64_t ranks = LaunchedProcesses();
  if (value && (!absl::SimpleAtoi(*value, &ranks) || ranks < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--ranks is \"", *value, "\": give a number of at least 1"));
  }
  return ranks;
}

// Value of --device, if it is there.
absl::StatusOr<std::optional<DeviceType>> TakeDevice(int* argc, char** argv) {
  DT_ASSIGN_OR_RETURN(const std::optional<std::string> value,
                      TakeFlag("--device", "a device: auto, cpu, cuda", argc, argv));
  if (!value) return std::optional<DeviceType>();
  absl::StatusOr<DeviceType> device = ChooseDevice(*value);
  if (!device.ok()) return Prefixed("--device", device.status());
  return std::optional<DeviceType>(*device);
}

}  // namespace

int Launch(int* argc, char** argv, absl::FunctionRef<absl::Status(RankContext&)> body,
           SpmdOptions options) {
  return RunProgram([&]() -> absl::Status {
    DT_ASSIGN_OR_RETURN(const int64_t ranks, TakeRanks(argc, argv));
    DT_ASSIGN_OR_RETURN(const std::optional<DeviceType> device, TakeDevice(argc, argv));
    if (device) options.device = device;
    return RunSpmd(ranks, body, options);
  });
}

}  // namespace dtensor

#include "dtensor/rng/profile.h"

#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace dtensor {
namespace {

struct Device {
  const char* name;
  int64_t sms, threads_per_sm;
};

// Source: multiProcessorCount and maxThreadsPerMultiProcessor as NVIDIA lists them, and the
// devices named by the test vectors.
constexpr Device kDevices[] = {
    {"h100", 132, 2048},    {"h100-pcie", 114, 2048}, {"h200", 132, 2048},
    {"h800", 132, 2048},    {"gh200", 132, 2048},     {"h20", 78, 2048},
    {"a100", 108, 2048},    {"a800", 108, 2048},      {"b200", 148, 2048},
    {"v100", 80, 2048},     {"t4", 40, 1024},         {"l4", 58, 1536},
    {"l40s", 142, 1536},    {"a10g", 80, 1536},       {"rtx3060", 28, 1536},
    {"rtx3090", 82, 1536},  {"rtx4080s", 80, 1536},   {"rtx4090", 128, 1536},
    {"rtxa4000", 48, 1536}, {"rtxa6000", 84, 1536},
};

}  // namespace

std::string KnownProfiles() {
  std::string names;
  for (const Device& d : kDevices) absl::StrAppend(&names, names.empty() ? "" : ", ", d.name);
  return names;
}

absl::StatusOr<Profile> CustomProfile(int64_t sms, int64_t threads_per_sm) {
  if (sms < 1 || sms > (1 << 15) || threads_per_sm < 256 || threads_per_sm > (1 << 16)) {
    return absl::InvalidArgumentError(
        absl::StrCat("random profile of ", sms, " SMs with ", threads_per_sm,
                     " threads each: SMs must be in [1, 32768], threads in [256, 65536]"));
  }
  Profile p;
  p.name = absl::StrCat("custom:", sms, "x", threads_per_sm);
  p.sms = sms;
  p.threads_per_sm = threads_per_sm;
  return p;
}

absl::StatusOr<Profile> FindProfile(absl::string_view name) {
  const std::string wanted = absl::AsciiStrToLower(name);
  if (absl::StartsWith(wanted, "custom:")) {
    const std::pair<std::string, std::string> sizes = absl::StrSplit(wanted.substr(7), 'x');
    int64_t sms, threads;
    if (!absl::SimpleAtoi(sizes.first, &sms) || !absl::SimpleAtoi(sizes.second, &threads)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "random profile \"", name, "\": a custom one reads custom:SMSxTHREADS_PER_SM, as in ",
          "custom:132x2048"));
    }
    return CustomProfile(sms, threads);
  }
  for (const Device& d : kDevices) {
    if (wanted != d.name) continue;
    Profile p;
    p.name = d.name;
    p.sms = d.sms;
    p.threads_per_sm = d.threads_per_sm;
    return p;
  }
  return absl::NotFoundError(absl::StrCat("no random profile \"", name, "\"; there are ",
                                          KnownProfiles(), " and custom:SMSxTHREADS_PER_SM"));
}

}  // namespace dtensor

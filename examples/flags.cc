#include "examples/flags.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "dtensor/mesh/program.h"
#include "dtensor/names.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {
namespace {

constexpr int64_t kMaxRanks = 256;

bool Known(absl::string_view flag) { return absl::FindCommandLineFlag(flag) != nullptr; }

}  // namespace

absl::Status InRange(const char* flag, int64_t value, int64_t most) {
  if (value > 0 && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, " must be from 1 to ", most, ", got ", value));
}

absl::Status CheckFlagNames(int argc, char** argv, const char* file) {
  // By default --help lists flags of the file that is called as the program is.
  const std::string of = absl::StrCat("/", file);
  absl::FlagsUsageConfig usage;
  usage.contains_helpshort_flags = usage.contains_help_flags = [of](absl::string_view source) {
    return absl::EndsWith(source, of);
  };
  absl::SetFlagsUsageConfig(std::move(usage));
  for (int i = 1; i < argc; ++i) {
    absl::string_view name = argv[i];
    if (name == "--") break;
    if (!absl::ConsumePrefix(&name, "--")) continue;
    const bool has_value = absl::StrContains(name, '=');
    name = name.substr(0, name.find('='));
    absl::string_view positive = name;
    if (absl::StartsWith(name, "help")) continue;
    if (!Known(name) && absl::ConsumePrefix(&positive, "no") && Known(positive)) continue;
    std::string underscored(name);
    std::replace(underscored.begin(), underscored.end(), '-', '_');
    if (Known(underscored)) {
      std::copy(underscored.begin(), underscored.end(), argv[i] + 2);
      // The next argument is the value, whatever it begins with.
      if (!has_value && !absl::FindCommandLineFlag(underscored)->IsOfType<bool>()) ++i;
      continue;
    }
    std::vector<std::string> known;
    for (const auto& [flag, entry] : absl::GetAllFlags()) {
      if (absl::EndsWith(entry->Filename(), file)) known.emplace_back(flag);
    }
    return absl::InvalidArgumentError(
        absl::StrCat("unknown flag --", name, "; nearest: --",
                     absl::StrJoin(NearestNames(name, known), ", --")));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<DeviceType>> ReadDevice(const char* name, const std::string& device) {
  if (device.empty()) return std::optional<DeviceType>();
  const absl::StatusOr<DeviceType> chosen = ChooseDevice(device);
  const absl::Status there = chosen.ok() ? CheckDevice(*chosen) : chosen.status();
  if (!there.ok()) return Prefixed(name, there);
  if (*chosen == DeviceType::kMeta) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " meta: its tensors have no values; give cpu, cuda or auto"));
  }
  return std::optional<DeviceType>(*chosen);
}

absl::StatusOr<DeviceMesh> ReadMesh(int64_t ranks, const std::string& text,
                                    const std::string& alone, std::optional<DeviceType> device) {
  if (ranks != 0) DT_RETURN_IF_ERROR(InRange("ranks", ranks, kMaxRanks));
  std::vector<int64_t> sizes = {1, 1};
  std::vector<std::string> names = {"dp", "tp"};  // the last dim's ranks are neighbours
  sizes[alone == "dp" ? 0 : 1] = ranks != 0 ? ranks : LaunchedProcesses();
  if (!text.empty()) {
    const absl::StatusOr<DeviceMesh> parsed = DeviceMesh::Parse(text);
    if (!parsed.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--mesh ", text, ": ", parsed.status().message()));
    }
    if (parsed->names()[0] == "tp" && parsed->ndim() > 1) std::swap(names[0], names[1]);
    sizes = {1, 1};
    for (int m = 0; m < parsed->ndim(); ++m) {
      const auto named = std::find(names.begin(), names.end(), parsed->names()[m]);
      if (named == names.end()) {
        return absl::InvalidArgumentError(absl::StrCat("--mesh ", text, ": unknown mesh dim \"",
                                                       parsed->names()[m],
                                                       "\"; this program has dp and tp"));
      }
      sizes[named - names.begin()] = parsed->size(m);
    }
  }
  const int64_t size = sizes[0] * sizes[1];
  if (ranks != 0 && ranks != size) {
    return absl::InvalidArgumentError(absl::StrCat("--ranks ", ranks, " contradicts --mesh ", text,
                                                   ", which has ", size,
                                                   " ranks; leave out one of them"));
  }
  if (size > kMaxRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("--mesh ", text, " has ", size, " ranks, at most ", kMaxRanks));
  }
  return DeviceMesh::Create(sizes, names, device);
}

}  // namespace dtensor

#include "dtensor/mesh/nccl/config.h"

#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "dtensor/tensor/status.h"

namespace dtensor::nccl {
namespace {

constexpr std::pair<absl::string_view, int Config::*> kNumbers[] = {
    {"cga_cluster_size", &Config::cga_cluster_size},
    {"min_ctas", &Config::min_ctas},
    {"max_ctas", &Config::max_ctas}};

absl::Status Bad(absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("DTENSOR_NCCL_CONFIG: ", what,
                   "; give LABEL:OPTION=VALUE,...;..., where LABEL is a group's or *, and OPTION "
                   "cga_cluster_size, min_ctas, max_ctas or net_name"));
}

absl::Status Set(absl::string_view option, Config* config) {
  const std::pair<absl::string_view, absl::string_view> at =
      absl::StrSplit(option, absl::MaxSplits('=', 1));
  if (at.first == "net_name" && !at.second.empty()) {
    // NCCL keeps the pointer. Ranks may be threads.
    static auto* const names = new std::set<std::string>;
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    config->net_name = names->emplace(at.second).first->c_str();
    return absl::OkStatus();
  }
  for (const auto& [name, member] : kNumbers) {
    if (at.first != name) continue;
    int value = 0;
    if (!absl::SimpleAtoi(at.second, &value) || value < 0) {
      return Bad(absl::StrCat("\"", option, "\" is no number of at least 0"));
    }
    config->*member = value;
    return absl::OkStatus();
  }
  return Bad(absl::StrCat("\"", option, "\" is no option"));
}

}  // namespace

absl::StatusOr<Config> ConfigOf(absl::string_view label) {
  Config config;
  const char* const text = std::getenv("DTENSOR_NCCL_CONFIG");
  if (text == nullptr) return config;
  for (const absl::string_view entry : absl::StrSplit(text, ';', absl::SkipWhitespace())) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(entry, absl::MaxSplits(':', 1));
    if (parts.second.empty()) return Bad(absl::StrCat("\"", entry, "\" has no options"));
    Config unused;  // what is said of others is read, too
    const absl::string_view whom = absl::StripAsciiWhitespace(parts.first);
    Config* const mine = whom == label || whom == "*" ? &config : &unused;
    for (const absl::string_view option : absl::StrSplit(parts.second, ',')) {
      DT_RETURN_IF_ERROR(Set(absl::StripAsciiWhitespace(option), mine));
    }
  }
  return config;
}

absl::StatusOr<bool> ChecksEach() {
  const char* const text = std::getenv("DTENSOR_CHECK");
  if (text == nullptr || *text == '\0') return false;
  if (absl::string_view(text) == "each") return true;
  return absl::InvalidArgumentError(
      absl::StrCat("DTENSOR_CHECK is \"", text, "\": give each, or unset it"));
}

}  // namespace dtensor::nccl

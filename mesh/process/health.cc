// The health file of a process, for who looks after it from outside.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "dtensor/mesh/process/process_world.h"
#include "dtensor/mesh/process/text.h"
#include "dtensor/tensor/file.h"

namespace dtensor {

using nlohmann::json;

std::string ProcessWorld::HealthPath() const {
  const char* const name = std::getenv("DTENSOR_HEALTH_FILE");
  if (name == nullptr || *name == '\0') return "";
  return endpoint_.size() == 1 ? name : absl::StrCat(name, ".rank", rank());
}

void ProcessWorld::WriteHealth(bool ended) {
  if (health_path_.empty()) return;
  json health = {{"rank", rank()},
                 {"size", size_},
                 {"pid", getpid()},
                 {"unix_seconds", absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch())},
                 {"beat_seconds", absl::ToDoubleSeconds(beat_)},
                 {"calls", json::array()}};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool through = rank() < size_ && left_[static_cast<size_t>(rank())];
    health["state"] = !cause_.ok() ? "failed" : ended ? "ended" : through ? "through" : "runs";
    health["error"] = cause_.ok() ? "" : std::string(cause_.message());
    for (const auto& [key, group] : groups_) {
      for (const FlightCall& call : group->Dump(1, through).calls) {
        if (!call.pending()) continue;
        health["calls"].push_back({{"group", call.group},
                                   {"call", absl::StrCat("#", call.sequence, " ", call.call)},
                                   {"state", call.state},
                                   {"waits_for", call.waits_for},
                                   {"seconds", call.age_ms / 1000}});
      }
    }
  }
  const absl::Status written =
      WriteFile(health_path_, health.dump(-1, ' ', false, json::error_handler_t::replace) + "\n");
  if (written.ok()) return;
  fprintf(stderr, "processes: DTENSOR_HEALTH_FILE: %s\n", std::string(written.message()).c_str());
  health_path_.clear();  // once is enough
}

}  // namespace dtensor

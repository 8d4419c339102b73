// What saving and loading a checkpoint share: names in its folder, its manifest, and how ranks
// agree.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/parallel/io/checkpoint.h"
#include "dtensor/parallel/io/checkpoint_file.h"
#include "dtensor/tensor/status.h"

namespace dtensor::internal {

inline constexpr char kManifest[] = "checkpoint.json";
inline constexpr char kModelFile[] = "model.safetensors",
                      kOptimizerFile[] = "optimizer.safetensors";
inline constexpr char kPartial[] = ".partial";

// "step-00000010"
std::string StepName(int64_t step);

// Whole checkpoints by step, and folders that are none. Nothing for a folder that cannot be read.
struct CheckpointListing {
  std::vector<std::pair<int64_t, std::filesystem::path>> steps;
  std::vector<std::string> others;
};
CheckpointListing ListCheckpoints(const std::filesystem::path& dir);

// Of parameters and persistent buffers, each once, under its first name.
StateDict TensorsOf(const Module& model);

// A manifest as it is written: with a checksum over itself.
struct Manifest {
  CheckpointInfo info = {};
  std::string generator = {};  // one state, or one of each rank
  std::vector<FileLayout> files = {};
};
std::string ToText(const Manifest& manifest);
// Errors: DataLoss for what ToText did not write, and for another version.
absl::StatusOr<Manifest> ParseManifest(const std::string& text);
std::string Hex(uint64_t sum);

// What every rank of the world brings to the others: how it went, and a few bytes. The first error
// by rank is everybody's, with the rank before it.
absl::StatusOr<std::vector<std::string>> AgreeAll(absl::string_view what,
                                                  const absl::Status& status,
                                                  absl::string_view mine = "");
// Sums of all ranks, added up.
absl::StatusOr<std::vector<uint64_t>> AddUp(absl::string_view what,
                                            const absl::StatusOr<std::vector<uint64_t>>& mine);

// What one rank does while others wait for what it says of it: an exception becomes that rank's
// status, so that it comes to the meeting all the same.
template <class Step>
auto Guarded(const Step& step) -> decltype(step()) {
  try {
    return step();
  } catch (...) {
    return CurrentException();
  }
}
// On rank 0 of the world alone.
template <class Step>
absl::Status OnFirst(const Step& step) {
  return RankContext::Current().rank() == 0 ? Guarded(step) : absl::OkStatus();
}

}  // namespace dtensor::internal

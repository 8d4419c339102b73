// Command lines of the programs here: errors that name the nearest flag, and meshes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dtensor/mesh/mesh.h"
#include "dtensor/tensor/device.h"

namespace dtensor {

// Errors: InvalidArgument naming --flag unless value is from 1 to `most`.
absl::Status InRange(const char* flag, int64_t value, int64_t most);

// Before absl::ParseCommandLine, which says that a flag is unknown, but not which one was meant.
// Takes --top-k for --top_k. `file` is where the program defines its flags, which --help lists,
// whatever the program is called.
//   Errors: InvalidArgument for an unknown flag, with the nearest ones.
absl::Status CheckFlagNames(int argc, char** argv, const char* file);

// A value of --device, or of the setting of that name; nothing where it is empty: DTENSOR_DEVICE
// decides. Errors: ChooseDevice's and CheckDevice's, after the name.
absl::StatusOr<std::optional<DeviceType>> ReadDevice(const char* name, const std::string& device);

// --ranks and --mesh against each other, as a mesh of dp and tp in the order given; a dim that is
// not named has size 1. Ranks without a mesh are all on the dim `alone`; without either there is
// one for each process.
//   Errors: InvalidArgument naming the flag: out of range, no mesh, other dims, contradictions.
absl::StatusOr<DeviceMesh> ReadMesh(int64_t ranks, const std::string& mesh,
                                    const std::string& alone, std::optional<DeviceType> device);

}  // namespace dtensor

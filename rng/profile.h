// Profile: the launch geometry and version of the device whose random numbers are reproduced.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dtensor {

// A value. Results depend on all fields except the name; the switches
// are off for current PyTorch releases.
struct Profile {
  std::string name = "h100";
  int64_t sms = 132;
  int64_t threads_per_sm = 2048;
  int layout_version = 1;  // 1: V = 256 * min(ceil(N / 256), cap)

  bool old_wide_advance = false;     // before mid-2024: 64-bit draws advance as if 4 per block
  bool old_wide_range = false;       // before 2.7: 64-bit draws from a range of 2^32, not 2^28
  bool old_dropout_vec = false;      // before 2.7: dropout vectors of 4 for every dtype
  bool flip_raw_uniform = false;     // before 2023: uniform_ turns a raw 1 into 0 before scaling
  bool old_exponential_log = false;  // before 2023: exponential_ does not clip the logarithm
  // Not PyTorch: dropout advances by what it consumed, so that streams never overlap.
  bool strict_streams = false;
  // On a GPU its own sine, logarithm and the like, as PyTorch there: normal_, log_normal_,
  // exponential_, cauchy_ and geometric_ of 16 and 32 bits are torch's on the same GPU, and no
  // longer the CPU's, bit for bit. Nothing else depends on it; a CPU has no such functions.
  bool hardware_math = false;

  int64_t block_cap() const { return sms * (threads_per_sm / 256); }
  int64_t thread_cap() const { return 256 * block_cap(); }
  friend bool operator==(const Profile&, const Profile&) = default;
};

// A known device ("h100", "a100", "rtx4090", ...; any case) or "custom:SMSxTHREADS_PER_SM".
//   Errors: NotFound naming the known profiles; InvalidArgument for a malformed custom one.
absl::StatusOr<Profile> FindProfile(absl::string_view name);
// Errors: InvalidArgument unless sms is in [1, 2^15] and threads_per_sm in [256, 2^16].
absl::StatusOr<Profile> CustomProfile(int64_t sms, int64_t threads_per_sm);
// "h100, h200, ..."
std::string KnownProfiles();

}  // namespace dtensor

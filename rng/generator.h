// Generator: the state of a random stream, (seed, offset), and the profile it is read with.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "dtensor/rng/profile.h"

namespace dtensor {

inline constexpr uint64_t kDefaultSeed = 67280421310721;

// A value, used by one thread: the ranks of a program each hold one in the same state, and every op
// moves all of them alike.
//   Source: torch.cuda's generator (CUDAGeneratorImpl.cpp): a seed and an offset, a multiple of 4.
class Generator {
 public:
  explicit Generator(uint64_t seed = kDefaultSeed, Profile profile = {})
      : seed_(seed), profile_(std::move(profile)) {}

  uint64_t seed() const { return seed_; }
  uint64_t offset() const { return offset_; }
  const Profile& profile() const { return profile_; }
  void set_profile(Profile profile) { profile_ = std::move(profile); }

  // Sets the seed and the offset to 0.
  void ManualSeed(uint64_t seed) {
    seed_ = seed;
    offset_ = 0;
  }
  // Errors: InvalidArgument unless a multiple of 4 below 2^63.
  absl::Status SetOffset(uint64_t offset);

  // What an op that consumes `increment` words per thread reads: the state before it. The offset
  // then moves by the increment rounded up to a multiple of 4.
  struct Reservation {
    uint64_t seed, offset;
  };
  Reservation Reserve(uint64_t increment) {
    const Reservation r{seed_, offset_};
    offset_ += (increment + 3) / 4 * 4;
    return r;
  }

  // Seed, then offset, little-endian: PyTorch's CUDA generator state. The profile is not in it.
  std::array<uint8_t, 16> State() const;
  // Takes 16 bytes, or 8 (a seed; the offset becomes 0). Errors: InvalidArgument for another length
  // or an offset that SetOffset refuses; nothing is changed then.
  absl::Status SetState(absl::Span<const uint8_t> state);

 private:
  uint64_t seed_;
  uint64_t offset_ = 0;
  Profile profile_;
};

// The calling rank's generator, which ops use when they are given none.
Generator& DefaultGenerator();
// Seeds the calling rank's default generator. Call it on every rank alike.
void ManualSeed(uint64_t seed);

}  // namespace dtensor

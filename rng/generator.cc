#include "dtensor/rng/generator.h"

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

struct DefaultGeneratorSlot {
  Generator generator;
};

void PutLittleEndian(uint64_t v, uint8_t* out) {
  for (int i = 0; i < 8; ++i) out[i] = static_cast<uint8_t>(v >> (8 * i));
}
uint64_t GetLittleEndian(const uint8_t* in) {
  uint64_t v = 0;
  for (int i = 0; i < 8; ++i) v |= static_cast<uint64_t>(in[i]) << (8 * i);
  return v;
}

}  // namespace

absl::Status Generator::SetOffset(uint64_t offset) {
  if (offset % 4 != 0 || (offset >> 63) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("generator offset ", offset, ": must be a multiple of 4 below 2^63"));
  }
  offset_ = offset;
  return absl::OkStatus();
}

std::array<uint8_t, 16> Generator::State() const {
  std::array<uint8_t, 16> state;
  PutLittleEndian(seed_, state.data());
  PutLittleEndian(offset_, state.data() + 8);
  return state;
}

absl::Status Generator::SetState(absl::Span<const uint8_t> state) {
  if (state.size() != 16 && state.size() != 8) {
    return absl::InvalidArgumentError(absl::StrCat(
        "generator state of ", state.size(), " bytes: must be 16 (seed, offset) or 8 (seed)"));
  }
  DT_RETURN_IF_ERROR(SetOffset(state.size() == 16 ? GetLittleEndian(state.data() + 8) : 0));
  seed_ = GetLittleEndian(state.data());
  return absl::OkStatus();
}

Generator& DefaultGenerator() {
  return RankContext::Current().Slot<DefaultGeneratorSlot>().generator;
}

void ManualSeed(uint64_t seed) { DefaultGenerator().ManualSeed(seed); }

}  // namespace dtensor

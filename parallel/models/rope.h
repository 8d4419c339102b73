// Rotary position embedding with the scalings that Hugging Face's configs know.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dtensor/distributed_tensor.h"

namespace dtensor {

// `type` is "default", "linear", "dynamic", "llama3", "yarn" or "longrope"; each reads the fields
// it needs.
struct RopeConfig {
  std::string type = "default";
  double theta = 10000;
  double factor = 1;
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  int64_t original_positions = 0;                    // llama3, yarn, longrope; 0: the model's own
  // yarn
  double beta_fast = 32, beta_slow = 1, mscale = 0, mscale_all_dim = 0;
  std::optional<double> attention_factor = {};  // longrope too; none: of factor
  bool truncate = true;
  // longrope: [size / 2], by which waves are longer; of calls with up to original_positions tokens,
  // and with more.
  std::vector<double> short_factor = {}, long_factor = {};
};
const std::vector<std::string>& RopeTypes();

struct RopeFrequencies {
  std::vector<double> inverse;  // [size / 2], radians per position
  double attention_factor = 1;  // of cosines and sines
};
// `max_positions` is the model's; `tokens` how many there are up to the last one of this call,
// which "dynamic" and "longrope" look at.
//   Errors: InvalidArgument for an odd size, an unknown type, another number of factors than of
//   frequencies, and numbers from which no finite frequencies come.
absl::StatusOr<RopeFrequencies> MakeRopeFrequencies(const RopeConfig& config, int64_t size,
                                                    int64_t max_positions, int64_t tokens);

// Cosines and sines by which queries and keys are turned.
struct Rotation {
  DTensor cos, sin;  // [seq, size], or [batch, 1, seq, size]
};
// positions: [seq] or [batch, seq] int64; frequencies: float64 [size / 2], on their mesh. Angles
// are computed in float64 and the result rounded to `dtype` once.
//   Comm: none.
Rotation MakeRotation(const DTensor& positions, const DTensor& frequencies, double attention_factor,
                      DType dtype);
// x [batch, heads, seq, size]: element i is turned with element i + size / 2.
//   Sharding: any but the last dim.
//   Source: transformers, apply_rotary_pos_emb.
DTensor Rotate(const DTensor& x, const Rotation& by);

}  // namespace dtensor

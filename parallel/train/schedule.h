// Learning rates over the steps of a training: a warm-up, then a decay.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dtensor {

// With w = warmup, n = steps and p = (step - w) / (n - w), from step 0 on:
//   step < w   peak * (step + 1) / w
//   constant   peak
//   linear     least + (peak - least) * (1 - p)
//   cosine     least + (peak - least) * (1 + cos(pi * p)) / 2
// Linear and cosine are `least` from step n on.
//   Source: transformers' get_linear_schedule_with_warmup and get_cosine_schedule_with_warmup, but
//           for the warm-up, which does not begin at zero (torchtitan's).
struct LearningRate {
  enum class Decay : uint8_t { kConstant, kLinear, kCosine };
  double peak = 1e-3;
  Decay decay = Decay::kConstant;
  int64_t warmup = 0, steps = 0;  // 0: as many as the Trainer has
  double least = 0;               // what linear and cosine end at

  double At(int64_t step) const;
  // Errors: InvalidArgument for a peak that is not positive and finite, a least outside of [0,
  // peak], a warm-up outside of [0, steps], and a decay over no steps.
  absl::Status Check() const;
};

// "constant", "linear", "cosine". Errors: InvalidArgument naming the nearest.
absl::StatusOr<LearningRate::Decay> ParseDecay(absl::string_view name);

}  // namespace dtensor

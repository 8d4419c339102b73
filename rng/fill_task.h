// FillTask: what a random fill does to one rank's memory, as plain data, so that the same work runs
// inline on the CPU and queued on a device.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "dtensor/rng/draw.h"
#include "dtensor/rng/planner.h"
#include "dtensor/rng/runs.h"
#include "dtensor/tensor/kernel.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {

struct FillTask {
  enum class Kind : uint8_t {
    kDraw,    // elements are results of `op` for `dtype`
    kMask,    // elements are bools, `vec` neighbours share a block (DropoutPlan)
    kChance,  // element i is 1 where u <= p[i]; out is contiguous, p of one shape in float64
  };
  Kind kind = Kind::kDraw;
  RandomKind op = RandomKind::kUniform;
  DType dtype = DType::kF32;
  int vec = 1;
  DrawParams params;
  uint64_t seed = 0;
  const uint64_t* shift = nullptr;  // in a graph: where the device has what to add to block numbers
  RandomPlan plan;
  std::vector<RunBox> boxes;
  const char* name = "random";  // of the op, for errors; lives as long as the program

  // On `out` (and `p`), inline or queued on the device they are on.
  //   Errors: InvalidArgument for a probability outside of [0, 1]; on a device that is told where
  //   the host waits. Unimplemented on a device without a kernel named kFillKernel.
  absl::Status Run(const Tensor& out, const Tensor& p = {}) const;
  // Of kMask: draws `mask`, and y = x * mask * scale, in one pass over the three, which are
  // contiguous and on a device with a kernel named kDropoutKernel.
  absl::Status RunDropout(const Tensor& mask, const Tensor& x, const Tensor& y, double scale) const;

  // The kernel's one attribute.
  std::vector<int64_t> ToWords() const;
  static FillTask FromWords(absl::Span<const int64_t> words);

 private:
  absl::Status Queue(const char* kernel_name, absl::Span<const TensorRef> in,
                     absl::Span<const TensorRef> out, DeviceType on, double scale) const;
};

inline constexpr char kFillKernel[] = "random_fill";
inline constexpr char kDropoutKernel[] = "random_dropout";  // x; words, scale -> y, mask

}  // namespace dtensor

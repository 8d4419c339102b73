// FillRandom: fills one rank's part of a distributed tensor with the bits of one device.
#pragma once

#include "absl/status/status.h"
#include "mesh/spec.h"
#include "rng/draw.h"
#include "rng/generator.h"
#include "tensor/tensor.h"

namespace dtensor {

// A random op and its parameters.
struct RandomOp {
  RandomKind kind = RandomKind::kUniform;
  double a = 0, b = 1;
};
// Values in [from, to).
inline RandomOp UniformOp(double from = 0, double to = 1) {
  return {RandomKind::kUniform, from, to};
}
inline RandomOp NormalOp(double mean = 0, double std = 1) {
  return {RandomKind::kNormal, mean, std};
}

// Writes the elements of `spec` that the calling rank holds to `local` (any strides; the null
// tensor outside the mesh), exactly as if one device of the generator's profile had filled the
// whole tensor. `generator` null means the rank's default one; it moves alike on every rank,
// whatever the rank holds. Nothing is written on the device meta. The buffer's version is the
// caller's to bump.
//   Types:    floating; arithmetic in float, in double for float64.
//   Sharding: any placement. Partial(sum) and Partial(prod): coordinate 0 holds the values, the
//             others the reduction's neutral element; other Partial: every rank holds the values.
//   Strides:  `global_strides` are those of the one-device tensor where it is dense but not
//             row-major; it is filled in memory order.
//   Comm:     none.
//   Errors:   InvalidArgument for a dtype or parameters the op does not take, a local tensor that
//             does not fit the spec, or what PlanRandom refuses. The generator does not move then.
//   Source:   torch's CUDA uniform_ and normal_; rng.md sections 3 to 5.
absl::Status FillRandom(const Tensor& local, const Spec& spec, const RandomOp& op,
                        Generator* generator = nullptr, IntSpan global_strides = {});

}  // namespace dtensor

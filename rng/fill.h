// FillRandom: fills one rank's part of a distributed tensor with the bits of one device.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "dtensor/mesh/spec.h"
#include "dtensor/rng/draw.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {

// A random op and its parameters (DrawCall says what they are).
struct RandomOp {
  RandomKind kind = RandomKind::kUniform;
  double a = 0, b = 1;
  int64_t from = 0, to = 0;  // of whole numbers: [from, to)
  // What random_() draws from: all that the dtype can hold and count in steps of one.
  bool full_range = false;
  std::string name = "uniform_";
};
// Values in [from, to).
inline RandomOp UniformOp(double from = 0, double to = 1) {
  return {RandomKind::kUniform, from, to};
}
inline RandomOp NormalOp(double mean = 0, double std = 1) {
  return {.kind = RandomKind::kNormal, .a = mean, .b = std, .name = "normal_"};
}
// Whole numbers in [from, to); 64-bit words where the profile's PyTorch takes them.
inline RandomOp RandomRangeOp(int64_t from, int64_t to) {
  return {.kind = RandomKind::kWords32, .from = from, .to = to, .name = "random_"};
}
inline RandomOp RandomFullOp() {
  return {.kind = RandomKind::kWords32, .full_range = true, .name = "random_"};
}
// 1 with probability p, else 0.
inline RandomOp BernoulliOp(double p) {
  return {.kind = RandomKind::kBernoulli, .a = p, .name = "bernoulli_"};
}
inline RandomOp ExponentialOp(double lambda = 1) {
  return {.kind = RandomKind::kExponential, .a = lambda, .name = "exponential_"};
}
inline RandomOp CauchyOp(double median = 0, double sigma = 1) {
  return {.kind = RandomKind::kCauchy, .a = median, .b = sigma, .name = "cauchy_"};
}
inline RandomOp LogNormalOp(double mean = 1, double std = 2) {
  return {.kind = RandomKind::kLogNormal, .a = mean, .b = std, .name = "log_normal_"};
}
// Trials until the first success.
inline RandomOp GeometricOp(double p) {
  return {.kind = RandomKind::kGeometric, .a = p, .name = "geometric_"};
}

// Writes the elements of `spec` that the calling rank holds to `local` (any strides; the null
// tensor outside the mesh), exactly as if one device of the generator's profile had filled the
// whole tensor. `generator` null means the rank's default one; it moves alike on every rank,
// whatever the rank holds. Nothing is written on the device meta. The buffer's version is the
// caller's to bump.
//   Types:    floating for the continuous ops, any for the others; arithmetic in float, in double
//             for float64.
//   Sharding: any placement. Partial(sum) and Partial(prod): coordinate 0 holds the values, the
//             others the reduction's neutral element; other Partial: every rank holds the values.
//   Strides:  `global_strides` are those of the one-device tensor where it is not row-major (a
//             transposed tensor, a slice of a larger one); it is filled in memory order.
//   Comm:     none.
//   Errors:   InvalidArgument for a dtype or parameters the op does not take, a local tensor that
//             does not fit the spec, or what PlanRandom refuses. The generator does not move then.
//   Source:   torch's CUDA generic sampler (DistributionTemplates.h); see rng/planner.h.
absl::Status FillRandom(const Tensor& local, const Spec& spec, const RandomOp& op,
                        Generator* generator = nullptr, IntSpan global_strides = {});

// Whether the calling rank holds elements that are to be drawn, with memory for them.
inline bool DrawsHere(const Spec& spec, const Tensor& local) {
  return spec.in_mesh() && local.has_data() && local.numel() > 0;
}

// InvalidArgument where `spec` is pending a max or a min: of such terms random numbers, or a mask,
// have no meaning.
absl::Status RefuseMaxAndMin(const Spec& spec, absl::string_view what);

}  // namespace dtensor

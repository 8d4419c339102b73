// The element functions of the CPU's kernels (ops/cpu) as device code: the same source, so the same
// bits wherever only IEEE operations and fma occur. What they take from the C library (pow, fmod)
// is CUDA's. The plugin is compiled with -fmad=false: only what is written as fma is one.
#pragma once

#define DT_LEVEL_NS device_code
#define DT_MATH static __device__ __forceinline__
#define DT_NUMBERS static __device__ constexpr

#include "dtensor/ops/cpu/activations.h"
#include "dtensor/ops/cpu/arithmetic.h"
#include "dtensor/ops/cpu/math.h"
#include "dtensor/ops/cpu/powers.h"
#include "dtensor/ops/cpu/real.h"
#include "dtensor/tensor/convert.h"

namespace dtensor::cuda {

// What elements of type S are computed in: f64, f32 or int64, as on the CPU.
template <class S>
using ComputedAs = std::conditional_t<
    std::is_same_v<S, double>, double,
    std::conditional_t<std::is_integral_v<S> || std::is_same_v<S, Bool>, int64_t, float>>;
template <class S>
__device__ ComputedAs<S> AsComputed(S v) {
  return static_cast<ComputedAs<S>>(AsNumber(v));
}

}  // namespace dtensor::cuda

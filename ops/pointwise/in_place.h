// In-place forms of the pointwise functions. Included by pointwise.h.
#pragma once

#include "absl/functional/function_ref.h"
#include "dtensor/ops/pointwise/pointwise.h"

namespace dtensor {

// Every function but those that pointwise.h writes in place itself has its form: `name_` is `name`
// written into its first argument. Where a gradient is wanted that reads the old self, it is copied
// first.
namespace internal {

inline bool WantsGradient(const DTensor& t) { return t.defined() && t.requires_grad(); }
template <class T>
bool WantsGradient(const T&) {
  return false;
}
// self = fn(self); of a copy, if `keep`. `as` is the name in messages.
const DTensor& WriteInto(const char* as, const DTensor& self, bool keep,
                         absl::FunctionRef<DTensor(const DTensor&)> fn);

}  // namespace internal

#define DT_IN_PLACE(name)                                                                         \
  template <class... Args>                                                                        \
  DTensor name##_(const DTensor& self, const Args&... args) {                                     \
    return internal::WriteInto(                                                                   \
        #name "_", self, (internal::WantsGradient(self) || ... || internal::WantsGradient(args)), \
        [&](const DTensor& x) -> DTensor { return name(x, args...); });                           \
  }
#define DT_WRITES_Hidden(name)
#define DT_WRITES_Backward(name)
#define DT_WRITES_Real(name) DT_IN_PLACE(name)
#define DT_WRITES_Same(name) DT_IN_PLACE(name)
#define DT_WRITES_NotBool(name) DT_IN_PLACE(name)
#define DT_WRITES_Two(name) DT_IN_PLACE(name)
#define DT_WRITES_TwoReal(name) DT_IN_PLACE(name)
#define DT_WRITES_TwoInt(name) DT_IN_PLACE(name)
#define DT_WRITES_Compared(name) DT_IN_PLACE(name)
#define DT_WRITES_Mixed(name) DT_IN_PLACE(name)
#define DT_WRITES_MixedReal(name) DT_IN_PLACE(name)
#define DT_WRITES_MixedInt(name) DT_IN_PLACE(name)
#define DT_POINTWISE(kind, user, name, ...) DT_WRITES_##user(name)
#include "dtensor/ops/pointwise/elementwise.inc"
// Those written by hand above.
// clang-format off
#define DT_FUNCTIONS_BY_HAND(DO)                                                                  \
  DO(pow)                                                                                         \
  DO(float_power)                                                                                 \
  DO(ldexp)                                                                                       \
  DO(square)                                                                                      \
  DO(true_divide)                                                                                 \
  DO(sgn) DO(deg2rad) DO(rad2deg) DO(bitwise_not) DO(round) DO(heaviside) DO(nextafter) DO(clamp) \
      DO(clamp_min) DO(clamp_max) DO(nan_to_num) DO(lerp) DO(addcmul) DO(addcdiv) DO(fill)        \
          DO(logit) DO(gelu) DO(softplus) DO(leaky_relu) DO(elu) DO(selu) DO(celu) DO(hardtanh)   \
              DO(relu6) DO(softshrink) DO(hardshrink) DO(threshold) DO(prelu) DO(masked_fill)
// clang-format on
DT_FUNCTIONS_BY_HAND(DT_IN_PLACE)
// Rounded, by floor_divide or its like.
inline DTensor div_(const DTensor& self, const DTensor& y, absl::string_view rounding_mode) {
  return internal::WriteInto("div_", self, false,
                             [&](const DTensor& x) -> DTensor { return div(x, y, rounding_mode); });
}
inline DTensor zero_(const DTensor& self) {
  return internal::WriteInto("zero_", self, false,
                             [](const DTensor& x) -> DTensor { return fill(x, 0); });
}
inline DTensor polygamma_(const DTensor& self, int64_t n) {
  return internal::WriteInto("polygamma_", self, internal::WantsGradient(self),
                             [&](const DTensor& x) -> DTensor { return polygamma(n, x); });
}
#undef DT_IN_PLACE
#undef DT_FUNCTIONS_BY_HAND
#undef DT_WRITES_Hidden
#undef DT_WRITES_Backward
#undef DT_WRITES_Real
#undef DT_WRITES_Same
#undef DT_WRITES_NotBool
#undef DT_WRITES_Two
#undef DT_WRITES_TwoReal
#undef DT_WRITES_TwoInt
#undef DT_WRITES_Compared
#undef DT_WRITES_Mixed
#undef DT_WRITES_MixedReal
#undef DT_WRITES_MixedInt

}  // namespace dtensor

// Pointwise ops on DTensor, declared in ops/pointwise/elementwise.inc. Included by ops/ops.h.
//
// All broadcast as PyTorch does and promote dtypes by torch.result_type: tensors with dims before
// tensors without, before C++ numbers, within a category (floating, integral, bool); functions of
// real numbers (exp, div, ...) take integers as float32.
//   Sharding: "..., ... -> ...": any common dim may be sharded. A Partial(sum) passes where the
//             op is linear in it (add, sub, neg, mul by a replica, div by one, where, masked_fill
//             with 0).
//   Errors:   InvalidArgument if shapes do not broadcast or a dtype is not taken. Same on every
//             rank.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "dtensor/dispatch.h"
#include "dtensor/distributed_tensor.h"

namespace dtensor {

// x + alpha * y
DTensor add(const DTensor& x, const DTensor& y, Scalar alpha = 1);
DTensor add(const DTensor& x, Scalar y, Scalar alpha = 1);
DTensor add(Scalar x, const DTensor& y, Scalar alpha = 1);
DTensor sub(const DTensor& x, const DTensor& y, Scalar alpha = 1);
DTensor sub(const DTensor& x, Scalar y, Scalar alpha = 1);
DTensor sub(Scalar x, const DTensor& y);
// y - alpha * x
DTensor rsub(const DTensor& x, const DTensor& y, Scalar alpha = 1);
DTensor rsub(const DTensor& x, Scalar y, Scalar alpha = 1);
DTensor mul(const DTensor& x, const DTensor& y);
DTensor mul(const DTensor& x, Scalar y);
// True division: integers give float32.
DTensor div(const DTensor& x, const DTensor& y);
DTensor div(const DTensor& x, Scalar y);
DTensor div(Scalar x, const DTensor& y);
DTensor true_divide(const DTensor& x, const DTensor& y);
DTensor true_divide(const DTensor& x, Scalar y);
// "floor" or "trunc": rounded, of the operands' dtype.
//   Errors: InvalidArgument for a whole number over 0, as for floor_divide, remainder and fmod.
DTensor div(const DTensor& x, const DTensor& y, absl::string_view rounding_mode);
DTensor div(const DTensor& x, Scalar y, absl::string_view rounding_mode);
DTensor pow(const DTensor& x, const DTensor& y);
DTensor pow(const DTensor& x, Scalar y);
DTensor pow(Scalar x, const DTensor& y);
// In float64.
DTensor float_power(const DTensor& x, const DTensor& y);
DTensor float_power(const DTensor& x, Scalar y);
DTensor float_power(Scalar x, const DTensor& y);
// x * 2^exponent; whole exponents leave the dtype of a floating x as it is.
DTensor ldexp(const DTensor& x, const DTensor& exponent);
DTensor square(const DTensor& x);
DTensor positive(const DTensor& x);  // x itself
DTensor sgn(const DTensor& x);
DTensor deg2rad(const DTensor& x);
DTensor rad2deg(const DTensor& x);
DTensor bitwise_not(const DTensor& x);  // of bool: logical_not

// Halves go to the even neighbour; to 10^-decimals.
DTensor round(const DTensor& x, int64_t decimals = 0);
// 0, 1, or `values` where x is 0. Both have one dtype.
DTensor heaviside(const DTensor& x, const DTensor& values);
// The number of the dtype that comes after x on the way to y.
DTensor nextafter(const DTensor& x, const DTensor& y);
// |x - y| <= atol + rtol |y|
DTensor isclose(const DTensor& x, const DTensor& y, double rtol = 1e-5, double atol = 1e-8,
                bool equal_nan = false);
// Bounds may be absent (std::nullopt, a null tensor), but not both; where min is above max the
// result is max. A NaN in any of them gives NaN.
DTensor clamp(const DTensor& x, std::optional<Scalar> min, std::optional<Scalar> max = {});
DTensor clamp(const DTensor& x, const DTensor& min, const DTensor& max);
DTensor clamp_min(const DTensor& x, Scalar min);
DTensor clamp_min(const DTensor& x, const DTensor& min);
DTensor clamp_max(const DTensor& x, Scalar max);
DTensor clamp_max(const DTensor& x, const DTensor& max);
// By default 0 and the ends of the dtype.
DTensor nan_to_num(const DTensor& x, std::optional<double> nan = {},
                   std::optional<double> posinf = {}, std::optional<double> neginf = {});
// x + weight * (end - x)
DTensor lerp(const DTensor& x, const DTensor& end, const DTensor& weight);
DTensor lerp(const DTensor& x, const DTensor& end, double weight);
// x + value * y * z, and x + value * y / z, which is floating.
DTensor addcmul(const DTensor& x, const DTensor& y, const DTensor& z, Scalar value = 1);
DTensor addcdiv(const DTensor& x, const DTensor& y, const DTensor& z, Scalar value = 1);
// x's shape, dtype and placement (Replicate where pending), and this value, which has no dims.
DTensor fill(const DTensor& x, Scalar value);
DTensor fill(const DTensor& x, const DTensor& value);
// log(x / (1 - x)), of x clamped to [eps, 1 - eps] if that is given.
DTensor logit(const DTensor& x, std::optional<double> eps = {});
// The n-th derivative of digamma.
DTensor polygamma(int64_t n, const DTensor& x);

DTensor gelu(const DTensor& x, bool approx_tanh = false);
DTensor softplus(const DTensor& x, double beta = 1, double threshold = 20);
DTensor leaky_relu(const DTensor& x, double negative_slope = 0.01);
DTensor elu(const DTensor& x, double alpha = 1);
DTensor selu(const DTensor& x);
DTensor celu(const DTensor& x, double alpha = 1);
DTensor hardtanh(const DTensor& x, Scalar min_val = -1, Scalar max_val = 1);
DTensor relu6(const DTensor& x);
DTensor softshrink(const DTensor& x, double lambd = 0.5);
DTensor hardshrink(const DTensor& x, double lambd = 0.5);
DTensor threshold(const DTensor& x, Scalar threshold, Scalar value);
// x, or weight * x where it is negative. weight: one number, or one for each channel (dim 1).
DTensor prelu(const DTensor& x, const DTensor& weight);
// The first half of a dim times the sigmoid of the second.
//   Comm: a sharded dim that is halved is gathered.
DTensor glu(const DTensor& x, int64_t dim = -1);

// cond is bool.
DTensor where(const DTensor& cond, const DTensor& x, const DTensor& y);
DTensor where(const DTensor& cond, const DTensor& x, Scalar y);
DTensor where(const DTensor& cond, Scalar x, const DTensor& y);
DTensor where(const DTensor& cond, Scalar x, Scalar y);  // float32 or int64
// x with `value` where mask (bool) is true; of integers a fraction is cut.
//   Errors: InvalidArgument for a value that an integer dtype cannot hold.
DTensor masked_fill(const DTensor& x, const DTensor& mask, Scalar value);
// `value` has no dims; it is converted to x's dtype and may want a gradient.
DTensor masked_fill(const DTensor& x, const DTensor& mask, const DTensor& value);

// The functions of elementwise.inc, by its column `user`: neg, exp, maximum, eq, tanh_backward, ...
// Comparisons give bool; of maximum and minimum NaN wins, and ties share the gradient.
#define DT_DECLARE_Hidden(name)
#define DT_DECLARE_Real(name) DTensor name(const DTensor& x);
#define DT_DECLARE_Same(name) DTensor name(const DTensor& x);
#define DT_DECLARE_NotBool(name) DTensor name(const DTensor& x);
#define DT_DECLARE_Two(name) DTensor name(const DTensor& x, const DTensor& y);
#define DT_DECLARE_TwoReal(name) DT_DECLARE_Two(name)
#define DT_DECLARE_TwoInt(name) DT_DECLARE_Two(name)
#define DT_DECLARE_Backward(name) DT_DECLARE_Two(name)
#define DT_DECLARE_WithNumber(name) DTensor name(const DTensor& x, Scalar y);
#define DT_DECLARE_OfNumber(name) DTensor name(Scalar x, const DTensor& y);
#define DT_DECLARE_Compared(name) DT_DECLARE_Two(name) DT_DECLARE_WithNumber(name)
#define DT_DECLARE_Mixed(name) DT_DECLARE_Compared(name) DT_DECLARE_OfNumber(name)
#define DT_DECLARE_MixedReal(name) DT_DECLARE_Mixed(name)
#define DT_DECLARE_MixedInt(name) DT_DECLARE_Mixed(name)
#define DT_POINTWISE(kind, user, name, ...) DT_DECLARE_##user(name)
#include "dtensor/ops/pointwise/elementwise.inc"
#undef DT_DECLARE_Hidden
#undef DT_DECLARE_Real
#undef DT_DECLARE_Same
#undef DT_DECLARE_NotBool
#undef DT_DECLARE_Two
#undef DT_DECLARE_TwoReal
#undef DT_DECLARE_TwoInt
#undef DT_DECLARE_Backward
#undef DT_DECLARE_WithNumber
#undef DT_DECLARE_OfNumber
#undef DT_DECLARE_Compared
#undef DT_DECLARE_Mixed
#undef DT_DECLARE_MixedReal
#undef DT_DECLARE_MixedInt

DTensor gelu_backward(const DTensor& dy, const DTensor& x, bool approx_tanh);
// x * mask * scale; the second half of dropout.
DTensor dropout_apply(const DTensor& x, const DTensor& mask, double scale);
// The part of dy that goes to x in maximum(x, y).
DTensor maximum_backward(const DTensor& dy, const DTensor& x, const DTensor& y);

DTensor operator+(const DTensor& x, const DTensor& y);
inline DTensor operator+(const DTensor& x, Scalar y) { return add(x, y); }
inline DTensor operator+(Scalar x, const DTensor& y) { return add(y, x); }
DTensor operator-(const DTensor& x, const DTensor& y);
inline DTensor operator-(const DTensor& x, Scalar y) { return sub(x, y); }
inline DTensor operator-(Scalar x, const DTensor& y) { return sub(x, y); }
inline DTensor operator*(const DTensor& x, const DTensor& y) { return mul(x, y); }
inline DTensor operator*(const DTensor& x, Scalar y) { return mul(x, y); }
inline DTensor operator*(Scalar x, const DTensor& y) { return mul(y, x); }
inline DTensor operator/(const DTensor& x, const DTensor& y) { return div(x, y); }
inline DTensor operator/(const DTensor& x, Scalar y) { return div(x, y); }
inline DTensor operator/(Scalar x, const DTensor& y) { return div(x, y); }
inline DTensor operator-(const DTensor& x) { return neg(x); }

// One line of elementwise.inc, for tests, benches and docs: inputs drawn from [lo, hi] are valid
// and away from kinks. `bool_input` is the index of a bool operand, or -1.
struct PointwiseCase {
  std::string name;
  int inputs;
  int bool_input;
  bool differentiable;  // has a gradient, and the output is floating
  bool compares;        // the output is bool
  bool divides;         // whole numbers by whole numbers other than 0
  double lo, hi;
};
std::vector<PointwiseCase> PointwiseCases();

// In place; each returns its first argument.
// `other` is broadcast to self and converted to its dtype; self is never redistributed.
//   Errors: InvalidArgument if the result has another shape than self or a wider kind of dtype
//   (floating into integer), for a leaf that requires grad, and for expanded tensors.
DTensor copy_(const DTensor& self, const DTensor& src);  // broadcasts, converts dtypes
DTensor add_(const DTensor& self, const DTensor& other, Scalar alpha = 1);
DTensor add_(const DTensor& self, Scalar value);
DTensor sub_(const DTensor& self, const DTensor& other, Scalar alpha = 1);
DTensor sub_(const DTensor& self, Scalar value);
// Where `other` wants a gradient self is copied first.
DTensor mul_(const DTensor& self, const DTensor& other);
DTensor mul_(const DTensor& self, Scalar value);
DTensor div_(const DTensor& self, const DTensor& other);
DTensor div_(const DTensor& self, Scalar value);
// So x += y changes what x's handle and every view of its memory see; x = x + y makes a new tensor.
// Also of views: x[0] += y.
inline DTensor operator+=(const DTensor& x, const DTensor& y) { return add_(x, y); }
inline DTensor operator+=(const DTensor& x, Scalar y) { return add_(x, y); }
inline DTensor operator-=(const DTensor& x, const DTensor& y) { return sub_(x, y); }
inline DTensor operator-=(const DTensor& x, Scalar y) { return sub_(x, y); }
inline DTensor operator*=(const DTensor& x, const DTensor& y) { return mul_(x, y); }
inline DTensor operator*=(const DTensor& x, Scalar y) { return mul_(x, y); }
inline DTensor operator/=(const DTensor& x, const DTensor& y) { return div_(x, y); }
inline DTensor operator/=(const DTensor& x, Scalar y) { return div_(x, y); }

}  // namespace dtensor

#include "dtensor/ops/pointwise/in_place.h"

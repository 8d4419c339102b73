// Pointwise ops on DTensor, declared in ops/pointwise/elementwise.inc. Included by ops/ops.h.
//
// All broadcast as PyTorch does and promote dtypes by torch.result_type: tensors with dims before
// tensors without, before C++ numbers, within a category (floating, integral, bool); functions of
// real numbers (exp, div, ...) take integers as float32.
//   Sharding: "..., ... -> ...": any common dim may be sharded. A Partial(sum) passes where the op
//   is
//             linear in it (add, sub, neg, mul by a replica, div by one, where, masked_fill with
//             0).
//   Errors:   InvalidArgument if shapes do not broadcast or a dtype is not taken. Same on every
//   rank.
#pragma once

#include <string>
#include <vector>

#include "dtensor/dispatch.h"
#include "dtensor/distributed_tensor.h"

namespace dtensor {

// x + alpha * y
DTensor add(const DTensor& x, const DTensor& y, Scalar alpha = 1);
DTensor add(const DTensor& x, Scalar y, Scalar alpha = 1);
DTensor sub(const DTensor& x, const DTensor& y, Scalar alpha = 1);
DTensor sub(const DTensor& x, Scalar y, Scalar alpha = 1);
DTensor sub(Scalar x, const DTensor& y);
DTensor mul(const DTensor& x, const DTensor& y);
DTensor mul(const DTensor& x, Scalar y);
// True division: integers give float32.
DTensor div(const DTensor& x, const DTensor& y);
DTensor div(const DTensor& x, Scalar y);
DTensor div(Scalar x, const DTensor& y);
DTensor pow(const DTensor& x, const DTensor& y);
DTensor pow(const DTensor& x, Scalar y);
DTensor pow(Scalar x, const DTensor& y);
DTensor gelu(const DTensor& x, bool approx_tanh = false);

// cond is bool.
DTensor where(const DTensor& cond, const DTensor& x, const DTensor& y);
DTensor where(const DTensor& cond, const DTensor& x, Scalar y);
DTensor where(const DTensor& cond, Scalar x, const DTensor& y);
// x with `value` where mask (bool) is true.
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
#define DT_DECLARE_WithNumber(name) DTensor name(const DTensor& x, Scalar y);
#define DT_DECLARE_Compared(name) DT_DECLARE_Two(name) DT_DECLARE_WithNumber(name)
#define DT_POINTWISE(kind, user, name, ...) DT_DECLARE_##user(name)
#include "dtensor/ops/pointwise/elementwise.inc"
#undef DT_DECLARE_Hidden
#undef DT_DECLARE_Real
#undef DT_DECLARE_Same
#undef DT_DECLARE_NotBool
#undef DT_DECLARE_Two
#undef DT_DECLARE_WithNumber
#undef DT_DECLARE_Compared

DTensor gelu_backward(const DTensor& dy, const DTensor& x, bool approx_tanh);
// x * mask * scale; the second half of dropout.
DTensor dropout_apply(const DTensor& x, const DTensor& mask, double scale);
// The part of dy that goes to x in maximum(x, y).
DTensor maximum_backward(const DTensor& dy, const DTensor& x, const DTensor& y);

inline DTensor operator+(const DTensor& x, const DTensor& y) { return add(x, y); }
inline DTensor operator+(const DTensor& x, Scalar y) { return add(x, y); }
inline DTensor operator+(Scalar x, const DTensor& y) { return add(y, x); }
inline DTensor operator-(const DTensor& x, const DTensor& y) { return sub(x, y); }
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
DTensor sub_(const DTensor& self, const DTensor& other);
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

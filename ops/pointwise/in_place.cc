// The in-place functions: what they check, and operands of other dtypes.
#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/pointwise/front.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

using pointwise::NumberAttr;
using pointwise::Times;

// Refuses a result of a wider kind than self's dtype.
void CheckType(absl::string_view op, const DTensor& self, DType result) {
  const DType has = self.dtype();
  const bool widens =
      (IsFloating(result) && !IsFloating(has)) || (has == DType::kBool && result != DType::kBool);
  if (widens) {
    ThrowInvalid(op, absl::StrCat("self is ", TypeName(has), " and cannot hold the ",
                                  TypeName(result), " result"));
  }
}

// And one of another shape.
void CheckInPlace(absl::string_view op, const DTensor& self, const DTensor& other, DType result) {
  if (other.shape() != self.shape()) {
    const absl::StatusOr<Shape> shape = BroadcastShapes(self.shape(), other.shape());
    if (!shape.ok() || *shape != self.shape()) {
      ThrowInvalid(op,
                   absl::StrCat("other ", ToString(other.shape()), " does not broadcast to self ",
                                ToString(self.shape()), ", whose shape cannot change in place"));
    }
  }
  CheckType(op, self, result);
}

DType TypeOf(const DTensor& self, Scalar s) {
  return s.is_float && !IsFloating(self.dtype()) ? DType::kF32 : self.dtype();
}

// self = op(self, other; attrs) for two tensors; `as` is the name in messages. Operands of other
// dtypes are computed with as `fresh` does, out of place, and the result is rounded.
DTensor Update(const char* as, const OpDef& op, const DTensor& self, const DTensor& other,
               absl::FunctionRef<DTensor(const DTensor&)> fresh,
               absl::Span<const Attr> attrs = {}) {
  CheckInPlace(as, self, other, other.dtype());
  if (other.dtype() != self.dtype()) {
    const bool records = GradEnabled() && (self.requires_grad() || other.requires_grad());
    return copy_(self, fresh(records ? clone(self) : self));
  }
  Call1(op, {&self, &other}, attrs);
  return self;
}
// self = op(self; number).
DTensor Update(const char* as, const OpDef& op, const DTensor& self, Scalar number) {
  CheckType(as, self, TypeOf(self, number));
  Call1(op, {&self}, {NumberAttr(number)});
  return self;
}

// Integers cannot hold a quotient.
void CheckFloating(const char* as, const DTensor& self) {
  if (IsFloating(self.dtype())) return;
  ThrowInvalid(as,
               absl::StrCat("self is ", TypeName(self.dtype()),
                            " and cannot hold the quotient, which is floating"),
               {{"self", self}});
}

}  // namespace

DTensor copy_(const DTensor& self, const DTensor& src) {
  static const OpDef& op = GetOp("copy_");
  return AsOp("copy_", {{"self", self}, {"src", src}}, [&] {
    CheckInPlace("copy_", self, src, self.dtype());
    const DTensor from = to(src, self.dtype());
    Call1(op, {&self, &from});
    return self;
  });
}

const DTensor& internal::WriteInto(const char* as, const DTensor& self, bool keep,
                                   absl::FunctionRef<DTensor(const DTensor&)> fn) {
  AsOp(as, {{"self", self}}, [&] {
    const DTensor y = fn(keep && GradEnabled() ? clone(self) : self);
    if (y.shape() != self.shape()) {
      ThrowInvalid(
          as, absl::StrCat("the result is ", ToString(y.shape()), ", self ", ToString(self.shape()),
                           ", whose shape cannot change in place"));
    }
    CheckType(as, self, y.dtype());
    copy_(self, y);
  });
  return self;
}

DTensor add_(const DTensor& self, const DTensor& other, Scalar alpha) {
  static const OpDef& op = GetOp("add_");
  return AsOp("add_", {{"self", self}, {"other", other}}, [&] {
    CheckType("add_", self, TypeOf(self, alpha));
    return Update("add_", op, self, other, [&](const DTensor& x) { return add(x, other, alpha); },
                  {NumberAttr(alpha)});
  });
}

DTensor add_(const DTensor& self, Scalar value) {
  static const OpDef& op = GetOp("add_scalar_");
  return AsOp("add_", {{"self", self}}, [&] { return Update("add_", op, self, value); });
}

DTensor sub_(const DTensor& self, const DTensor& other, Scalar alpha) {
  static const OpDef& op = GetOp("add_");
  return AsOp("sub_", {{"self", self}, {"other", other}}, [&] {
    pointwise::RefuseBool("sub_", pointwise::BothTypes("sub_", self, other), self);
    CheckType("sub_", self, TypeOf(self, alpha));
    return Update("sub_", op, self, other,
                  [&](const DTensor& x) { return add(x, other, Times(alpha, -1)); },
                  {NumberAttr(Times(alpha, -1))});
  });
}

DTensor sub_(const DTensor& self, Scalar value) {
  static const OpDef& op = GetOp("add_scalar_");
  return AsOp("sub_", {{"self", self}}, [&] {
    pointwise::RefuseBool("sub_", pointwise::TypeWith("sub_", self, value), self);
    return Update("sub_", op, self, pointwise::Negated(value, self.dtype()));
  });
}

DTensor mul_(const DTensor& self, const DTensor& other) {
  static const OpDef& op = GetOp("mul_");
  return AsOp("mul_", {{"self", self}, {"other", other}}, [&] {
    CheckInPlace("mul_", self, other, other.dtype());
    if (GradEnabled() && other.requires_grad()) {  // its gradient needs what is overwritten
      return copy_(self, mul(clone(self), other));
    }
    return Update("mul_", op, self, other, [&](const DTensor& x) { return mul(x, other); });
  });
}

DTensor mul_(const DTensor& self, Scalar value) {
  static const OpDef& op = GetOp("mul_scalar_");
  return AsOp("mul_", {{"self", self}}, [&] { return Update("mul_", op, self, value); });
}

DTensor div_(const DTensor& self, const DTensor& other) {
  static const OpDef& op = GetOp("div_");
  return AsOp("div_", {{"self", self}, {"other", other}}, [&] {
    CheckFloating("div_", self);
    CheckInPlace("div_", self, other, other.dtype());
    if (GradEnabled() && other.requires_grad()) {  // its gradient needs what is overwritten
      return copy_(self, div(clone(self), other));
    }
    return Update("div_", op, self, other, [&](const DTensor& x) { return div(x, other); });
  });
}

DTensor div_(const DTensor& self, Scalar value) {
  static const OpDef& op = GetOp("div_scalar_");
  return AsOp("div_", {{"self", self}}, [&] {
    CheckFloating("div_", self);
    return Update("div_", op, self, value);
  });
}

}  // namespace dtensor

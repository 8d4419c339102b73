// Variances, norms and log-sum-exp: made of sums, so that a sharded dim takes small reductions.
#include <array>
#include <cmath>
#include <memory>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

DTensor SumSquares(const DTensor& x, const Dims& axes, bool keepdim) {
  static const OpDef& op = GetOp("sum_squares");
  return Call1(op, {&x}, {IntsAttr(axes), BoolAttr(keepdim)});
}

DimList ListOf(const Dims& axes) { return DimList(axes.begin(), axes.end()); }

// y with the size-1 dims `axes` dropped.
DTensor Dropped(const DTensor& y, const Dims& axes, bool keepdim) {
  return keepdim || axes.empty() ? y : squeeze(y, ListOf(axes));
}

// s^p for s >= 0, with gradient 0 where s is 0 (or NaN is not what its derivative comes to).
DTensor Root(const DTensor& s, double p) {
  const DTensor zero = eq(s, 0), safe = masked_fill(s, zero, 1);
  const double of_zero = p > 0 ? 0 : HUGE_VAL;
  return masked_fill(p == 0.5 ? sqrt(safe) : pow(safe, p), zero, of_zero);
}

// Variance and mean with the dims kept, in the type they are computed in.
struct Moments {
  DTensor variance, mean;
};
Moments MomentsOf(const DTensor& x, const Dims& axes, Scalar correction) {
  const DTensor wide = to(x, ComputeType(x.dtype()));
  double count = 1;
  for (const int64_t a : axes) count *= static_cast<double>(x.shape()[a]);
  const DTensor m = mean(wide, ListOf(axes), true);
  // The mean takes no part in the gradient: distances from it add up to 0.
  const DTensor squares = SumSquares(sub(wide, m.Detach()), axes, true);
  // Of nothing NaN, whatever the correction.
  return {div(squares, count > 0 ? std::fmax(count - correction.d, 0) : 0), m};
}

enum class Which { kVariance, kRoot };

Values VarianceAndMean(const char* name, Which which, const DTensor& x, const DimList& dims,
                       Scalar correction, bool keepdim) {
  return AsOp(name, {{"x", x}}, [&] {
    RequireFloating(name, x);
    const Dims axes = CheckedDims(name, dims, x.ndim());
    const Moments m = MomentsOf(x, axes, correction);
    const DTensor v = which == Which::kRoot ? Root(m.variance, 0.5) : m.variance;
    return Values{to(Dropped(v, axes, keepdim), x.dtype()),
                  to(Dropped(m.mean, axes, keepdim), x.dtype())};
  });
}

// |x|^p; at 0 the gradient of powers below 1 is 0.
DTensor Powers(const DTensor& x, double p) {
  if (p >= 1) return p == 1 ? abs(x) : pow(abs(x), p);
  const DTensor zero = eq(x, 0);
  return masked_fill(pow(abs(masked_fill(x, zero, 1)), p), zero, p > 0 ? 0 : HUGE_VAL);
}

void CheckNorm(const char* name, const DTensor& x, double p, const Dims& axes) {
  RequireFloating(name, x);
  if (p >= 0 && !std::isinf(p)) return;
  for (const int64_t a : axes) {
    if (x.shape()[a] != 0) continue;
    ThrowInvalid(name, absl::StrCat("dim ", a, " is empty: over nothing there is no norm of ord ",
                                    p, ", only of a finite one from 0 up"));
  }
}

DTensor Norm(const char* name, const DTensor& x, double p, const DimList& dims, bool keepdim,
             std::optional<DType> dtype) {
  return AsOp(name, {{"x", x}}, [&] {
    const DTensor in = dtype ? to(x, *dtype) : x;
    const Dims axes = CheckedDims(name, dims, x.ndim());
    CheckNorm(name, in, p, axes);
    const DTensor wide = to(in, ComputeType(in.dtype()));
    const DimList list = ListOf(axes);
    const auto norm_of = [&]() -> DTensor {
      // Of a 0-d tensor `list` is empty, and all is what is meant.
      if (p == 0) return to(sum(ne(wide, 0), list, keepdim), wide.dtype());
      if (std::isinf(p)) {
        return p > 0 ? amax(abs(wide), list, keepdim) : amin(abs(wide), list, keepdim);
      }
      if (p == 2) return Root(SumSquares(wide, axes, keepdim), 0.5);
      const DTensor total = sum(Powers(wide, p), list, keepdim);
      return p == 1 ? total : Root(total, 1 / p);
    };
    return to(norm_of(), in.dtype());
  });
}

// With the dims kept.
DTensor LogSumExp(const DTensor& x, const Dims& axes) {
  bool nothing = false;
  for (const int64_t a : axes) nothing |= x.shape()[a] == 0;
  const DTensor in = x.Detach();
  const DimList list = ListOf(axes);
  const auto value = [&] {
    if (nothing) return log(sum(exp(in), list, true));
    const DTensor top = amax(in, list, true);
    const DTensor high = masked_fill(top, ne(sub(top, top), 0), 0);  // infinities cancel to NaN
    return add(log(sum(exp(sub(in, high)), list, true)), high);
  };
  const auto saved = std::make_shared<std::array<DTensor, 2>>();  // x and the result
  const auto forward = [&]() -> Values {
    const DTensor y = value();
    *saved = {in, y.Detach()};
    return {y};
  };
  const auto backward = [saved](const Values& grads) -> Values {
    return {mul(grads[0], exp(sub((*saved)[0], (*saved)[1])))};
  };
  return CustomFunction("logsumexp", {x}, forward, backward, *saved)[0];
}

// Elements that are close, as bools.
DTensor Close(const DTensor& x, const DTensor& other, double rtol, double atol, bool equal_nan) {
  const DType type = PromoteTypes(x.dtype(), other.dtype());
  const DType wide = IsFloating(type) ? ComputeType(type) : DType::kF64;
  const DTensor a = to(x, wide), b = to(other, wide);
  const DTensor far = gt(abs(sub(a, b)), add(mul(abs(b), rtol), atol));
  // Infinities are close to themselves only; NaN is neither far nor close.
  const DTensor infinite = logical_not(eq(sub(b, b), 0));
  const DTensor near = masked_fill(masked_fill(logical_not(far), infinite, false), ne(a, a), false);
  const DTensor same = masked_fill(near, eq(a, b), true);
  if (!equal_nan) return same;
  return masked_fill(same, mul(ne(a, a), ne(b, b)), true);
}

}  // namespace

DTensor var(const DTensor& x, DimList dims, Scalar correction, bool keepdim) {
  return VarianceAndMean("var", Which::kVariance, x, dims, correction, keepdim)[0];
}
DTensor std(const DTensor& x, DimList dims, Scalar correction, bool keepdim) {
  return VarianceAndMean("std", Which::kRoot, x, dims, correction, keepdim)[0];
}
Values var_mean(const DTensor& x, DimList dims, Scalar correction, bool keepdim) {
  return VarianceAndMean("var_mean", Which::kVariance, x, dims, correction, keepdim);
}
Values std_mean(const DTensor& x, DimList dims, Scalar correction, bool keepdim) {
  return VarianceAndMean("std_mean", Which::kRoot, x, dims, correction, keepdim);
}

DTensor linalg_vector_norm(const DTensor& x, Scalar ord, DimList dims, bool keepdim,
                           std::optional<DType> dtype) {
  return Norm("linalg_vector_norm", x, ord.d, dims, keepdim, dtype);
}
DTensor norm(const DTensor& x, Scalar p, DimList dims, bool keepdim, std::optional<DType> dtype) {
  return Norm("norm", x, p.d, dims, keepdim, dtype);
}
DTensor dist(const DTensor& x, const DTensor& other, Scalar p) {
  return AsOp("dist", {{"x", x}, {"other", other}}, [&] { return norm(sub(x, other), p); });
}

DTensor logsumexp(const DTensor& x, DimList dims, bool keepdim) {
  return AsOp("logsumexp", {{"x", x}}, [&] {
    const DType result = IsFloating(x.dtype()) ? x.dtype() : DType::kF32;
    const Dims axes = CheckedDims("logsumexp", dims, x.ndim());
    const DTensor y = LogSumExp(to(x, ComputeType(result)), axes);
    return to(Dropped(y, axes, keepdim), result);
  });
}

bool equal(const DTensor& x, const DTensor& other) {
  return AsOp("equal", {{"x", x}, {"other", other}},
              [&] { return x.shape() == other.shape() && all(eq(x, other)).Item() != 0; });
}

bool allclose(const DTensor& x, const DTensor& other, double rtol, double atol, bool equal_nan) {
  return AsOp("allclose", {{"x", x}, {"other", other}},
              [&] { return all(Close(x, other, rtol, atol, equal_nan)).Item() != 0; });
}

}  // namespace dtensor

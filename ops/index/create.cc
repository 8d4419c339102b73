// Tensors made like others, and of numbers in a row.
#include <cmath>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/index/pick.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

DTensor Like(const char* op, const DTensor& x, Scalar value, std::optional<DType> dtype) {
  RequireDefined(op, {{"x", x}});
  RequireOwn(op, {{"x", x}});
  RequireHolds(op, dtype.value_or(x.dtype()), value, {{"x", x}});
  return full(x.shape(), value,
              {dtype.value_or(x.dtype()), x.mesh(), WithoutPending(x.placements())});
}

DTensor New(const char* op, const DTensor& x, IntSpan shape, Scalar value, TensorOptions options) {
  RequireDefined(op, {{"x", x}});
  RequireOwn(op, {{"x", x}});
  if (!options.dtype) options.dtype = x.dtype();
  if (options.placements.empty()) options.mesh = x.mesh();
  RequireHolds(op, *options.dtype, value, {{"x", x}});
  return full(shape, value, options);
}

// Numbers of a row, of which number i of n is at(start, end, i), in the dtype asked for.
template <class At>
DTensor Row(const char* op, Scalar start, Scalar end, int64_t n, TensorOptions options,
            const At& at) {
  if (n < 0 || n > int64_t{1} << 40) {
    ThrowInvalid(op, absl::StrCat("steps must be 0 or more (and fit), are ", n));
  }
  if (!options.dtype) options.dtype = DType::kF32;
  const bool integral = !IsFloating(*options.dtype);
  const double first = integral ? static_cast<double>(start.i) : start.d;
  const double last = integral ? static_cast<double>(end.i) : end.d;
  const double step = n > 1 ? (last - first) / static_cast<double>(n - 1) : 0;
  const Tensor values = ValueOrThrow(Tensor::Empty({n}, DType::kF64));
  for (int64_t i = 0; i < n; ++i) {
    // From the nearer end, so that both are exact.
    const double x = n == 1 || i < n / 2 ? first + step * static_cast<double>(i)
                                         : last - step * static_cast<double>(n - 1 - i);
    static_cast<double*>(values.data())[i] = at(x);
  }
  const Placements& p = options.placements;
  return DistributeTensor(
      ValueOrThrow(values.To(*options.dtype)), options.mesh,
      p.empty() && options.mesh.defined() ? Placements(options.mesh.ndim()) : p);
}

}  // namespace

DTensor zeros_like(const DTensor& x, std::optional<DType> dtype) {
  return Like("zeros_like", x, 0, dtype);
}
DTensor ones_like(const DTensor& x, std::optional<DType> dtype) {
  return Like("ones_like", x, 1, dtype);
}
DTensor full_like(const DTensor& x, Scalar value, std::optional<DType> dtype) {
  return Like("full_like", x, value, dtype);
}
DTensor new_zeros(const DTensor& x, IntSpan shape, TensorOptions options) {
  return New("new_zeros", x, shape, 0, std::move(options));
}
DTensor new_ones(const DTensor& x, IntSpan shape, TensorOptions options) {
  return New("new_ones", x, shape, 1, std::move(options));
}
DTensor new_full(const DTensor& x, IntSpan shape, Scalar value, TensorOptions options) {
  return New("new_full", x, shape, value, std::move(options));
}

DTensor linspace(Scalar start, Scalar end, int64_t steps, TensorOptions options) {
  if (!options.dtype) options.dtype = DType::kF32;
  if (steps == 1) return full({1}, start, options);  // which may be more than a double holds
  return Row("linspace", start, end, steps, std::move(options), [](double x) { return x; });
}
DTensor logspace(Scalar start, Scalar end, int64_t steps, double base, TensorOptions options) {
  return Row("logspace", start, end, steps, std::move(options),
             [base](double x) { return std::pow(base, x); });
}

DTensor eye(int64_t n, std::optional<int64_t> m, TensorOptions options) {
  const int64_t columns = m.value_or(n);
  if (n < 0 || columns < 0) {
    ThrowInvalid("eye", absl::StrCat("sizes ", n, " and ", columns, " must be 0 or more"));
  }
  if (!options.dtype) options.dtype = DType::kF32;
  const DTensor rows = arange(0, n, 1, {DType::kI64, options.mesh, {}});
  const DTensor across = arange(0, columns, 1, {DType::kI64, options.mesh, {}});
  const DTensor y = to(eq(unsqueeze(rows, 1), across), *options.dtype);
  return options.placements.empty() ? y : y.Redistribute(options.placements);
}

}  // namespace dtensor

#include "tests/ops/program_ops.h"

#include <algorithm>
#include <functional>

#include "absl/strings/match.h"
#include "dtensor/ops/rules.h"
#include "dtensor/tensor/kernel.h"

namespace dtensor::testing {
namespace {

// Writes through the plain local array, as a user's own code would.
Values ThroughLocal(const DTensor& x, const std::function<void(const Tensor&)>& write) {
  {
    NoGrad no_grad;
    mul_(x, 1);  // says whether it may be written
  }
  write(x.local());
  return {};
}

DTensor Expanded(Args& a, const DTensor& x) {
  Shape shape = x.shape();
  for (int64_t& size : shape) {
    if (size == 1 && a.Pick("grow", 0, 1) == 1) size = a.Pick("size", 1, 3);
  }
  if (a.Pick("lead", 0, 1) == 1) shape.insert(shape.begin(), a.Pick("size", 1, 3));
  return expand(x, shape);
}

DTensor Reshaped(Args& a, const DTensor& x) {
  const int64_t n = x.numel();
  const int64_t rows = a.Pick("rows", 1, 4);
  return n % rows == 0 && n > 0 ? reshape(x, {rows, n / rows}) : reshape(x, {n});
}

DTensor Sliced(Args& a, const DTensor& x) {
  const int64_t dim = a.Dim(x), size = a.SizeAt(x, dim);
  const int64_t start = a.Pick("start", 0, size - 1), end = a.Pick("end", start, size);
  return slice(x, dim, start, end, a.Pick("step", 1, 2));
}

DTensor Permuted(Args& a, const DTensor& x) {
  Dims order;
  const int64_t turn = a.Dim(x);
  for (int d = 0; d < x.ndim(); ++d) order.push_back((d + turn) % x.ndim());
  return permute(x, order);
}

DTensor Transposed(Args& a, const DTensor& x) {
  const int64_t first = a.Dim(x);
  return transpose(x, first, a.Dim(x));
}

DTensor Selected(Args& a, const DTensor& x) {
  const int64_t dim = a.Dim(x);
  return select(x, dim, a.Pick("index", 0, a.SizeAt(x, dim) - 1));
}

Values FirstPieces(Args& a, const DTensor& x) {
  const int64_t dim = a.Dim(x);
  Values pieces = split(x, a.Pick("size", 1, 3), dim);
  if (pieces.size() > 2) pieces.resize(2);
  return pieces;
}

bool IsRowMajor(const DTensor& x) {
  const IntSpan strides = MemoryStrides(x);
  return strides.empty() || IsContiguous(x.shape(), strides);
}

// Of a row-major tensor: FromLocal cannot know in which order another one lies in memory. Of one
// with dims: no global shape counts as not given.
DTensor ThereAndBack(const DTensor& x) {
  const DTensor from = IsRowMajor(x) ? x : clone(x);
  if (x.ndim() == 0) return from.Detach();
  FromLocalOptions options;
  options.shape = x.shape();
  return FromLocal(from.ToLocal(), x.mesh(), x.placements(), options);
}

// Always a copy: to() gives x itself where the dtype is the same.
DTensor Cast(Args& a, const DTensor& x) {
  const DTensor y = to(x, static_cast<DType>(a.Pick("dtype", 0, kNumDTypes - 1)));
  return y.impl() == x.impl() ? clone(x) : y;
}

DimList DimsOf(Args& a, const DTensor& x) {
  DimList dims;
  for (int d = 0; d < x.ndim(); ++d) {
    if (a.Pick("over", 0, 1) == 1) dims.push_back(d);
  }
  if (dims.empty() && x.ndim() > 0) dims.push_back(0);
  return dims;
}

// Some indices of a dim, the same on every rank.
DTensor IndicesOf(Args& a, const DTensor& x, int64_t dim) {
  std::vector<int64_t> at;
  const int64_t size = a.SizeAt(x, dim);
  for (int64_t n = size == 0 ? 0 : a.Pick("picks", 0, 3); n > 0; --n) {
    at.push_back(a.Pick("at", 0, size - 1));
  }
  return FromVector(at, {static_cast<int64_t>(at.size())}, {DType::kI64, x.mesh(), {}});
}

DTensor Picked(Args& a, const DTensor& x) {
  if (x.ndim() == 0) return clone(x);
  const int64_t dim = a.Dim(x);
  return index_select(x, dim, IndicesOf(a, x, dim));
}

DTensor Rolled(Args& a, const DTensor& x) {
  if (x.ndim() == 0) return clone(x);
  const int64_t dim = a.Dim(x);
  return roll(x, {a.Pick("by", -2, 2)}, {dim});
}

DTensor Filled(Args& a, const DTensor& x) {
  if (x.ndim() == 0) return x;
  const int64_t dim = a.Dim(x);
  return index_fill_(x, dim, IndicesOf(a, x, dim), a.Number());
}

using X = const DTensor&;  // an operand; null where an op takes fewer

// What takes its operands alone.
#define DT_ON_X(expression) [](Args&, X x, X, X) -> Values { return {expression}; }
#define DT_ON_XY(expression) [](Args&, X x, X y, X) -> Values { return {expression}; }
// With arguments.
#define DT_ARGS_X(expression) [](Args& a, X x, X, X) -> Values { return {expression}; }
#define DT_ARGS_XY(expression) [](Args& a, X x, X y, X) -> Values { return {expression}; }

// The functions that elementwise.inc makes: a pending sum passes where they are linear, and whole
// numbers stay whole where they take integers. Gradients are what backward runs.
void AddElementwise(std::vector<OpEntry>* all) {
  RegisterOps();
  const auto add = [all](const char* name, int inputs, decltype(OpEntry::run) run) {
    const bool whole = (FindHostKernel(name)->dtypes & DTypeBit(DType::kI64)) != 0;
    const bool linear = !GetOp(name).linear_forms().empty();
    all->push_back({name, inputs, (whole ? 0u : kInexact) | (linear ? kLinear : 0u), run});
  };
#define DT_ADD_Hidden(name)
#define DT_ADD_Real(name) add(#name, 1, DT_ON_X(name(x)));
#define DT_ADD_Same DT_ADD_Real
#define DT_ADD_NotBool DT_ADD_Real
#define DT_ADD_Two(name) add(#name, 2, DT_ON_XY(name(x, y)));
#define DT_ADD_Compared DT_ADD_Two
#define DT_ADD_TwoReal DT_ADD_Two
#define DT_ADD_MixedReal DT_ADD_Two
#define DT_ADD_Mixed(name)   // refuse whole numbers over 0
#define DT_ADD_TwoInt(name)  // refuse floating operands
#define DT_ADD_MixedInt(name)
#define DT_ADD_Backward(name)
#define DT_POINTWISE(kind, user, name, ...) DT_ADD_##user(name)
#include "dtensor/ops/pointwise/elementwise.inc"
}

// No result.
Values Done(const DTensor&) { return {}; }

const std::vector<OpEntry> kViews = {
    {"permute", 1, kLinear | kView, DT_ARGS_X(Permuted(a, x))},
    {"transpose", 1, kLinear | kView, DT_ARGS_X(Transposed(a, x))},
    {"reshape", 1, kLinear | kView, DT_ARGS_X(Reshaped(a, x))},
    {"flatten", 1, kLinear | kView, DT_ARGS_X(flatten(x, a.Dim(x), -1))},
    {"unsqueeze", 1, kLinear | kView, DT_ARGS_X(unsqueeze(x, a.Dim(x)))},
    {"squeeze", 1, kLinear | kView, DT_ON_X(squeeze(x))},
    {"expand", 1, kLinear | kView, DT_ARGS_X(Expanded(a, x))},
    {"slice", 1, kLinear | kView, DT_ARGS_X(Sliced(a, x))},
    {"select", 1, kLinear | kView, DT_ARGS_X(Selected(a, x))},
    {"split", 1, kLinear | kView, [](Args& a, X x, X, X) { return FirstPieces(a, x); }},
    {"diagonal", 1, kLinear | kView,
     DT_ARGS_X(x.ndim() < 2 ? unsqueeze(x, 0) : diagonal(x, a.Pick("offset", -1, 1)))},
    {"detach", 1, kLinear | kView, DT_ON_X(x.Detach())},
    {"contiguous", 1, kLinear | kView, DT_ON_X(contiguous(x))},
    {"through_local", 1, kLinear | kView, DT_ON_X(ThereAndBack(x))},
};

const std::vector<OpEntry> kCopies = {
    {"clone", 1, kLinear, DT_ON_X(clone(x))},
    {"to", 1, kLinear, DT_ARGS_X(Cast(a, x))},
    {"cat", 2, kLinear, DT_ARGS_XY(cat({x, y}, a.Dim(x)))},
    {"stack", 1, kLinear, DT_ARGS_X(stack({x, x}, a.Dim(x)))},
    {"flip", 1, kLinear, DT_ARGS_X(flip(x, DimsOf(a, x)))},
    {"roll", 1, kLinear, DT_ARGS_X(Rolled(a, x))},
    {"tril", 1, kLinear, DT_ARGS_X(x.ndim() < 2 ? clone(x) : tril(x, a.Pick("diagonal", -1, 2)))},
    {"index_select", 1, kLinear | kMoves, DT_ARGS_X(Picked(a, x))},
    {"move", 1, kLinear | kMoves, DT_ARGS_X(MovedCopy(x, a.Layout(x.shape(), true)))},
    {"async", 1, kLinear | kMoves, DT_ARGS_X(MovedCopy(x, a.Layout(x.shape(), true), true))},
    {"settle", 1, kSettles, DT_ARGS_X(MovedCopy(x, a.Layout(x.shape(), false)))},
    {"shared", 1, kLinear | kMoves | kSnapshot,
     DT_ARGS_X(x.Redistribute(a.Layout(x.shape(), true), {.shared = true}))},
    {"read", 1, kLinear, [](Args&, X x, X, X) { return x.ToVector<double>(), Values(); }},
};

const std::vector<OpEntry> kElementwise = {
    {"add_number", 1, 0, DT_ARGS_X(x + a.Number())},
    {"add_integer", 1, 0, DT_ARGS_X(x + a.Pick("integer", -3, 3))},
    {"mul_number", 1, kLinear, DT_ARGS_X(x* a.Number())},
    {"mul_integer", 1, kLinear, DT_ARGS_X(x* a.Pick("integer", -2, 2))},
    {"number_sub", 1, 0, DT_ARGS_X(a.Number() - x)},
    {"square", 1, 0, DT_ON_X(pow(x, 2))},
    {"half", 1, kLinear | kInexact, DT_ON_X(x / 2)},
    {"add", 2, kLinear, DT_ON_XY(x + y)},
    {"sub", 2, kLinear, DT_ARGS_XY(sub(x, y, a.Pick("alpha", 1, 2)))},
    {"mul", 2, kLinear | kProduct, DT_ON_XY(x* y)},
    {"where", 2, kLinear, DT_ON_XY(where(gt(x, 0), x, y))},
    {"masked_fill", 2, kLinear, DT_ARGS_XY(masked_fill(x, eq(y, 0), a.Pick("value", 0, 2)))},
    {"clamp", 1, 0, DT_ON_X(masked_fill(x, logical_not(lt(x* x, 9)), 1))},
    {"dropout", 1, kLinear, DT_ON_X(dropout(x, 0.5))},
};

const std::vector<OpEntry> kReductions = {
    {"sum", 1, kLinear | kSums, DT_ARGS_X(sum(x, DimsOf(a, x), a.Pick("keepdim", 0, 1) == 1))},
    {"amax", 1, 0, DT_ARGS_X(amax(x.Detach(), DimsOf(a, x), a.Pick("keepdim", 0, 1) == 1))},
    {"amin", 1, 0, DT_ARGS_X(amin(x.Detach(), DimsOf(a, x), a.Pick("keepdim", 0, 1) == 1))},
    {"cumsum", 1, kLinear | kSums, DT_ARGS_X(cumsum(x, a.Dim(x)))},
    {"sort", 1, 0, DT_ARGS_X(sort(x, a.Dim(x), a.Pick("descending", 0, 1) == 1)[0])},
    {"matmul", 2, kLinear | kSums | kProduct, DT_ON_XY(matmul(x, y))},
    {"linear", 3, kLinear | kSums | kProduct,
     [](Args&, X x, X y, X z) -> Values { return {linear(x, y, z)}; }},
};

const std::vector<OpEntry> kInPlace = {
    {"add_", 2, kWrites | kLinear,
     [](Args& a, X x, X y, X) { return Done(add_(x, y, a.Pick("alpha", 1, 2))); }},
    {"add_number_", 1, kWrites, [](Args& a, X x, X, X) { return Done(add_(x, a.Number())); }},
    {"mul_", 2, kWrites | kLinear | kProduct, [](Args&, X x, X y, X) { return Done(mul_(x, y)); }},
    {"mul_number_", 1, kWrites | kLinear,
     [](Args& a, X x, X, X) { return Done(mul_(x, a.Number())); }},
    {"copy_", 2, kWrites | kLinear, [](Args&, X x, X y, X) { return Done(copy_(x, y)); }},
    {"index_fill_", 1, kWrites, [](Args& a, X x, X, X) { return Done(Filled(a, x)); }},
    {"random_", 1, kWrites,
     [](Args& a, X x, X, X) { return random_(x, 0, a.Pick("to", 1, 4)), Values(); }},
    {"bernoulli_", 1, kWrites, [](Args&, X x, X, X) { return bernoulli_(x, 0.5), Values(); }},
    {"uniform_", 1, kWrites | kInexact, [](Args&, X x, X, X) { return uniform_(x), Values(); }},
    {"local_double", 1, kWrites | kLinear | kScales,
     [](Args&, X x, X, X) {
       return ThroughLocal(x, [](const Tensor& t) { AddInPlace(t, ValueOrThrow(t.Clone())); });
     }},
    {"local_fill", 1, kWrites | kFills,
     [](Args& a, X x, X, X) {
       const double value = a.Number();
       return ThroughLocal(x, [value](const Tensor& t) { Fill(t, value); });
     }},
};

}  // namespace

DTensor MovedCopy(const DTensor& x, const Placements& p, bool async) {
  if (!async) return clone(x).Redistribute(p);
  // Of x itself, which may change before the result is read; but what is moved stands for x as it
  // lies in memory, and a copy on one rank is row-major.
  if (!IsRowMajor(x)) return clone(x).Redistribute(p, {.async = true});
  if (x.mesh().is_self()) return clone(x);
  const DTensor y = x.Redistribute(p, {.async = true});
  return y.impl() == x.impl() ? clone(x) : y;
}

const std::vector<OpEntry>& ProgramOps() {
  static const std::vector<OpEntry> kOps = [] {
    std::vector<OpEntry> all;
    for (const auto* family : {&kViews, &kCopies, &kElementwise, &kReductions, &kInPlace}) {
      all.insert(all.end(), family->begin(), family->end());
    }
    AddElementwise(&all);
    return all;
  }();
  return kOps;
}

const OpEntry& ProgramOp(const std::string& name) {
  for (const OpEntry& op : ProgramOps()) {
    if (name == op.name) return op;
  }
  ThrowIfError(absl::NotFoundError(name));
  return ProgramOps()[0];
}

}  // namespace dtensor::testing

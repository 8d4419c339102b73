// Kernels of nll_loss and cross_entropy on [n, v]; v may be this rank's block of the classes.
#include "dtensor/ops/cpu/rows.h"
#include "dtensor/ops/cpu/wide_rows.h"
#include "dtensor/ops/kernels.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

int64_t TargetAt(const TensorRef& t, int64_t i) {
  return t.dtype == DType::kI32 ? static_cast<const int32_t*>(t.data)[i]
                                : static_cast<const int64_t*>(t.data)[i];
}

// Writes a decimal number; std::to_string would be code shared between levels.
int Print(char* out, int64_t v) {
  char digits[24];
  int n = 0, at = 0;
  uint64_t u = v < 0 ? 0 - static_cast<uint64_t>(v) : static_cast<uint64_t>(v);
  do {
    digits[n++] = static_cast<char>('0' + u % 10);
  } while ((u /= 10) != 0);
  if (v < 0) out[at++] = '-';
  while (n > 0) out[at++] = digits[--n];
  return at;
}
int Print(char* out, const char* text) {
  int n = 0;
  for (; text[n] != '\0'; ++n) out[n] = text[n];
  return n;
}

void FailTarget(const KernelCall& c, int64_t target, int64_t position, int64_t classes) {
  char text[160];
  int n = Print(text, "target ");
  n += Print(text + n, target);
  n += Print(text + n, " at position ");
  n += Print(text + n, position);
  n += Print(text + n, " is out of range for ");
  n += Print(text + n, classes);
  n += Print(text + n, " classes");
  c.workspace->Fail({text, static_cast<size_t>(n)});
}

enum class Where { kHere, kElsewhere, kIgnored, kBad };

// Local column of target i, where it is this rank's.
Where Locate(const KernelCall& c, const TensorRef& t, int64_t i, const FactorRange& v,
             int64_t ignore, int64_t* column) {
  const int64_t target = TargetAt(t, i);
  if (target == ignore) return Where::kIgnored;
  if (target < 0 || target >= v.global) {
    FailTarget(c, target, i, v.global);
    return Where::kBad;
  }
  *column = target - v.start;
  return *column >= 0 && *column < v.local ? Where::kHere : Where::kElsewhere;
}

FactorRange ClassesOf(const KernelCall& c, int64_t columns) {
  if (c.factors.empty() || c.factors[0].global < 0) return {0, columns, columns};
  return c.factors[0];
}

template <class T>
T ElementAt(const TensorRef& x, int64_t i) {
  if (!IsNarrow(x.dtype)) return static_cast<const T*>(x.data)[i];
  float element = 0;
  Widen(x, i, 1, &element);
  return static_cast<T>(element);
}

// logp [n, v], t [n]; ignore_index -> [n]
template <class T>
void NllPick(const KernelCall& c) {
  const TensorRef& x = c.in[0];
  const FactorRange v = ClassesOf(c, x.sizes[1]);
  auto* out = static_cast<T*>(c.out[0].data);
  for (int64_t i = 0; i < x.sizes[0]; ++i) {
    int64_t column = 0;
    const Where where = Locate(c, c.in[1], i, v, c.attrs[0].i, &column);
    if (where == Where::kBad) return;
    out[i] = where == Where::kHere ? -ElementAt<T>(x, i * x.sizes[1] + column) : T(0);
  }
}

// dy [n], t [n]; num_classes, ignore_index -> [n, v]
template <class T>
void NllPickBackward(const KernelCall& c) {
  const TensorRef& out = c.out[0];
  const FactorRange v = ClassesOf(c, out.sizes[1]);
  RowsOut<T> rows(c, 0, out.sizes[1]);
  for (int64_t i = 0; i < out.sizes[0]; ++i) {
    T* row = rows(i);
    for (int64_t j = 0; j < out.sizes[1]; ++j) row[j] = T(0);
    int64_t column = 0;
    const Where where = Locate(c, c.in[1], i, v, c.attrs[1].i, &column);
    if (where == Where::kBad) return;
    if (where == Where::kHere) row[column] = -static_cast<const T*>(c.in[0].data)[i];
  }
}

// x [n, v], m [n] -> [n]
template <class T>
void SumExp(const KernelCall& c) {
  const TensorRef& x = c.in[0];
  const int64_t n = x.sizes[1];
  RowsIn<T> rows(c, 0, n);
  for (int64_t i = 0; i < x.sizes[0]; ++i) {
    const T* row = rows(i);
    const T m = static_cast<const T*>(c.in[1].data)[i];
    const T sum = SumOf<T>(n, [row, m](int64_t j) { return Exp(row[j] - m); });
    static_cast<T*>(c.out[0].data)[i] = m == -__builtin_inff() ? T(0) : sum;
  }
}

// x [n, v], t [n]; ignore_index -> log(sum(exp(x))) - x[t], max(x), log(sum(exp(x - max))) [n]
template <class T>
void CrossEntropyRows(const KernelCall& c) {
  const TensorRef& x = c.in[0];
  const int64_t n = x.sizes[1];
  auto *losses = static_cast<T*>(c.out[0].data), *top = static_cast<T*>(c.out[1].data);
  auto* log_sums = static_cast<T*>(c.out[2].data);
  RowsIn<T> rows(c, 0, n);
  for (int64_t i = 0; i < x.sizes[0]; ++i) {
    const T* row = rows(i);
    int64_t column = 0;
    const Where where = Locate(c, c.in[1], i, {0, n, n}, c.attrs[0].i, &column);
    if (where == Where::kBad) return;
    const T m = MaxOf(row, n);
    const T sum = SumOf<T>(n, [row, m](int64_t j) { return Exp(row[j] - m); });
    const T log_sum = Log(m == -__builtin_inff() ? T(0) : sum);
    top[i] = m;
    log_sums[i] = log_sum;
    // The large terms cancel first.
    losses[i] = where == Where::kHere ? (m - row[column]) + log_sum : T(0);
  }
}

// dy [n], x [n, v], top [n], log_sum [n], t [n]; ignore_index -> [n, v]
template <class T>
void CrossEntropyBackward(const KernelCall& c) {
  const TensorRef& x = c.in[1];
  const int64_t n = x.sizes[1];
  const FactorRange v = ClassesOf(c, n);
  RowsIn<T> rows(c, 1, n);
  RowsOut<T> gradients(c, 0, n);
  for (int64_t i = 0; i < x.sizes[0]; ++i) {
    const T* row = rows(i);
    T* dx = gradients(i);
    int64_t column = 0;
    const Where where = Locate(c, c.in[4], i, v, c.attrs[0].i, &column);
    if (where == Where::kBad) return;
    const T dy = where == Where::kIgnored ? T(0) : static_cast<const T*>(c.in[0].data)[i];
    const T top = static_cast<const T*>(c.in[2].data)[i];
    const T log_sum = static_cast<const T*>(c.in[3].data)[i];
    for (int64_t j = 0; j < n; ++j) dx[j] = Exp((row[j] - top) - log_sum) * dy;
    if (where == Where::kIgnored) {
      for (int64_t j = 0; j < n; ++j) dx[j] = T(0);
    }
    if (where == Where::kHere) dx[column] -= dy;
  }
}

// The operands with a number per class, which RunFloating converts a few rows at a time.
constexpr RowOperands kScores{.in = 0b1}, kGradient{.out = 0b1};
constexpr RowOperands kScoresAndGradient{.in = 0b10, .out = 0b1};

void NllPickKernel(const KernelCall& c) {
  RunFloating(c, NllPick<double>, NllPick<float>, 0, kScores);
}
void NllPickBackwardKernel(const KernelCall& c) {
  RunFloating(c, NllPickBackward<double>, NllPickBackward<float>, 0, kGradient);
}
void SumExpKernel(const KernelCall& c) {
  RunFloating(c, SumExp<double>, SumExp<float>, 0, kScores);
}
void CrossEntropyRowsKernel(const KernelCall& c) {
  RunFloating(c, CrossEntropyRows<double>, CrossEntropyRows<float>, 0, kScores);
}
void CrossEntropyBackwardKernel(const KernelCall& c) {
  RunFloating(c, CrossEntropyBackward<double>, CrossEntropyBackward<float>, 0, kScoresAndGradient);
}

}  // namespace

void RegisterLoss(AddKernelFn add) {
  add("nll_pick", NllPickKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("nll_pick_backward", NllPickBackwardKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("sum_exp", SumExpKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("cross_entropy_rows", CrossEntropyRowsKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("cross_entropy_backward", CrossEntropyBackwardKernel, kFloatDTypes,
      KernelLayout::kContiguous);
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor

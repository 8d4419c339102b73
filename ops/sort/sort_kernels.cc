// Sorting lines, and taking one or several of their elements by rank. Memory-bound or branching:
// one build serves every CPU level.
#include <string>

#include "dtensor/ops/cpu/widen.h"
#include "dtensor/ops/kernels.h"
#include "dtensor/ops/sort/lines.h"

namespace dtensor {
namespace {

// Writes the first `k` entries of a line, as values and places.
template <class T>
void Write(const KernelCall& c, const LineSorter<T>& from, int64_t line,
           const Entry<typename SortKey<T>::Key>* entries, int64_t k) {
  auto* values = static_cast<T*>(c.out[0].data);
  auto* indices = static_cast<int64_t*>(c.out[1].data);
  for (int64_t i = 0; i < k; ++i) {
    const int64_t at = from.shape().At(line, i, k);
    values[at] = from.Value(line, entries[i].place);
    indices[at] = entries[i].place;
  }
}

// attrs: dim, descending
template <class T>
void Sort(const KernelCall& c) {
  LineSorter<T> lines(c, c.attrs[0].i, c.attrs[1].i != 0);
  for (int64_t line = 0; line < lines.shape().lines(); ++line) {
    Write(c, lines, line, lines.Sorted(line), lines.n());
  }
}

// attrs: k, dim, largest
template <class T>
void TopK(const KernelCall& c) {
  LineSorter<T> lines(c, c.attrs[1].i, c.attrs[2].i != 0);
  const int64_t k = c.attrs[0].i;
  if (k > lines.n() || c.out[0].sizes[c.attrs[1].i] != k) {
    return c.workspace->Fail("k is larger than the dim");
  }
  for (int64_t line = 0; line < lines.shape().lines(); ++line) {
    Write(c, lines, line, lines.First(line, k), k);
  }
}

// --- one element of each line: which, by its place

// The first NaN, or -1.
template <class T>
int64_t FirstNan(const Entry<typename SortKey<T>::Key>* entries, int64_t n) {
  if (!SortKey<T>::kHasNan) return -1;
  for (int64_t i = 0; i < n; ++i) {
    if (entries[i].key == SortKey<T>::kNan) return i;
  }
  return -1;
}

struct KthValue {
  template <class T>
  static int64_t Pick(LineSorter<T>& lines, int64_t line, int64_t k) {
    lines.Load(line);
    return lines.Nth(k - 1).place;
  }
};
struct Median {
  template <class T>
  static int64_t Pick(LineSorter<T>& lines, int64_t line, int64_t) {
    const int64_t nan = FirstNan<T>(lines.Load(line), lines.n());
    return nan >= 0 ? nan : lines.Nth((lines.n() - 1) / 2).place;
  }
};
struct NanMedian {
  template <class T>
  static int64_t Pick(LineSorter<T>& lines, int64_t line, int64_t) {
    const auto* entries = lines.Load(line);
    int64_t numbers = lines.n();
    if (SortKey<T>::kHasNan) {
      numbers = std::count_if(entries, entries + lines.n(),
                              [](const auto& e) { return e.key != SortKey<T>::kNan; });
    }
    return lines.Nth(std::max<int64_t>(numbers - 1, 0) / 2).place;
  }
};
// The smallest of those that are there most often; every NaN is one of its own.
struct Mode {
  template <class T>
  static int64_t Pick(LineSorter<T>& lines, int64_t line, int64_t) {
    const auto* entries = lines.Sorted(line);
    int64_t best = 0, most = 0, run = 0;
    for (int64_t i = 0; i < lines.n(); ++i) {
      const bool nan = SortKey<T>::kHasNan && entries[i].key == SortKey<T>::kNan;
      run = i > 0 && entries[i].key == entries[i - 1].key && !nan ? run + 1 : 1;
      if (run <= most) continue;
      most = run;
      best = i - run + 1;
    }
    return entries[best].place;
  }
};

// attrs: dim, keepdim, k
template <class T, class How>
void Pick(const KernelCall& c) {
  LineSorter<T> lines(c, c.attrs[0].i);
  auto* values = static_cast<T*>(c.out[0].data);
  auto* indices = static_cast<int64_t*>(c.out[1].data);
  if (std::max<int64_t>(c.attrs[2].i, 1) > lines.n()) {
    return c.workspace->Fail("the dim has too few elements");
  }
  for (int64_t line = 0; line < lines.shape().lines(); ++line) {
    indices[line] = How::template Pick<T>(lines, line, c.attrs[2].i);
    values[line] = lines.Value(line, indices[line]);
  }
}

// --- by index along a dim

int64_t IndexAt(const TensorRef& index, int64_t i) {
  return static_cast<const int64_t*>(index.data)[i];
}
// This rank's part of the dim that indices count.
FactorRange RangeOf(const KernelCall& c, int64_t size) {
  if (c.factors.empty() || c.factors[0].global < 0) return {0, size, size};
  return c.factors[0];
}
// Whether the lines along `dim` are those of `other`, which has `n` elements in each: a declaration
// that is wrong says otherwise, and is to be judged, not to write beyond a tensor.
bool SameLines(const KernelCall& c, const LineShape& lines, const TensorRef& other, int64_t n) {
  const LineShape theirs(other, c.attrs[0].i);
  if (theirs.outer == lines.outer && theirs.inner == lines.inner && theirs.n == n) return true;
  c.workspace->Fail("the parts of x and of the indices are not of the same lines");
  return false;
}
bool InRange(const KernelCall& c, int64_t index, int64_t size) {
  if (index >= 0 && index < size) return true;
  c.workspace->Fail("index " + std::to_string(index) + " is out of range for a dim of size " +
                    std::to_string(size));
  return false;
}

// x, index -> x at the indices along attrs[0]; zero where another rank has the element.
template <class T>
void Take(const KernelCall& c) {
  const TensorRef &x = c.in[0], &index = c.in[1];
  const LineShape to(index, c.attrs[0].i);
  const FactorRange range = RangeOf(c, x.sizes[c.attrs[0].i]);
  if (!SameLines(c, to, x, range.local) || !SameLines(c, to, c.out[0], to.n)) return;
  const auto* in = static_cast<const T*>(x.data);
  auto* out = static_cast<T*>(c.out[0].data);
  for (int64_t line = 0; line < to.lines(); ++line) {
    for (int64_t i = 0; i < to.n; ++i) {
      const int64_t at = to.At(line, i, to.n), from = IndexAt(index, at);
      if (!InRange(c, from, range.global)) return;
      const int64_t mine = from - range.start;
      out[at] = mine < 0 || mine >= range.local ? T{} : in[to.At(line, mine, range.local)];
    }
  }
}

// y, index -> zeros of attrs[1] elements along attrs[0], y added at the indices.
template <class T>
void Put(const KernelCall& c) {
  const TensorRef &y = c.in[0], &index = c.in[1];
  const LineShape from(index, c.attrs[0].i);
  const FactorRange range = RangeOf(c, c.attrs[1].i);
  if (!SameLines(c, from, y, from.n) || !SameLines(c, from, c.out[0], range.local)) return;
  const auto* in = static_cast<const T*>(y.data);
  auto* out = static_cast<T*>(c.out[0].data);
  std::fill(out, out + from.lines() * range.local, T(0));
  for (int64_t line = 0; line < from.lines(); ++line) {
    for (int64_t i = 0; i < from.n; ++i) {
      const int64_t at = from.At(line, i, from.n), to = IndexAt(index, at);
      if (!InRange(c, to, range.global)) return;
      const int64_t mine = to - range.start;
      if (mine >= 0 && mine < range.local) out[from.At(line, mine, range.local)] += in[at];
    }
  }
}
void PutKernel(const KernelCall& c) {
  if (c.in[0].dtype == DType::kI64) return Put<uint64_t>(c);  // wraps around
  RunFloating(c, Put<double>, Put<float>);
}

// The kernel of the element type of in[0].
void SortKernel(const KernelCall& c) {
  VisitDType(c.in[0].dtype, [&c](auto element) { Sort<typename decltype(element)::type>(c); });
}
void TopKKernel(const KernelCall& c) {
  VisitDType(c.in[0].dtype, [&c](auto element) { TopK<typename decltype(element)::type>(c); });
}
void TakeKernel(const KernelCall& c) {
  VisitDType(c.in[0].dtype, [&c](auto element) { Take<typename decltype(element)::type>(c); });
}
template <class How>
void PickKernel(const KernelCall& c) {
  VisitDType(c.in[0].dtype, [&c](auto element) { Pick<typename decltype(element)::type, How>(c); });
}

}  // namespace

void RegisterSortKernels(AddKernelFn add) {
  const auto all = [add](const char* name, KernelFn fn) {
    add(name, fn, kAllDTypes, KernelLayout::kContiguous);
  };
  all("sort", SortKernel);
  all("topk", TopKKernel);
  all("kthvalue", PickKernel<KthValue>);
  all("median", PickKernel<Median>);
  all("nanmedian", PickKernel<NanMedian>);
  all("mode", PickKernel<Mode>);
  all("take_along", TakeKernel);
  add("put_along", PutKernel, kFloatDTypes | DTypeBit(DType::kI64), KernelLayout::kContiguous);
}

}  // namespace dtensor

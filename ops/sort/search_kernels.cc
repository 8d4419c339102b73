// Binary search, and equal rows. Branching: one build serves every CPU level.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "dtensor/ops/kernels.h"
#include "dtensor/ops/sort/keys.h"

namespace dtensor {
namespace {

int64_t ProductOf(const TensorRef& t, int from, int to) {
  int64_t n = 1;
  for (int d = from; d < to; ++d) n *= t.sizes[d];
  return n;
}

// Where `key` may be put among the n keys of a sequence: before those equal to it, or (right) after
// them. `order`: where the elements of the sequence stand, if it is not sorted.
template <class T>
int64_t Place(const T* sequence, const int64_t* order, int64_t n, T value, bool right) {
  const auto key = SortKey<T>::Of(value);
  if (SortKey<T>::kHasNan && key == SortKey<T>::kNan) return n;
  int64_t low = 0, high = n;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    const auto at = SortKey<T>::Of(sequence[order == nullptr ? middle : order[middle]]);
    if (at < key || (right && at == key)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// sequence [n] or [..., n], x of any shape or [..., m], order like the sequence (absent: in[2]
// is missing) -> places; attrs: right, int32
template <class T>
void Search(const KernelCall& c) {
  const TensorRef &sequence = c.in[0], &x = c.in[1];
  const int64_t n = sequence.sizes[sequence.ndim - 1];
  const int64_t rows = ProductOf(sequence, 0, sequence.ndim - 1);
  const int64_t total = ProductOf(x, 0, x.ndim), m = rows == 0 ? 0 : total / rows;
  const auto* order = c.in.size() > 2 ? static_cast<const int64_t*>(c.in[2].data) : nullptr;
  for (int64_t i = 0; order != nullptr && i < rows * n; ++i) {
    if (order[i] >= 0 && order[i] < n) continue;
    c.workspace->Fail("sorter holds " + std::to_string(order[i]) + ", which is no index of " +
                      std::to_string(n) + " elements");
    return;
  }
  for (int64_t i = 0; i < rows * m; ++i) {
    const int64_t start = i / m * n;
    const int64_t place = Place<T>(static_cast<const T*>(sequence.data) + start,
                                   order == nullptr ? nullptr : order + start, n,
                                   static_cast<const T*>(x.data)[i], c.attrs[0].i != 0);
    if (c.out[0].dtype == DType::kI32) {
      static_cast<int32_t*>(c.out[0].data)[i] = static_cast<int32_t>(place);
    } else {
      static_cast<int64_t*>(c.out[0].data)[i] = place;
    }
  }
}
void SearchKernel(const KernelCall& c) {
  VisitDType(c.in[0].dtype, [&c](auto element) { Search<typename decltype(element)::type>(c); });
}

// Rows of m elements of type T, compared from the left; a NaN differs from everything.
template <class T>
struct ComparedRows {
  const T* x;
  int64_t m;
  int Compare(int64_t a, int64_t b) const {
    for (int64_t j = 0; j < m; ++j) {
      const auto p = SortKey<T>::Of(x[a * m + j]), q = SortKey<T>::Of(x[b * m + j]);
      if (p != q) return p < q ? -1 : 1;
    }
    return 0;
  }
  bool Same(int64_t a, int64_t b) const {
    if (Compare(a, b) != 0) return false;
    for (int64_t j = 0; j < m && SortKey<T>::kHasNan; ++j) {
      if (SortKey<T>::Of(x[a * m + j]) == SortKey<T>::kNan) return false;
    }
    return true;
  }
};

// x [n, m] -> the rows that differ, first of all, which of them each row is, how often each is
// there (both [n], as the rows zeros at the end), and how many there are; attrs: consecutive
template <class T>
void Unique(const KernelCall& c) {
  const int64_t n = c.in[0].sizes[0], m = c.in[0].sizes[1];
  const ComparedRows<T> rows = {static_cast<const T*>(c.in[0].data), m};
  auto* values = static_cast<T*>(c.out[0].data);
  auto* inverse = static_cast<int64_t*>(c.out[1].data);
  auto* counts = static_cast<int64_t*>(c.out[2].data);
  auto* order = static_cast<int64_t*>(c.workspace->Allocate(n * 8));
  std::iota(order, order + n, 0);
  if (c.attrs[0].i == 0) {
    std::sort(order, order + n, [&rows](int64_t a, int64_t b) {
      const int side = rows.Compare(a, b);
      return side < 0 || (side == 0 && a < b);
    });
  }
  std::fill(values, values + n * m, T{});
  std::fill(counts, counts + n, 0);
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i == 0 || !rows.Same(order[i - 1], order[i])) {
      std::copy(rows.x + order[i] * m, rows.x + (order[i] + 1) * m, values + found * m);
      ++found;
    }
    inverse[order[i]] = found - 1;
    ++counts[found - 1];
  }
  *static_cast<int64_t*>(c.out[3].data) = found;
}
void UniqueKernel(const KernelCall& c) {
  VisitDType(c.in[0].dtype, [&c](auto element) { Unique<typename decltype(element)::type>(c); });
}

}  // namespace

void RegisterSearchKernels(AddKernelFn add) {
  const auto all = [add](const char* name, KernelFn fn) {
    add(name, fn, kAllDTypes, KernelLayout::kContiguous);
  };
  all("searchsorted", SearchKernel);
  all("searchsorted_by", SearchKernel);
  all("unique_rows", UniqueKernel);
}

}  // namespace dtensor

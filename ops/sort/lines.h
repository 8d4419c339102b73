// For kernels over lines along a dim: the line as keys with their places, sorted where asked.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "dtensor/ops/sort/keys.h"
#include "dtensor/tensor/kernel.h"

namespace dtensor {

// An array as [outer, n, inner] around one of its dims.
struct LineShape {
  int64_t outer = 1, n, inner = 1;
  LineShape(const TensorRef& x, int64_t dim) : n(x.sizes[dim]) {
    for (int64_t d = 0; d < dim; ++d) outer *= x.sizes[d];
    for (int64_t d = dim + 1; d < x.ndim; ++d) inner *= x.sizes[d];
  }
  int64_t lines() const { return outer * inner; }
  // Of element `i` of a line in an array in which the dim has `size`.
  int64_t At(int64_t line, int64_t i, int64_t size) const {
    return (line / inner * size + i) * inner + line % inner;
  }
};

// A key and where in the line it stands: of equal keys the first one comes first.
template <class Key>
struct Entry {
  Key key;
  uint32_t place;
  friend bool operator<(const Entry& a, const Entry& b) {
    return a.key < b.key || (a.key == b.key && a.place < b.place);
  }
};

// Sorts entries whose places ascend; `spare` is as long. By bytes of the key, the lowest first: no
// comparisons, and equal keys stay in order.
template <class Key>
void SortEntries(Entry<Key>* entries, Entry<Key>* spare, int64_t n) {
  if (n < 256) return std::sort(entries, entries + n);
  constexpr int kBytes = sizeof(Key);
  int64_t counts[kBytes][256] = {};
  for (int64_t i = 0; i < n; ++i) {
    for (int b = 0; b < kBytes; ++b) ++counts[b][entries[i].key >> (8 * b) & 255];
  }
  Entry<Key>*from = entries, *to = spare;
  for (int b = 0; b < kBytes; ++b) {
    if (counts[b][from[0].key >> (8 * b) & 255] == n) continue;  // this byte tells none apart
    int64_t start = 0, starts[256];
    for (int v = 0; v < 256; ++v) {
      starts[v] = start;
      start += counts[b][v];
    }
    for (int64_t i = 0; i < n; ++i) to[starts[from[i].key >> (8 * b) & 255]++] = from[i];
    std::swap(from, to);
  }
  if (from != entries) std::memcpy(entries, from, static_cast<size_t>(n) * sizeof(Entry<Key>));
}

// Entries of one line after the other, in workspace memory.
template <class T>
class LineSorter {
 public:
  using Key = typename SortKey<T>::Key;
  // `flipped`: the largest first.
  LineSorter(const KernelCall& c, int64_t dim, bool flipped = false)
      : shape_(c.in[0], dim),
        x_(static_cast<const T*>(c.in[0].data)),
        flip_(flipped ? static_cast<Key>(~Key{0}) : Key{0}) {
    const int64_t bytes = shape_.n * static_cast<int64_t>(sizeof(Entry<Key>));
    if (shape_.n > UINT32_MAX) {
      c.workspace->Fail("a dim of more than 4294967295 elements cannot be sorted");
      shape_.outer = 0;
      return;
    }
    entries_ = static_cast<Entry<Key>*>(c.workspace->Allocate(bytes));
    spare_ = static_cast<Entry<Key>*>(c.workspace->Allocate(bytes));
  }
  const LineShape& shape() const { return shape_; }
  int64_t n() const { return shape_.n; }
  T Value(int64_t line, int64_t i) const { return x_[shape_.At(line, i, shape_.n)]; }

  // The entries of a line, as they stand there.
  Entry<Key>* Load(int64_t line) {
    const T* x = x_ + shape_.At(line, 0, shape_.n);
    for (int64_t i = 0; i < shape_.n; ++i, x += shape_.inner) {
      entries_[i] = {static_cast<Key>(SortKey<T>::Of(*x) ^ flip_), static_cast<uint32_t>(i)};
    }
    return entries_;
  }
  const Entry<Key>* Sorted(int64_t line) {
    Load(line);
    SortEntries(entries_, spare_, shape_.n);
    return entries_;
  }
  // The first `k` in order; what comes after them is in any order.
  const Entry<Key>* First(int64_t line, int64_t k) {
    constexpr int64_t kFew = 16;
    if (k <= kFew) return FewFirst(line, k);
    Load(line);
    if (k < shape_.n) std::nth_element(entries_, entries_ + k, entries_ + shape_.n);
    std::sort(entries_, entries_ + k);
    return entries_;
  }
  // The one that `k` others come before.
  const Entry<Key>& Nth(int64_t k) {
    std::nth_element(entries_, entries_ + k, entries_ + shape_.n);
    return entries_[k];
  }

 private:
  // Keeps those in order that came first so far; few others come before the last of them.
  const Entry<Key>* FewFirst(int64_t line, int64_t k) {
    const T* x = x_ + shape_.At(line, 0, shape_.n);
    int64_t kept = 0;
    for (int64_t i = 0; i < (k > 0 ? shape_.n : 0); ++i, x += shape_.inner) {
      const Key key = static_cast<Key>(SortKey<T>::Of(*x) ^ flip_);
      if (kept == k && key >= entries_[k - 1].key) continue;
      int64_t at = kept < k ? kept++ : k - 1;
      for (; at > 0 && key < entries_[at - 1].key; --at) entries_[at] = entries_[at - 1];
      entries_[at] = {key, static_cast<uint32_t>(i)};
    }
    return entries_;
  }

  LineShape shape_;
  const T* x_;
  Key flip_;
  Entry<Key>*entries_ = nullptr, *spare_ = nullptr;
};

}  // namespace dtensor

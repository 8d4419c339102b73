// Sorting lines, taking one or several of their elements by rank, and binary search.
#include "dtensor/tensor/cuda/kernels/bitonic.h"
#include "dtensor/tensor/cuda/kernels/sort_lines.h"

namespace dtensor::cuda {
namespace {

// Of equal keys the first in the line comes first.
struct Entry {  // two numbers, as Order takes them
  uint64_t key, place;
  __device__ bool operator>(const Entry& b) const {
    return key != b.key ? key > b.key : place > b.place;
  }
};

// Which elements of a line come first, second and so on: `room` places for each line, every
// `step`-th number. Those of line i count from i * before.
struct Order {
  const uint64_t* places;  // null where there is no memory
  int64_t step, room, before;
  uint64_t mask;
  __device__ int64_t Place(int64_t line, int64_t i) const {
    return static_cast<int64_t>(places[(line * room + i) * step] & mask) - line * before;
  }
};

template <class X>
__global__ void __launch_bounds__(kThreads)
    Load(const X* x, Lines lines, bool descending, Entry* entries, int64_t room, int64_t all) {
  for (int64_t k = GridStart(); k < all; k += GridStep()) {
    const int64_t line = k / room, i = k - line * room;
    const bool mine = line < lines.count && i < lines.n;
    Entry e = {kNan, kNan};  // after all others
    if (mine) {
      const uint64_t key = KeyOf(x[lines.At(line, i, lines.n)]);
      e = {descending ? ~key : key, static_cast<uint64_t>(i)};
    }
    entries[k] = e;
  }
}
// Lines that a block holds are sorted by one launch, longer ones by the library.
template <class X>
Order Sorted(const KernelCall& c, const Lines& lines, bool descending) {
  if (lines.n > kSortTile) {
    const uint64_t* const keys = SortAllLines<X>(c, lines, descending);
    return {keys, 1, lines.n, lines.n, LowBits(lines.PlaceBits())};
  }
  const int64_t room = RoomFor(lines.n, 2);
  const int64_t all = (lines.count * room + kSortTile - 1) / kSortTile * kSortTile;
  auto* const entries = Scratch<Entry>(c, all);
  if (entries == nullptr) return {};
  Load<<<BlocksFor(all), kThreads, 0, StreamOf(c)>>>(In<X>(c, 0), lines, descending, entries, room,
                                                     all);
  CheckLaunch();
  SortShortLines(c, entries, all, room);
  return {&entries->place, 2, room, 0, ~uint64_t{0}};
}

// The first k of each line.
template <class X>
__global__ void __launch_bounds__(kThreads)
    WriteFirst(const X* x, Lines lines, Order order, int64_t k, X* values, int64_t* places) {
  for (int64_t w = GridStart(); w < lines.count * k; w += GridStep()) {
    const int64_t line = w / k, i = w - line * k, at = lines.At(line, i, k);
    const int64_t place = order.Place(line, i);
    values[at] = x[lines.At(line, place, lines.n)];
    places[at] = place;
  }
}
void FirstOfLines(const KernelCall& c, int64_t axis, int64_t k, bool descending) {
  const Lines lines(c.in[0], axis);
  if (lines.count * k == 0) return;
  VisitDType(c.in[0].dtype, [&](auto element) {
    using X = typename decltype(element)::type;
    const Order order = Sorted<X>(c, lines, descending);
    if (order.places == nullptr) return;
    WriteFirst<<<BlocksFor(lines.count * k), kThreads, 0, StreamOf(c)>>>(
        In<X>(c, 0), lines, order, k, Out<X>(c, 0), Out<int64_t>(c, 1));
    CheckLaunch();
  });
}
// attrs: dim, descending
void SortKernel(const KernelCall& c) {
  FirstOfLines(c, c.attrs[0].i, c.in[0].sizes[c.attrs[0].i], c.attrs[1].i != 0);
}
// attrs: k, dim, largest
void TopKKernel(const KernelCall& c) {
  const int64_t k = c.attrs[0].i, axis = c.attrs[1].i;
  if (k > c.in[0].sizes[axis] || c.out[0].sizes[axis] != k) {
    return c.workspace->Fail("k is larger than the dim");
  }
  FirstOfLines(c, axis, k, c.attrs[2].i != 0);
}

// --- one element of each line: number Of(sorted, k) of the sorted ones

template <class X>
struct SortedLine {
  const X* x;
  const Lines& lines;
  const Order& order;
  int64_t line;
  __device__ int64_t Place(int64_t i) const { return order.Place(line, i); }
  __device__ uint64_t Key(int64_t i) const { return KeyOf(x[lines.At(line, Place(i), lines.n)]); }
  // How many are numbers, not NaN.
  __device__ int64_t Numbers() const {
    if (!kHasNan<X>) return lines.n;
    int64_t low = 0, high = lines.n;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (Key(middle) == kNan) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};
struct KthValue {
  template <class X>
  __device__ static int64_t Of(const SortedLine<X>&, int64_t k) {
    return k - 1;
  }
};
// The first NaN, if there is one.
struct Median {
  template <class X>
  __device__ static int64_t Of(const SortedLine<X>& sorted, int64_t) {
    const int64_t n = sorted.lines.n, numbers = sorted.Numbers();
    return numbers < n ? numbers : (n - 1) / 2;
  }
};
struct NanMedian {
  template <class X>
  __device__ static int64_t Of(const SortedLine<X>& sorted, int64_t) {
    const int64_t numbers = sorted.Numbers();
    return numbers == 0 ? 0 : (numbers - 1) / 2;
  }
};
// The smallest of those that are there most often; every NaN is one of its own.
struct Mode {
  template <class X>
  __device__ static int64_t Of(const SortedLine<X>& sorted, int64_t) {
    int64_t best = 0, most = 0, run = 0;
    uint64_t last = 0;
    for (int64_t i = 0; i < sorted.lines.n; ++i) {
      const uint64_t key = sorted.Key(i);
      const bool nan = kHasNan<X> && key == kNan;
      run = i > 0 && key == last && !nan ? run + 1 : 1;
      last = key;
      if (run <= most) continue;
      most = run;
      best = i - run + 1;
    }
    return best;
  }
};
template <class How, class X>
__global__ void __launch_bounds__(kThreads, 1)
    WriteOne(const X* x, Lines lines, Order order, int64_t k, X* values, int64_t* places) {
  for (int64_t line = GridStart(); line < lines.count; line += GridStep()) {
    const SortedLine<X> sorted = {x, lines, order, line};
    const int64_t place = sorted.Place(How::Of(sorted, k));
    values[line] = x[lines.At(line, place, lines.n)];
    places[line] = place;
  }
}
// attrs: dim, keepdim, k
template <class How>
void PickKernel(const KernelCall& c) {
  const Lines lines(c.in[0], c.attrs[0].i);
  const int64_t k = c.attrs[2].i;
  if ((k < 1 ? 1 : k) > lines.n) return c.workspace->Fail("the dim has too few elements");
  if (lines.count == 0) return;
  VisitDType(c.in[0].dtype, [&](auto element) {
    using X = typename decltype(element)::type;
    const Order order = Sorted<X>(c, lines, false);
    if (order.places == nullptr) return;
    WriteOne<How><<<BlocksFor(lines.count), kThreads, 0, StreamOf(c)>>>(
        In<X>(c, 0), lines, order, k, Out<X>(c, 0), Out<int64_t>(c, 1));
    CheckLaunch();
  });
}

// Where x may be put among the n elements of its sequence: before those equal to it, or (right)
// after them. `order`: where the elements stand, if they are not sorted.
template <class X>
__global__ void __launch_bounds__(kThreads)
    Search(const X* sequence, const X* x, const int64_t* order, int64_t n, int64_t m, int64_t all,
           bool right, void* out, bool narrow, ErrorSlot slot) {
  for (int64_t i = GridStart(); i < all; i += GridStep()) {
    const int64_t start = i / m * n;
    const uint64_t key = KeyOf(x[i]);
    int64_t low = 0, high = n;
    if (kHasNan<X> && key == kNan) low = n;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      int64_t from = middle;
      if (order != nullptr) {
        from = order[start + middle];
        if (from < 0 || from >= n) {
          Complaint(slot) << "sorter holds " << from << ", which is no index of " << n
                          << " elements";
          break;
        }
      }
      const uint64_t at = KeyOf(sequence[start + from]);
      if (at < key || (right && at == key)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (narrow) {
      static_cast<int32_t*>(out)[i] = static_cast<int32_t>(low);
    } else {
      static_cast<int64_t*>(out)[i] = low;
    }
  }
}
// sequence [n] or [..., n], x of any shape or [..., m], perhaps order; attrs: right, int32
void SearchKernel(const KernelCall& c) {
  const TensorRef& sequence = c.in[0];
  const int64_t n = sequence.sizes[sequence.ndim - 1];
  const int64_t rows = ProductOf(sequence, 0, sequence.ndim - 1);
  const int64_t m = rows == 0 ? 0 : NumelOf(c.in[1]) / rows;
  if (rows * m == 0) return;
  VisitDType(sequence.dtype, [&](auto element) {
    using X = typename decltype(element)::type;
    Search<<<BlocksFor(rows * m), kThreads, 0, StreamOf(c)>>>(
        In<X>(c, 0), In<X>(c, 1), c.in.size() > 2 ? In<int64_t>(c, 2) : nullptr, n, m, rows * m,
        c.attrs[0].i != 0, c.out[0].data, c.out[0].dtype == DType::kI32, ErrorSlotOf(c));
    CheckLaunch();
  });
}

}  // namespace

void AddSortKernels(AddKernelFn add) {
  const auto all = [add](const char* name, KernelFn fn) {
    add(name, fn, kAllDTypes, KernelLayout::kContiguous);
  };
  all("sort", SortKernel);
  all("topk", TopKKernel);
  all("kthvalue", PickKernel<KthValue>);
  all("median", PickKernel<Median>);
  all("nanmedian", PickKernel<NanMedian>);
  all("mode", PickKernel<Mode>);
  all("searchsorted", SearchKernel);
  all("searchsorted_by", SearchKernel);
}

}  // namespace dtensor::cuda

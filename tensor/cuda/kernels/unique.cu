// Equal rows: sorted by their elements from the left, or as they come, and numbered. Single
// elements the library sorts, by their bits; rows of several are compared.
#include <cub/device/device_scan.cuh>

#include "dtensor/tensor/cuda/kernels/bitonic.h"
#include "dtensor/tensor/cuda/kernels/sort_lines.h"

namespace dtensor::cuda {
namespace {

inline constexpr int64_t kNoRow = -1;  // of a place beyond the last row

// Rows of m elements, compared from the left.
template <class X>
struct ComparedRows {
  const X* x;
  int64_t m;
  // Whether row a comes after row b: of equal rows the later one does, and what is no row.
  __device__ bool operator()(int64_t a, int64_t b) const {
    if (a == kNoRow || b == kNoRow) return b != kNoRow;
    for (int64_t j = 0; j < m; ++j) {
      const uint64_t p = KeyOf(x[a * m + j]), q = KeyOf(x[b * m + j]);
      if (p != q) return p > q;
    }
    return a > b;
  }
  // A NaN differs from everything.
  __device__ bool Same(int64_t a, int64_t b) const {
    for (int64_t j = 0; j < m; ++j) {
      const uint64_t p = KeyOf(x[a * m + j]);
      if (p != KeyOf(x[b * m + j]) || (kHasNan<X> && p == kNan)) return false;
    }
    return true;
  }
};

__global__ void __launch_bounds__(kThreads) InOrder(int64_t* order, int64_t n, int64_t room) {
  for (int64_t i = GridStart(); i < room; i += GridStep()) order[i] = i < n ? i : kNoRow;
}

__global__ void __launch_bounds__(kThreads)
    TakePlaces(const uint64_t* keys, int place_bits, int64_t* order, int64_t n) {
  for (int64_t i = GridStart(); i < n; i += GridStep()) {
    order[i] = static_cast<int64_t>(keys[i] & LowBits(place_bits));
  }
}
// False where there is no memory.
template <class X>
bool SortElements(const KernelCall& c, int64_t* order) {
  const Lines line(c.in[0], 0);
  const uint64_t* const keys = SortAllLines<X>(c, line, false);
  if (keys == nullptr) return false;
  TakePlaces<<<BlocksFor(line.n), kThreads, 0, StreamOf(c)>>>(keys, line.PlaceBits(), order,
                                                              line.n);
  CheckLaunch();
  return true;
}

// first[i]: whether row order[i] differs from the one before it.
template <class X>
__global__ void __launch_bounds__(kThreads)
    FindFirst(ComparedRows<X> rows, const int64_t* order, int64_t* first, int64_t n) {
  for (int64_t i = GridStart(); i < n; i += GridStep()) {
    first[i] = i == 0 || !rows.Same(order[i - 1], order[i]) ? 1 : 0;
  }
}
// Adds up what FindFirst wrote: the row of each place is that of the rows found whose number, from
// 1 up, comes to stand there. Whole numbers: their sum is no matter of its order. False where there
// is no memory.
bool NumberRows(const KernelCall& c, int64_t* numbers, int64_t n) {
  size_t bytes = 0;
  NoteError(cub::DeviceScan::InclusiveSum(nullptr, bytes, numbers, n, StreamOf(c)));
  void* const memory = Scratch<char>(c, static_cast<int64_t>(bytes));
  if (memory == nullptr) return false;
  NoteError(cub::DeviceScan::InclusiveSum(memory, bytes, numbers, n, StreamOf(c)));
  return true;
}
__device__ inline bool IsFirst(const int64_t* number, int64_t i) {
  return i == 0 || number[i] != number[i - 1];
}

// Writes the rows found.
template <class X>
__global__ void __launch_bounds__(kThreads) WriteRows(ComparedRows<X> rows, const int64_t* order,
                                                      const int64_t* number, X* values, int64_t n) {
  for (int64_t w = GridStart(); w < n * rows.m; w += GridStep()) {
    const int64_t i = w / rows.m, j = w - i * rows.m;
    if (IsFirst(number, i)) values[(number[i] - 1) * rows.m + j] = rows.x[order[i] * rows.m + j];
  }
}
// Where each begins, and how many there are.
__global__ void __launch_bounds__(kThreads)
    WriteStarts(const int64_t* number, int64_t* starts, int64_t* found, int64_t n) {
  for (int64_t i = GridStart(); i < n; i += GridStep()) {
    if (IsFirst(number, i)) starts[number[i] - 1] = i;
    if (i == n - 1) *found = number[i];
  }
}
__global__ void __launch_bounds__(kThreads)
    WriteCounts(const int64_t* order, const int64_t* number, const int64_t* starts,
                const int64_t* found, int64_t* inverse, int64_t* counts, int64_t n) {
  for (int64_t i = GridStart(); i < n; i += GridStep()) {
    inverse[order[i]] = number[i] - 1;
    const int64_t end = i + 1 < *found ? starts[i + 1] : n;
    counts[i] = i < *found ? end - starts[i] : 0;
  }
}

// x [n, m] -> rows, inverse, counts, found; attrs: consecutive
void UniqueKernel(const KernelCall& c) {
  const int64_t n = c.in[0].sizes[0], m = c.in[0].sizes[1], room = RoomFor(n, kSortTile);
  auto* const found = Out<int64_t>(c, 3);
  if (n == 0) {
    NoteError(cudaMemsetAsync(found, 0, sizeof(int64_t), StreamOf(c)));
    return;
  }
  auto *order = Scratch<int64_t>(c, room), *number = Scratch<int64_t>(c, n);
  auto* starts = Scratch<int64_t>(c, n);
  if (order == nullptr || number == nullptr || starts == nullptr) return;
  InOrder<<<BlocksFor(room), kThreads, 0, StreamOf(c)>>>(order, n, room);
  CheckLaunch();
  bool ok = true;
  VisitDType(c.in[0].dtype, [&](auto element) {
    using X = typename decltype(element)::type;
    const ComparedRows<X> rows = {In<X>(c, 0), m};
    const bool sorts = c.attrs[0].i == 0;
    if (sorts && m == 1) ok = SortElements<X>(c, order);
    if (sorts && m > 1) SortLine(c, order, room, rows);
    if (!ok) return;
    FindFirst<<<BlocksFor(n), kThreads, 0, StreamOf(c)>>>(rows, order, number, n);
    CheckLaunch();
    ok = NumberRows(c, number, n);
    if (!ok || m == 0) return;
    NoteError(cudaMemsetAsync(c.out[0].data, 0, static_cast<size_t>(n * m * SizeOf(c.out[0].dtype)),
                              StreamOf(c)));
    WriteRows<<<BlocksFor(n * m), kThreads, 0, StreamOf(c)>>>(rows, order, number, Out<X>(c, 0), n);
    CheckLaunch();
  });
  if (!ok) return;
  WriteStarts<<<BlocksFor(n), kThreads, 0, StreamOf(c)>>>(number, starts, found, n);
  CheckLaunch();
  WriteCounts<<<BlocksFor(n), kThreads, 0, StreamOf(c)>>>(
      order, number, starts, found, Out<int64_t>(c, 1), Out<int64_t>(c, 2), n);
  CheckLaunch();
}

}  // namespace

void AddUniqueKernels(AddKernelFn add) {
  add("unique_rows", UniqueKernel, kAllDTypes, KernelLayout::kContiguous);
}

}  // namespace dtensor::cuda

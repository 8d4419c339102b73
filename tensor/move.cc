// Fill, Copy and reductions in place on strided tensors: dims are put in order and merged here,
// runs are done by the active CPU level.
#include <algorithm>

#include "absl/base/attributes.h"
#include "dtensor/tensor/cpu/kernels/runs.h"
#include "dtensor/tensor/cpu/level.h"
#include "dtensor/tensor/device_move.h"
#include "dtensor/tensor/next_index.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {
namespace {

struct LoopDim {
  int64_t size, a, b;  // strides of the written and of the read tensor
};
using Loop = absl::InlinedVector<LoopDim, 6>;

// Dims with size > 1, the written tensor's largest stride first, merged where both allow it.
Loop MakeLoop(IntSpan shape, IntSpan a, IntSpan b) {
  Loop dims;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == 1) continue;
    dims.push_back({shape[d], a[d], b[d]});
    for (size_t k = dims.size() - 1; k > 0 && dims[k - 1].a < dims[k].a; --k) {
      std::swap(dims[k - 1], dims[k]);  // few dims, mostly in order: cheaper than a sort
    }
  }
  Loop merged;
  for (const LoopDim& d : dims) {
    if (!merged.empty() && merged.back().a == d.a * d.size && merged.back().b == d.b * d.size) {
      merged.back() = {merged.back().size * d.size, d.a, d.b};
    } else {
      merged.push_back(d);
    }
  }
  if (merged.empty()) merged.push_back({1, 1, 1});
  return merged;
}

// Calls run(offset_a, offset_b) for every index of the dims but the last `inner`.
template <class Run>
ABSL_ATTRIBUTE_ALWAYS_INLINE inline void ForOuter(const Loop& loop, size_t inner, const Run& run) {
  const size_t outer = loop.size() - inner;
  if (outer == 0) return run(0, 0);
  absl::InlinedVector<int64_t, 6> at(outer, 0);
  int64_t a = 0, b = 0;
  const auto moved = [&](size_t d, int64_t by) {
    a += by * loop[d].a;
    b += by * loop[d].b;
  };
  do {
    run(a, b);
  } while (NextIndex(at, [&](size_t d) { return loop[d].size; }, moved));
}

int SizeLog(DType t) { return __builtin_ctzll(static_cast<uint64_t>(SizeOf(t))); }

char* At(const Tensor& t, int64_t offset) {
  return static_cast<char*>(t.data()) + offset * SizeOf(t.dtype());
}

// Fills with `value` (of dtype `from`) converted to the tensor's dtype.
ABSL_ATTRIBUTE_ALWAYS_INLINE inline void FillConverted(const Tensor& out, const void* value,
                                                       DType from) {
  if (out.device() != DeviceType::kCpu) return FillElsewhere(out, value, from);
  if (out.numel() == 0) return;
  const RunTable& runs = ActiveRuns();
  uint64_t bits = 0;
  runs.copy[static_cast<int>(from)][static_cast<int>(out.dtype())](&bits, 1, value, 1, 1);
  const Loop loop = MakeLoop(out.shape(), out.strides(), out.strides());
  const FillRunFn fill = runs.fill[SizeLog(out.dtype())];
  ForOuter(loop, 1,
           [&](int64_t a, int64_t) { fill(At(out, a), loop.back().a, &bits, loop.back().size); });
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline void CopyAll(const TensorRef& src, const TensorRef& dst) {
  DT_CHECK(src.ndim == dst.ndim);
  const IntSpan sizes(dst.sizes, dst.ndim);
  DT_CHECK(IntSpan(src.sizes, src.ndim) == sizes);
  if (Numel(sizes) == 0) return;
  const auto at = [](const TensorRef& t, int64_t offset) {
    return static_cast<char*>(t.data) + offset * SizeOf(t.dtype);
  };
  const RunTable& runs = ActiveRuns();
  const Loop loop = MakeLoop(sizes, IntSpan(dst.strides, dst.ndim), IntSpan(src.strides, src.ndim));
  const LoopDim& last = loop.back();
  const bool plane =
      src.dtype == dst.dtype && loop.size() >= 2 && last.b != 1 && loop[loop.size() - 2].b < last.b;
  if (plane) {
    const LoopDim& row = loop[loop.size() - 2];
    const CopyPlaneFn copy = runs.plane[SizeLog(src.dtype)];
    ForOuter(loop, 2, [&](int64_t a, int64_t b) {
      copy(at(dst, a), row.a, last.a, at(src, b), row.b, last.b, row.size, last.size);
    });
    return;
  }
  const CopyRunFn copy = runs.copy[static_cast<int>(src.dtype)][static_cast<int>(dst.dtype)];
  ForOuter(loop, 1,
           [&](int64_t a, int64_t b) { copy(at(dst, a), last.a, at(src, b), last.b, last.size); });
}

}  // namespace

const RunTable& ActiveRuns() {
  static const RunTable& table = DT_AT_CPU_LEVEL(ActiveCpuLevel(), TensorRuns());
  return table;
}

void Fill(const Tensor& out, double value) {
  FillConverted(out, &value, DType::kF64);
  out.buffer().BumpVersion();
}
void FillInt(const Tensor& out, int64_t value) {
  FillConverted(out, &value, DType::kI64);
  out.buffer().BumpVersion();
}

void CopyRef(const TensorRef& src, const TensorRef& dst) { CopyAll(src, dst); }

void Copy(const Tensor& src, const Tensor& dst) {
  DT_CHECK(src.shape() == dst.shape());
  dst.buffer().BumpVersion();
  if (src.device() != DeviceType::kCpu || dst.device() != DeviceType::kCpu) {
    return CopyElsewhere(src, dst);
  }
  CopyAll(src.ref(), dst.ref());
}

void CopyUnlessSame(const Tensor& src, const Tensor& dst) {
  if (src.numel() == 0 || (src.data() == dst.data() && src.strides() == dst.strides())) return;
  Copy(src, dst);
}

void ReduceInPlace(const Tensor& acc, const Tensor& x, ReduceOp op) {
  DT_CHECK(acc.shape() == x.shape() && acc.dtype() == x.dtype());
  acc.buffer().BumpVersion();
  if (acc.device() != DeviceType::kCpu) return ReduceElsewhere(acc, x, op);
  if (acc.numel() == 0) return;
  const int which = op == ReduceOp::kAvg ? 0 : static_cast<int>(op);
  const ReduceRunFn reduce = ActiveRuns().reduce[which][static_cast<int>(acc.dtype())];
  const Loop loop = MakeLoop(acc.shape(), acc.strides(), x.strides());
  const LoopDim& last = loop.back();
  ForOuter(loop, 1,
           [&](int64_t a, int64_t b) { reduce(At(acc, a), last.a, At(x, b), last.b, last.size); });
}

void AddInPlace(const Tensor& acc, const Tensor& x) { ReduceInPlace(acc, x, ReduceOp::kSum); }

std::string_view Name(ReduceOp op) {
  constexpr std::string_view kNames[] = {"sum", "max", "min", "prod", "avg"};
  return kNames[static_cast<int>(op)];
}

}  // namespace dtensor

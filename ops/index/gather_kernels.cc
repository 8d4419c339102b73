// Reading and writing where indices say: memory-bound, so one build serves every CPU level.
//
// Operands are seen as [outer, rows, inner], rows along the indexed dim; indices either name whole
// rows ([picks]) or an element each ([outer, picks, inner]).
#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "dtensor/ops/cpu/widen.h"
#include "dtensor/ops/kernels.h"
#include "dtensor/tensor/cpu/kernels/element_ops.h"
#include "dtensor/tensor/cpu/kernels/runs.h"

namespace dtensor {
namespace {

// As int64, in workspace memory if they are not.
const int64_t* Indices(const KernelCall& c, const TensorRef& index) {
  if (index.dtype == DType::kI64) return static_cast<const int64_t*>(index.data);
  const int64_t n = NumelOf(index);
  auto* wide = static_cast<int64_t*>(c.workspace->Allocate(n * SizeOf(DType::kI64)));
  ActiveRuns().copy[static_cast<int>(index.dtype)][static_cast<int>(DType::kI64)](wide, 1,
                                                                                  index.data, 1, n);
  return wide;
}

class Picks {
 public:
  // `x`: the operand that has the rows; `index`: the one that names them.
  Picks(const KernelCall& c, const TensorRef& x, const TensorRef& index)
      : workspace_(c.workspace), by_row_(index.ndim == 1) {
    const int dim = static_cast<int>(c.attrs[0].i);
    for (int d = 0; d < x.ndim; ++d) (d < dim ? outer_ : inner_) *= d == dim ? 1 : x.sizes[d];
    const int64_t local = x.sizes[dim];
    const bool cut = !c.factors.empty() && c.factors[0].global >= 0;
    rows_ = cut ? c.factors[0] : FactorRange{0, local, local};
    rows_.local = std::min(rows_.local, local);  // whatever a wrong declaration says of its part
    picks_ = by_row_ ? index.sizes[0] : index.sizes[dim];
    index_ = Indices(c, index);
  }

  // run(p, r, n): the n elements from p on of the operand with an element per pick belong to those
  // from r on of the one with rows; n is a number, or the constant 1. r < 0: another rank has that
  // row. Ends where an index is out of range: the call fails.
  template <class Run>
  void Each(const Run& run) const {
    const int64_t rows = by_row_ ? picks_ : picks_ * inner_, span = rows_.local * inner_;
    const int64_t* index = index_;
    for (int64_t o = 0; o < outer_; ++o) {
      if (by_row_) index = index_;
      const int64_t* const bad = by_row_ && inner_ != 1 ? Rows(index, o, run)
                                 : inner_ == 1
                                     ? Elements<true>(index, o * rows, rows, o * span, run)
                                     : Elements<false>(index, o * rows, rows, o * span, run);
      if (bad != nullptr) return Fail(bad);
      index += rows;
    }
  }

 private:
  static constexpr int64_t kBad = std::numeric_limits<int64_t>::min();

  // Of one index of the outer dims: whole rows, or an element per index. Where an index is bad, it.
  template <class Run>
  const int64_t* Rows(const int64_t* index, int64_t o, const Run& run) const {
    for (int64_t k = 0; k < picks_; ++k, ++index) {
      const int64_t row = RowOf(*index);
      if (row == kBad) return index;
      run((o * picks_ + k) * inner_, row < 0 ? -1 : (o * rows_.local + row) * inner_, inner_);
    }
    return nullptr;
  }
  template <bool single, class Run>
  const int64_t* Elements(const int64_t* index, int64_t at, int64_t n, int64_t base,
                          const Run& run) const {
    const FactorRange rows = rows_;
    const int64_t inner = single ? 1 : inner_;
    int64_t column = 0;
    for (int64_t k = 0; k < n; ++k, ++index) {
      if (static_cast<uint64_t>(*index) >= static_cast<uint64_t>(rows.global)) return index;
      const int64_t row = *index - rows.start;
      const bool here = static_cast<uint64_t>(row) < static_cast<uint64_t>(rows.local);
      run(at + k, here ? base + row * inner + column : -1, std::integral_constant<int64_t, 1>());
      if (!single) column = column + 1 == inner ? 0 : column + 1;
    }
    return nullptr;
  }

  // -1: not here.
  int64_t RowOf(int64_t id) const {
    if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(rows_.global)) return kBad;
    const int64_t row = id - rows_.start;
    return static_cast<uint64_t>(row) < static_cast<uint64_t>(rows_.local) ? row : -1;
  }
  void Fail(const int64_t* index) const {
    workspace_->Fail("index " + std::to_string(*index) + " is out of range for a dim of " +
                     std::to_string(rows_.global) + " (position " + std::to_string(index - index_) +
                     ")");
  }

  Workspace* workspace_;
  bool by_row_;
  int64_t outer_ = 1, inner_ = 1, picks_ = 0;
  FactorRange rows_{};
  const int64_t* index_ = nullptr;
};

// visit(T{}) with an unsigned integer as wide as the elements of the dtype.
template <class Visit>
void VisitSize(DType t, const Visit& visit) {
  switch (LogSizeOf(t)) {
    case 0:
      return visit(uint8_t{});
    case 1:
      return visit(uint16_t{});
    case 2:
      return visit(uint32_t{});
    default:
      return visit(uint64_t{});
  }
}

// x, index -> out; rows of other ranks give zeros. attrs: dim
void GatherKernel(const KernelCall& c) {
  const Picks picks(c, c.in[0], c.in[1]);
  VisitSize(c.out[0].dtype, [&](auto element) {
    using T = decltype(element);
    const T* x = static_cast<const T*>(c.in[0].data);
    T* out = static_cast<T*>(c.out[0].data);
    picks.Each([=](int64_t p, int64_t r, auto n) {
      if (r < 0) {
        std::fill_n(out + p, n, T{0});
      } else {
        std::copy_n(x + r, n, out + p);
      }
    });
  });
}

// --- writing: out[row] = f(out[row], src[pick])

// Of equals, as 0 and -0 are, a maximum or minimum leaves what is there.
template <ReduceOp kOp, class T>
void Combine(const Picks& picks, const void* src, void* out) {
  const T* from = static_cast<const T*>(src);
  T* to = static_cast<T*>(out);
  picks.Each([=](int64_t p, int64_t r, auto n) {
    if (r < 0) return;
    for (int64_t i = 0; i < n; ++i) {
      to[r + i] = DT_LEVEL_NS::Reduced<kOp>(from[p + i], to[r + i]);
    }
  });
}

// What is in `out` combined with src where index says.
template <ReduceOp kOp>
void CombineInto(const KernelCall& c, const TensorRef& src) {
  const Picks picks(c, c.out[0], c.in[1]);
  VisitDType(c.out[0].dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    if constexpr (!std::is_same_v<T, BFloat16> && !std::is_same_v<T, Half>) {
      Combine<kOp, T>(picks, src.data, c.out[0].data);
    }
  });
}

// x, index, src -> out, which may be x. attrs: dim
void CopyBase(const KernelCall& c) {
  const TensorRef &x = c.in[0], &out = c.out[0];
  const auto bytes = static_cast<size_t>(NumelOf(out) * SizeOf(out.dtype));
  if (x.data != out.data && bytes > 0) std::memcpy(out.data, x.data, bytes);
}

// Of indices that are equal the last one writes.
void ScatterKernel(const KernelCall& c) {
  CopyBase(c);
  const Picks picks(c, c.out[0], c.in[1]);
  VisitSize(c.out[0].dtype, [&](auto element) {
    using T = decltype(element);
    const T* src = static_cast<const T*>(c.in[2].data);
    T* out = static_cast<T*>(c.out[0].data);
    picks.Each([=](int64_t p, int64_t r, auto n) {
      if (r >= 0) std::copy_n(src + p, n, out + r);
    });
  });
}

template <ReduceOp kOp>
void CombineKernel(const KernelCall& c) {
  CopyBase(c);
  CombineInto<kOp>(c, c.in[2]);
}

// dy, index -> out, whose rows are sums. attrs: dim, size
void GatherBackwardKernel(const KernelCall& c) {
  const auto bytes = static_cast<size_t>(NumelOf(c.out[0]) * SizeOf(c.out[0].dtype));
  if (bytes > 0) std::memset(c.out[0].data, 0, bytes);
  CombineInto<ReduceOp::kSum>(c, c.in[0]);
}

// The kernel in float32 for 16-bit floats, whose sums are rounded once.
template <KernelFn fn>
void Wide(const KernelCall& c) {
  IsNarrow(c.out[0].dtype) ? RunWidened(c, fn) : fn(c);
}
// In place, where what is written may lie in any order.
template <KernelFn fn>
void AnyOrder(const KernelCall& c) {
  RunContiguous(c, fn);
}

// Indices of a dim of `size`, from 0 up. attrs: size, wraps
void CheckIndexKernel(const KernelCall& c) {
  const int64_t n = NumelOf(c.in[0]), size = c.attrs[0].i, least = c.attrs[1].i != 0 ? -size : 0;
  const auto* index = Indices(c, c.in[0]);
  auto* out = static_cast<int64_t*>(c.out[0].data);
  for (int64_t i = 0; i < n; ++i) {
    if (index[i] < least || index[i] >= size) {
      c.workspace->Fail("index " + std::to_string(index[i]) + " is not in [" +
                        std::to_string(least) + ", " + std::to_string(size) + ")");
      return;
    }
    out[i] = index[i] < 0 ? index[i] + size : index[i];
  }
}

}  // namespace

void RegisterGatherKernels(AddKernelFn add) {
  constexpr uint32_t kIndices = DTypeBit(DType::kI64) | DTypeBit(DType::kI32);
  constexpr KernelLayout kRows = KernelLayout::kContiguous;
  add("gather", GatherKernel, kAllDTypes, kRows);
  add("gather_backward", Wide<GatherBackwardKernel>, kAllDTypes, kRows);
  add("scatter", ScatterKernel, kAllDTypes, kRows);
  add("scatter_", AnyOrder<ScatterKernel>, kAllDTypes, kRows);
  add("scatter_add", Wide<CombineKernel<ReduceOp::kSum>>, kAllDTypes, kRows);
  add("scatter_add_", AnyOrder<Wide<CombineKernel<ReduceOp::kSum>>>, kAllDTypes, kRows);
  add("scatter_prod", Wide<CombineKernel<ReduceOp::kProd>>, kAllDTypes, kRows);
  add("scatter_amax", Wide<CombineKernel<ReduceOp::kMax>>, kAllDTypes, kRows);
  add("scatter_amin", Wide<CombineKernel<ReduceOp::kMin>>, kAllDTypes, kRows);
  add("check_index", CheckIndexKernel, kIndices, kRows);
}

}  // namespace dtensor

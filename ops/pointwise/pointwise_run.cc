#include "dtensor/ops/pointwise/pointwise_run.h"

#include <algorithm>

#include "dtensor/tensor/common_run.h"
#include "dtensor/tensor/cpu/kernels/runs.h"
#include "dtensor/tensor/next_index.h"
#include "dtensor/tensor/shape.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

constexpr int kMaxOperands = 4;  // the output, then the inputs
constexpr int64_t kSpan = 1024;  // elements per buffer
constexpr int64_t kShortRow = 64;
// A block of an operand that lies along another dim than rows do: whole blocks of CopyPlane.
constexpr int64_t kTileRows = 64, kTileColumns = 64;

struct LoopDim {
  int64_t size;
  int64_t stride[kMaxOperands];
};

// A function of truth values is a polynomial of them over the field of two elements (Zhegalkin's);
// attrs->i has its terms: that of bit p is the product of the inputs whose bit is set in p.
template <int kInputs>
void RunTruths(void* out, const void* const* in, int64_t n, const Attr* attrs) {
  uint8_t term[8];
  for (int p = 0; p < 8; ++p) term[p] = (attrs->i >> p) & 1;
  auto* o = static_cast<uint8_t*>(out);
  const auto* pa = static_cast<const uint8_t*>(in[0]);
  const auto* pb = static_cast<const uint8_t*>(in[kInputs > 1 ? 1 : 0]);
  const auto* pc = static_cast<const uint8_t*>(in[kInputs > 2 ? 2 : 0]);
  const auto truth = [](uint8_t x) -> uint8_t { return x < 1 ? x : 1; };
  _Pragma("GCC ivdep")  // the output may be the first input
      for (int64_t i = 0; i < n; ++i) {
    const uint8_t a = truth(pa[i]);
    uint8_t of = term[0] ^ (a & term[1]);
    if constexpr (kInputs > 1) of ^= truth(pb[i]) & (term[2] ^ (a & term[3]));
    if constexpr (kInputs > 2) {
      of ^= truth(pc[i]) & (term[4] ^ (a & term[5]) ^ (truth(pb[i]) & (term[6] ^ (a & term[7]))));
    }
    o[i] = of;
  }
}

// One call's operands, dims merged where all of them allow it.
class Walk {
 public:
  Walk(const KernelCall& call, const PointwiseLoop& loop)
      : loop_(loop), workspace_(call.workspace) {
    operands_ = 1 + static_cast<int>(call.in.size());
    DT_CHECK(operands_ <= kMaxOperands);
    refs_[0] = &call.out[0];
    for (int k = 1; k < operands_; ++k) refs_[k] = &call.in[k - 1];
    attrs_ = call.attrs != nullptr ? call.attrs : &no_attr_;
    ChooseTypes();
    if (OfTruths()) TakeTruths();
    MergeDims();
    ChooseTurned();
  }

  void Run() {
    for (const LoopDim& d : dims_) {
      if (d.size == 0) return;
    }
    // A call for every short row would cost more than what is in it.
    const bool plane = dims_.size() > 1 && dims_.back().size < kShortRow &&
                       dims_[dims_.size() - 2].size >= kShortRow;
    const size_t outer = dims_.size() - (plane || turns_ ? 2 : 1);
    absl::InlinedVector<int64_t, 6> at(outer, 0);
    int64_t offset[kMaxOperands] = {};
    do {
      turns_ ? Tiles(offset) : plane ? Plane(offset) : Row(offset);
    } while (NextIndex(
        at, [&](size_t d) { return dims_[d].size; },
        [&](size_t d, int64_t by) { Step(dims_[d], by, offset); }));
  }

 private:
  void Step(const LoopDim& dim, int64_t count, int64_t* offset) const {
    for (int k = 0; k < operands_; ++k) offset[k] += count * dim.stride[k];
  }

  // Computing type: that of the first operand that is not the mask; 16-bit floats in f32, integers
  // in int64. Bool operands and results are bytes.
  void ChooseTypes() {
    const int first = loop_.mask == 0 ? 2 : 1;
    const DType t = refs_[first]->dtype;
    compute_ = t == DType::kF64 ? DType::kF64 : IsFloating(t) ? DType::kF32 : DType::kI64;
    span_ = compute_ == DType::kF64 ? loop_.f64 : compute_ == DType::kF32 ? loop_.f32 : loop_.i64;
    DT_CHECK(span_ != nullptr);
    for (int k = 0; k < operands_; ++k) {
      const bool byte = k == 0 ? loop_.bool_out : k - 1 == loop_.mask;
      type_[k] = byte ? DType::kBool : compute_;
    }
  }

  // Truth values alone, and so many that asking pays.
  bool OfTruths() const {
    constexpr int64_t kLeast = 64;
    return std::all_of(refs_, refs_ + operands_,
                       [](const TensorRef* r) { return r->dtype == DType::kBool; }) &&
           Numel({refs_[0]->sizes, static_cast<size_t>(refs_[0]->ndim)}) >= kLeast;
  }
  // Truth values as they lie in memory, where the op's loop would take each as a whole number: it
  // is asked what it makes of every combination.
  void TakeTruths() {
    const int inputs = operands_ - 1, places = 1 << inputs;
    const void* in[kMaxOperands];
    for (int k = 0; k < inputs; ++k) {
      uint8_t values[8];
      for (int p = 0; p < places; ++p) values[p] = (p >> k) & 1;
      ActiveRuns().copy[static_cast<int>(DType::kBool)][static_cast<int>(type_[k + 1])](
          buffer_[k + 1], 1, values, 1, places);
      in[k] = buffer_[k + 1];
    }
    span_(buffer_[0], in, places, attrs_);
    uint8_t results[8];
    StoreRun()(results, 1, buffer_[0], 1, places);
    int64_t terms = 0;  // from the values of a function, by Moebius's transform, its polynomial
    for (int p = 0; p < places; ++p) terms |= static_cast<int64_t>(results[p]) << p;
    terms ^= (terms & 0x55) << 1;
    terms ^= (terms & 0x33) << 2;
    terms ^= (terms & 0x0f) << 4;
    terms_.i = terms;
    attrs_ = &terms_;
    span_ = inputs == 1 ? RunTruths<1> : inputs == 2 ? RunTruths<2> : RunTruths<3>;
    std::fill(type_, type_ + operands_, DType::kBool);
  }

  // Of how many operands a row along a dim is a run, or one value.
  int64_t RunsAlong(const LoopDim& dim) const {
    return std::count_if(dim.stride, dim.stride + operands_,
                         [](int64_t stride) { return stride == 0 || stride == 1; });
  }

  void MergeDims() {
    absl::InlinedVector<LoopDim, 4> dims;
    size_t inner = 0;  // rows are along the dim with most runs, of equals the last
    for (int d = 0; d < refs_[0]->ndim; ++d) {
      LoopDim dim;
      dim.size = refs_[0]->sizes[d];
      if (dim.size == 1) continue;
      for (int k = 0; k < operands_; ++k) dim.stride[k] = refs_[k]->strides[d];
      if (dims.empty() || RunsAlong(dim) >= RunsAlong(dims[inner])) inner = dims.size();
      dims.push_back(dim);
    }
    if (!dims.empty()) std::rotate(dims.begin() + inner, dims.begin() + inner + 1, dims.end());
    for (LoopDim& dim : dims) {
      if (!dims_.empty() && Merges(dims_.back(), dim)) {
        dim.size *= dims_.back().size;
        dims_.back() = dim;
      } else {
        dims_.push_back(dim);
      }
    }
    if (dims_.empty()) dims_.push_back({1, {1, 1, 1, 1}});
  }
  // Operands that lie along another dim than rows do, the same one; it becomes the next to last.
  void ChooseTurned() {
    constexpr int64_t kLeast = 16;
    const LoopDim inner = dims_.back();
    if (inner.size < kLeast || workspace_ == nullptr) return;
    int64_t bytes = 0;
    for (int k = 0; k < operands_; ++k) {
      if (inner.stride[k] == 0 || inner.stride[k] == 1) continue;
      for (size_t d = 0; d + 1 < dims_.size() && !turns_; ++d) {
        if (dims_[d].stride[k] != 1 || dims_[d].size < kLeast) continue;
        std::rotate(dims_.begin() + d, dims_.begin() + d + 1, dims_.end() - 1);
        turns_ = true;
      }
      turned_[k] = turns_ && dims_[dims_.size() - 2].stride[k] == 1;
      if (turned_[k]) bytes += kTileRows * kTileColumns * SizeOf(refs_[k]->dtype);
    }
    if (!turns_) return;
    auto* at = static_cast<char*>(workspace_->Allocate(bytes));
    for (int k = 0; k < operands_; ++k) {
      tile_[k] = at;
      if (turned_[k]) at += kTileRows * kTileColumns * SizeOf(refs_[k]->dtype);
    }
  }

  bool Merges(const LoopDim& outer, const LoopDim& inner) const {
    for (int k = 0; k < operands_; ++k) {
      if (outer.stride[k] != inner.stride[k] * inner.size) return false;
    }
    return true;
  }

  // From memory to what is computed in, and back.
  CopyRunFn LoadRun(int k) const {
    return ActiveRuns().copy[static_cast<int>(refs_[k]->dtype)][static_cast<int>(type_[k])];
  }
  CopyRunFn StoreRun() const {
    return ActiveRuns().copy[static_cast<int>(type_[0])][static_cast<int>(refs_[0]->dtype)];
  }
  char* At(int k, int64_t offset) const {
    return static_cast<char*>(refs_[k]->data) + offset * SizeOf(refs_[k]->dtype);
  }
  bool Direct(int k) const { return dims_.back().stride[k] == 1 && refs_[k]->dtype == type_[k]; }

  // One run of the innermost dim, in spans where something needs a buffer.
  void Row(const int64_t* offset) {
    const LoopDim& inner = dims_.back();
    bool all_direct = true;
    for (int k = 0; k < operands_; ++k) all_direct &= Direct(k) || inner.stride[k] == 0;
    const int64_t step = all_direct && !HasConstant() ? inner.size : kSpan;
    for (int64_t i = 0; i < inner.size; i += step) {
      const int64_t n = std::min(step, inner.size - i);
      const void* in[kMaxOperands];
      for (int k = 1; k < operands_; ++k) in[k - 1] = Load(k, offset[k], i, n);
      if (Direct(0)) {
        span_(At(0, offset[0] + i), in, n, attrs_);
      } else {
        span_(buffer_[0], in, n, attrs_);
        Store(offset[0], i, n);
      }
    }
  }

  // Rows whose turned operands are copied so that they lie as rows do, block by block.
  void Tiles(const int64_t* offset) {
    const LoopDim &rows = dims_[dims_.size() - 2], &inner = dims_.back();
    for (int64_t i = 0; i < rows.size; i += kTileRows) {
      const int64_t m = std::min(kTileRows, rows.size - i);
      for (int64_t j = 0; j < inner.size; j += kTileColumns) {
        const int64_t n = std::min(kTileColumns, inner.size - j);
        int64_t at[kMaxOperands];
        for (int k = 0; k < operands_; ++k) {
          at[k] = offset[k] + i * rows.stride[k] + j * inner.stride[k];
          if (k > 0 && turned_[k]) {
            PlaneOf(k)(tile_[k], n, 1, At(k, at[k]), 1, inner.stride[k], m, n);
          }
        }
        for (int64_t r = 0; r < m; ++r) RowOfTile(r, n, at);
        if (turned_[0]) PlaneOf(0)(At(0, at[0]), 1, inner.stride[0], tile_[0], n, 1, m, n);
      }
    }
  }
  CopyPlaneFn PlaneOf(int k) const {
    return ActiveRuns().plane[__builtin_ctzll(static_cast<uint64_t>(SizeOf(refs_[k]->dtype)))];
  }

  void RowOfTile(int64_t r, int64_t n, const int64_t* at) {
    const LoopDim& rows = dims_[dims_.size() - 2];
    const auto row_of = [&](int k) {
      return turned_[k] ? tile_[k] + r * n * SizeOf(refs_[k]->dtype)
                        : At(k, at[k] + r * rows.stride[k]);
    };
    const void* in[kMaxOperands];
    for (int k = 1; k < operands_; ++k) {
      const bool direct = refs_[k]->dtype == type_[k] && (turned_[k] || Direct(k));
      if (direct) {
        in[k - 1] = row_of(k);
      } else if (turned_[k]) {
        LoadRun(k)(buffer_[k], 1, row_of(k), 1, n);
        in[k - 1] = buffer_[k];
      } else {
        in[k - 1] = Load(k, at[k] + r * rows.stride[k], 0, n);
      }
    }
    const bool direct = refs_[0]->dtype == type_[0] && (turned_[0] || Direct(0));
    span_(direct ? static_cast<void*>(row_of(0)) : buffer_[0], in, n, attrs_);
    if (direct) return;
    StoreRun()(row_of(0), turned_[0] ? 1 : dims_.back().stride[0], buffer_[0], 1, n);
  }

  // Many short rows, as one run: what does not lie so is copied, column by column.
  void Plane(const int64_t* offset) {
    const LoopDim &rows = dims_[dims_.size() - 2], &inner = dims_.back();
    const int64_t step = kSpan / inner.size;
    for (int64_t i = 0; i < rows.size; i += step) {
      const int64_t n = std::min(step, rows.size - i);
      const void* in[kMaxOperands];
      for (int k = 1; k < operands_; ++k) {
        const int64_t at = offset[k] + i * rows.stride[k];
        const bool one_run = rows.stride[k] == inner.stride[k] * inner.size;
        in[k - 1] = buffer_[k];
        if (one_run && Direct(k)) in[k - 1] = At(k, at);
        if (in[k - 1] != buffer_[k] || (i > 0 && rows.stride[k] == 0)) continue;
        const CopyRunFn copy = LoadRun(k);
        if (one_run) {
          copy(buffer_[k], 1, At(k, at), inner.stride[k], n * inner.size);
          continue;
        }
        for (int64_t j = 0; j < inner.size; ++j) {
          copy(reinterpret_cast<char*>(buffer_[k]) + j * SizeOf(type_[k]), inner.size,
               At(k, at + j * inner.stride[k]), rows.stride[k], n);
        }
      }
      StorePlane(offset[0] + i * rows.stride[0], n, in);
    }
  }

  void StorePlane(int64_t at, int64_t n, const void* const* in) {
    const LoopDim &rows = dims_[dims_.size() - 2], &inner = dims_.back();
    const CopyRunFn copy = StoreRun();
    const bool one_run = rows.stride[0] == inner.stride[0] * inner.size;
    const bool direct = one_run && Direct(0);
    span_(direct ? static_cast<void*>(At(0, at)) : buffer_[0], in, n * inner.size, attrs_);
    if (direct) return;
    if (one_run) return copy(At(0, at), inner.stride[0], buffer_[0], 1, n * inner.size);
    for (int64_t j = 0; j < inner.size; ++j) {
      copy(At(0, at + j * inner.stride[0]), rows.stride[0],
           reinterpret_cast<const char*>(buffer_[0]) + j * SizeOf(type_[0]), inner.size, n);
    }
  }

  bool HasConstant() const {
    for (int k = 1; k < operands_; ++k) {
      if (dims_.back().stride[k] == 0) return true;
    }
    return false;
  }

  const void* Load(int k, int64_t offset, int64_t i, int64_t n) {
    if (Direct(k)) return At(k, offset + i);
    const int64_t stride = dims_.back().stride[k];
    if (stride != 0) {
      LoadRun(k)(buffer_[k], 1, At(k, offset + i * stride), stride, n);
    } else if (i == 0) {  // the same value for the whole row
      uint64_t value = 0;
      LoadRun(k)(&value, 1, At(k, offset), 1, 1);
      ActiveRuns().fill[__builtin_ctzll(static_cast<uint64_t>(SizeOf(type_[k])))](buffer_[k], 1,
                                                                                  &value, n);
    }
    return buffer_[k];
  }

  void Store(int64_t offset, int64_t i, int64_t n) {
    const int64_t stride = dims_.back().stride[0];
    StoreRun()(At(0, offset + i * stride), stride, buffer_[0], 1, n);
  }

  const PointwiseLoop& loop_;
  Workspace* const workspace_;
  int operands_ = 0;
  const TensorRef* refs_[kMaxOperands];
  DType type_[kMaxOperands];
  DType compute_ = DType::kF32;
  PointwiseSpanFn span_ = nullptr;
  absl::InlinedVector<LoopDim, 4> dims_;
  bool turns_ = false, turned_[kMaxOperands] = {};
  char* tile_[kMaxOperands];
  const Attr* attrs_ = nullptr;
  const Attr no_attr_;
  Attr terms_;
  alignas(64) double buffer_[kMaxOperands][kSpan];
};

// The common case without a Walk: everything contiguous and of the computing type.
bool RunFlat(const KernelCall& call, const PointwiseLoop& loop) {
  const TensorRef& out = call.out[0];
  const DType t = call.in[0].dtype;
  if (loop.mask >= 0 || loop.bool_out) return false;
  if (t != DType::kF32 && t != DType::kF64) return false;
  const int64_t numel = CommonRun(out, call.in);
  if (numel < 0) return false;
  const void* in[kMaxOperands];
  for (size_t k = 0; k < call.in.size(); ++k) {
    if (call.in[k].dtype != t) return false;
    in[k] = call.in[k].data;
  }
  if (out.dtype != t) return false;
  (t == DType::kF32 ? loop.f32 : loop.f64)(out.data, in, numel, call.attrs);
  return true;
}

template <class T>
bool HasZero(const TensorRef& x) {
  for (int d = 0; d < x.ndim; ++d) {
    if (x.sizes[d] == 0) return false;
  }
  absl::InlinedVector<int64_t, 6> at(static_cast<size_t>(x.ndim), 0);
  const T* p = static_cast<const T*>(x.data);
  do {
    if (*p == T(0)) return true;
  } while (NextIndex(
      at, [&](size_t d) { return x.sizes[d]; },
      [&](size_t d, int64_t by) { p += by * x.strides[d]; }));
  return false;
}
bool HasIntegerZero(const TensorRef& x) {
  switch (x.dtype) {
    case DType::kI64:
      return HasZero<int64_t>(x);
    case DType::kI32:
      return HasZero<int32_t>(x);
    case DType::kU8:
    case DType::kBool:
      return HasZero<uint8_t>(x);
    default:
      return false;
  }
}

}  // namespace

void RunQuotient(const KernelCall& call, const PointwiseLoop& loop) {
  if (HasIntegerZero(call.in[1])) {
    return call.workspace->Fail(
        "a whole number is divided by 0; convert with to() for inf and nan");
  }
  RunPointwise(call, loop);
}

void RunPointwise(const KernelCall& call, const PointwiseLoop& loop) {
  if (call.attrs == nullptr) {
    const Attr none;
    KernelCall padded = call;
    padded.attrs = &none;
    return RunPointwise(padded, loop);
  }
  if (!RunFlat(call, loop)) Walk(call, loop).Run();
}

}  // namespace dtensor

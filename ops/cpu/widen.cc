#include "dtensor/ops/cpu/widen.h"

#include <algorithm>
#include <vector>

#include "dtensor/tensor/cpu/kernels/runs.h"
#include "dtensor/tensor/shape.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {
namespace {

CopyRunFn ConverterOf(DType from, DType to) {
  return ActiveRuns().copy[static_cast<int>(from)][static_cast<int>(to)];
}

void Convert(const TensorRef& from, const TensorRef& to) {
  ConverterOf(from.dtype, to.dtype)(to.data, 1, from.data, 1, NumelOf(from));
}

bool IsRowMajor(const TensorRef& t) {
  int64_t step = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    if (t.sizes[d] == 0) return true;
    if (t.sizes[d] != 1 && t.strides[d] != step) return false;
    step *= t.sizes[d];
  }
  return true;
}

}  // namespace

void RunContiguous(const KernelCall& call, KernelFn contiguous) {
  const auto fits = [](std::span<const TensorRef> all) {
    return std::all_of(all.begin(), all.end(), IsRowMajor);
  };
  if (fits(call.in) && fits(call.out)) return contiguous(call);
  std::vector<TensorRef> in(call.in.begin(), call.in.end()), out(call.out.begin(), call.out.end());
  std::vector<Strides> strides(in.size() + out.size());  // refs point into it
  size_t used = 0;
  const auto flatten = [&](TensorRef* t) {
    Strides& s = strides[used++];
    s = ContiguousStrides(IntSpan(t->sizes, t->ndim));
    t->strides = s.data();
    t->data = call.workspace->Allocate(NumelOf(*t) * SizeOf(t->dtype));
  };
  for (size_t i = 0; i < in.size(); ++i) {
    if (IsRowMajor(in[i])) continue;
    flatten(&in[i]);
    CopyRef(call.in[i], in[i]);
  }
  for (TensorRef& t : out) {
    if (!IsRowMajor(t)) flatten(&t);
  }
  KernelCall flat = call;
  flat.in = in;
  flat.out = out;
  contiguous(flat);
  for (size_t o = 0; o < out.size(); ++o) {
    if (out[o].data != call.out[o].data) CopyRef(out[o], call.out[o]);
  }
}

void Widen(const TensorRef& from, int64_t start, int64_t n, float* to) {
  const void* first = static_cast<const char*>(from.data) + start * SizeOf(from.dtype);
  ConverterOf(from.dtype, DType::kF32)(to, 1, first, 1, n);
}

void Narrow(const float* from, int64_t n, const TensorRef& to, int64_t start) {
  void* first = static_cast<char*>(to.data) + start * SizeOf(to.dtype);
  ConverterOf(DType::kF32, to.dtype)(first, 1, from, 1, n);
}

void RunWidened(const KernelCall& call, KernelFn f32, RowOperands left) {
  std::vector<TensorRef> in(call.in.begin(), call.in.end()), out(call.out.begin(), call.out.end());
  const auto widen = [&](TensorRef* t) {
    t->data = call.workspace->Allocate(NumelOf(*t) * SizeOf(DType::kF32));
    t->dtype = DType::kF32;
  };
  const auto widened = [](const TensorRef& t, uint32_t not_these, size_t i) {
    return IsNarrow(t.dtype) && (not_these >> i & 1) == 0;
  };
  for (size_t i = 0; i < in.size(); ++i) {
    if (!widened(call.in[i], left.in, i)) continue;
    widen(&in[i]);
    Convert(call.in[i], in[i]);
  }
  for (size_t i = 0; i < out.size(); ++i) {
    if (widened(call.out[i], left.out, i)) widen(&out[i]);
  }
  KernelCall converted = call;
  converted.in = in;
  converted.out = out;
  f32(converted);
  for (size_t i = 0; i < out.size(); ++i) {
    if (widened(call.out[i], left.out, i)) Convert(out[i], call.out[i]);
  }
}

void RunWidenedPieces(const KernelCall& call, KernelFn f32) {
  constexpr int64_t kPiece = 4096, kStep = 1;
  struct Operand {
    TensorRef whole;
    float* wide;  // null where it is as wide as it has to be
  };
  std::vector<Operand> operands;
  for (const std::span<const TensorRef> side : {call.in, call.out}) {
    for (const TensorRef& t : side) {
      const int64_t bytes = kPiece * SizeOf(DType::kF32);
      operands.push_back(
          {t, IsNarrow(t.dtype) ? static_cast<float*>(call.workspace->Allocate(bytes)) : nullptr});
    }
  }
  const int64_t n = NumelOf(call.in[0]);
  std::vector<TensorRef> parts(operands.size()), pieces(operands.size());
  KernelCall piece = call;
  piece.in = std::span(pieces).first(call.in.size());
  piece.out = std::span(pieces).subspan(call.in.size());
  for (int64_t start = 0; start < n; start += kPiece) {
    const int64_t count = std::min(kPiece, n - start);
    for (size_t i = 0; i < operands.size(); ++i) {
      const TensorRef& t = operands[i].whole;
      parts[i] = {static_cast<char*>(t.data) + start * SizeOf(t.dtype), &count, &kStep, 1, t.dtype};
      pieces[i] = parts[i];
      if (operands[i].wide == nullptr) continue;
      pieces[i].data = operands[i].wide;
      pieces[i].dtype = DType::kF32;
      if (i < call.in.size()) Convert(parts[i], pieces[i]);
    }
    f32(piece);
    for (size_t i = call.in.size(); i < operands.size(); ++i) {
      if (operands[i].wide != nullptr) Convert(pieces[i], parts[i]);
    }
  }
}

}  // namespace dtensor

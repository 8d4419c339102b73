#include "dtensor/ops/cases.h"

namespace dtensor {
namespace {

DTensor Embedding(CaseArgs& a) {
  const DTensor weight = a.T("weight");
  int64_t padding = a.Int("padding_idx", -1);
  if (a.Has("padding_idx") && padding < 0) padding += weight.size(0);  // as PyTorch counts
  return embedding(a.T("input"), weight, padding, a.Bool("scale_grad_by_freq"));
}

TensorOptions OptionsOf(CaseArgs& a) {
  TensorOptions options;
  options.dtype = a.Type("dtype");
  return options;
}

DTensor Range(CaseArgs& a) {
  const Scalar start = a.Has("start") ? a.Number("start") : Scalar(0);
  const Scalar step = a.Has("step") ? a.Number("step") : Scalar(1);
  return arange(start, a.Number("end"), step, OptionsOf(a));
}

#define DT_CAST_CASE(name, type) DT_CASE(name, "self[...]", to(a.T("self"), DType::type))

}  // namespace

void AddIndexCases(CaseTable* table) {
  table->Add({
      DT_CASE(embedding,
              "weight[2v,c] input[2a,b]:int64<2v | weight[v,c] input[3n]:int64<v padding_idx=2 | "
              "weight[v,c]~ input[a,b]:int64<v scale_grad_by_freq=true",
              Embedding(a)),
      DT_CASE(cat,
              "tensors[a,b];[a,b] dim=0 | tensors[3,a,b];[3,c,b] dim=1 | "
              "tensors[3,0,b];[3,a,b] dim=1",
              cat(a.List("tensors"), a.Int("dim"))),
      DT_CASE(stack, "tensors[a,b];[a,b] dim=1 | tensors[a];[a];[a] dim=0",
              stack(a.List("tensors"), a.Int("dim"))),
      DT_CASE(to, "self[...] dtype=float32 | self[...] dtype=int64",
              to(a.T("self"), *a.Type("dtype"))),
      DT_CAST_CASE(bool, kBool),
      DT_CAST_CASE(float, kF32),
      DT_CAST_CASE(double, kF64),
      DT_CAST_CASE(half, kF16),
      DT_CAST_CASE(bfloat16, kBF16),
      DT_CAST_CASE(int, kI32),
      DT_CAST_CASE(long, kI64),
      DT_CASE(clone, "self[...]", clone(a.T("self"))),
      DT_CASE(detach, "self[...]", detach(a.T("self"))),
      // Of what is not: row-major tensors it gives back.
      DT_CASE(contiguous, "self[a,b] transposed=true | self[a,b,c] transposed=true | self[...]",
              contiguous(a.Bool("transposed") ? transpose(a.T("self"), 0, -1) : a.T("self"))),
      DT_CASE(zeros_like, "self[...]", zeros_like(a.T("self"), a.Type("dtype"))),
      DT_CASE(ones_like, "self[...]", ones_like(a.T("self"), a.Type("dtype"))),
      DT_CASE(zeros, "size=4,6", zeros(a.Ints("size"), OptionsOf(a))),
      DT_CASE(ones, "size=5,3 dtype=int64", ones(a.Ints("size"), OptionsOf(a))),
      DT_CASE(full, "size=5,3 fill_value=2.5",
              full(a.Ints("size"), a.Number("fill_value"), OptionsOf(a))),
      DT_CASE(arange, "end=7.0 | start=1 end=9 step=2 dtype=int64", Range(a)),
  });
  const auto cast = [](DType from, DType to) {
    return VerifySample{{Of(from, {5, 3})}, {DTypeAttr(to)}};
  };
  VerifySample rounded = cast(DType::kF64, DType::kF32);  // terms that are rounded each: other bits
  rounded.exact = true;
  table->Judge({
      {"clone", {{{I({5, 3})}}, {{Of(DType::kI32, {4, 6})}}, {{Of(DType::kU8, {4, 6})}}}},
      {"contiguous", {{{I({5, 3})}}}},
      {"to",
       {cast(DType::kF32, DType::kF64), rounded, cast(DType::kI64, DType::kF64),
        cast(DType::kF64, DType::kBool), cast(DType::kI64, DType::kI32),
        cast(DType::kI32, DType::kU8), cast(DType::kI32, DType::kI64),
        cast(DType::kU8, DType::kI32), cast(DType::kI64, DType::kF32),
        cast(DType::kBool, DType::kU8), cast(DType::kBool, DType::kF64)}},
      {"cat", {{{Of(DType::kU8, {4, 6}), Of(DType::kU8, {4, 2})}, {IntAttr(1)}}}},
  });
}

}  // namespace dtensor

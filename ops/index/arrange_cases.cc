#include "dtensor/ops/cases.h"

namespace dtensor {
namespace {

TensorOptions IndexOptions(CaseArgs& a) {
  TensorOptions options;
  options.dtype = a.Type("dtype").value_or(DType::kI64);
  return options;
}

TensorOptions TypeOnly(CaseArgs& a) {
  TensorOptions options;
  options.dtype = a.Type("dtype");
  return options;
}

DimList Plane(CaseArgs& a) { return a.Has("dims") ? a.Ints("dims") : DimList{0, 1}; }
Scalar Value(CaseArgs& a) { return a.Has("value") ? a.Number("value") : Scalar(0); }

DTensor Eye(CaseArgs& a) {
  std::optional<int64_t> m;
  if (a.Has("m")) m = a.Int("m");
  return eye(a.Int("n"), m, TypeOnly(a));
}

}  // namespace

void AddArrangeCases(CaseTable* table) {
  table->Add({
      DT_CASE(tril, "self[a,b] | self[...,4,5] diagonal=1 | self[a,b,c] diagonal=-1",
              tril(a.T("self"), a.Int("diagonal"))),
      DT_CASE(triu, "self[a,b] | self[...,5,4] diagonal=1 | self[a,b,c] diagonal=-1",
              triu(a.T("self"), a.Int("diagonal"))),
      DT_CASE(tril_, "self[a,b]", tril_(a.Written("self"), a.Int("diagonal"))),
      DT_CASE(triu_, "self[a,b]", triu_(a.Written("self"), a.Int("diagonal"))),
      DT_CASE(tril_indices, "row=4 col=3 offset=1",
              tril_indices(a.Int("row"), a.Int("col"), a.Int("offset"), IndexOptions(a))),
      DT_CASE(triu_indices, "row=3 col=4 offset=-1",
              triu_indices(a.Int("row"), a.Int("col"), a.Int("offset"), IndexOptions(a))),
      DT_CASE(diag, "self[a] diagonal=1 | self[a,b] diagonal=-1 | self[a,b]",
              diag(a.T("self"), a.Int("diagonal"))),
      DT_CASE(diagflat, "self[2,3] offset=1 | self[a]", diagflat(a.T("self"), a.Int("offset"))),
      DT_CASE(diag_embed, "self[a,b] | self[a,3] offset=-2 dim1=0 dim2=2",
              diag_embed(a.T("self"), a.Int("offset"), a.Int("dim1", -2), a.Int("dim2", -1))),
      DT_CASE(block_diag, "tensors[a,b];[2,3];[b] | tensors[a,1];[1,b]",
              block_diag(a.List("tensors"))),
      DT_CASE(flip, "self[a,b] dims=0 | self[a,b,c] dims=0,2 | self[...] dims=-1",
              flip(a.T("self"), a.Ints("dims"))),
      DT_CASE(fliplr, "self[a,b]", fliplr(a.T("self"))),
      DT_CASE(flipud, "self[a,b]", flipud(a.T("self"))),
      DT_CASE(rot90, "self[a,b] | self[a,b,c] k=3 dims=0,2 | self[a,b] k=2",
              rot90(a.T("self"), a.Int("k", 1), Plane(a))),
      DT_CASE(roll,
              "self[a,b] shifts=1 dims=0 | self[a,b] shifts=2 | self[a,b] shifts=-1,2 dims=0,1",
              roll(a.T("self"), a.Ints("shifts"), a.Ints("dims"))),
      DT_CASE(hstack, "tensors[a,b];[a,2] | tensors[a];[b]", hstack(a.List("tensors"))),
      DT_CASE(vstack, "tensors[a,b];[2,b] | tensors[a];[a]", vstack(a.List("tensors"))),
      DT_CASE(dstack, "tensors[a,b];[a,b] | tensors[a];[a]", dstack(a.List("tensors"))),
      DT_CASE(column_stack, "tensors[a,b];[a,2] | tensors[a];[a,b]",
              column_stack(a.List("tensors"))),
      DT_CASE(constant_pad_nd, "self[a,b] pad=1,2 value=1.5 | self[4,6] pad=-1,1,2,-2",
              constant_pad_nd(a.T("self"), a.Ints("pad"), Value(a))),
      DT_CASE(pad,
              "input[a,6] pad=2,1 mode=reflect | input[a,b,4] pad=1,2,1,0 mode=replicate | "
              "input[a,6] pad=2,3 mode=circular | input[a,b] pad=1,1",
              pad(a.T("input"), a.Ints("pad"), a.TextOr("mode", "constant"), Value(a))),
      DT_CASE(full_like, "self[...] fill_value=2.5",
              full_like(a.T("self"), a.Number("fill_value"), a.Type("dtype"))),
      DT_CASE(new_zeros, "self[a,b] size=2,3", new_zeros(a.T("self"), a.Ints("size"), TypeOnly(a))),
      DT_CASE(new_ones, "self[a,b] size=2,3", new_ones(a.T("self"), a.Ints("size"), TypeOnly(a))),
      DT_CASE(new_full, "self[a,b] size=2,3 fill_value=1.5",
              new_full(a.T("self"), a.Ints("size"), a.Number("fill_value"), TypeOnly(a))),
      DT_CASE(linspace, "start=0.5 end=4.0 steps=7",
              linspace(a.Number("start"), a.Number("end"), a.Int("steps"), TypeOnly(a))),
      DT_CASE(logspace, "start=0.0 end=2.0 steps=5",
              logspace(a.Number("start"), a.Number("end"), a.Int("steps"), a.Float("base", 10),
                       TypeOnly(a))),
      DT_CASE(eye, "n=3 | n=4 m=2", Eye(a)),
  });
  table->Judge({
      {"tril", {{{I({5, 3})}, {IntAttr(0), BoolAttr(false)}}}},
      {"flip", {{{I({5, 3})}, {Attr()}, {0}, 0}}},
  });
}

}  // namespace dtensor

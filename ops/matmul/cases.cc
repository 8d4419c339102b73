#include "dtensor/ops/cases.h"

namespace dtensor {
namespace {

// A number of dims, or the dims of a and then those of b.
DTensor TensorDot(CaseArgs& a) {
  if (!a.IsList("dims")) return tensordot(a.T("a"), a.T("b"), a.Int("dims", 2));
  const DimList dims = a.Ints("dims");
  const auto half = dims.begin() + static_cast<std::ptrdiff_t>(dims.size() / 2);
  return tensordot(a.T("a"), a.T("b"), DimList(dims.begin(), half), DimList(half, dims.end()));
}

// beta * self + alpha * fn(x, y)
using Added = DTensor (*)(const DTensor&, const DTensor&, const DTensor&, Scalar, Scalar);
DTensor Plus(CaseArgs& a, const DTensor& self, Added fn, const char* x, const char* y) {
  const auto number = [&a](const char* name) { return a.Has(name) ? a.Number(name) : Scalar(1); };
  return fn(self, a.T(x), a.T(y), number("beta"), number("alpha"));
}
DTensor Plus(CaseArgs& a, Added fn, const char* x, const char* y) {
  return Plus(a, a.T("self"), fn, x, y);
}
DTensor PlusInto(CaseArgs& a, Added fn, const char* x, const char* y) {
  return Plus(a, a.Written("self"), fn, x, y);
}

Activation ActivationIn(CaseArgs& a) {
  const std::string name = a.Text("activation");
  if (name == "relu") return Activation::kRelu;
  if (name == "silu") return Activation::kSilu;
  return name == "gelu_tanh" ? Activation::kGeluTanh : Activation::kGelu;
}

}  // namespace

void AddMatmulCases(CaseTable* table) {
  table->Add({
      DT_CASE(matmul,
              "self[a,b] other[b,c] | self[a,b,c] other[c,d] | self[a,1] other[1,b] | "
              "self[2,3,a,b] other[3,b,c] | self[2,1,a,b] other[2,3,b,c] | self[a,b] other[b]",
              matmul(a.T("self"), a.T("other"))),
      DT_CASE(mm, "self[a,b] mat2[b,c]", mm(a.T("self"), a.T("mat2"))),
      DT_CASE(mv, "self[a,b] vec[b]", mv(a.T("self"), a.T("vec"))),
      DT_CASE(dot, "self[a] tensor[a]", dot(a.T("self"), a.T("tensor"))),
      DT_CASE(outer, "self[a] vec2[b]", outer(a.T("self"), a.T("vec2"))),
      DT_CASE(addmm, "self[a,c] mat1[a,b] mat2[b,c] beta=0.5 alpha=2 | self[c] mat1[a,b] mat2[b,c]",
              Plus(a, addmm, "mat1", "mat2")),
      DT_CASE(addmv, "self[a] mat[a,b] vec[b] alpha=0.5 | self[]~ mat[a,b] vec[b] beta=0",
              Plus(a, addmv, "mat", "vec")),
      DT_CASE(baddbmm, "self[3,a,c] batch1[3,a,b] batch2[3,b,c] beta=0.5",
              Plus(a, baddbmm, "batch1", "batch2")),
      DT_CASE(addbmm, "self[a,c] batch1[3,a,b] batch2[3,b,c] alpha=0.5",
              Plus(a, addbmm, "batch1", "batch2")),
      DT_CASE(addr, "self[a,b] vec1[a] vec2[b] beta=0.5 alpha=2 | self[b]~ vec1[a] vec2[b] beta=0",
              Plus(a, addr, "vec1", "vec2")),
      DT_CASE(addmm_, "self[a,c] mat1[a,b] mat2[b,c] beta=0.5 alpha=2",
              PlusInto(a, addmm_, "mat1", "mat2")),
      DT_CASE(addmv_, "self[a] mat[a,b] vec[b] alpha=0.5", PlusInto(a, addmv_, "mat", "vec")),
      DT_CASE(baddbmm_, "self[3,a,c] batch1[3,a,b] batch2[3,b,c] beta=0.5",
              PlusInto(a, baddbmm_, "batch1", "batch2")),
      DT_CASE(addbmm_, "self[a,c] batch1[3,a,b] batch2[3,b,c] alpha=0.5",
              PlusInto(a, addbmm_, "batch1", "batch2")),
      DT_CASE(addr_, "self[a,b] vec1[a] vec2[b] beta=0.5 alpha=2",
              PlusInto(a, addr_, "vec1", "vec2")),
      DT_CASE(einsum,
              "equation=bhid,bhjd->bhij operands[b,2,s,d];[b,2,t,d] | equation=...ij,...jk "
              "operands[a,1,b,c];[3,c,2] | equation=iji->j operands[a,b,a] | "
              "equation=bn,anm,bm->ba operands[a,b];[c,b,d];[a,d] | "
              "equation=ij,jk,kl,ml->im operands[a,b];[b,c];[c,2];[3,2] | equation=ab,bc->ca "
              "operands[a,b];[b,c]",
              einsum(a.Text("equation"), a.List("operands"))),
      DT_CASE(tensordot,
              "a[a,b,c] b[b,c,d] dims=2 | a[a,b,c] b[a,d,c] dims=2,0,2,0 | "
              "a[a,b] b[c,d] dims=0",
              TensorDot(a)),
      DT_CASE(inner, "self[a,b] other[c,b] | self[a,b,c] other[c]",
              inner(a.T("self"), a.T("other"))),
      DT_CASE(kron, "self[a,b] other[c,2] | self[a] other[2,3]", kron(a.T("self"), a.T("other"))),
      DT_CASE(linalg_vecdot, "x[a,b,c] y[b,c] dim=1 | x[a,b] y[a,b]",
              linalg_vecdot(a.T("x"), a.T("y"), a.Int("dim", -1))),
      DT_CASE(bilinear,
              "input1[a,b] input2[a,c] weight[d,b,c] bias[d] | input1[b] input2[c] weight[2,b,c]",
              bilinear(a.T("input1"), a.T("input2"), a.T("weight"), a.Optional("bias"))),
      DT_CASE(bmm, "self[3,a,b] mat2[3,b,c] | self[a,b,c] mat2[a,c,d]",
              bmm(a.T("self"), a.T("mat2"))),
      DT_CASE(linear,
              "input[a,b] weight[c,b] bias[c] | input[a,b,c] weight[d,c] bias[d] | "
              "input[0,a] weight[b,a] bias[b] | input[...,k] weight[n,k] | "
              "input[a,b] weight[b] bias[] | input[a,b] weight[c,b] bias[]",
              linear(a.T("input"), a.T("weight"), a.Optional("bias"))),
      DT_CASE(linear_activation,
              "x[a,b] w[c,b] b[c] activation=gelu | x[a,b,c] w[d,c] b[d] activation=gelu_tanh | "
              "x[a,b] w[c,b] activation=silu | x[...,k] w[n,k] activation=gelu_tanh | "
              "x[a,b] w[c,b] b[c] activation=relu | x[a,b,c] w[d,c] activation=relu | "
              "x[a,b,c] w[d,c] b[d] activation=relu | x[a,b] w[c,b] activation=relu | "
              "x[a,b]~ w[c,b]~ b[c]~ activation=gelu | x[a,b,c]~ w[d,c]~ b[d]~ activation=silu | "
              "x[a,b]~ w[c,b]~ activation=gelu_tanh | x[a,b,c]~ w[d,c]~ activation=gelu | "
              "x[a,b] w[b] b[] activation=silu",
              linear_activation(a.T("x"), a.T("w"), a.Optional("b"), ActivationIn(a))),
  });
  table->Judge({
      // Of a product of two operands a gradient is one of these; of three dims and of two.
      {"outer_sum", {{{F({3, 4, 5}), F({3, 4, 2})}}, {{F({5, 3}), F({5, 4})}}}},
  });
}

}  // namespace dtensor

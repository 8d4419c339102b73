#include "dtensor/ops/cases.h"

namespace dtensor {

void AddMatmulCases(CaseTable* table) {
  table->Add({
      DT_CASE(matmul,
              "self[a,b] other[b,c] | self[a,b,c] other[c,d] | self[a,1] other[1,b] | "
              "self[2,3,a,b] other[3,b,c] | self[2,1,a,b] other[2,3,b,c] | self[a,b] other[b]",
              matmul(a.T("self"), a.T("other"))),
      DT_CASE(mm, "self[a,b] mat2[b,c]", matmul(a.T("self"), a.T("mat2"))),
      DT_CASE(mv, "self[a,b] vec[b]", matmul(a.T("self"), a.T("vec"))),
      DT_CASE(bmm, "self[3,a,b] mat2[3,b,c] | self[a,b,c] mat2[a,c,d]",
              bmm(a.T("self"), a.T("mat2"))),
      DT_CASE(linear,
              "input[a,b] weight[c,b] bias[c] | input[a,b,c] weight[d,c] bias[d] | "
              "input[0,a] weight[b,a] bias[b] | input[...,k] weight[n,k]",
              linear(a.T("input"), a.T("weight"), a.Optional("bias"))),
  });
  table->Judge({
      // Of a product of two operands a gradient is one of these; of three dims and of two.
      {"outer_sum", {{{F({3, 4, 5}), F({3, 4, 2})}}, {{F({5, 3}), F({5, 4})}}}},
  });
}

}  // namespace dtensor

#include "dtensor/ops/cases.h"

namespace dtensor {

void AddReduceCases(CaseTable* table) {
  table->Add({
      DT_CASE(sum,
              "self[a,b] dim=0 | self[a,b,c] dim=0,2 keepdim=true | self[...] | self[a,0] dim=1",
              sum(a.T("self"), a.Ints("dim"), a.Bool("keepdim"), a.Type("dtype"))),
      DT_CASE(mean, "self[...] | self[a,b,c] dim=0,2 keepdim=true | self[...] dim=1",
              mean(a.T("self"), a.Ints("dim"), a.Bool("keepdim"), a.Type("dtype"))),
      DT_CASE(amax, "self[a,b] dim=1 | self[a,b,c] dim=0,1 keepdim=true | self[...]",
              amax(a.T("self"), a.Ints("dim"), a.Bool("keepdim"))),
      DT_CASE(sum_to, "self[a,b] shape=1,b | self[a,b,c] shape=b,1",
              sum_to(a.T("self"), a.Ints("shape"))),
  });
  const Attr no = BoolAttr(false), yes = BoolAttr(true);
  table->Judge({
      {"sum",
       {{{I({5, 3})}, {Attr(), no}, {1}, 0},
        Group(1, {{Of(DType::kI32, {5, 3})}, {Attr(), no}, {1}, 0}),  // its sums are wider
        Group(1, {{Of(DType::kU8, {3, 2})}, {Attr(), no}, {0}, 0}),
        Group(1, {{Of(DType::kBool, {3, 2})}, {Attr(), no}, {0}, 0})}},
      {"amax",
       {{{I({5, 3})}, {Attr(), no}, {0}, 0},
        {{Of(DType::kI32, {3, 2})}, {Attr(), no}, {0}, 0},
        {{Of(DType::kU8, {3, 2})}, {Attr(), no}, {0}, 0},
        {{Of(DType::kBool, {3, 2})}, {Attr(), no}, {0}, 0}}},
      // With dims that are kept and were 1 before: a gradient that broadcasts.
      {"amax_backward", {{{F({1, 5}), F({3, 5}), F({1, 5})}, {Attr(), yes}, {0}, 0}}},
  });
}

}  // namespace dtensor

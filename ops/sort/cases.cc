#include "dtensor/ops/cases.h"

namespace dtensor {
namespace {

// Along a dim values and indices, of all elements a value.
Values MedianCase(CaseArgs& a, DTensor (*whole)(const DTensor&),
                  Values (*along)(const DTensor&, int64_t, bool)) {
  if (!a.Has("dim")) return {whole(a.T("self"))};
  return along(a.T("self"), a.Int("dim"), a.Bool("keepdim"));
}

DTensor Quantile(CaseArgs& a) {
  const std::string how = a.TextOr("interpolation", "linear");
  if (!a.IsTensor("q")) return quantile(a.T("self"), a.Float("q"), a.Dim(), a.Bool("keepdim"), how);
  return quantile(a.T("self"), a.T("q"), a.Dim(), a.Bool("keepdim"), how);
}

DTensor Search(CaseArgs& a) {
  const bool right = a.Bool("right") || a.TextOr("side", "left") == "right";
  const DTensor sequence = a.T("sorted_sequence"), sorter = a.Optional("sorter");
  if (!a.IsTensor("self")) {
    return searchsorted(sequence, a.Number("self"), a.Bool("out_int32"), right, sorter);
  }
  return searchsorted(sequence, a.T("self"), a.Bool("out_int32"), right, sorter);
}
DTensor Bucketize(CaseArgs& a) {
  const DTensor boundaries = a.T("boundaries");
  const bool int32 = a.Bool("out_int32"), right = a.Bool("right");
  if (!a.IsTensor("self")) return bucketize(a.Number("self"), boundaries, int32, right);
  return bucketize(a.T("self"), boundaries, int32, right);
}

DTensor IsIn(CaseArgs& a) {
  const bool unique = a.Bool("assume_unique"), invert = a.Bool("invert");
  if (a.Has("test_element")) {
    return isin(a.T("elements"), a.Number("test_element"), unique, invert);
  }
  return isin(a.T("elements"), a.T("test_elements"), unique, invert);
}

#define DT_LINE_SAMPLES "self[a,b] dim=1 | self[a,b,c] dim=0 | self[...] dim=-1"
#define DT_PICK_SAMPLES "self[a,b] dim=1 | self[a,b,c] dim=0 keepdim=true"

}  // namespace

void AddSortCases(CaseTable* table) {
  table->Add({
      DT_CASE(sort, DT_LINE_SAMPLES " descending=true",
              sort(a.T("self"), a.Int("dim", -1), a.Bool("descending"), a.Bool("stable"))),
      DT_CASE(argsort, DT_LINE_SAMPLES,
              argsort(a.T("self"), a.Int("dim", -1), a.Bool("descending"), a.Bool("stable"))),
      DT_CASE(msort, "self[...]", msort(a.T("self"))),
      DT_CASE(topk, "self[a,2b] k=2 dim=1 | self[2a,b,c] k=3 dim=0 largest=false | self[a,b] k=1",
              topk(a.T("self"), a.Int("k"), a.Int("dim", -1),
                   !a.Has("largest") || a.Bool("largest"), !a.Has("sorted") || a.Bool("sorted"))),
      DT_CASE(kthvalue, "self[a,b] k=2 dim=1 | self[a,b,c] k=1 dim=0 keepdim=true",
              kthvalue(a.T("self"), a.Int("k"), a.Int("dim", -1), a.Bool("keepdim"))),
      DT_CASE(median, DT_PICK_SAMPLES " | self[...]", MedianCase(a, median, median)),
      DT_CASE(nanmedian, DT_PICK_SAMPLES " | self[...]", MedianCase(a, nanmedian, nanmedian)),
      DT_CASE(mode, DT_PICK_SAMPLES, mode(a.T("self"), a.Int("dim", -1), a.Bool("keepdim"))),
      DT_CASE(quantile,
              "self[a,b] q=0.3 dim=1 | self[a,b,c] q[3]@0.1..0.9 dim=0 keepdim=true | self[...] "
              "q=0.5 interpolation=nearest | self[a,b] q=0.4 dim=0 interpolation=midpoint",
              Quantile(a)),
      DT_CASE(searchsorted,
              "sorted_sequence[a] self[b,c] | sorted_sequence[a,b] self[a,c] right=true "
              "out_int32=true | sorted_sequence[a,b] self[a,c] sorter[a,b]:int64<b | "
              "sorted_sequence[a] self[b,c] sorter[a]:int64<a | sorted_sequence[a] self=0.5",
              Search(a)),
      DT_CASE(bucketize,
              "self[...] boundaries[3] | self[a,b] boundaries[4] right=true | self=0.5 "
              "boundaries[4]",
              Bucketize(a)),
      DT_CASE(isin,
              "elements[a,b]:int64 test_elements[2]:int64 | elements[...] test_elements[3,2] "
              "invert=true | elements[a]:int64 test_element=2",
              IsIn(a)),
      DT_CASE(bincount, "self[a]:int64<5 | self[2a]:int64<3 weights[2a] minlength=4",
              bincount(a.T("self"), a.Optional("weights"), a.Int("minlength"))),
      DT_CASE(histc, "self[...] bins=4 | self[a,b] bins=5 min=-0.5 max=0.75",
              histc(a.T("self"), a.Int("bins", 100), a.Has("min") ? a.Number("min") : Scalar(0),
                    a.Has("max") ? a.Number("max") : Scalar(0))),
      DT_CASE(unique,
              "input[a,b]:int64 return_inverse=true return_counts=true | input[2a,1]:int64 dim=0 | "
              "input[...]",
              unique(a.T("input"), !a.Has("sorted") || a.Bool("sorted"), a.Bool("return_inverse"),
                     a.Bool("return_counts"), a.Dim())),
      DT_CASE(unique_consecutive,
              "self[2a]:int64 return_inverse=true return_counts=true | self[1,2a]:int64 dim=1",
              unique_consecutive(a.T("self"), a.Bool("return_inverse"), a.Bool("return_counts"),
                                 a.Dim())),
  });
  // Lines that ranks sort and count where they are.
  table->Large({
      {"sort", "self[5001] descending=true | self[8192]"},
      {"argsort", "self[5001] | self[1,4096] descending=true"},
      {"msort", "self[5001] | self[4096,1]"},
      {"kthvalue", "self[5001] k=1200 | self[5001] k=5000 keepdim=true | self[5001,2] k=9 dim=0"},
      {"median", "self[5001] dim=0 | self[2,4096] dim=1 keepdim=true | self[5001] | self[50,82]"},
      {"nanmedian",
       "self[5001] dim=0 | self[4096,2] dim=0 keepdim=true | self[5001] | self[82,50]"},
      {"quantile", "self[5001] q=0.3 dim=0 | self[4096] q[3]@0.1..0.9"},
      {"unique",
       "input[5001] return_inverse=true return_counts=true | "
       "input[4096]:int64<300 return_inverse=true"},
      {"unique_consecutive",
       "self[5001]:int64<3 return_inverse=true return_counts=true | self[4096] "
       "return_inverse=true"},
  });
  // Indices that repeat, in a dim that is longer or shorter than what is put there.
  const VerifyInput ids = {{4, 6}, DType::kI64, {0, 2, 2, 1, 0, 1, 1, 1, 0, 2, 2, 2,
                                                 2, 0, 1, 2, 0, 1, 0, 0, 1, 1, 2, 2}};
  table->Judge({
      {"put_along",
       {{{F({4, 6}), ids}, {IntAttr(1), IntAttr(3)}},
        {{F({4, 6}), ids}, {IntAttr(0), IntAttr(5)}}}},
      {"take_along", {{{F({4, 5}), ids}, {IntAttr(1)}}, {{F({5, 6}), ids}, {IntAttr(0)}}}},
      {"searchsorted_by",
       {{{F({5}), F({4, 3}), {{5}, DType::kI64, {0, 1, 2, 3, 4}}},
         {BoolAttr(false), BoolAttr(false)}}}},
  });
}

}  // namespace dtensor

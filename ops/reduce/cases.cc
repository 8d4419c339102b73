#include "dtensor/ops/cases.h"

namespace dtensor {
namespace {

#define DT_DIMS_SAMPLES "self[a,b] dim=1 | self[a,b,c] dim=0,1 keepdim=true | self[...]"
#define DT_DIM_SAMPLES "self[a,b] dim=1 | self[a,b,c] dim=0 keepdim=true"
#define DT_EXTREME_SAMPLES DT_DIM_SAMPLES " | self[...] | self[a,b] other[b]"
#define DT_MOMENT_SAMPLES DT_DIMS_SAMPLES " | self[a,b] dim=0 correction=0"

Scalar NumberOr(CaseArgs& a, const char* name, Scalar otherwise) {
  return a.Has(name) ? a.Number(name) : otherwise;
}

// By number, or by PyTorch's names.
Scalar NormOrder(CaseArgs& a) {
  const std::string name = a.IsText("p") ? a.Text("p") : "";
  if (name == "nuc") a.LeaveOut("norm of singular values");
  return name == "fro" ? 2 : NumberOr(a, "p", 2);
}

// The three functions of one name.
template <DTensor (*kWhole)(const DTensor&), Values (*kAlong)(const DTensor&, int64_t, bool),
          DTensor (*kOfTwo)(const DTensor&, const DTensor&)>
Values Extreme(CaseArgs& a) {
  const DTensor x = a.T("self");
  if (a.Has("other")) return {kOfTwo(x, a.T("other"))};
  if (a.Has("dim")) return kAlong(x, a.Int("dim"), a.Bool("keepdim"));
  return {kWhole(x)};
}

// var and its kin, of which PyTorch's older form has `unbiased` in place of `correction`.
template <class F>
auto Moment(CaseArgs& a, const F& moment) {
  Scalar correction = NumberOr(a, "correction", 1);
  if (a.Has("unbiased")) correction = a.Bool("unbiased");
  return moment(a.T("self"), a.Ints("dim"), correction, a.Bool("keepdim"));
}

DTensor Truth(bool value) { return full({}, value, {DType::kBool}); }

}  // namespace

void AddStatisticsCases(CaseTable* table) {
  table->Add({
      DT_CASE(aminmax, DT_DIM_SAMPLES " | self[...]",
              aminmax(a.T("self"), a.Dim(), a.Bool("keepdim"))),
      DT_CASE(max, DT_EXTREME_SAMPLES, Extreme<max, max, max>(a)),
      DT_CASE(min, DT_EXTREME_SAMPLES, Extreme<min, min, min>(a)),
      DT_CASE(argmax, DT_DIM_SAMPLES " | self[...] keepdim=true",
              argmax(a.T("self"), a.Dim(), a.Bool("keepdim"))),
      DT_CASE(argmin, DT_DIM_SAMPLES " | self[...]",
              argmin(a.T("self"), a.Dim(), a.Bool("keepdim"))),
      DT_CASE(var, DT_MOMENT_SAMPLES, Moment(a, var)),
      DT_CASE(std, DT_MOMENT_SAMPLES, Moment(a, std)),
      DT_CASE(var_mean, DT_MOMENT_SAMPLES, Moment(a, var_mean)),
      DT_CASE(std_mean, DT_MOMENT_SAMPLES, Moment(a, std_mean)),
      DT_CASE(linalg_vector_norm, "self[a,b] dim=1 | self[a,b,c] ord=3 dim=0,2 | self[...] ord=0.5",
              linalg_vector_norm(a.T("self"), NumberOr(a, "ord", 2), a.Ints("dim"),
                                 a.Bool("keepdim"), a.Type("dtype"))),
      DT_CASE(norm, "input[a,b] dim=1 keepdim=true | input[a,b] p=1 dim=0 | input[...] p=inf",
              norm(a.T("input"), NormOrder(a), a.Ints("dim"), a.Bool("keepdim"), a.Type("dtype"))),
      DT_CASE(dist, "self[a,b] other[a,b] | self[a,b] other[b] p=3",
              dist(a.T("self"), a.T("other"), NumberOr(a, "p", 2))),
      DT_CASE(logsumexp, DT_DIMS_SAMPLES " | self[a,0] dim=1",
              logsumexp(a.T("self"), a.Ints("dim"), a.Bool("keepdim"))),
      DT_CASE(equal, "self[a,b] other[a,b]", Truth(equal(a.T("self"), a.T("other")))),
      DT_CASE(allclose, "self[a,b] other[b]",
              Truth(allclose(a.T("self"), a.T("other"), a.Float("rtol", 1e-5),
                             a.Float("atol", 1e-8), a.Bool("equal_nan")))),
  });
}

}  // namespace dtensor

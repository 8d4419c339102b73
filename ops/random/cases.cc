#include "dtensor/ops/cases.h"

#include "absl/functional/function_ref.h"

namespace dtensor {
namespace {

DTensor Filled(CaseArgs& a, absl::FunctionRef<void(const DTensor&)> fill) {
  const DTensor x = a.Written("self").Detach();  // what has a history is not filled
  fill(x);
  return x;
}
#define DT_FILL_CASE(name, samples, ...) \
  DT_CASE_IS(kDraws, name, samples, Filled(a, [&](const DTensor& x) { __VA_ARGS__; }))
#define DT_DRAW_CASE(name, samples, ...) DT_CASE_IS(kDraws, name, samples, __VA_ARGS__)

void FillBernoulli(CaseArgs& a, const DTensor& x) {
  if (a.IsTensor("p")) return bernoulli_(x, a.T("p"));
  bernoulli_(x, a.Float("p"));
}
void FillWhole(CaseArgs& a, const DTensor& x) {
  if (!a.Has("to")) return random_(x);
  random_(x, a.Int("from"), a.Int("to"));
}

}  // namespace

void AddRandomCases(CaseTable* table) {
  table->Add({
      DT_FILL_CASE(random_, "self[...] from=-2 to=9 | self[...]", FillWhole(a, x)),
      DT_FILL_CASE(bernoulli_, "self[...] p=0.25 | self[a,b] p[a,b]@0..1", FillBernoulli(a, x)),
      DT_FILL_CASE(uniform_, "self[...] from=-1.0 to=2.0",
                   uniform_(x, a.Float("from"), a.Float("to", 1))),
      DT_FILL_CASE(normal_, "self[...] mean=1.0 std=0.5",
                   normal_(x, a.Float("mean"), a.Float("std", 1))),
      DT_FILL_CASE(exponential_, "self[...] lambd=2.0", exponential_(x, a.Float("lambd", 1))),
      DT_FILL_CASE(cauchy_, "self[...] median=1.0 sigma=0.5",
                   cauchy_(x, a.Float("median"), a.Float("sigma", 1))),
      DT_FILL_CASE(log_normal_, "self[...] mean=0.5 std=0.25",
                   log_normal_(x, a.Float("mean", 1), a.Float("std", 2))),
      DT_FILL_CASE(geometric_, "self[...] p=0.5", geometric_(x, a.Float("p"))),
      DT_DRAW_CASE(rand_like, "self[...]", rand_like(a.T("self"))),
      DT_DRAW_CASE(randn_like, "self[...]", randn_like(a.T("self"))),
      DT_DRAW_CASE(randint_like, "self[...] low=-3 high=5",
                   randint_like(a.T("self"), a.Int("low"), a.Int("high"))),
      DT_DRAW_CASE(randint, "low=-3 high=5 size=4,3",
                   randint(a.Int("low"), a.Int("high"), a.Ints("size"))),
      DT_DRAW_CASE(randperm, "n=7", randperm(a.Int("n"))),
      DT_DRAW_CASE(bernoulli, "self[...]@0..1", bernoulli(a.T("self"))),
      DT_DRAW_CASE(multinomial,
                   "self[a,b]@0.1..1 num_samples=2 | self[b]@0.1..1 num_samples=9 replacement=true",
                   multinomial(a.T("self"), a.Int("num_samples"), a.Bool("replacement"))),
      DT_DRAW_CASE(dropout, "input[...] p=0.25 | input[...] p=0.25 train=false",
                   dropout(a.T("input"), a.Float("p", 0.5), !a.Has("train") || a.Bool("train"))),
      DT_DRAW_CASE(dropout_, "input[...] p=0.25", dropout_(a.Written("input"), a.Float("p", 0.5))),
      DT_DRAW_CASE(dropout_with_mask, "input[...] p=0.25",
                   dropout_with_mask(a.T("input"), a.Float("p", 0.5))),
      DT_DRAW_CASE(feature_dropout, "input[a,b,c] p=0.5",
                   feature_dropout(a.T("input"), a.Float("p", 0.5))),
      DT_DRAW_CASE(alpha_dropout, "input[...] p=0.25",
                   alpha_dropout(a.T("input"), a.Float("p", 0.5))),
  });
}

}  // namespace dtensor

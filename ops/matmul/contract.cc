// "contract": the product of two tensors of any dims. What dims both have and the result keeps come
// first, those that are summed over last; each is a factor of its own, so any of them may be
// sharded.
#include "dtensor/ops/matmul/contract.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

void AddNames(absl::string_view prefix, int64_t n, DimTexts* names) {
  for (int64_t i = 0; i < n; ++i) names->push_back(absl::StrCat(prefix, i));
}

// "b0 m0 k0, b0 n0 k0 -> b0 m0 n0"
absl::StatusOr<FactorText> ContractFactors(const OpCall& call) {
  const int64_t batch = call.Int("batch"), shared = call.Int("shared");
  const int64_t least = std::min(call.in(0).ndim(), call.in(1).ndim());
  if (batch < 0 || shared < 0 || batch > least || shared > least - batch) {
    return absl::InvalidArgumentError(
        absl::StrCat("x ", ToString(call.shape(0)), " and w ", ToString(call.shape(1)), " have no ",
                     batch, " dims of a batch and ", shared, " to sum over"));
  }
  const int64_t rows = call.in(0).ndim() - batch - shared;
  const int64_t cols = call.in(1).ndim() - batch - shared;
  DimTexts x, w, out;
  AddNames("b", batch, &x);
  w = out = x;
  AddNames("m", rows, &x);
  AddNames("n", cols, &w);
  AddNames("m", rows, &out);
  AddNames("n", cols, &out);
  AddNames("k", shared, &x);
  AddNames("k", shared, &w);
  return FactorText{FactorString({x, w}, {out}), {}};
}

// x [a..., b..., c...] -> [a..., c..., b...], where b has `middle` dims and c `last`.
DTensor SwapLast(const DTensor& x, int middle, int last) {
  if (middle == 0 || last == 0) return x;
  const int first = x.ndim() - middle - last;
  Dims order;
  for (int d = 0; d < first; ++d) order.push_back(d);
  for (int d = 0; d < last; ++d) order.push_back(first + middle + d);
  for (int d = 0; d < middle; ++d) order.push_back(first + d);
  return permute(x, order);
}

void ContractVjp(VjpCall& c) {
  const int batch = static_cast<int>(c.Int("batch")), shared = static_cast<int>(c.Int("shared"));
  const int rows = c.in_spec(0).ndim() - batch - shared;
  const int cols = c.in_spec(1).ndim() - batch - shared;
  if (c.needs(0)) {  // dy [b, m, n], w [b, k, n]
    c.set(0, Contract(c.grad(), SwapLast(c.in(1), cols, shared), batch, cols));
  }
  if (c.needs(1)) {  // dy [b, n, m], x [b, k, m]
    c.set(1,
          Contract(SwapLast(c.grad(), rows, cols), SwapLast(c.in(0), rows, shared), batch, rows));
  }
}

}  // namespace

void RegisterContractOps() {
  Op("contract(x, w; batch, shared)")
      .Factors(ContractFactors)
      .Linear("x * w")
      .Check(SameDTypes)
      .Vjp(ContractVjp, "x for w, w for x");
}

DTensor Contract(const DTensor& x, const DTensor& w, int batch, int shared) {
  static const OpDef& op = GetOp("contract");
  return Call1(op, {&x, &w}, {IntAttr(batch), IntAttr(shared)});
}

}  // namespace dtensor

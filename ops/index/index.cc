// Joining, copying and converting.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

// "d0 c0 d2, d0 c1 d2 -> d0 {c0 c1} d2"
absl::StatusOr<FactorText> CatFactors(const OpCall& call) {
  const int64_t dim = call.Int("dim");
  std::vector<DimTexts> inputs;
  std::string joined;
  DT_RETURN_IF_ERROR(RequireDim("dim", dim, call.in(0).ndim()));
  for (int i = 0; i < call.num_inputs(); ++i) {
    DimTexts x = DimNames(call.in(i).ndim());
    if (dim >= call.in(i).ndim() || call.in(i).ndim() != call.in(0).ndim()) {
      return absl::InvalidArgumentError(absl::StrCat("numbers of dims differ: xs0 ",
                                                     ToString(call.shape(0)), ", xs", i, " ",
                                                     ToString(call.shape(i))));
    }
    x[dim] = absl::StrCat("c", i);
    absl::StrAppend(&joined, i > 0 ? " " : "", x[dim]);
    inputs.push_back(std::move(x));
  }
  DimTexts out = DimNames(call.in(0).ndim());
  out[dim] = absl::StrCat("{", joined, "}");
  return FactorText{FactorString(inputs, {out}), {}};
}

void CatVjp(VjpCall& c) {
  const int64_t dim = c.Int("dim");
  int64_t start = 0;
  for (int i = 0; i < c.num_inputs(); ++i) {
    const int64_t end = start + c.in_spec(i).shape()[dim];
    if (c.needs(i)) c.set(i, slice(c.grad(), dim, start, end));
    start = end;
  }
}

// A pending sum survives a cast only where the cast is exact.
bool CastKeepsSums(const OpCall& call) {
  const DType from = call.dtype(0), target = call.Type("dtype");
  return IsFloating(from) && IsFloating(target) && PromoteTypes(from, target) == target;
}

// A pending maximum or minimum survives a cast that never turns two numbers around: what is out of
// range of an integer dtype (an infinity, where a rank has nothing) or only compared with 0 does.
bool CastIsMonotone(const OpCall& call, ReduceOp) {
  const DType from = call.dtype(0), target = call.Type("dtype");
  if (IsFloating(target) || from == DType::kBool) return true;
  return !IsFloating(from) && target != DType::kBool && PromoteTypes(from, target) == target;
}

void ToVjp(VjpCall& c) { c.set(0, to(c.grad(), c.in_spec(0).dtype())); }
void IdentityVjp(VjpCall& c) { c.set(0, c.grad()); }

absl::StatusOr<Tensor> ContiguousView(const Tensor& in, const Shape&, absl::Span<const Attr>,
                                      absl::Span<const FactorRange>) {
  return in.Contiguous();
}

// The tensor that the others of a cat must be like: the first that is not [0], which torch lets
// pass among tensors of any shape.
// ThrowInvalid for a list of inputs xs0, xs1, ...
[[noreturn]] void ThrowList(absl::string_view op, absl::string_view why,
                            absl::Span<const DTensor> xs) {
  std::vector<std::string> names;
  for (size_t i = 0; i < xs.size(); ++i) names.push_back(absl::StrCat("xs", i));
  std::vector<NamedInput> inputs;
  for (size_t i = 0; i < xs.size(); ++i) inputs.push_back({names[i], xs[i]});
  Throw(ExplainError(op, inputs, absl::InvalidArgumentError(why)));
}

const DTensor& CatModel(absl::Span<const DTensor> xs) {
  if (xs.empty()) ThrowInvalid("cat", "needs at least one tensor");
  for (size_t i = 0; i < xs.size(); ++i) RequireDefined("cat", {{absl::StrCat("xs", i), xs[i]}});
  for (size_t i = 0; i < xs.size(); ++i) {
    if (xs[i].ndim() == 0) ThrowList("cat", absl::StrCat("tensor ", i, " has no dims"), xs);
  }
  const auto it = std::find_if(xs.begin(), xs.end(),
                               [](const DTensor& x) { return x.ndim() != 1 || x.size(0) != 0; });
  return it == xs.end() ? xs[0] : *it;
}

}  // namespace

void RegisterIndexOps() {
  Op("cat(xs...; dim)")
      .Factors(CatFactors)
      .Linear("xs")
      .Monotone("xs")
      .Check(SameDTypes)
      .Vjp(CatVjp);
  Op("to(x; dtype)")
      .Factors("... -> ...")
      .Elementwise()
      .LinearIf(CastKeepsSums, "x")
      .MonotoneIf(CastIsMonotone, "x")
      .OutDType([](const OpCall& c, int) -> absl::StatusOr<DType> { return c.Type("dtype"); })
      .Vjp(ToVjp);
  Op("clone(x)").Factors("... -> ...").Elementwise().Linear("x").Monotone("x").Vjp(IdentityVjp);
  Op("contiguous(x)")
      .Factors("... -> ...")
      .Linear("x")
      .Monotone("x")
      .View(ContiguousView, /*reorders=*/false)
      .Vjp(IdentityVjp);
}

DTensor cat(absl::Span<const DTensor> xs, int64_t dim) {
  static const OpDef& op = GetOp("cat");
  const DTensor& model = CatModel(xs);
  const int d = CheckedDim("cat", dim, model.ndim());
  Shape nothing = model.shape();
  nothing[d] = 0;
  DType dtype = xs[0].dtype();
  for (const DTensor& x : xs) dtype = PromoteTypes(dtype, x.dtype());
  std::vector<DTensor> operands;
  std::vector<const DTensor*> inputs;
  for (const DTensor& x : xs) {
    const bool passes = x.ndim() == 1 && x.size(0) == 0;
    operands.push_back(to(passes ? reshape(x, nothing) : x, dtype));
  }
  for (const DTensor& x : operands) inputs.push_back(&x);
  return Call1(op, inputs, {IntAttr(d)});
}

DTensor stack(absl::Span<const DTensor> xs, int64_t dim) {
  if (xs.empty()) ThrowInvalid("stack", "needs at least one tensor");
  for (size_t i = 0; i < xs.size(); ++i) RequireDefined("stack", {{absl::StrCat("xs", i), xs[i]}});
  const int d = CheckedDim("stack", dim, xs[0].ndim() + 1);
  std::vector<DTensor> operands;
  for (size_t i = 0; i < xs.size(); ++i) {
    if (xs[i].shape() != xs[0].shape()) {
      ThrowList("stack",
                absl::StrCat("shapes differ: tensor 0 is ", ToString(xs[0].shape()), ", tensor ", i,
                             " is ", ToString(xs[i].shape())),
                xs);
    }
    operands.push_back(unsqueeze(xs[i], d));
  }
  return cat(operands, d);
}

namespace {

// `to`, where an op behind it looks at x.
DTensor Cast(const DTensor& x, DType dtype) {
  static const OpDef& op = GetOp("to");
  return x.dtype() == dtype ? x : Call1(op, {&x}, {DTypeAttr(dtype)});
}

}  // namespace

DTensor to(const DTensor& x, DType dtype) {
  RequireDefined("to", {{"x", x}});
  RequireOwn("to", {{"x", x}});
  return Cast(x, dtype);
}

DTensor clone(const DTensor& x) {
  static const OpDef& op = GetOp("clone");
  return Call1(op, {&x});
}

DTensor detach(const DTensor& x) { return x.Detach(); }

DTensor contiguous(const DTensor& x) {
  static const OpDef& op = GetOp("contiguous");
  return Call1(op, {&x});
}

}  // namespace dtensor

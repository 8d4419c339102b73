// Matrix products. torch.matmul's forms are built from "matmul" (one matrix on the right),
// "matmul_t" (the same, transposed) and "bmm" (a matrix per batch element).
#include "absl/algorithm/container.h"
#include "absl/base/attributes.h"
#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

DTensor MatmulT(const DTensor& x, const DTensor& w) {
  static const OpDef& op = GetOp("matmul_t");
  return Call1(op, {&x, &w});
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline DTensor MatmulPlain(const DTensor& x, const DTensor& w) {
  static const OpDef& op = GetOp("matmul");
  return Call1(op, {&x, &w});
}

// a [..., n], b [..., k] -> [n, k], summed over the leading dims.
DTensor OuterSum(const DTensor& a, const DTensor& b) {
  static const OpDef& op = GetOp("outer_sum");
  return Call1(op, {&a, &b});
}

void MatmulVjp(VjpCall& c) {
  if (c.needs(0)) c.set(0, MatmulT(c.grad(), c.in(1)));
  if (c.needs(1)) c.set(1, OuterSum(c.in(0), c.grad()));
}

void MatmulTVjp(VjpCall& c) {
  if (c.needs(0)) c.set(0, MatmulPlain(c.grad(), c.in(1)));
  if (c.needs(1)) c.set(1, OuterSum(c.grad(), c.in(0)));
}

void LinearVjp(VjpCall& c) {
  MatmulTVjp(c);
  if (c.needs(2)) c.set(2, sum_to(c.grad(), c.in_spec(2).shape()));
}

// --- linear_activation

DTensor Activate(const DTensor& x, Activation activation) {
  switch (activation) {
    case Activation::kRelu:
      return relu(x);
    case Activation::kSilu:
      return silu(x);
    case Activation::kGelu:
    case Activation::kGeluTanh:
      break;
  }
  return gelu(x, activation == Activation::kGeluTanh);
}

// `g`: the gradient of the product.
void ActivatedVjp(VjpCall& c, const DTensor& g) {
  if (c.needs(0)) c.set(0, MatmulPlain(g, c.in(1)));
  if (c.needs(1)) c.set(1, OuterSum(g, c.in(0)));
  if (c.num_inputs() == 3 && c.needs(2)) c.set(2, sum_to(g, c.in_spec(2).shape()));
}
void LinearReluVjp(VjpCall& c) { ActivatedVjp(c, relu_backward(c.grad(), c.out())); }
void LinearKeptVjp(VjpCall& c) {
  const auto activation = static_cast<Activation>(c.Int("activation"));
  const bool is_silu = activation == Activation::kSilu, tanh = activation == Activation::kGeluTanh;
  const DTensor& kept = c.out(1);
  ActivatedVjp(c, is_silu ? silu_backward(c.grad(), kept) : gelu_backward(c.grad(), kept, tanh));
}

// Three ops for a product: linear_relu, whose result says what the gradient needs; linear_act for
// where none is wanted; linear_act_kept gives what the activation was taken of, too.
void RegisterActivated(const std::string& product, const std::string& inputs,
                       const std::string& factors) {
  Op(absl::StrCat(product, "_relu(", inputs, ") -> y"))
      .Factors(absl::StrCat(factors, " -> ... n"))
      .Check(SameDTypes)
      .Vjp(LinearReluVjp, "x for w, w for x, y");
  Op(absl::StrCat(product, "_act(", inputs, "; activation) -> y"))
      .Factors(absl::StrCat(factors, " -> ... n"))
      .Check(SameDTypes);
  Op(absl::StrCat(product, "_act_kept(", inputs, "; activation) -> y, kept"))
      .Factors(absl::StrCat(factors, " -> ... n, ... n"))
      .Check(SameDTypes)
      .Vjp(LinearKeptVjp, "x for w, w for x, kept");
}

struct ActivatedOps {
  const OpDef &relu, &act, &kept;
  explicit ActivatedOps(const std::string& product)
      : relu(GetOp(product + "_relu")),
        act(GetOp(product + "_act")),
        kept(GetOp(product + "_act_kept")) {}
};

// Whether every rank has whole sums of the product, as they are: nothing is pending, and `dim` of t
// is not cut.
bool SumsWhole(const DTensor& t, int dim) {
  return absl::c_none_of(t.placements(), [dim](const Placement& p) {
    return p.is_partial() || p.is_flat() || (p.cuts_dim() && p.dim() == dim);
  });
}

void OuterSumVjp(VjpCall& c) {
  if (c.needs(0)) c.set(0, MatmulT(c.in(1), c.grad()));
  if (c.needs(1)) c.set(1, MatmulPlain(c.in(0), c.grad()));
}

// x [..., m, k] times w [..., k, n]; batch dims broadcast. They stay as they are: flattened into
// one, the dims behind the first could not stay sharded (the heads of attention).
DTensor BatchMatmul(const DTensor& x, const DTensor& w) {
  static const OpDef& op = GetOp("bmm");
  return Call1(op, {&x, &w});
}

void BmmVjp(VjpCall& c) {
  const auto fit = [](const DTensor& g, const Spec& input) {
    return IntSpan(g.shape()) == input.shape() ? g : sum_to(g, input.shape());
  };
  if (c.needs(0)) {
    c.set(0, fit(BatchMatmul(c.grad(), transpose(c.in(1), -1, -2)), c.in_spec(0)));
  }
  if (c.needs(1)) {
    c.set(1, fit(BatchMatmul(transpose(c.in(0), -1, -2), c.grad()), c.in_spec(1)));
  }
}

void CheckBatch(const DTensor& x, const DTensor& w) {
  const IntSpan xs = x.shape(), ws = w.shape();
  if (BroadcastShapes(xs.first(xs.size() - 2), ws.first(ws.size() - 2)).ok()) return;
  ThrowInvalid("matmul",
               absl::StrCat("batch dims do not broadcast: x ", ToString(xs), ", w ", ToString(ws)),
               {{"x", x}, {"w", w}});
}

void CheckInner(const DTensor& x, const DTensor& w) {
  const int64_t inner = w.size(w.ndim() == 1 ? 0 : -2);
  if (x.size(-1) != inner) {
    ThrowInvalid(
        "matmul",
        absl::StrCat("inner sizes differ: x ", ToString(x.shape()), ", w ", ToString(w.shape())),
        {{"x", x}, {"w", w}});
  }
}

}  // namespace

void RegisterMatmulOps() {
  Op("matmul(x, w)")
      .Factors("... k, k n -> ... n")
      .Linear("x * w")
      .Check(SameDTypes)
      .Vjp(MatmulVjp, "x for w, w for x");
  Op("matmul_t(x, w)")
      .Factors("... k, n k -> ... n")
      .Linear("x * w")
      .Check(SameDTypes)
      .Vjp(MatmulTVjp, "x for w, w for x");
  Op("linear(x, w, b)")
      .Factors("... k, n k, n -> ... n")
      .Linear("x * w + b")
      .Check(SameDTypes)
      .Vjp(LinearVjp, "x for w, w for x");
  RegisterActivated("linear", "x, w, b", "... [k], n [k], n");
  RegisterActivated("matmul_t", "x, w", "... [k], n [k]");
  Op("outer_sum(a, b)")
      .Factors("... n, ... k -> n k")
      .Linear("a * b")
      .Check([](const OpCall& c) {
        const absl::Status dtypes = SameDTypes(c);
        return dtypes.ok() ? SameLeading(c, {1, 1}) : dtypes;
      })
      .Vjp(OuterSumVjp, "a for b, b for a");
  Op("bmm(x, w)")
      .Factors("... m k, ... k n -> ... m n")
      .Linear("x * w")
      .Check(SameDTypes)
      .Vjp(BmmVjp, "x for w, w for x");
}

DTensor matmul(const DTensor& x, const DTensor& w) {
  return AsOp("matmul", {{"x", x}, {"w", w}}, [&] {
    if (x.ndim() == 0 || w.ndim() == 0) {
      ThrowInvalid("matmul", "needs at least one dim on both sides", {{"x", x}, {"w", w}});
    }
    CheckInner(x, w);
    if (w.ndim() == 2) return MatmulPlain(x, w);
    if (w.ndim() == 1) return squeeze(MatmulT(x, unsqueeze(w, 0)), {-1});
    if (x.ndim() == 1) return squeeze(matmul(unsqueeze(x, 0), w), {-2});
    if (x.ndim() == 2) {  // (w^T x^T)^T: no copy of x per batch element
      return transpose(MatmulT(transpose(w, -1, -2), x), -1, -2);
    }
    CheckBatch(x, w);
    return BatchMatmul(x, w);
  });
}

DTensor bmm(const DTensor& x, const DTensor& w) {
  return AsOp("bmm", {{"x", x}, {"w", w}}, [&] {
    if (x.ndim() != 3 || w.ndim() != 3 || x.size(0) != w.size(0)) {
      ThrowInvalid(
          "bmm",
          absl::StrCat("takes two tensors of three dims with equally many matrices, got x ",
                       ToString(x.shape()), ", w ", ToString(w.shape())),
          {{"x", x}, {"w", w}});
    }
    return BatchMatmul(x, w);
  });
}

DTensor linear(const DTensor& x, const DTensor& w, const DTensor& b) {
  static const OpDef& op = GetOp("linear");
  return AsOp("linear", {{"x", x}, {"w", w}, {"b", b, true}}, [&] {
    if (x.ndim() == 0) ThrowInvalid("linear", "x needs at least one dim");
    if (w.ndim() == 1) {  // [..., k], [k] -> [...]
      if (!b.defined()) return matmul(x, w);
      if (b.ndim() > 0 || b.dtype() != x.dtype()) {
        ThrowInvalid("linear", "with a w of one dim b must have none, and x's dtype",
                     {{"w", w}, {"b", b}});
      }
      return add(matmul(x, w), b);
    }
    if (!b.defined()) return MatmulT(x, w);
    if (b.ndim() > 0 || w.ndim() != 2) return Call1(op, {&x, &w, &b});
    const DTensor same = expand(b, {w.size(0)});
    return Call1(op, {&x, &w, &same});
  });
}

DTensor linear_activation(const DTensor& x, const DTensor& w, const DTensor& b,
                          Activation activation) {
  static const ActivatedOps with_bias("linear"), without("matmul_t");
  return AsOp("linear_activation", {{"x", x}, {"w", w}, {"b", b, true}}, [&] {
    RequireFloating("linear_activation", x);
    const bool has_bias = b.defined();
    const bool fused = x.ndim() > 0 && w.ndim() == 2 && (!has_bias || b.ndim() == 1) &&
                       SumsWhole(x, x.ndim() - 1) && SumsWhole(w, 1) &&
                       (!has_bias || SumsWhole(b, -1));
    if (!fused) return Activate(Settled(linear(x, w, b)), activation);
    const ActivatedOps& ops = has_bias ? with_bias : without;
    const DTensor* all[] = {&x, &w, &b};
    const Inputs inputs(all, has_bias ? 3 : 2);
    if (activation == Activation::kRelu) return Call1(ops.relu, inputs);
    const Attr attrs[] = {IntAttr(static_cast<int64_t>(activation))};
    const bool records = GradEnabled() && (x.requires_grad() || w.requires_grad() ||
                                           (has_bias && b.requires_grad()));
    return records ? Call(ops.kept, inputs, attrs)[0] : Call1(ops.act, inputs, attrs);
  });
}

}  // namespace dtensor

// Scaled dot product attention. Without a mask one fused op; with one, matmul and softmax.
#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// q and k are the inputs `q` and `q` + 1; three inputs from `q` on have four dims.
absl::Status CheckGroups(const OpCall& call, int q) {
  for (int i = q; i < q + 3; ++i) {
    if (call.in(i).ndim() != 4) {
      return absl::InvalidArgumentError(
          absl::StrCat(call.op().InputName(i), " must have 4 dims, is ", ToString(call.shape(i))));
    }
  }
  const int64_t heads = call.shape(q)[1], groups = call.shape(q + 1)[1];
  if (groups == 0 ? heads != 0 : heads % groups != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the ", heads, " heads of q are no multiple of the ", groups, " of k"));
  }
  if (!IsFloating(call.dtype(0))) return absl::InvalidArgumentError("needs floating tensors");
  return absl::OkStatus();
}

// Query heads per key head go in `r`: heads of one group stay together.
absl::StatusOr<FactorText> GroupedText(const OpCall& call, int q, std::string text) {
  DT_RETURN_IF_ERROR(CheckGroups(call, q));
  const int64_t heads = call.shape(q)[1], groups = call.shape(q + 1)[1];
  return FactorText{std::move(text), {{"r", groups == 0 ? 1 : heads / groups}}};
}

absl::StatusOr<FactorText> GroupedFactors(const OpCall& call) {
  return GroupedText(call, 0, "b (g r) s [d], b g [t] [d], b g [t] e -> b (g r) s e, b (g r) s");
}

absl::StatusOr<FactorText> GroupedBackwardFactors(const OpCall& call) {
  return GroupedText(call, 1,
                     "b (g r) s e, b (g r) s [d], b g [t] [d], b g [t] e, b (g r) s e, b (g r) s "
                     "-> b (g r) s [d], b g [t] [d], b g [t] e");
}

absl::Status CheckAttention(const OpCall& call) {
  DT_RETURN_IF_ERROR(CheckGroups(call, 0));
  return SameDTypes(call);
}
absl::Status CheckAttentionBackward(const OpCall& call) { return CheckGroups(call, 1); }

absl::StatusOr<DType> AttentionDType(const OpCall& call, int output) {
  return output == 0 ? call.dtype(0) : ComputeType(call.dtype(0));
}

absl::StatusOr<DType> GradientDType(const OpCall& call, int) { return call.dtype(1); }

void AttentionVjp(VjpCall& c) {
  static const OpDef& op = GetOp("attention_backward");
  const DTensor &dy = c.grad(), &q = c.in(0), &k = c.in(1), &v = c.in(2);
  const DTensor &o = c.out(0), &lse = c.out(1);
  const Values grads = Call(op, {&dy, &q, &k, &v, &o, &lse}, c.attrs());
  for (int i = 0; i < 3; ++i) {
    if (c.needs(i)) c.set(i, grads[i]);
  }
}

struct Qkv {
  DTensor q, k, v;
};

Shape BatchOf(const DTensor& x) { return Shape(x.shape().begin(), x.shape().end() - 3); }

// x [..., heads, s, d] with the leading dims grown to `batch` and flattened to one.
DTensor FourDims(const DTensor& x, const Shape& batch) {
  Shape shape = batch;
  shape.insert(shape.end(), x.shape().end() - 3, x.shape().end());
  const DTensor grown = expand(x, shape);
  if (batch.size() == 1) return grown;
  return reshape(grown, {Numel(batch), x.size(-3), x.size(-2), x.size(-1)});
}

Shape Broadcast(const Shape& a, const Shape& b) {
  absl::StatusOr<Shape> both = BroadcastShapes(a, b);
  if (!both.ok()) ThrowInvalid("scaled_dot_product_attention", both.status().message());
  return *both;
}

// One key head per group of query heads. Without enable_gqa the numbers must agree, but for
// broadcasting.
void CheckHeads(const Qkv& in, bool enable_gqa) {
  const int64_t heads = in.q.size(-3), groups = in.k.size(-3);
  const bool same = heads == groups || (groups == 1 && heads > 0);
  if (in.v.size(-3) != groups || !(enable_gqa ? groups > 0 && heads % groups == 0 : same)) {
    ThrowInvalid("scaled_dot_product_attention",
                 absl::StrCat("head counts do not fit: q ", ToString(in.q.shape()), ", k ",
                              ToString(in.k.shape()), ", v ", ToString(in.v.shape()),
                              enable_gqa ? "" : " (enable_gqa is off)"),
                 {{"q", in.q}, {"k", in.k}, {"v", in.v}});
  }
}

// [b, g, t, d] -> [b, g * r, t, d], each head r times in a row.
DTensor RepeatHeads(const DTensor& x, int64_t r) {
  if (r == 1) return x;
  const Shape& s = x.shape();
  return reshape(expand(unsqueeze(x, 2), {s[0], s[1], r, s[2], s[3]}),
                 {s[0], s[1] * r, s[2], s[3]});
}

// dropout(softmax(q k^T * scale + mask)) v; rows without any key give 0. mask may be null.
DTensor Masked(const Qkv& in, const DTensor& mask, double scale, double dropout_p) {
  const int64_t r = in.k.size(1) == 0 ? 1 : in.q.size(1) / in.k.size(1);
  const DTensor k = RepeatHeads(in.k, r), v = RepeatHeads(in.v, r);
  DTensor scores = matmul(mul(in.q, scale), transpose(k, -1, -2));
  const double minus_infinity = -std::numeric_limits<double>::infinity();
  if (!mask.defined()) {
    return matmul(dropout(softmax(scores, -1), dropout_p), v);
  }
  if (mask.dtype() == DType::kBool) {
    scores = masked_fill(scores, logical_not(mask), minus_infinity);
  } else {
    scores = add(scores, to(mask, scores.dtype()));
  }
  if (scores.size(-1) == 0) return matmul(scores, v);
  const DTensor no_key = eq(amax(scores.Detach(), {-1}, true), minus_infinity);
  const DTensor p = softmax(masked_fill(scores, no_key, 0), -1);
  return matmul(dropout(masked_fill(p, no_key, 0), dropout_p), v);
}

// [s, t] bool on x's mesh: key j counts for query i if j <= i.
DTensor CausalMask(const DTensor& x, int64_t s, int64_t t) {
  const TensorOptions options = {.dtype = DType::kI64, .mesh = x.mesh()};
  return ge(unsqueeze(arange(0, s, 1, options), 1), arange(0, t, 1, options));
}

DTensor Fused(const Qkv& in, double scale, bool is_causal) {
  static const OpDef& op = GetOp("attention");
  return Call(op, {&in.q, &in.k, &in.v}, {FloatAttr(scale), BoolAttr(is_causal)})[0];
}

}  // namespace

void RegisterAttentionOps() {
  Op("attention(q, k, v; scale, causal) -> o, lse")
      .Factors(GroupedFactors)
      .Factors("b h s [d], b [g] [t] [d], b [g] [t] e -> b h s e, b h s")
      .Linear({"o: v(q, k)", "lse: (q, k)"})
      .NeedsOffset("s")
      .NeedsOffset("h")
      .Check(CheckAttention)
      .OutDType(AttentionDType)
      .Vjp(AttentionVjp, "q, k, v, o, lse");
  Op("attention_backward(do, q, k, v, o, lse; scale, causal) -> dq, dk, dv")
      .Factors(GroupedBackwardFactors)
      .Factors(
          "b h s e, b h s [d], b [g] [t] [d], b [g] [t] e, b h s e, b h s "
          "-> b h s [d], b [g] [t] [d], b [g] [t] e")
      .Linear({"dq: do * v(q, k, lse) + do * o(q, k, lse)",
               "dk: do * v(q, k, lse) + do * o(q, k, lse)", "dv: do(q, k, lse)"})
      .NeedsOffset("s")
      .NeedsOffset("h")
      .Check(CheckAttentionBackward)
      .OutDType(GradientDType);
}

DTensor scaled_dot_product_attention(const DTensor& q, const DTensor& k, const DTensor& v,
                                     const DTensor& mask, bool is_causal,
                                     std::optional<double> scale, bool enable_gqa,
                                     double dropout_p) {
  constexpr const char* kName = "scaled_dot_product_attention";
  return AsOp(
      "scaled_dot_product_attention", {{"q", q}, {"k", k}, {"v", v}, {"mask", mask, true}}, [&] {
        Qkv in{q, k, v};
        for (DTensor* x : {&in.q, &in.k, &in.v}) {
          if (x->ndim() < 2) {
            ThrowInvalid(kName, absl::StrCat("needs two dims or more, got ", ToString(x->shape())));
          }
          while (x->ndim() < 4) *x = unsqueeze(*x, 0);
        }
        if (mask.defined() && is_causal) ThrowInvalid(kName, "takes a mask or is_causal, not both");
        CheckHeads(in, enable_gqa);
        const Shape batch = Broadcast(Broadcast(BatchOf(in.q), BatchOf(in.k)), BatchOf(in.v));
        Shape out = batch;
        out.insert(out.end(), {in.q.size(-3), in.q.size(-2), in.v.size(-1)});
        in = {FourDims(in.q, batch), FourDims(in.k, batch), FourDims(in.v, batch)};
        const double by = scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))));
        DTensor o;
        if (mask.defined() || dropout_p != 0) {
          DTensor m = is_causal ? CausalMask(in.q, in.q.size(-2), in.k.size(-2)) : mask;
          while (m.defined() && m.ndim() < 3) m = unsqueeze(m, 0);
          o = Masked(in, m.defined() && m.ndim() > 4 ? FourDims(m, batch) : m, by, dropout_p);
        } else {
          o = Fused(in, by, is_causal);
        }
        out.erase(out.begin(), out.end() - std::max(q.ndim(), 3) + (q.ndim() == 2 ? 1 : 0));
        return reshape(o, out);
      });
}

}  // namespace dtensor

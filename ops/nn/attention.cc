// Scaled dot product attention: one fused op, with a mask or dropout another; of matmul and softmax
// where the mask wants a gradient.
#include "dtensor/ops/nn/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/rng/dropout.h"
#include "dtensor/rng/tracker.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

constexpr char kName[] = "scaled_dot_product_attention";
constexpr char kNoLse[] =
    "no log-sum-exp where the mask wants a gradient, or where dropout draws numbers that depend on "
    "the layout (ScopedRngMode)";

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

// ", b (g r) s [t]" for a mask: input `at`, if there is one; dims of size 1 count for all.
absl::StatusOr<std::string> MaskText(const OpCall& call, int at, int q, absl::string_view heads) {
  if (at >= call.num_inputs()) return std::string();
  const Shape &mask = call.shape(at), &sq = call.shape(q), &sk = call.shape(q + 1);
  const int64_t sizes[] = {sq[0], sq[1], sq[2], sk[2]};
  const absl::string_view names[] = {"b", heads, "s", "[t]"};
  if (mask.size() != 4) {
    return absl::InvalidArgumentError(
        absl::StrCat("the mask must have 4 dims, is ", ToString(mask)));
  }
  std::string text = ",";
  for (int d = 0; d < 4; ++d) {
    if (mask[d] != sizes[d] && mask[d] != 1) {
      return absl::InvalidArgumentError(absl::StrCat("the mask ", ToString(mask),
                                                     " does not broadcast to the scores ",
                                                     ToString(IntSpan(sizes, 4))));
    }
    absl::StrAppend(&text, " ", mask[d] == sizes[d] ? names[d] : "1");
  }
  return text;
}

// Heads of q in groups that read one head of k each, or q's heads by themselves, with all of k's.
struct HeadNames {
  absl::string_view q, k;
};
constexpr HeadNames kGrouped = {"(g r)", "g"}, kSeparate = {"h", "[g]"};

// Query heads per key head go in `r`: heads of one group stay together.
FactorText WithGroups(const OpCall& call, int q, std::string text, const HeadNames& heads) {
  if (heads.q == kSeparate.q) return {std::move(text), {}};
  const int64_t all = call.shape(q)[1], groups = call.shape(q + 1)[1];
  return {std::move(text), {{"r", groups == 0 ? 1 : all / groups}}};
}

// With a mask the repeats of one head of k are q's heads: `r` is never cut then.
const HeadNames& NamesOf(const OpCall& call, int q, const HeadNames& heads) {
  return call.num_inputs() % 3 == 1 && call.shape(q + 1)[1] == 1 ? kSeparate : heads;
}

template <const HeadNames& kHeads>
absl::StatusOr<FactorText> ForwardFactors(const OpCall& call) {
  DT_RETURN_IF_ERROR(CheckGroups(call, 0));
  const HeadNames& heads = NamesOf(call, 0, kHeads);
  DT_ASSIGN_OR_RETURN(const std::string mask, MaskText(call, 3, 0, heads.q));
  const auto [h, g] = heads;
  return WithGroups(call, 0,
                    absl::StrCat("b ", h, " s [d], b ", g, " [t] [d], b ", g, " [t] e", mask,
                                 " -> b ", h, " s e, b ", h, " s"),
                    heads);
}

template <const HeadNames& kHeads>
absl::StatusOr<FactorText> BackwardFactors(const OpCall& call) {
  DT_RETURN_IF_ERROR(CheckGroups(call, 1));
  const HeadNames& heads = NamesOf(call, 1, kHeads);
  DT_ASSIGN_OR_RETURN(const std::string mask, MaskText(call, 6, 1, heads.q));
  const auto [h, g] = heads;
  return WithGroups(call, 1,
                    absl::StrCat("b ", h, " s e, b ", h, " s [d], b ", g, " [t] [d], b ", g,
                                 " [t] e, b ", h, " s e, b ", h, " s", mask, " -> b ", h,
                                 " s [d], b ", g, " [t] [d], b ", g, " [t] e"),
                    heads);
}

absl::Status CheckAttention(const OpCall& call) {
  DT_RETURN_IF_ERROR(CheckGroups(call, 0));
  return SameDTypes(call);
}
absl::Status CheckMask(const OpCall& call, int mask) {
  const DType dtype = call.dtype(mask);
  if (dtype == DType::kBool || IsFloating(dtype)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the mask must be bool or floating, is ", TypeName(dtype)));
}
absl::Status CheckMaskedAttention(const OpCall& call) {
  DT_RETURN_IF_ERROR(CheckGroups(call, 0));
  if (call.dtype(0) != call.dtype(1) || call.dtype(0) != call.dtype(2)) {
    return absl::InvalidArgumentError("q, k and v must have the same dtype");
  }
  return CheckMask(call, 3);
}
// Of the log-sum-exp that the gradients read: a rounding of it would be one of every weight.
DType LseType(DType q) { return q == DType::kF32 ? DType::kF64 : ComputeType(q); }
absl::Status CheckAttentionBackward(const OpCall& call) {
  DT_RETURN_IF_ERROR(CheckGroups(call, 1));
  DT_RETURN_IF_ERROR(SameComputeTypes(call, 5));
  const DType lse = LseType(call.dtype(1));
  if (call.dtype(5) == lse) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("lse must be ", TypeName(lse), " where q is ",
                                                 TypeName(call.dtype(1)), ", is ",
                                                 TypeName(call.dtype(5))));
}
absl::Status CheckMaskedBackward(const OpCall& call) {
  DT_RETURN_IF_ERROR(CheckAttentionBackward(call));
  return CheckMask(call, 6);
}

absl::StatusOr<DType> AttentionDType(const OpCall& call, int output) {
  return output == 0 ? call.dtype(0) : LseType(call.dtype(0));
}

absl::StatusOr<DType> GradientDType(const OpCall& call, int) { return call.dtype(1); }

void SetGradients(VjpCall& c, const Values& grads) {
  for (int i = 0; i < 3; ++i) {
    if (c.needs(i)) c.set(i, grads[i]);
  }
}
void AttentionVjp(VjpCall& c) {
  if (!c.has_grad()) return;
  static const OpDef& op = GetOp("attention_backward");
  const DTensor &dy = c.grad(), &q = c.in(0), &k = c.in(1), &v = c.in(2);
  const DTensor &o = c.out(0), &lse = c.out(1);
  SetGradients(c, Call(op, {&dy, &q, &k, &v, &o, &lse}, c.attrs()));
}
void MaskedAttentionVjp(VjpCall& c) {
  if (!c.has_grad()) return;
  static const OpDef& op = GetOp("masked_attention_backward");
  const DTensor &dy = c.grad(), &q = c.in(0), &k = c.in(1), &v = c.in(2), &mask = c.in(3);
  const DTensor &o = c.out(0), &lse = c.out(1);
  SetGradients(c, Call(op, {&dy, &q, &k, &v, &o, &lse, &mask}, c.attrs()));
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
  if (!both.ok()) ThrowInvalid(kName, both.status().message());
  return *both;
}

// Without groups heads broadcast as other leading dims do. One head of k and v stays one: the op
// reads it for all of q's.
void BroadcastHeads(Qkv* in) {
  const int64_t heads = std::max(in->k.size(-3), in->v.size(-3));
  for (DTensor* x : {&in->q, &in->k, &in->v}) {
    if (x->size(-3) != 1 || heads <= 1) continue;
    Shape shape = x->shape();
    shape[shape.size() - 3] = heads;
    *x = expand(*x, shape);
  }
}

// One key head per group of query heads. Without enable_gqa the numbers must agree, but for
// broadcasting.
void CheckHeads(const Qkv& in, bool enable_gqa) {
  const int64_t heads = in.q.size(-3), groups = in.k.size(-3);
  const bool same = heads == groups || (groups == 1 && heads > 0);
  if (in.v.size(-3) != groups || !(enable_gqa ? groups > 0 && heads % groups == 0 : same)) {
    ThrowInvalid(kName,
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

// Those of the mask, which may be null, that also the causal one lets through.
DTensor Seen(const Qkv& in, const DTensor& mask, bool is_causal) {
  if (!is_causal) return mask;
  const DTensor causal = CausalMask(in.q, in.q.size(-2), in.k.size(-2));
  if (!mask.defined()) return causal;
  if (mask.dtype() == DType::kBool) return logical_and(mask, causal);
  return where(causal, mask, -std::numeric_limits<double>::infinity());
}

// A mask for every weight: [..., s, t] with the leading dims of `batch`, perhaps of size 1.
DTensor FourDimsOfMask(DTensor m, const Shape& batch) {
  while (m.ndim() < 4) m = unsqueeze(m, 0);
  const bool per_batch = m.ndim() > 4 || (batch.size() > 1 && m.size(0) != 1);
  return per_batch ? FourDims(m, batch) : m;
}

// The bits that dropout of the weights takes; none where there is nothing to draw.
std::vector<int64_t> ReserveWeights(const Qkv& in, double dropout_p) {
  const Shape weights = {in.q.size(0), in.q.size(1), in.q.size(2), in.k.size(2)};
  if (dropout_p == 0 || Numel(weights) == 0) return {};
  absl::StatusOr<std::vector<int64_t>> words = ReserveDropout(weights, in.q.dtype(), dropout_p);
  if (!words.ok()) ThrowInvalid(kName, words.status().message(), {{"q", in.q}});
  return *std::move(words);
}

// o and lse; mask may be null.
Values Fused(const Qkv& in, DTensor mask, double scale, bool is_causal, double dropout_p) {
  if (!mask.defined() && dropout_p == 0) {
    static const OpDef& op = GetOp("attention");
    return Call(op, {&in.q, &in.k, &in.v}, {FloatAttr(scale), BoolAttr(is_causal)});
  }
  static const OpDef& op = GetOp("masked_attention");
  absl::Cleanup undo = [before = RngSnapshot::Take()] { before.Restore(); };  // if it is refused
  const std::vector<int64_t> words = ReserveWeights(in, dropout_p);
  if (!mask.defined()) {
    mask = ones({1, 1, 1, 1}, {.dtype = DType::kBool, .mesh = in.q.mesh()});
  }
  Values made = Call(op, {&in.q, &in.k, &in.v, &mask},
                     {FloatAttr(scale), BoolAttr(is_causal),
                      FloatAttr(1 / KeepChance(in.q.dtype(), dropout_p)), IntsAttr(words)});
  std::move(undo).Cancel();
  return made;
}

// Whether the weights must exist: their mask has a gradient, or random numbers depend on layouts.
bool NeedsWeights(const DTensor& q, const DTensor& mask, double dropout_p) {
  if (mask.defined() && GradEnabled() && mask.requires_grad()) return true;
  return dropout_p != 0 && CurrentRngMode() != RngMode::kThreadBased && !q.mesh().is_self();
}

// o and, if asked for, lse.
Values Attend(const DTensor& q, const DTensor& k, const DTensor& v, const DTensor& mask,
              bool is_causal, std::optional<double> scale, bool enable_gqa, double dropout_p,
              bool with_lse) {
  Qkv in{q, k, v};
  for (DTensor* x : {&in.q, &in.k, &in.v}) {
    if (x->ndim() < 2) {
      ThrowInvalid(kName, absl::StrCat("needs two dims or more, got ", ToString(x->shape())));
    }
    while (x->ndim() < 4) *x = unsqueeze(*x, 0);
  }
  if (!(dropout_p >= 0 && dropout_p <= 1)) {
    ThrowInvalid(kName, absl::StrCat("dropout_p must be in [0, 1], got ", dropout_p));
  }
  if (!enable_gqa) BroadcastHeads(&in);
  CheckHeads(in, enable_gqa);
  const Shape batch = Broadcast(Broadcast(BatchOf(in.q), BatchOf(in.k)), BatchOf(in.v));
  const int most = std::max({q.ndim(), k.ndim(), v.ndim()});
  const auto leading = [&](std::initializer_list<int64_t> last) {  // as the longest has them
    Shape shape = batch;
    shape.insert(shape.end(), last.begin(), last.end());
    const size_t drop = most == 2 ? 2 : most == 3 ? 1 : 0;
    shape.erase(shape.begin(), shape.begin() + static_cast<int64_t>(drop));
    return shape;
  };
  const Shape out = leading({in.q.size(-3), in.q.size(-2), in.v.size(-1)});
  in = {FourDims(in.q, batch), FourDims(in.k, batch), FourDims(in.v, batch)};
  // Of no features all scores are 0, whatever they are multiplied by.
  const double by = scale.value_or(1 / std::sqrt(std::max(1.0, static_cast<double>(q.size(-1)))));
  const DTensor m = mask.defined() ? FourDimsOfMask(mask, batch) : mask;
  if (NeedsWeights(in.q, m, dropout_p)) {
    if (with_lse) ThrowInvalid(kName, kNoLse);
    return {reshape(Masked(in, Seen(in, m, is_causal), by, dropout_p), out)};
  }
  Values o = Fused(in, m, by, is_causal, dropout_p == 1 ? 0 : dropout_p);
  if (dropout_p == 1) o[0] = dropout(o[0], 1);  // of everything: nothing is drawn
  if (!with_lse) return {reshape(o[0], out)};
  const DTensor lse = to(o[1].Detach(), ComputeType(in.q.dtype()));
  return {reshape(o[0], out), reshape(lse, leading({in.q.size(-3), in.q.size(-2)}))};
}

// torch refuses both together.
void CheckOneMask(const DTensor& mask, bool is_causal) {
  if (mask.defined() && is_causal) {
    ThrowInvalid(kName, "takes a mask or is_causal, not both (causal_attention does)");
  }
}

// Bits of dropout need offsets, and so that of `r`: it is cut into blocks only then, that is never
// (NamesOf). `mask` is bool, or added. `words` are those of ReserveDropout, or none; `kept` what
// weights that stay are multiplied by.
void RegisterMaskedAttention() {
  Op("masked_attention(q, k, v, mask; scale, causal, kept, words) -> o, lse")
      .Factors(ForwardFactors<kGrouped>)
      .Factors(ForwardFactors<kSeparate>)
      .Linear({"o: v(q, k, mask)", "lse: (q, k, mask)"})
      .NeedsOffset("s")
      .NeedsOffset("h")
      .NeedsOffset("b")
      .NeedsOffset("g")
      .NeedsOffset("r")
      .Check(CheckMaskedAttention)
      .OutDType(AttentionDType)
      .Vjp(MaskedAttentionVjp, "q, k, v, mask, o, lse");
  Op("masked_attention_backward(do, q, k, v, o, lse, mask; scale, causal, kept, words) "
     "-> dq, dk, dv")
      .Factors(BackwardFactors<kGrouped>)
      .Factors(BackwardFactors<kSeparate>)
      .Linear({"dq: do * v(q, k, lse, mask) + do * o(q, k, lse, mask)",
               "dk: do * v(q, k, lse, mask) + do * o(q, k, lse, mask)", "dv: do(q, k, lse, mask)"})
      .NeedsOffset("s")
      .NeedsOffset("h")
      .NeedsOffset("b")
      .NeedsOffset("g")
      .NeedsOffset("r")
      .Check(CheckMaskedBackward)
      .OutDType(GradientDType);
}

}  // namespace

void RegisterAttentionOps() {
  Op("attention(q, k, v; scale, causal) -> o, lse")
      .Factors(ForwardFactors<kGrouped>)
      .Factors(ForwardFactors<kSeparate>)
      .Linear({"o: v(q, k)", "lse: (q, k)"})
      .NeedsOffset("s")
      .NeedsOffset("h")
      .Check(CheckAttention)
      .OutDType(AttentionDType)
      .Vjp(AttentionVjp, "q, k, v, o, lse");
  Op("attention_backward(do, q, k, v, o, lse; scale, causal) -> dq, dk, dv")
      .Factors(BackwardFactors<kGrouped>)
      .Factors(BackwardFactors<kSeparate>)
      .Linear({"dq: do * v(q, k, lse) + do * o(q, k, lse)",
               "dk: do * v(q, k, lse) + do * o(q, k, lse)", "dv: do(q, k, lse)"})
      .NeedsOffset("s")
      .NeedsOffset("h")
      .Check(CheckAttentionBackward)
      .OutDType(GradientDType);
  RegisterMaskedAttention();
}

Values scaled_dot_product_attention_lse(const DTensor& q, const DTensor& k, const DTensor& v,
                                        const DTensor& mask, bool is_causal,
                                        std::optional<double> scale, bool enable_gqa,
                                        double dropout_p) {
  return AsOp("scaled_dot_product_attention_lse",
              {{"q", q}, {"k", k}, {"v", v}, {"mask", mask, true}}, [&] {
                CheckOneMask(mask, is_causal);
                return Attend(q, k, v, mask, is_causal, scale, enable_gqa, dropout_p, true);
              });
}

DTensor causal_attention(const DTensor& q, const DTensor& k, const DTensor& v, const DTensor& mask,
                         std::optional<double> scale, bool enable_gqa, double dropout_p) {
  return AsOp(kName, {{"q", q}, {"k", k}, {"v", v}, {"mask", mask, true}},
              [&] { return Attend(q, k, v, mask, true, scale, enable_gqa, dropout_p, false)[0]; });
}

DTensor scaled_dot_product_attention(const DTensor& q, const DTensor& k, const DTensor& v,
                                     const DTensor& mask, bool is_causal,
                                     std::optional<double> scale, bool enable_gqa,
                                     double dropout_p) {
  return AsOp(kName, {{"q", q}, {"k", k}, {"v", v}, {"mask", mask, true}}, [&] {
    CheckOneMask(mask, is_causal);
    return Attend(q, k, v, mask, is_causal, scale, enable_gqa, dropout_p, false)[0];
  });
}

}  // namespace dtensor

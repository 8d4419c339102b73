#include "dtensor/ops/cases.h"

#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

Reduction ReductionOf(CaseArgs& a) {
  const std::string name = a.TextOr("reduction", "mean");
  if (name != "none" && name != "sum" && name != "mean") {
    ThrowInvalid("case", "reduction is none, sum or mean");
  }
  return name == "none" ? Reduction::kNone : name == "sum" ? Reduction::kSum : Reduction::kMean;
}

DTensor Attention(CaseArgs& a) {
  if (a.Float("dropout_p") != 0) a.LeaveOut("dropout");
  std::optional<double> scale;
  if (a.Has("scale")) scale = a.Float("scale");
  return scaled_dot_product_attention(a.T("query"), a.T("key"), a.T("value"),
                                      a.Optional("attn_mask"), a.Bool("is_causal"), scale,
                                      a.Bool("enable_gqa"));
}

}  // namespace

void AddNNCases(CaseTable* table) {
  table->Add({
      DT_CASE(softmax, "self[a,b] dim=1 | self[a,b,c] dim=0 | self[...] dim=-1",
              softmax(a.T("self"), a.Int("dim"), a.Type("dtype"))),
      DT_CASE(log_softmax, "self[a,b] dim=1 | self[a,b,c] dim=0 | self[...] dim=-1",
              log_softmax(a.T("self"), a.Int("dim"), a.Type("dtype"))),
      DT_CASE(layer_norm,
              "input[a,b] weight[b] bias[b] normalized_shape=b | "
              "input[a,b,c] weight[c] bias[c] normalized_shape=c eps=0.1 | "
              "input[a,b,c] weight[b,c] normalized_shape=b,c | input[...,k] normalized_shape=k",
              layer_norm(a.T("input"), a.Ints("normalized_shape"), a.Optional("weight"),
                         a.Optional("bias"), a.Float("eps", 1e-5))),
      DT_CASE(rms_norm,
              "input[a,b] weight[b] normalized_shape=b | "
              "input[a,b,c] weight[c] normalized_shape=c eps=0.1 | input[...,k] normalized_shape=k",
              rms_norm(a.T("input"), a.Ints("normalized_shape"), a.Optional("weight"),
                       a.Float("eps", -1))),
      DT_CASE(nll_loss,
              "input[n,2c] target[n]:int64<2c weight[2c]~@0.5..2 | "
              "input[n,2c] target[n]:int64<2c ignore_index=1 reduction=sum | "
              "input[n,2c] target[n]:int64<2c reduction=none",
              nll_loss(a.T("input"), a.T("target"), a.Optional("weight"),
                       a.Int("ignore_index", -100), ReductionOf(a))),
      DT_CASE(
          cross_entropy,
          "input[n,2c] target[n]:int64<2c | "
          "input[n,2c] target[n]:int64<2c weight[2c]~@0.5..2 label_smoothing=0.25 | "
          "input[n,2c] target[n]:int64<2c ignore_index=1 reduction=sum | "
          "input[n,2c] target[n]:int64<2c reduction=none",
          cross_entropy(a.T("input"), a.T("target"), a.Optional("weight"),
                        a.Int("ignore_index", -100), ReductionOf(a), a.Float("label_smoothing"))),
      // 4g query heads on g key heads; as many; all on one; with a mask.
      DT_CASE_IS(kFinite, scaled_dot_product_attention,
                 "query[2,2g,s,2] key[2,g,s,2] value[2,g,s,2] "
                 "is_causal=true enable_gqa=true scale=0.5 | "
                 "query[2,h,s,2] key[2,h,t,2] value[2,h,t,3] scale=0.5 | "
                 "query[1,h,s,3] key[1,1,s,3] value[1,1,s,2] "
                 "is_causal=true enable_gqa=true scale=0.5 | "
                 "query[b,2,s,d] key[b,2,t,d] value[b,2,t,d] attn_mask[s,t]",
                 Attention(a)),
  });
}

}  // namespace dtensor

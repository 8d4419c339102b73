#include "dtensor/ops/cases.h"

#include <map>

#include "dtensor/ops/nn/attention.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

Reduction ReductionOf(CaseArgs& a) {
  const std::string name = a.TextOr("reduction", "mean");
  static const std::map<std::string, Reduction> kByName = {{"none", Reduction::kNone},
                                                           {"sum", Reduction::kSum},
                                                           {"mean", Reduction::kMean},
                                                           {"batchmean", Reduction::kBatchMean}};
  const auto found = kByName.find(name);
  if (found == kByName.end()) ThrowInvalid("case", "reduction is none, sum, mean or batchmean");
  return found->second;
}

std::optional<double> ScaleOf(CaseArgs& a) {
  return a.Has("scale") ? std::optional<double>(a.Float("scale")) : std::nullopt;
}
DTensor Attention(CaseArgs& a) {
  if (a.Float("dropout_p") != 0) a.LeaveOut("dropout");
  return scaled_dot_product_attention(a.T("query"), a.T("key"), a.T("value"),
                                      a.Optional("attn_mask"), a.Bool("is_causal"), ScaleOf(a),
                                      a.Bool("enable_gqa"));
}
// The log-sum-exp has no gradient.
DTensor DroppedAttention(CaseArgs& a) {
  return scaled_dot_product_attention_lse(a.T("query"), a.T("key"), a.T("value"),
                                          a.Optional("attn_mask"), a.Bool("is_causal"), ScaleOf(a),
                                          a.Bool("enable_gqa"), a.Float("dropout_p"))[0];
}

// A norm with running statistics, which it may move.
DTensor StatisticsArg(CaseArgs& a, const char* name) {
  return a.Has(name) ? a.Written(name) : DTensor();
}

// input, target and a reduction.
using Loss = DTensor (*)(const DTensor&, const DTensor&, Reduction);
DTensor LossOf(CaseArgs& a, Loss loss) { return loss(a.T("input"), a.T("target"), ReductionOf(a)); }

void AddElementLosses(CaseTable* table) {
  table->Add({
      DT_CASE(mse_loss, "input[a,b] target[a,b] | input[a,b] target[b] reduction=none",
              LossOf(a, mse_loss)),
      DT_CASE(l1_loss, "input[a,b] target[a,b] | input[a] target[a] reduction=sum",
              LossOf(a, l1_loss)),
      DT_CASE(smooth_l1_loss,
              "input[a,b] target[a,b] beta=0.5 | input[a] target[a] reduction=none beta=0",
              smooth_l1_loss(a.T("input"), a.T("target"), ReductionOf(a), a.Float("beta", 1))),
      DT_CASE(huber_loss,
              "input[a,b] target[a,b] delta=0.5 | input[a] target[a] reduction=sum delta=3",
              huber_loss(a.T("input"), a.T("target"), ReductionOf(a), a.Float("delta", 1))),
      DT_CASE(
          binary_cross_entropy,
          "input[a,b]@0.1..0.9 target[a,b]@0..1 weight[b]~ | "
          "input[a]@0.1..0.9 target[a]@0..1 reduction=none",
          binary_cross_entropy(a.T("input"), a.T("target"), a.Optional("weight"), ReductionOf(a))),
      DT_CASE(binary_cross_entropy_with_logits,
              "input[a,b] target[a,b]@0..1 weight[a,1]~ pos_weight[b]~ | "
              "input[a] target[a]@0..1 reduction=sum",
              binary_cross_entropy_with_logits(a.T("input"), a.T("target"), a.Optional("weight"),
                                               ReductionOf(a), a.Optional("pos_weight"))),
      DT_CASE(kl_div,
              "input[a,b] target[a,b]@0.1..1 reduction=batchmean | "
              "input[a,b] target[a,b] log_target=true | input[a] target[a]@0.1..1 reduction=none",
              kl_div(a.T("input"), a.T("target"), ReductionOf(a), a.Bool("log_target"))),
      DT_CASE(
          poisson_nll_loss,
          "input[a,b] target[a,b]@1.5..4 full=true | "
          "input[a,b]@0.5..2 target[a,b]@1.5..4 log_input=false reduction=none",
          poisson_nll_loss(a.T("input"), a.T("target"), !a.Has("log_input") || a.Bool("log_input"),
                           a.Bool("full"), a.Float("eps", 1e-8), ReductionOf(a))),
      DT_CASE(margin_ranking_loss,
              "input1[a,b] input2[a,b] target[a,b] margin=0.5 | "
              "input1[a] input2[a] target[a] reduction=none",
              margin_ranking_loss(a.T("input1"), a.T("input2"), a.T("target"), a.Float("margin"),
                                  ReductionOf(a))),
  });
}

void AddChannelNorms(CaseTable* table) {
  table->Add({
      DT_CASE_IS(
          kWrites, batch_norm,
          "input[a,b,c] running_mean[b]~ running_var[b]~@0.5..2 weight[b] bias[b] "
          "training=true eps=0.5 | input[a,b,2,c] running_mean[b]~ running_var[b]~@0.5..2 "
          "weight[b] bias[b] | input[a,b] training=true eps=0.5",
          batch_norm(a.T("input"), StatisticsArg(a, "running_mean"),
                     StatisticsArg(a, "running_var"), a.Optional("weight"), a.Optional("bias"),
                     a.Bool("training"), a.Float("momentum", 0.1), a.Float("eps", 1e-5))),
      DT_CASE_IS(
          kWrites, instance_norm,
          "input[a,b,c] running_mean[b]~ running_var[b]~@0.5..2 weight[b] bias[b] eps=0.5 | "
          "input[a,b,c,2] running_mean[b]~ running_var[b]~@0.5..2 use_input_stats=false",
          instance_norm(a.T("input"), StatisticsArg(a, "running_mean"),
                        StatisticsArg(a, "running_var"), a.Optional("weight"), a.Optional("bias"),
                        !a.Has("use_input_stats") || a.Bool("use_input_stats"),
                        a.Float("momentum", 0.1), a.Float("eps", 1e-5))),
      DT_CASE(group_norm,
              "input[a,2b,c] num_groups=2 weight[2b] bias[2b] eps=0.5 | "
              "input[a,2b] num_groups=b eps=0.5",
              group_norm(a.T("input"), a.Int("num_groups"), a.Optional("weight"),
                         a.Optional("bias"), a.Float("eps", 1e-5))),
      DT_CASE(local_response_norm, "input[a,b,c] size=3 alpha=0.5 | input[a,b,2,c] size=2 k=0.5",
              local_response_norm(a.T("input"), a.Int("size"), a.Float("alpha", 1e-4),
                                  a.Float("beta", 0.75), a.Float("k", 1))),
      DT_CASE(normalize, "input[a,b] | input[a,b,c] dim=2 p=3 | input[a,b]@0.5..2 p=-1",
              normalize(a.T("input"), a.Float("p", 2), a.Has("dim") ? a.Ints("dim") : DimList{1},
                        a.Float("eps", 1e-12))),
      DT_CASE(cosine_similarity, "x1[a,b] x2[a,b] | x1[a,1,c] x2[b,c] dim=-1",
              cosine_similarity(a.T("x1"), a.T("x2"), a.Int("dim", 1), a.Float("eps", 1e-8))),
  });
}

}  // namespace

void AddNNCases(CaseTable* table) {
  AddElementLosses(table);
  AddChannelNorms(table);
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
      OpCase{"native_layer_norm",
             "input[a,b] normalized_shape=b weight[b] bias[b] eps=0.1 | "
             "input[a,b,c] normalized_shape=b,c eps=0.1",
             [](CaseArgs& a) {
               return native_layer_norm(a.T("input"), a.Ints("normalized_shape"),
                                        a.Optional("weight"), a.Optional("bias"), a.Float("eps"));
             },
             kNoGradient},
      DT_CASE(softmin, "input[a,b] dim=1 | input[a,b,c] dim=0",
              softmin(a.T("input"), a.Int("dim"), a.Type("dtype"))),
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
                 "query[b,2,s,d] key[b,2,t,d] value[b,2,t,d] attn_mask[s,t] | "
                 "query[2,2g,s,2] key[2,g,t,2] value[2,g,t,2] attn_mask[2,2g,s,t]~ "
                 "enable_gqa=true | "
                 "query[b,h,s,2] key[b,h,t,2] value[b,h,t,3] attn_mask[b,1,1,t]:bool",
                 Attention(a)),
      DT_CASE_IS(kDraws | kFinite, scaled_dot_product_attention_lse,
                 "query[2,2g,s,2] key[2,g,t,2] value[2,g,t,2] attn_mask[2g,1,t]~ "
                 "enable_gqa=true dropout_p=0.25 | "
                 "query[b,h,s,2] key[b,1,s,2] value[b,1,s,3] is_causal=true enable_gqa=true "
                 "dropout_p=0.5 scale=0.5",
                 DroppedAttention(a)),
      DT_CASE_IS(kFinite, causal_attention,
                 "query[2,2g,s,2] key[2,g,s,2] value[2,g,s,2] attn_mask[2,1,1,s]:bool "
                 "enable_gqa=true | "
                 "query[b,h,s,2] key[b,h,s,2] value[b,h,s,3] attn_mask[s,s]~ scale=0.5 | "
                 "query[b,2,s,d] key[b,2,s,d] value[b,2,s,d] attn_mask[b,1,s,s]",
                 causal_attention(a.T("query"), a.T("key"), a.T("value"), a.Optional("attn_mask"),
                                  ScaleOf(a), a.Bool("enable_gqa"))),
  });
  // Cross entropy takes it where classes are cut.
  table->Judge({{"sum_exp", {{{F({4, 12}), F({4})}}, {{F({5, 6}), F({5})}}}}});
}

}  // namespace dtensor

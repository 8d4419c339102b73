// What layers of networks compute: softmax, norms, losses, attention.
#pragma once

#include "dtensor/ops/family.h"

namespace dtensor {

// exp(x) / sum(exp(x)) over dim, and its logarithm.
//   Shapes:   x's; a 0-d x has dim 0 and -1.
//   Types:    floating; `dtype` converts x first.
//   Sharding: any dim but `dim`. Over a sharded `dim` it decomposes into amax, exp and sum where
//             gathering x would cost more.
//   Comm:     then two reductions of x's size without `dim`; one in backward.
//   Errors:   OutOfRange for dim, InvalidArgument for an integer dtype.
DTensor softmax(const DTensor& x, int64_t dim, std::optional<DType> dtype = {});
DTensor log_softmax(const DTensor& x, int64_t dim, std::optional<DType> dtype = {});

// Norms go over the last dims: (x - mean) / sqrt(variance + eps) * weight + bias.
//   Shapes:   the last dims of x are normalized_shape, which weight and bias have (or are null).
//   Types:    floating, all the same; statistics in float32 or wider.
//   Sharding: all dims before; linear in weight and bias together. Gradients of weight and bias
//             come as Partial(sum) of sharded leading dims.
//   Comm:     none of its own.
//   Errors:   InvalidArgument if shapes or dtypes do not fit.
//   Source:   torch.nn.functional.layer_norm
DTensor layer_norm(const DTensor& x, IntSpan normalized_shape, const DTensor& weight = {},
                   const DTensor& bias = {}, double eps = 1e-5);
// x / sqrt(mean(x^2) + eps) * weight; the rest as layer_norm. eps = -1 (the default): the machine
// epsilon of the computing type, as PyTorch's default.
DTensor rms_norm(const DTensor& x, IntSpan normalized_shape, const DTensor& weight = {},
                 double eps = -1);

enum class Reduction { kNone, kMean, kSum };
// -logp[i, target[i]] * weight[target[i]]; ignored rows count 0. The mean divides by the weights of
// the rows that count.
//   Shapes:   logp [n, v] (or [v], or [n, v, d...]), target [n] ([], [n, d...]); weight [v] or null
//             -> [] or, for kNone, target's.
//   Types:    logp floating, target int64 or int32; sums and means in float32 or wider.
//   Sharding: "n v, n -> n", linear in logp.
//   Errors:   InvalidArgument for shapes and for a target outside of [0, v).
//   Source:   torch.nn.functional.nll_loss
DTensor nll_loss(const DTensor& logp, const DTensor& target, const DTensor& weight = {},
                 int64_t ignore_index = -100, Reduction reduction = Reduction::kMean);
// nll_loss of log_softmax. Integer targets of class indices, or floating ones (class probabilities,
// shape of logits; their mean is over rows).
//   Shapes, Types: as nll_loss.
//   Sharding: rows and classes.
//   Comm:     with sharded classes reductions of [n] only, two for class indices without weight and
//             smoothing, all of them in forward.
//   Errors:   as nll_loss; InvalidArgument for label_smoothing outside of [0, 1].
//   Source:   torch.nn.functional.cross_entropy
DTensor cross_entropy(const DTensor& logits, const DTensor& target, const DTensor& weight = {},
                      int64_t ignore_index = -100, Reduction reduction = Reduction::kMean,
                      double label_smoothing = 0);

// softmax(q k^T * scale + mask) v; scale is 1 / sqrt(d) by default.
//   Shapes:   q [b, h, s, d], k [b, g, t, d], v [b, g, t, e] -> [b, h, s, e]; g is h or 1 or, with
//             enable_gqa, divides h. Other numbers of leading dims as torch. mask: bool (true: take
//             part) or floating (added), broadcast to [b, h, s, t]. is_causal: key j counts for
//             query i if j <= i. dropout_p drops attention weights (as dropout does).
//   Types:    floating, all the same.
//   Sharding: batch, heads (whole groups; or query heads with all key heads on every rank), query
//             sequence, e. With a mask as matmul and softmax.
//   Comm:     none of its own; with the query sequence sharded, gradients of k and v come as
//             Partial(sum).
//   Errors:   InvalidArgument for shapes that do not fit, and for a mask together with is_causal.
//   Source:   torch.nn.functional.scaled_dot_product_attention
DTensor scaled_dot_product_attention(const DTensor& q, const DTensor& k, const DTensor& v,
                                     const DTensor& mask = {}, bool is_causal = false,
                                     std::optional<double> scale = {}, bool enable_gqa = false,
                                     double dropout_p = 0);

}  // namespace dtensor

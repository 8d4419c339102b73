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
// softmax of -x.
DTensor softmin(const DTensor& x, int64_t dim, std::optional<DType> dtype = {});

// Norms go over the last dims: (x - mean) / sqrt(variance + eps) * weight + bias.
//   Shapes:   the last dims of x are normalized_shape, which weight and bias have (or are null).
//   Types:    floating, all the same; statistics in float32 or wider.
//   Sharding: all dims before; linear in weight and bias together. Gradients of weight and bias
//             come as Partial(sum) of sharded leading dims. Over a sharded last dim it decomposes
//             into sums where gathering x would cost more.
//   Comm:     then reductions of a number per row, two in forward (rms_norm: one), one of two
//             numbers in backward (rms_norm: of one).
//   Errors:   InvalidArgument if shapes or dtypes do not fit.
//   Source:   torch.nn.functional.layer_norm
DTensor layer_norm(const DTensor& x, IntSpan normalized_shape, const DTensor& weight = {},
                   const DTensor& bias = {}, double eps = 1e-5);
// x / sqrt(mean(x^2) + eps) * weight; the rest as layer_norm. eps = -1 (the default): the machine
// epsilon of the computing type, as PyTorch's default. A weight of another floating dtype is
// computed with in the wider type; the result has x's.
DTensor rms_norm(const DTensor& x, IntSpan normalized_shape, const DTensor& weight = {},
                 double eps = -1);

// layer_norm, then mean and 1 / sqrt(variance + eps) with size 1 in place of the normalized dims,
// in x's dtype (as PyTorch has them on CPUs) and without a gradient.
//   Source:   torch.native_layer_norm
Values native_layer_norm(const DTensor& x, IntSpan normalized_shape, const DTensor& weight,
                         const DTensor& bias, double eps);

// (x - mean) / sqrt(variance + eps) * weight + bias per channel, dim 1 of x. batch_norm takes mean
// and variance over the batch and all dims behind the channel, instance_norm over these alone,
// group_norm over them and a group of channels. In training batch_norm and instance_norm move the
// running statistics in place, by `momentum`, towards those of x (of its unbiased variance); else
// they use them.
//   Shapes:   x [n, c, ...]; the others [c] or null -> x's. An empty x changes nothing.
//   Types:    floating; computed in float32 or wider, also the sums.
//   Sharding: any dim. Where one is sharded that statistics go over, they are sums over the ranks:
//             the numbers are those of one rank. Running statistics stay where they are.
//   Comm:     then two reductions of a number per channel (instance, group) in forward, one of two
//             numbers in backward.
//   Errors:   InvalidArgument for shapes, an integer dtype, statistics of one value, a num_groups
//             that does not divide c, and missing running statistics where they are used.
//   Source:   torch.nn.functional.batch_norm, instance_norm, group_norm
DTensor batch_norm(const DTensor& x, const DTensor& running_mean, const DTensor& running_var,
                   const DTensor& weight = {}, const DTensor& bias = {}, bool training = false,
                   double momentum = 0.1, double eps = 1e-5);
DTensor instance_norm(const DTensor& x, const DTensor& running_mean = {},
                      const DTensor& running_var = {}, const DTensor& weight = {},
                      const DTensor& bias = {}, bool use_input_stats = true, double momentum = 0.1,
                      double eps = 1e-5);
DTensor group_norm(const DTensor& x, int64_t num_groups, const DTensor& weight = {},
                   const DTensor& bias = {}, double eps = 1e-5);
// x / (k + alpha * mean of the squares of `size` channels around)^beta; beyond the ends are zeros.
//   Shapes:   [n, c, ...] with a dim or more behind c.
//   Types:    floating; int64 (not empty) gives float32, of means that are cut to whole numbers.
//   Sharding: any dim but the channels, which are read whole.
//   Errors:   InvalidArgument for shapes, other integers and size < 1.
//   Source:   torch.nn.functional.local_response_norm
DTensor local_response_norm(const DTensor& x, int64_t size, double alpha = 1e-4, double beta = 0.75,
                            double k = 1);
// x / max(|x|, eps), its p norm over `dims` (linalg_vector_norm): p may be 0, negative and
// infinite.
//   Types:    floating.
//   Sharding: any dim; over a sharded one of `dims` the norm is a small reduction.
//   Errors:   InvalidArgument for integers and a p of NaN, OutOfRange for a dim.
//   Source:   torch.nn.functional.normalize
DTensor normalize(const DTensor& x, double p = 2, DimList dims = {1}, double eps = 1e-12);
// sum(x1 * x2) / (max(|x1|, eps) * max(|x2|, eps)) over dim, of tensors that broadcast.
//   Types:    floating after promotion.
//   Sharding: as normalize.
//   Errors:   InvalidArgument for shapes and integers, OutOfRange for dim.
//   Source:   torch.nn.functional.cosine_similarity
DTensor cosine_similarity(const DTensor& x1, const DTensor& x2, int64_t dim = 1, double eps = 1e-8);

enum class Reduction { kNone, kMean, kSum, kBatchMean };  // kBatchMean: kl_div's alone
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
// shape of logits; their mean is over rows, and target and weight have gradients, too).
//   Shapes, Types: as nll_loss.
//   Sharding: rows and classes.
//   Comm:     with sharded classes reductions of [n] only: for class indices two, both in forward;
//             for probabilities one more in backward.
//   Errors:   as nll_loss; InvalidArgument for label_smoothing outside of [0, 1].
//   Source:   torch.nn.functional.cross_entropy
DTensor cross_entropy(const DTensor& logits, const DTensor& target, const DTensor& weight = {},
                      int64_t ignore_index = -100, Reduction reduction = Reduction::kMean,
                      double label_smoothing = 0);

// Losses of elements: a number for each, then their mean or sum over all.
//   mse_loss             (input - target)^2
//   l1_loss              |input - target|
//   smooth_l1_loss       d^2 / (2 beta) for d = |input - target| < beta, else d - beta / 2
//   huber_loss           d^2 / 2 for d <= delta, else delta * (d - delta / 2)
//   binary_cross_entropy -(target log(input) + (1 - target) log(1 - input)) * weight, logarithms
//                        from -100 up; NaN for an input outside of [0, 1]
//   binary_cross_entropy_with_logits  the same of sigmoid(input), without overflow; pos_weight
//                        multiplies the part of target
//   kl_div               target * (log(target) - input), or with log_target exp(target) * (target -
//                        input); kBatchMean divides the sum by the size of input's dim 0
//   poisson_nll_loss     exp(input) - target * input, or without log_input input - target *
//                        log(input + eps); full adds log(target!) by Stirling's formula
//   margin_ranking_loss  max(0, -target * (input1 - input2) + margin)
//   Shapes:   operands broadcast (the cross entropies: input and target are of one shape) -> [], or
//             for kNone that shape.
//   Types:    floating after promotion; computed in float32 or wider.
//   Sharding: any dim; the sum of a sharded one is Partial(sum).
//   Comm:     none of its own.
//   Errors:   InvalidArgument for shapes, integers, and numbers that are no loss.
//   Source:   torch.nn.functional.mse_loss, ...
DTensor mse_loss(const DTensor& input, const DTensor& target,
                 Reduction reduction = Reduction::kMean);
DTensor l1_loss(const DTensor& input, const DTensor& target,
                Reduction reduction = Reduction::kMean);
DTensor smooth_l1_loss(const DTensor& input, const DTensor& target,
                       Reduction reduction = Reduction::kMean, double beta = 1);
DTensor huber_loss(const DTensor& input, const DTensor& target,
                   Reduction reduction = Reduction::kMean, double delta = 1);
DTensor binary_cross_entropy(const DTensor& input, const DTensor& target,
                             const DTensor& weight = {}, Reduction reduction = Reduction::kMean);
DTensor binary_cross_entropy_with_logits(const DTensor& input, const DTensor& target,
                                         const DTensor& weight = {},
                                         Reduction reduction = Reduction::kMean,
                                         const DTensor& pos_weight = {});
DTensor kl_div(const DTensor& input, const DTensor& target, Reduction reduction = Reduction::kMean,
               bool log_target = false);
DTensor poisson_nll_loss(const DTensor& input, const DTensor& target, bool log_input = true,
                         bool full = false, double eps = 1e-8,
                         Reduction reduction = Reduction::kMean);
DTensor margin_ranking_loss(const DTensor& input1, const DTensor& input2, const DTensor& target,
                            double margin = 0, Reduction reduction = Reduction::kMean);

// softmax(q k^T * scale + mask) v; scale is 1 / sqrt(d) by default.
//   Shapes:   q [b, h, s, d], k [b, g, t, d], v [b, g, t, e] -> [b, h, s, e]; g is h or 1 or, with
//             enable_gqa, divides h. Other numbers of leading dims as torch. mask: bool (true: take
//             part) or floating (added), broadcast to [b, h, s, t]. is_causal: key j counts for
//             query i if j <= i. dropout_p drops attention weights (as dropout does).
//   Types:    floating, all the same.
//   Sharding: batch, heads (whole groups; or query heads with all key heads on every rank), query
//             sequence, e. Where a mask wants a gradient, or dropout draws by layout, as matmul and
//             softmax, in s x t of memory. An inf in v may be NaN for earlier queries, by layout.
//   Comm:     none of its own; with the query sequence sharded dk and dv come as Partial(sum).
//   Errors:   InvalidArgument for shapes that do not fit, and for a mask together with is_causal.
//   Source:   torch.nn.functional.scaled_dot_product_attention
DTensor scaled_dot_product_attention(const DTensor& q, const DTensor& k, const DTensor& v,
                                     const DTensor& mask = {}, bool is_causal = false,
                                     std::optional<double> scale = {}, bool enable_gqa = false,
                                     double dropout_p = 0);

}  // namespace dtensor

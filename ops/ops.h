// Ops on DTensor: what user programs and models are written with. Same meaning as PyTorch's
// functions of the same name unless said otherwise; shapes are global. Every function throws Error
// on bad input, the same on every rank. `dim`s may be negative.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "dtensor/autograd.h"
#include "dtensor/dispatch.h"
#include "dtensor/distribute.h"
#include "dtensor/dtensor.h"

namespace dtensor {

using DimList = std::vector<int64_t>;

// Pointwise ops are declared from ops/elementwise.inc in ops/pointwise.h.

// --- matmul family (ops/matmul.cc) ---
// Matrix product over the last dim of x and the second last of w (the only one of a vector).
//   Shapes:   x [..., m, k], w [k, n] -> [..., m, n]; x [..., m, k], w [..., k, n] with broadcast
//             leading dims; a vector on either side is a row or a column that the result drops.
//   Types:    the same dtype; accumulates in float32 or wider.
//   Sharding: "... k, k n -> ... n" or "b m k, b k n -> b m n", linear in x and in w. Sharding k
//             gives Partial(sum).
//   Comm:     none of its own; inputs may be redistributed first (see Explain).
//   Errors:   InvalidArgument if inner sizes, batch dims or dtypes differ. Same on every rank.
//   Source:   torch.matmul
DTensor matmul(const DTensor& x, const DTensor& w);
// A matrix product per batch element.
//   Shapes:   x [b, m, k], w [b, k, n] -> [b, m, n]
//   Types, Sharding, Comm, Errors: as matmul.
DTensor bmm(const DTensor& x, const DTensor& w);
// x w^T + b.
//   Shapes:   x [..., k], w [n, k], b [n] or null -> [..., n]; w [k] without b -> [...]
//   Types:    the same dtype; accumulates in float32 or wider.
//   Sharding: "... k, n k, n -> ... n", linear: "x * w + b". With k sharded b must be Partial too,
//             and becomes so without communication.
//   Comm:     none of its own.
//   Errors:   InvalidArgument if sizes or dtypes differ.
//   Source:   torch.nn.functional.linear
DTensor linear(const DTensor& x, const DTensor& w, const DTensor& b = {});

// --- reductions (ops/reduce.cc); empty dims = all ---
// Sum over dims.
//   Shapes:   x without `dims`, or with size 1 there (keepdim); a 0-d x has dim 0 and -1.
//   Types:    x's; int64 for integers and bool; `dtype` converts x first.
//   Sharding: reduced dims vanish; sharding one gives Partial(sum). Linear in x.
//   Comm:     none.
//   Errors:   OutOfRange for a dim, InvalidArgument for a dim named twice.
DTensor sum(const DTensor& x, DimList dims = {}, bool keepdim = false,
            std::optional<DType> dtype = {});
// sum / number of elements, as a product with 1 / n of global sizes: right for uneven shards, and a
// pending sum stays one. Errors: as sum; InvalidArgument for an integer result.
DTensor mean(const DTensor& x, DimList dims = {}, bool keepdim = false,
             std::optional<DType> dtype = {});
// Largest element over dims; equal ones share the gradient. NaN wins.
//   Shapes:   as sum.
//   Types:    any; the result's is x's.
//   Sharding: sharding a reduced dim gives Partial(max).
//   Errors:   as sum; InvalidArgument for a reduced dim of size 0.
DTensor amax(const DTensor& x, DimList dims = {}, bool keepdim = false);
// Sums leading and size-1 dims away so that the result has `shape` (the gradient of broadcasting).
// Errors: InvalidArgument if x is no broadcast of `shape`.
DTensor sum_to(const DTensor& x, IntSpan shape);

// --- softmax (ops/softmax.cc) ---
// exp(x) / sum(exp(x)) over dim, and its logarithm.
//   Shapes:   x's; a 0-d x has dim 0 and -1.
//   Types:    floating; `dtype` converts x first.
//   Sharding: any dim but `dim`. Over a sharded `dim` it decomposes into amax, exp and sum where
//             gathering x would cost more.
//   Comm:     then two reductions of x's size without `dim`; one in backward.
//   Errors:   OutOfRange for dim, InvalidArgument for an integer dtype.
DTensor softmax(const DTensor& x, int64_t dim, std::optional<DType> dtype = {});
DTensor log_softmax(const DTensor& x, int64_t dim, std::optional<DType> dtype = {});

// --- norms (ops/norm.cc): over the last dims, given by weight_shape ---
// (x - mean) / sqrt(variance + eps) * weight + bias.
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

// --- embedding and losses (ops/embedding.cc, ops/loss.cc) ---
// Rows of a table.
//   Shapes:   ids of any shape, weight [v, d] -> [..., d]
//   Types:    ids int64 or int32; the result's is weight's.
//   Sharding: "v d, ... -> ... d", linear in weight. A rank looks up the rows it has; sharding
//             v gives Partial(sum), and the gradient comes in weight's own placement.
//   Comm:     none of its own.
//   Errors:   InvalidArgument for an id outside of [0, v), and for padding_idx >= v. The row
//             padding_idx gets no gradient; padding_idx < 0: none.
DTensor embedding(const DTensor& ids, const DTensor& weight, int64_t padding_idx = -1);
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

// --- attention (ops/attention.cc) ---
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

// --- views (ops/view.cc): no communication but for a sharded dim that is cut or tangled ---
// They share memory with x where they would on one device. Where x has to be moved first the result
// is a copy: writing to it, and reading it after x was written to, are errors (FailedPrecondition).
// Row-major with another shape, one -1 allowed. A sharded dim stays sharded where both shapes share
// a factor ("(a b) -> a b"): heads of a sharded projection stay on their ranks. A copy where the
// strides of the one-device tensor do not allow a view. Errors: InvalidArgument if the number of
// elements differs.
DTensor view(const DTensor& x, IntSpan shape);
DTensor reshape(const DTensor& x, IntSpan shape);
DTensor flatten(const DTensor& x, int64_t start_dim = 0, int64_t end_dim = -1);
DTensor unflatten(const DTensor& x, int64_t dim, IntSpan sizes);
DTensor transpose(const DTensor& x, int64_t a, int64_t b);
DTensor permute(const DTensor& x, IntSpan dims);
DTensor squeeze(const DTensor& x);                // all dims of (global) size 1
DTensor squeeze(const DTensor& x, DimList dims);  // those of size 1 among dims; none for {}
DTensor unsqueeze(const DTensor& x, int64_t dim);
DTensor expand(const DTensor& x, IntSpan shape);  // -1 keeps a size
// x[start:end:step] as Python clamps it; step > 0. A dim of which all is taken may stay sharded.
DTensor slice(const DTensor& x, int64_t dim, int64_t start, int64_t end, int64_t step = 1);
DTensor select(const DTensor& x, int64_t dim, int64_t index);
// Pieces of `size` (the last may be smaller), or of the sizes given. Gradients are joined once.
Values split(const DTensor& x, int64_t size, int64_t dim = 0);
Values split(const DTensor& x, DimList sizes, int64_t dim = 0);

// --- joining and copying (ops/index.cc) ---
// Joined along an existing dim, in the promoted dtype; tensors [0] may be among others of any
// shape, as in torch. A Partial(sum) of all of them stays one. Errors: InvalidArgument for other
// dims that differ.
DTensor cat(absl::Span<const DTensor> xs, int64_t dim = 0);
DTensor stack(absl::Span<const DTensor> xs, int64_t dim = 0);
// x itself if it has the dtype. A pending sum survives a cast to a wider floating type only.
DTensor to(const DTensor& x, DType dtype);
DTensor clone(const DTensor& x);
DTensor detach(const DTensor& x);
// x itself where the one-device tensor is row-major, else a copy that is.
DTensor contiguous(const DTensor& x);
// In x's placement; Replicate where x is Partial.
DTensor zeros_like(const DTensor& x);
DTensor ones_like(const DTensor& x);

// --- random (ops/random.cc): the numbers of one device under any placement, no communication ---
// All draw from the rank's default generator; call them on every rank alike. In place and without
// history: uniform_ and normal_ (dtensor/distribute.h) and
void random_(const DTensor& t, int64_t from, int64_t to);  // whole numbers in [from, to)
void random_(const DTensor& t);  // from 0 up to what the dtype counts in steps of one
void bernoulli_(const DTensor& t, double p = 0.5);
void bernoulli_(const DTensor& t, const DTensor& p);  // p in t's placement
void exponential_(const DTensor& t, double lambda = 1);
void cauchy_(const DTensor& t, double median = 0, double sigma = 1);
void log_normal_(const DTensor& t, double mean = 1, double std = 2);
void geometric_(const DTensor& t, double p);
DTensor randint(int64_t low, int64_t high, IntSpan shape, TensorOptions options = {DType::kI64});
DTensor rand_like(const DTensor& x);
DTensor randn_like(const DTensor& x);
DTensor randint_like(const DTensor& x, int64_t low, int64_t high);
DTensor bernoulli(const DTensor& p);  // 1 with probability p[i]
DTensor randperm(int64_t n, const TensorOptions& options = {DType::kI64});
// Indices of categories drawn with the (unnormalised) probabilities in the last dim.
//   Shapes:   p [k] or [n, k] -> [samples] or [n, samples] int64, replicated
//   Comm:     gathers p.
//   Errors:   InvalidArgument for more samples than categories without replacement, a negative or
//             not finite probability, or a row that sums to 0.
DTensor multinomial(const DTensor& p, int64_t samples, bool replacement = false);
// x with elements zeroed with probability p and the others scaled by 1 / (1 - p). The mask is that
// of one device; ranks that hold terms of a pending sum share it, so the sum may stay pending.
//   Types:    floating. p = 0 or training = false: x itself, nothing is drawn.
//   Errors:   InvalidArgument for p outside of [0, 1], and for a pending max or min.
//   Source:   torch.nn.functional.dropout on CUDA
DTensor dropout(const DTensor& x, double p = 0.5, bool training = true);
// The same, and the bool mask of what was kept.
Values dropout_with_mask(const DTensor& x, double p);
DTensor dropout_(const DTensor& x, double p = 0.5, bool training = true);
// Whole channels (dims 0 and 1) at a time.
DTensor feature_dropout(const DTensor& x, double p = 0.5, bool training = true);
// Keeps mean and variance of a self-normalising network (torch.nn.functional.alpha_dropout).
DTensor alpha_dropout(const DTensor& x, double p = 0.5, bool training = true);

// --- in place; return their first argument ---
// `other` is broadcast to self and converted to its dtype; self is never redistributed.
//   Errors: InvalidArgument if the result has another shape than self or a wider kind of dtype
//   (floating into integer), for a leaf that requires grad, and for expanded tensors.
DTensor copy_(const DTensor& self, const DTensor& src);  // broadcasts, converts dtypes
DTensor add_(const DTensor& self, const DTensor& other, Scalar alpha = 1);
DTensor add_(const DTensor& self, Scalar value);
DTensor mul_(const DTensor& self,
             const DTensor& other);  // copies self where other wants a gradient
DTensor mul_(const DTensor& self, Scalar value);

// Registers all shipped ops and kernels; called by every op function on first use.
void RegisterOps();

}  // namespace dtensor

#include "ops/pointwise.h"

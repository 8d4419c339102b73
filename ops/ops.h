// Ops on DTensor: what user programs and models are written with. Same meaning as PyTorch's
// functions of the same name unless said otherwise; shapes are global. Every function throws Error
// on bad input, the same on every rank. `dim`s may be negative.
#pragma once

#include <cstdint>
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
// torch.matmul: vectors, matrices, broadcast batches.
DTensor matmul(const DTensor& x, const DTensor& w);
DTensor bmm(const DTensor& x, const DTensor& w);
// x [..., k], w [n, k], b [n] or null -> [..., n]
DTensor linear(const DTensor& x, const DTensor& w, const DTensor& b = {});

// --- reductions (ops/reduce.cc); empty dims = all ---
DTensor sum(const DTensor& x, DimList dims = {}, bool keepdim = false,
            std::optional<DType> dtype = {});
DTensor mean(const DTensor& x, DimList dims = {}, bool keepdim = false,
             std::optional<DType> dtype = {});
DTensor amax(const DTensor& x, DimList dims = {}, bool keepdim = false);
// Sums leading and size-1 dims away so that the result has `shape` (the gradient of broadcasting).
DTensor sum_to(const DTensor& x, IntSpan shape);

// --- softmax (ops/softmax.cc) ---
DTensor softmax(const DTensor& x, int64_t dim, std::optional<DType> dtype = {});
DTensor log_softmax(const DTensor& x, int64_t dim, std::optional<DType> dtype = {});

// --- norms (ops/norm.cc): over the last dims, given by weight_shape ---
DTensor layer_norm(const DTensor& x, IntSpan normalized_shape, const DTensor& weight = {},
                   const DTensor& bias = {}, double eps = 1e-5);
// eps < 0: the machine epsilon of the computing type, as PyTorch's default.
DTensor rms_norm(const DTensor& x, IntSpan normalized_shape, const DTensor& weight = {},
                 double eps = -1);

// --- embedding and losses (ops/embedding.cc, ops/loss.cc) ---
// ids of any shape, weight [v, d] -> [..., d]. padding_idx < 0: none (its row gets no gradient).
DTensor embedding(const DTensor& ids, const DTensor& weight, int64_t padding_idx = -1);
enum class Reduction { kNone, kMean, kSum };
// logp [n, v] (or [v], or [n, v, d...]), target [n] ([], [n, d...]); weight [v] or null.
DTensor nll_loss(const DTensor& logp, const DTensor& target, const DTensor& weight = {},
                 int64_t ignore_index = -100, Reduction reduction = Reduction::kMean);
// Integer targets of class indices, or floating ones (class probabilities, shape of logits). With
// class-sharded logits no tensor of their size is communicated.
DTensor cross_entropy(const DTensor& logits, const DTensor& target, const DTensor& weight = {},
                      int64_t ignore_index = -100, Reduction reduction = Reduction::kMean,
                      double label_smoothing = 0);

// --- attention (ops/attention.cc) ---
// q [b, h, s, d], k, v [b, g, t, d] (h a multiple of g) -> [b, h, s, d]; other numbers of leading
// dims as torch. mask: bool (true = take part) or floating (added), broadcast to [b, h, s, t].
DTensor scaled_dot_product_attention(const DTensor& q, const DTensor& k, const DTensor& v,
                                     const DTensor& mask = {}, bool is_causal = false,
                                     std::optional<double> scale = {}, bool enable_gqa = false);

// --- views (ops/view.cc) ---
DTensor view(const DTensor& x, IntSpan shape);     // one -1 allowed
DTensor reshape(const DTensor& x, IntSpan shape);  // one -1 allowed
DTensor flatten(const DTensor& x, int64_t start_dim = 0, int64_t end_dim = -1);
DTensor unflatten(const DTensor& x, int64_t dim, IntSpan sizes);
DTensor transpose(const DTensor& x, int64_t a, int64_t b);
DTensor permute(const DTensor& x, IntSpan dims);
DTensor squeeze(const DTensor& x);  // all dims of size 1
DTensor squeeze(const DTensor& x, DimList dims);
DTensor unsqueeze(const DTensor& x, int64_t dim);
DTensor expand(const DTensor& x, IntSpan shape);  // -1 keeps a size
DTensor slice(const DTensor& x, int64_t dim, int64_t start, int64_t end, int64_t step = 1);
DTensor select(const DTensor& x, int64_t dim, int64_t index);
Values split(const DTensor& x, int64_t size, int64_t dim = 0);
Values split(const DTensor& x, DimList sizes, int64_t dim = 0);

// --- joining and copying (ops/index.cc) ---
DTensor cat(absl::Span<const DTensor> xs, int64_t dim = 0);
DTensor stack(absl::Span<const DTensor> xs, int64_t dim = 0);
DTensor to(const DTensor& x, DType dtype);
DTensor clone(const DTensor& x);
DTensor detach(const DTensor& x);
DTensor contiguous(const DTensor& x);  // local data made contiguous
DTensor zeros_like(const DTensor& x);
DTensor ones_like(const DTensor& x);

// --- in place; return their first argument ---
DTensor copy_(const DTensor& self, const DTensor& src);  // broadcasts, converts dtypes
DTensor add_(const DTensor& self, const DTensor& other, Scalar alpha = 1);
DTensor add_(const DTensor& self, Scalar value);
DTensor mul_(const DTensor& self, const DTensor& other);
DTensor mul_(const DTensor& self, Scalar value);

// Registers all shipped ops and kernels; called by every op function on first use.
void RegisterOps();

}  // namespace dtensor

#include "ops/pointwise.h"

// Losses of tokens over logits whose classes are sharded: nothing of the size of the logits moves.
#pragma once

#include "dtensor/distributed_tensor.h"
#include "dtensor/intercept.h"
#include "dtensor/ops/ops.h"

namespace dtensor {

// While it is open, softmax and log_softmax over a dim that is cut on any mesh dim are computed in
// parts: largest, sum of exponentials, quotient. Each part goes where that takes fewest bytes,
// which is two reductions of a number per row, but for a handful of classes per rank, and one in
// backward. cross_entropy of class indices does so always, with none in backward; with this scope
// so do class probabilities and nll_loss(log_softmax(x)). Where Recompute runs what is inside again
// the scope must be open still: keep it open over Backward.
//   Errors: of Backward, FailedPrecondition where a result was changed in place.
//   Source: torch.distributed.tensor.parallel.loss_parallel
class LossParallel {
 public:
  LossParallel();
  LossParallel(const LossParallel&) = delete;

 private:
  const InterceptCalls log_softmax_, softmax_;
};

// What label smoothing of a means, v classes, p their log-probabilities.
enum class Smoothing : uint8_t {
  kTorch,     // (1 - a) nll - a mean(p)
  kMegatron,  // (1 - s) nll - s mean(p), s = a v / (v - 1): all of a goes to the other classes
};

struct TokenLossOptions {
  DTensor weight = {};          // of classes, [v]
  int64_t ignore_index = -100;  // targets that count nothing
  Reduction reduction = Reduction::kMean;
  double label_smoothing = 0;  // a
  Smoothing smoothing = Smoothing::kTorch;
  // times the square of log(sum(exp(logits))), per token that counts: keeps logits from drifting.
  double z_loss = 0;
};
// Cross entropy per token. The mean is over all tokens that count on all ranks, however unequally
// they are spread; v and the means over classes are those of the whole vocabulary.
//   Shapes:   logits [..., v], target [...] int64 or int32 -> [], or [...] for kNone.
//   Sharding: rows and classes, over any mesh dims.
//   Comm:     two reductions of a number per row, three of them together in the second; none in
//             backward.
//   Errors:   those of cross_entropy; InvalidArgument for a negative z_loss, and for Megatron's
//             smoothing of one class or more than it has room for.
DTensor token_loss(const DTensor& logits, const DTensor& target,
                   const TokenLossOptions& options = {});

}  // namespace dtensor

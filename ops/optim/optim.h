// What optimizers compute, as ops over lists of tensors: updates in place, norms, scaling. Nothing
// is recorded: call them under NoGrad. A list is one call per tensor here; a device on which calls
// are dear may take it whole.
#pragma once

#include "absl/types/span.h"
#include "dtensor/distributed_tensor.h"
#include "dtensor/tensor/shape.h"

namespace dtensor {

using TensorList = absl::Span<const DTensor>;

struct SGDOptions {
  double lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false;
};
struct AdamWOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 1e-2;
  bool amsgrad = false, maximize = false;
};

// One step of gradient descent, p -= lr * (g + weight_decay * p), or with a momentum m of that.
//   Shapes:   lists of one length (momenta: empty without momentum); the tensors of one index have
//             one shape. steps: the number of this update of each, from 1 on; 1 sets m.
//   Types:    floating, one per index; 16-bit floats are computed in float32.
//   Sharding: "... -> ..." and flat pieces. p and m stay, g is brought to them.
//   Errors:   InvalidArgument for lists, shapes or dtypes that do not fit.
//   Source:   torch.optim.SGD
void sgd_(TensorList parameters, TensorList momenta, TensorList grads, IntSpan steps,
          const SGDOptions& options);
// One step of Adam with decoupled weight decay. max_squares: empty without amsgrad.
//   Shapes, Types, Sharding, Errors: as sgd_.
//   Source:   torch.optim.AdamW
void adamw_(TensorList parameters, TensorList averages, TensorList squares, TensorList max_squares,
            TensorList grads, IntSpan steps, const AdamWOptions& options);

// Sum of |x|^p over all elements; the largest |x| for p = infinity (0 of nothing, NaN wins).
//   Shapes:   [...] -> []
//   Types:    floating -> float64, in which it is summed.
//   Sharding: any dim, and flat pieces: Partial(sum), or Partial(max).
//   Errors:   InvalidArgument for integers and p <= 0.
DTensor power_sum(const DTensor& x, double p);
// x *= by, a float64 tensor without dims: in float32 for 16-bit floats.
//   Sharding: any dim, and flat pieces.
//   Errors:   InvalidArgument for integers, and another `by`.
void scale_(TensorList xs, const DTensor& by);

// Normal values within [a, b] of uniform ones: x becomes mean + std * sqrt(2) * erfinv(x), clamped.
//   Types:    floating; computed in float64.
//   Sharding: any dim, and flat pieces.
void truncated_normal_from_uniform_(const DTensor& x, double mean, double std, double a, double b);

}  // namespace dtensor

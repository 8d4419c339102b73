// What optimizers compute, as ops over lists of tensors: updates in place, norms, scaling. Nothing
// is recorded: call them under NoGrad. A list is one call per tensor; a device that has a kernel
// for lists, as CUDA does, runs them together (dtensor/call_list.h).
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
struct AdamOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool amsgrad = false, maximize = false;
  bool decoupled_weight_decay = false;  // as AdamW's
};
struct AdagradOptions {
  double lr = 1e-2, lr_decay = 0, weight_decay = 0, initial_accumulator_value = 0, eps = 1e-10;
  bool maximize = false;
};
struct RMSpropOptions {
  double lr = 1e-2, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
  bool centered = false, maximize = false;
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
// One step of Adam: the decay is a part of the gradient, unless the options say otherwise.
//   Shapes, Types, Sharding, Errors: as sgd_.
//   Source:   torch.optim.Adam
void adam_(TensorList parameters, TensorList averages, TensorList squares, TensorList max_squares,
           TensorList grads, IntSpan steps, const AdamOptions& options);
// One step of Adagrad; sums of squares of gradients, which begin as initial_accumulator_value.
//   Shapes, Types, Sharding, Errors: as sgd_.
//   Source:   torch.optim.Adagrad
void adagrad_(TensorList parameters, TensorList sums, TensorList grads, IntSpan steps,
              const AdagradOptions& options);
// One step of RMSprop. momenta: empty without momentum; averages: empty if not centered.
//   Shapes, Types, Sharding, Errors: as sgd_.
//   Source:   torch.optim.RMSprop
void rmsprop_(TensorList parameters, TensorList squares, TensorList momenta, TensorList averages,
              TensorList grads, const RMSpropOptions& options);

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

// The norm of all elements of all tensors together: a float64 tensor without dims, in which it is
// summed.
//   Comm:     one all-reduce of one number over the whole mesh.
//   Errors:   InvalidArgument for integers, a norm_type that is neither positive nor infinity, and
//             tensors on different meshes.
//   Source:   torch.nn.utils.get_total_norm
DTensor get_total_norm(TensorList tensors, double norm_type = 2);
// Multiplies all by min(1, max_norm / (total_norm + 1e-6)). Waits for nothing.
//   Errors:   InvalidArgument for a negative max_norm.
//   Source:   torch.nn.utils.clip_grads_with_norm_
void clip_grads_with_norm_(TensorList grads, double max_norm, const DTensor& total_norm);
// Both; the norm in the gradients' dtype. Gradients may be pending sums.
//   Source:   torch.nn.utils.clip_grad_norm_ (which takes parameters: ClipGradients)
DTensor clip_grad_norm_(TensorList grads, double max_norm, double norm_type = 2);
// Brings every element into [-clip_value, clip_value]; NaN stays.
//   Errors:   InvalidArgument for integers, and a clip_value that is negative or NaN.
//   Source:   torch.nn.utils.clip_grad_value_
void clip_grad_value_(TensorList grads, double clip_value);

// Normal values within [a, b] of uniform ones: x becomes mean + std * sqrt(2) * erfinv(x), clamped.
//   Types:    floating; computed in float64.
//   Sharding: any dim, and flat pieces.
void truncated_normal_from_uniform_(const DTensor& x, double mean, double std, double a, double b);

}  // namespace dtensor

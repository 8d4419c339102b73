// Autograd: a tape of VJPs written with ops. docs/adr/0003-gradients-carry-placements.md fixes how
// many reductions a backward makes.
#pragma once

#include <functional>

#include "absl/functional/function_ref.h"
#include "dtensor/dispatch.h"
#include "dtensor/distributed_tensor.h"
#include "dtensor/op.h"

namespace dtensor {

namespace internal {
class Node;
}

// One node's backward: reads gradients and saved values, sets a gradient per input. Errors: throws
// InvalidArgument for an input or output that the op has not, or does not save.
class VjpCall {
 public:
  bool has_grad(int output = 0) const { return grad(output).defined(); }
  // Gradient of an output, in the placement of that output (Partial becomes Replicate); or where
  // that is Replicate, perhaps Partial(sum) still, where the sum costs no more later
  // (docs/adr/0003). Ops take either.
  const DTensor& grad(int output = 0) const {
    if (static_cast<size_t>(output) >= grads_.size()) ThrowNoOutput(output);
    return grads_[output];
  }
  // Saved values (those named in Vjp's `saves`), without history.
  const DTensor& in(int i) const;
  const DTensor& out(int i = 0) const;
  // Specs of all inputs, saved or not.
  const Spec& in_spec(int i) const;
  int num_inputs() const;
  bool needs(int input) const;  // whether input i wants a gradient
  int64_t Int(absl::string_view attr) const { return Read(attr).i; }
  bool Bool(absl::string_view attr) const { return Read(attr).i != 0; }
  double Float(absl::string_view attr) const { return Read(attr).d; }
  IntSpan Ints(absl::string_view attr) const {
    const Attr& a = Read(attr);
    return IntSpan(a.ints, a.n);
  }
  const Attr& Read(absl::string_view attr) const;
  absl::Span<const Attr> attrs() const;
  // Gradient of input i: same global shape as the input, any placement.
  void set(int input, DTensor gradient);

 private:
  friend class internal::Node;
  friend class BackwardPass;
  VjpCall(const internal::Node& node, Values grads);
  [[noreturn]] void ThrowNoOutput(int output) const;
  const internal::Node& node_;
  Values grads_;
  Values results_;
};

// Brings gradients that NoGradSync left pending on these leaves (nulls are skipped) to where the
// leaves are, as the end of Backward would.
//   Comm:   one all-reduce for many leaves that are reduced over the same mesh dims; all ranks of
//           the mesh must call it, in the same order.
void SyncGradients(absl::Span<const DTensor> leaves);

// An op of the caller's own: `forward` runs without recording, `backward` maps output gradients to
// input gradients (null, or left out at the end = none). Both use ordinary ops. Inputs that want
// gradients: those that require one. Saved values are what `backward` captures; keep no output
// captured by handle of the result itself (use Detach). Captured tensors that the caller could
// change in place belong into `saves`, read after `forward`, which may put results there: backward
// refuses if one was changed. `passes_sums`: backward is linear in the gradients by ops that take
// nothing else (view and reorder, put together), so that pending sums may come. What `forward`
// throws leaves as it is; if one rank alone met it, its peers are told.
using CustomBackward = std::function<Values(const Values& grads)>;
Values CustomFunction(absl::string_view name, absl::Span<const DTensor> inputs,
                      absl::FunctionRef<Values()> forward, CustomBackward backward,
                      absl::Span<const DTensor> saves = {}, bool passes_sums = false);

// fn(inputs) without keeping the values in between: a backward that needs one runs fn again, up to
// the last that is needed, with the random numbers of the first time (default generator and all
// RngTrackers of the rank), ImplicitReplication and MeshScope. fn must be a function of its inputs,
// parameters and the generator. Calls nest: the inputs of an inner one are recomputed by the outer
// one.
//   Comm:   that of fn, again in backward as far as it runs.
//   Errors: those of fn; in backward FailedPrecondition if what fn reads was changed in place by
//           another than fn, or fn does other things than the first time.
//   Source: torch.utils.checkpoint (early stop)
Values Recompute(const std::function<Values(const Values&)>& fn, const Values& inputs);
// For what a function does once per call besides its results, though a backward may run it again:
// running statistics, counters. Runs `body` under NoGrad, but not where Recompute runs it again.
// `body` draws no random numbers. Outside of Recompute it just runs.
void RunOnce(absl::FunctionRef<void()> body);

bool GradEnabled();  // of the calling rank

}  // namespace dtensor

// Calls of an op taken over by the program: looked at, changed, or answered in dispatch's place
// (docs/guide/ops.md, "From outside").
#pragma once

#include <functional>
#include <string>

#include "absl/strings/string_view.h"
#include "dtensor/dispatch.h"
#include "dtensor/distributed_tensor.h"
#include "dtensor/op.h"

namespace dtensor::internal {

// Tells every scope (InterceptCalls::OnMade).
void NoteMade(const DTensor& result, const DTensor& of);

}  // namespace dtensor::internal
namespace dtensor {

// A call as the program made it: before inputs are checked, moved, or a plan is looked up.
struct InterceptedCall {
  const OpDef& op;
  Values inputs;  // may be changed before Proceed()
  Attrs attrs;    // as inputs; lists in them are the caller's
  const DispatchOptions& options;

  // Goes on: to interceptors further out, then to dispatch. Any number of times.
  //   Errors: those of the call.
  Values Proceed() const;
};

// While it is open, calls of `op` by this rank go to `fn`, whose results are the call's. Calls that
// gradients and other ops make count too, also those of a rehearsal. Scopes nest: inner ones see a
// call first. Ops that `fn` calls do not come back to it. Every rank of a mesh must answer alike,
// as it must call alike. Costs one comparison where no scope is open.
// Functions that are made of several ops (conv2d, nonzero) have no call of their own: name one of
// their ops.
//   Errors: of the first call of any op, Unimplemented naming the nearest if none has this name; of
//           calls that it sees, InvalidArgument if `fn` gives null or another number of results
//           than the op has; what `fn` throws leaves as an error of the call.
//   Source: veScale's hooks (_pre_patch_for_dispatch, _post_patch_for_dispatch,
//           _bypass_for_dispatch), as one.
class InterceptCalls {
 public:
  using Fn = std::function<Values(InterceptedCall& call)>;
  InterceptCalls(absl::string_view op, Fn fn);
  explicit InterceptCalls(Fn fn) : InterceptCalls("", std::move(fn)) {}  // of every op
  ~InterceptCalls();
  InterceptCalls(const InterceptCalls&) = delete;

  // Told of every result whose elements the host read out of another tensor's values (the places
  // where a mask is true), which no op shows.
  using MadeFn = std::function<void(const DTensor& result, const DTensor& of)>;
  void OnMade(MadeFn fn) { made_ = std::move(fn); }

  // --- for dispatch ---
  // The innermost from `scope` outwards that wants calls of `op`; null: none.
  static const InterceptCalls* Wanting(const InterceptCalls* scope, const OpDef& op);
  // Fills `outputs`.
  absl::Status Run(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
                   const DispatchOptions& options, absl::Span<DTensor> outputs) const;

 private:
  friend void internal::NoteMade(const DTensor& result, const DTensor& of);
  const std::string op_;
  const Fn fn_;
  MadeFn made_;
  const InterceptCalls* const outer_;
  mutable bool names_op_;  // it is known that op_ does

  bool NamesOp() const;
};

}  // namespace dtensor

// Shared by the op families in ops/*.cc: argument checks of op functions and builders of factor
// strings for ops whose rule depends on attributes.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/op.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

// The declaration of a shipped op; registers all of them at the first call. Keep the reference in a
// function-local static: the look-up takes a lock.
const OpDef& GetOp(absl::string_view name);

// Throws Error(InvalidArgument) in the form of ExplainError.
[[noreturn]] void ThrowInvalid(absl::string_view op, absl::string_view why,
                               std::initializer_list<NamedInput> inputs = {});

// Throws "[op] input NAME is null" for the first that is and may not be.
[[noreturn]] void ThrowNull(absl::string_view op, std::initializer_list<NamedInput> inputs);
inline void RequireDefined(absl::string_view op, std::initializer_list<NamedInput> inputs) {
  for (const NamedInput& in : inputs) {
    if (!in.value.defined() && !in.optional) ThrowNull(op, inputs);
  }
}
// Throws unless the (defined) inputs are the calling rank's own. Ops check it; this is for
// functions that may return an input as it is.
void RequireOwn(absl::string_view op, std::initializer_list<NamedInput> inputs);
// x as a result: without its history where nothing is recorded, as what is made of it has none.
inline DTensor Unchanged(absl::string_view op, const DTensor& x) {
  RequireOwn(op, {{"x", x}});
  return GradEnabled() || !x.requires_grad() ? x : x.Detach();
}
// x with what is pending reduced onto every rank: later steps and the backward need all of it.
inline DTensor Settled(const DTensor& x) {
  RequireOwn("settled", {{"x", x}});
  return x.spec().has_partial() ? x.Redistribute(WithoutPending(x.placements())) : x;
}
// A function of ops that runs: one call in traces, and to peers that are told of an error.
class FunctionScope {
 public:
  explicit FunctionScope(absl::string_view op)
      : trace_(RankContext::Current().trace()), named_(trace_, op) {
    ++trace_.functions;
  }
  ~FunctionScope() {
    if (--trace_.functions == 0 && !trace_.untold.ok()) Tell();
  }
  FunctionScope(const FunctionScope&) = delete;

 private:
  void Tell();
  TraceState& trace_;
  ScopedOp named_;
};
[[noreturn]] void ThrowAs(absl::string_view op, std::initializer_list<NamedInput> inputs,
                          const absl::Status& status);
// Runs the body of an op function: the inputs must be defined, and traces and uniform errors name
// it and what it was given, also where another op that it is made of fails: "[cross_entropy] in
// nll_pick: ...; inputs: ...".
template <class F>
auto AsOp(absl::string_view op, std::initializer_list<NamedInput> inputs, const F& body) {
  RequireDefined(op, inputs);
  const FunctionScope scope(op);
  try {
    return body();
  } catch (const Error& error) {
    ThrowAs(op, inputs, error.status());
  }
}

// How many classes x names, of which there are some: one more than the largest. Throws where that
// is no int64.
int64_t CountClasses(absl::string_view op, const DTensor& x);

// `dim` in [0, ndim); a 0-d tensor counts as 1-d. Throws OutOfRange "[op] ...".
int CheckedDim(absl::string_view op, int64_t dim, int ndim);
// Ascending and distinct; empty `dims` = all. For 0-d tensors the answer is empty.
Dims CheckedDims(absl::string_view op, IntSpan dims, int ndim);
// Throws unless x is floating.
void RequireFloating(absl::string_view op, const DTensor& x);
// Throws unless dtype t holds `value` (Misfit).
void RequireHolds(absl::string_view op, DType t, const Scalar& value,
                  std::initializer_list<NamedInput> inputs = {});
// For rules, which also see calls that no op function has looked at: OutOfRange unless `dim` is in
// [0, end); InvalidArgument unless `dims` ascend, too.
absl::Status RequireDim(absl::string_view attr, int64_t dim, int64_t end);
absl::Status RequireDims(absl::string_view attr, IntSpan dims, int64_t end);
// For Check: every input has the dtype of the first.
absl::Status SameDTypes(const OpCall& call);
// The floating ones of the first `inputs` are computed in one type, as bfloat16 and float32 are.
absl::Status SameComputeTypes(const OpCall& call, int inputs);

// For Check, of ops whose kernels do not broadcast: inputs have the same leading dims. `trailing`:
// per input how many dims come after those, or -1 for one without leading dims.
absl::Status SameLeading(const OpCall& call, std::initializer_list<int> trailing);

// "int64"
std::string TypeName(DType t);

// The dtype in which a mean or a loss is computed: float32 for the 16-bit floats.
DType ComputeType(DType t);

// --- factor strings -----------------------------------------------------------------------------
using DimTexts = std::vector<std::string>;  // one factor text per dim
std::string DimName(int dim);               // "d0"
DimTexts DimNames(int ndim);                // "d0", "d1", ...
std::string Whole(absl::string_view name);  // "[d0]"
// "d0 d1, d1 d2 -> d0 d2"
std::string FactorString(const std::vector<DimTexts>& inputs, const std::vector<DimTexts>& outputs);
bool Contains(IntSpan list, int64_t value);

}  // namespace dtensor

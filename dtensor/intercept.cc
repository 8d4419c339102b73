#include "dtensor/intercept.h"

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/impl.h"
#include "dtensor/names.h"

namespace dtensor {

Values InterceptedCall::Proceed() const {
  if (attrs.size() != op.attr_names().size()) {  // a plan that is kept counts no more
    Throw(InFunction(op.name(), absl::InvalidArgumentError(absl::StrCat(
                                    "takes ", op.attr_names().size(), " attributes, got ",
                                    attrs.size(), " from an interceptor"))));
  }
  absl::InlinedVector<const DTensor*, 4> pointers;
  for (const DTensor& t : inputs) pointers.push_back(&t);
  return Call(op, pointers, attrs, options);
}

namespace {

InterceptCalls::Fn Given(InterceptCalls::Fn fn) {
  if (fn) return fn;
  Throw(absl::InvalidArgumentError("[InterceptCalls] the function is null"));
}

}  // namespace

InterceptCalls::InterceptCalls(absl::string_view op, Fn fn)
    : op_(op),
      fn_(Given(std::move(fn))),
      outer_(std::exchange(internal::State().interceptor, this)),
      names_op_(op.empty() || OpRegistry::Find(op).ok()) {}

InterceptCalls::~InterceptCalls() { internal::State().interceptor = outer_; }

const InterceptCalls* InterceptCalls::Wanting(const InterceptCalls* scope, const OpDef& op) {
  while (scope != nullptr && !scope->op_.empty() && scope->op_ != op.name() && scope->NamesOp()) {
    scope = scope->outer_;
  }
  return scope;
}

void internal::NoteMade(const DTensor& result, const DTensor& of) {
  const InterceptCalls* scope = internal::State().interceptor;
  for (; scope != nullptr; scope = scope->outer_) {
    if (scope->made_) scope->made_(result, of);
  }
}

// Ops may be registered after the scope was opened: those that ship are by the first call of one.
bool InterceptCalls::NamesOp() const {
  if (!names_op_) names_op_ = OpRegistry::Find(op_).ok();
  return names_op_;
}

absl::Status InterceptCalls::Run(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
                                 const DispatchOptions& options,
                                 absl::Span<DTensor> outputs) const {
  if (!NamesOp()) {
    std::vector<std::string> all;
    for (const OpDef* known : OpRegistry::All()) all.push_back(known->name());
    return absl::UnimplementedError(absl::StrCat(
        "[InterceptCalls] no op \"", op_,
        "\" is registered; nearest: ", absl::StrJoin(NearestNames(op_, all), ", "),
        ". A function that is made of several ops has no call to intercept: name one of its ops"));
  }
  InterceptedCall call = {op, {}, Attrs(attrs.begin(), attrs.end()), options};
  for (const DTensor* t : inputs) call.inputs.push_back(*t);
  // What `fn` calls goes to the scopes around this one only.
  internal::EngineState& state = internal::State();
  const InterceptCalls* const innermost = std::exchange(state.interceptor, outer_);
  const absl::Cleanup restore = [&] { state.interceptor = innermost; };
  Values made = fn_(call);
  if (made.size() != outputs.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("an interceptor gave ", made.size(), " results, the op has ", outputs.size()));
  }
  for (size_t o = 0; o < outputs.size(); ++o) {
    if (!made[o].defined()) {
      return absl::InvalidArgumentError(absl::StrCat("an interceptor gave null as result ", o));
    }
    outputs[o] = std::move(made[o]);
  }
  return absl::OkStatus();
}

}  // namespace dtensor

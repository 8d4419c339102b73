#include "dtensor/intercept.h"

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "dtensor/impl.h"

namespace dtensor {

Values InterceptedCall::Proceed() const {
  absl::InlinedVector<const DTensor*, 4> pointers;
  for (const DTensor& t : inputs) pointers.push_back(&t);
  return Call(op, pointers, attrs, options);
}

InterceptCalls::InterceptCalls(absl::string_view op, Fn fn)
    : op_(op), fn_(std::move(fn)), outer_(std::exchange(internal::State().interceptor, this)) {}

InterceptCalls::~InterceptCalls() { internal::State().interceptor = outer_; }

const InterceptCalls* InterceptCalls::Wanting(const InterceptCalls* scope, const OpDef& op) {
  while (scope != nullptr && !scope->op_.empty() && scope->op_ != op.name()) scope = scope->outer_;
  return scope;
}

absl::Status InterceptCalls::Run(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
                                 const DispatchOptions& options,
                                 absl::Span<DTensor> outputs) const {
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

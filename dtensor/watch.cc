#include "dtensor/watch.h"

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "dtensor/impl.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

namespace {

WatchCalls::Fn Given(WatchCalls::Fn fn) {
  if (fn) return fn;
  Throw(InFunction("WatchCalls", absl::InvalidArgumentError("the function is null")));
}

}  // namespace

WatchCalls::WatchCalls(Fn fn)
    : fn_(Given(std::move(fn))),
      outer_(std::exchange(internal::State().watcher, static_cast<CallWatcher*>(this))) {}

WatchCalls::~WatchCalls() { internal::State().watcher = outer_; }

void WatchCalls::Note(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
                      const internal::DispatchEntry& entry) {
  {  // its own calls are none of the program's
    CallWatcher* const open = std::exchange(internal::State().watcher, nullptr);
    const absl::Cleanup back = [open] { internal::State().watcher = open; };
    const NoGrad no_grad;
    fn_(op, inputs, attrs);
  }
  if (outer_ != nullptr) outer_->Note(op, inputs, attrs, entry);
}

}  // namespace dtensor

#include "dtensor/watch.h"

#include <utility>

#include "dtensor/impl.h"

namespace dtensor {

WatchCalls::WatchCalls(Fn fn)
    : fn_(std::move(fn)),
      outer_(std::exchange(internal::State().watcher, static_cast<CallWatcher*>(this))) {}

WatchCalls::~WatchCalls() { internal::State().watcher = outer_; }

void WatchCalls::Note(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
                      const internal::DispatchEntry& entry) {
  fn_(op, inputs, attrs);
  if (outer_ != nullptr) outer_->Note(op, inputs, attrs, entry);
}

}  // namespace dtensor

// Op calls of the calling rank, seen before they run.
#pragma once

#include <functional>

#include "dtensor/dispatch.h"

namespace dtensor {

namespace internal {
struct DispatchEntry;

// Shown every call that has a plan, in the order of the calls. One is asked at a time
// (EngineState::watcher), so watching costs nothing where nobody does.
class CallWatcher {
 public:
  virtual ~CallWatcher() = default;
  virtual void Note(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
                    const DispatchEntry& entry) = 0;
};
}  // namespace internal

// While it is open `fn` sees every op call of the rank before it runs, with its inputs where the
// program has them; also calls that gradients and other ops make, but none of a rehearsal that is
// opened meanwhile. Scopes nest: the outer ones see a call after the inner ones. What `fn` calls
// itself, under NoGrad, nobody sees.
class WatchCalls final : internal::CallWatcher {
 public:
  using Fn = std::function<void(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs)>;
  explicit WatchCalls(Fn fn);  // Errors: throws InvalidArgument for null
  ~WatchCalls() override;
  WatchCalls(const WatchCalls&) = delete;

 private:
  void Note(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
            const internal::DispatchEntry& entry) override;
  const Fn fn_;
  CallWatcher* const outer_;
};

}  // namespace dtensor

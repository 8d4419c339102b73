// Memos: a redistribution of one value to one placement happens once. The result is kept on the
// value and is gone with it, or when the value changes.
//
// What a module owns (a parameter) lives for ever, so there a memo ends when the module call that
// made it returns; or, if a recorded node saved it, when the backward has passed that node. Only
// what all ranks do alike counts: neither handles of the caller nor when a tape is dropped. A tape
// without a backward keeps its memos until the parameter changes.
#pragma once

#include <vector>

#include "dtensor/impl.h"

namespace dtensor::internal {

// Null if there is none that fits. `record`: one with a history, if the source has one.
DTensor FindAmongMemos(const DTensorImpl& source, const SpecRef& target, bool record);
inline DTensor FindMemo(const DTensorImpl& source, const SpecRef& target, bool record) {
  return source.rare ? FindAmongMemos(source, target, record) : DTensor();
}
// Takes the place of results that are out of date.
void KeepMemo(DTensorImpl& source, const DTensor& result, bool recorded);
// Before the value is written to.
void DropMemos(DTensorImpl& source);

// A node saved `t`; a backward passed one that had.
void MemoSaved(const DTensorImpl& t);
void MemoReleased(const DTensorImpl& t);

// A module's call, from construction to destruction.
class MemoScope {
 public:
  MemoScope();
  ~MemoScope();
  MemoScope(const MemoScope&) = delete;

 private:
  friend void KeepMemo(DTensorImpl& source, const DTensor& result, bool recorded);
  EngineState& state_;
  MemoScope* const outer_;
  std::vector<DTensor> sources_;  // of memos made in this call
};

}  // namespace dtensor::internal

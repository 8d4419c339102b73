// CallTag: what a collective is for. It enters the fingerprint, so that ranks which run different
// ops are caught even where the ops' collectives are alike, and it stands in error messages and
// flight reports.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "dtensor/mesh/hash.h"
#include "dtensor/mesh/spec.h"

namespace dtensor {

using SharedText = std::shared_ptr<const std::string>;

// Pointers, valid during the call: a tag is set on every redistribution.
struct CallTag {
  const SharedText* op = nullptr;  // the op, its inputs' specs and where they go; null: no op
  const Spec* from = nullptr;      // of a redistribution; null outside one
  const Spec* to = nullptr;
  bool gradient = false;  // between meshes of other ranks: one is to come back
  uint64_t hash = 0;      // of all this; the same on every rank that does the same
};

// A tag to keep: texts are shared, not copied.
struct KeptTag {
  SharedText op, from, to;
  bool gradient = false;

  void Keep(const CallTag& tag) {
    gradient = tag.gradient;
    if (tag.op != nullptr) {
      op = *tag.op;
      return;
    }
    op = nullptr;
    from = tag.from == nullptr ? nullptr : tag.from->text();
    to = tag.from == nullptr ? nullptr : tag.to->text();
  }
  // "matmul(x = ... -> [R], w = ...)" or "... to ..."; empty if there is nothing to say.
  std::string ToString() const {
    if (op) return *op;
    if (!from) return "";
    return *from + " to " + *to + (gradient ? ", its gradient to come back" : "");
  }
};

// Sets the tag of the calling rank's collectives for a scope. Scopes nest.
class ScopedCallTag {
 public:
  // On behalf of the op that `text` names; `text` outlives the scope. `hash`: of op, specs, plan.
  ScopedCallTag(CallTag* tag, const SharedText& text, uint64_t hash)
      : tag_(tag), previous_(std::exchange(*tag, {&text, nullptr, nullptr, false, hash})) {}
  // A redistribution, inside the op whose scope is open.
  ScopedCallTag(CallTag* tag, const Spec& from, const Spec& to, bool gradient = false)
      : tag_(tag), previous_(*tag) {
    tag->from = &from;
    tag->to = &to;
    tag->gradient = gradient;
    tag->hash = HashMix(HashMix(tag->hash, from.hash()), to.hash());
    if (gradient) tag->hash = HashMix(tag->hash, 1);
  }
  ~ScopedCallTag() { *tag_ = previous_; }
  ScopedCallTag(const ScopedCallTag&) = delete;
  ScopedCallTag& operator=(const ScopedCallTag&) = delete;

 private:
  CallTag* tag_;
  CallTag previous_;
};

}  // namespace dtensor

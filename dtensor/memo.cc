#include "dtensor/memo.h"

#include <algorithm>
#include <utility>

namespace dtensor::internal {
namespace {

// Memos that die, one by one: each may be the last handle of a tensor that has memos itself.
thread_local constinit std::vector<Memo>* dying = nullptr;

void Bury(std::vector<Memo> memos) {
  for (const Memo& m : memos) {
    if (m.result.impl()->rare) m.result.impl()->rare->memo_of = nullptr;
  }
  if (dying != nullptr) {
    for (Memo& m : memos) dying->push_back(std::move(m));
    return;
  }
  dying = &memos;
  while (!memos.empty()) {
    const Memo next = std::move(memos.back());
    memos.pop_back();
  }
  dying = nullptr;
}

// Takes out the memos for which `gone` says so.
template <class F>
void Remove(Rare& rare, const F& gone) {
  const auto kept =
      std::partition(rare.memo.begin(), rare.memo.end(), [&](const Memo& m) { return !gone(m); });
  if (kept == rare.memo.end()) return;
  std::vector<Memo> removed(std::make_move_iterator(kept),
                            std::make_move_iterator(rare.memo.end()));
  rare.memo.erase(kept, rare.memo.end());
  Bury(std::move(removed));
}

bool Over(const Memo& m) { return !m.in_call && m.saved == 0; }

Memo* MemoWith(const DTensorImpl& result) {
  if (!result.rare || result.rare->memo_of == nullptr) return nullptr;
  DTensorImpl& source = *result.rare->memo_of;
  for (Memo& m : source.rare->memo) {
    if (m.result.impl() == &result) return &m;
  }
  return nullptr;
}

}  // namespace

Rare::~Rare() {
  if (!memo.empty()) Bury(std::move(memo));
}

DTensor FindAmongMemos(const DTensorImpl& source, const SpecRef& target, bool record) {
  for (const Memo& m : source.rare->memo) {
    if (m.result.spec_ref() == target && m.source_version == source.local.buffer().version() &&
        m.result_version == m.result.impl()->local.buffer().version() && (m.recorded || !record)) {
      return m.result;
    }
  }
  return {};
}

void KeepMemo(DTensorImpl& source, const DTensor& result, bool recorded) {
  EngineState& state = State();
  if (source.owned && state.memo_scope == nullptr) return;  // nothing would end it
  Rare& rare = RareOf(source);
  const uint64_t version = source.local.buffer().version();
  Remove(rare, [&](const Memo& m) {
    return m.source_version != version || m.result.spec_ref() == result.spec_ref();
  });
  rare.memo.push_back({result, version, result.impl()->local.buffer().version(), recorded, true});
  if (rare.after == &rare) rare.InsertAfter(&state.memos);
  if (!source.owned) return;
  RareOf(*result.impl()).memo_of = &source;
  ++source.refs;
  state.memo_scope->sources_.push_back(DTensor::Adopt(&source));
}

void DropMemos(DTensorImpl& source) {
  if (source.rare) Remove(*source.rare, [](const Memo&) { return true; });
}

void MemoSaved(const DTensorImpl& t) {
  if (Memo* m = MemoWith(t)) ++m->saved;
}

void MemoReleased(const DTensorImpl& t) {
  Memo* m = MemoWith(t);
  if (m == nullptr) return;
  --m->saved;
  if (Over(*m)) Remove(*t.rare->memo_of->rare, Over);
}

MemoScope::MemoScope() : state_(State()), outer_(std::exchange(state_.memo_scope, this)) {}

MemoScope::~MemoScope() {
  state_.memo_scope = outer_;
  for (const DTensor& source : sources_) {
    Rare& rare = *source.impl()->rare;
    for (Memo& m : rare.memo) m.in_call = false;
    Remove(rare, Over);
  }
}

}  // namespace dtensor::internal

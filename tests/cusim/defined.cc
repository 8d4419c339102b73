// Which kernels may read registers that nothing has written: found once, so that the others run
// without keeping account.
#include <vector>

#include "tests/cusim/ptx.h"

namespace cusim {
namespace {

using Slots = std::vector<uint64_t>;  // a bit for each slot

bool Has(const Slots& slots, int i) { return (slots[i / 64] >> (i % 64) & 1) != 0; }
void Put(Slots* slots, int i) { (*slots)[i / 64] |= 1ull << (i % 64); }

// What is surely written before instruction `at` is at most `now`; whether that is news.
bool Narrow(Slots* known, bool* seen, const Slots& now) {
  if (!*seen) {
    *seen = true;
    *known = now;
    return true;
  }
  bool changed = false;
  for (size_t i = 0; i < now.size(); ++i) {
    const uint64_t both = (*known)[i] & now[i];
    changed |= both != (*known)[i];
    (*known)[i] = both;
  }
  return changed;
}

}  // namespace

bool MayReadUndefined(const Kernel& k) {
  Slots start(static_cast<size_t>(k.slots) / 64 + 1);
  for (const auto& [slot, value] : k.constants) Put(&start, slot);
  for (const int slot : k.specials) {
    if (slot >= 0) Put(&start, slot);
  }
  std::vector<Slots> known(k.code.size());
  std::vector<bool> seen(k.code.size());
  std::vector<int> todo;
  const auto reach = [&](int at, const Slots& now) {
    bool was = seen[at];
    if (Narrow(&known[at], &was, now)) todo.push_back(at);
    seen[at] = was;
  };
  if (!k.code.empty()) reach(0, start);
  while (!todo.empty()) {
    const int at = todo.back();
    todo.pop_back();
    const Insn& in = k.code[at];
    if (in.flow == Flow::kCall) return true;  // its ways back are not followed
    Slots now = known[at];
    for (const int slot : in.s) {
      if (slot >= 0 && !Has(now, slot)) return true;
    }
    if (in.guard >= 0 && !Has(now, in.guard)) return true;
    if (in.guard < 0) {
      for (const int slot : in.d) {
        if (slot >= 0) Put(&now, slot);
      }
    }
    if (in.flow == Flow::kBranch) reach(in.target, now);
    const bool ends = in.flow == Flow::kExit || in.flow == Flow::kTrap ||
                      in.flow == Flow::kReturn || in.flow == Flow::kBranch;
    if ((!ends || in.guard >= 0) && at + 1 < static_cast<int>(k.code.size())) reach(at + 1, now);
  }
  return false;
}

}  // namespace cusim

// Shuffles, votes, matches and barriers: what lanes do together. The member mask is in.s[15].
#include "tests/cusim/ops.h"

namespace cusim {
namespace {

// A lane that took part in nothing gives no value: one that shows.
constexpr uint64_t kNoValue = 0xdeadbeef;

enum Shuffle : uint8_t { kUp0, kDown0, kButterfly, kIndex };

void ShflOp(Exec& e, const Insn& in, uint32_t mask) {
  const std::array<uint64_t, 32> values = [&] {
    std::array<uint64_t, 32> v;
    std::memcpy(v.data(), e.Reg(in.s[0]), sizeof v);
    return v;
  }();
  const uint64_t *const b = e.Reg(in.s[1]), *const c = e.Reg(in.s[2]);
  uint64_t* const p = in.d[1] >= 0 ? e.Reg(in.d[1]) : nullptr;
  EachLane(mask, [&](int l) {
    const int by = static_cast<int>(b[l] & 31), clamp = static_cast<int>(c[l] & 31);
    const int segment = static_cast<int>(c[l] >> 8 & 31);
    const int last = (l & segment) | (clamp & ~segment), first = l & segment;
    int from = l;
    bool inside = false;
    switch (in.mode) {
      case kUp0:
        from = l - by, inside = from >= last;
        break;
      case kDown0:
        from = l + by, inside = from <= last;
        break;
      case kButterfly:
        from = l ^ by, inside = from <= last;
        break;
      default:
        from = first | (by & ~segment), inside = from <= last;
        break;
    }
    if (!inside) from = l;
    const bool there = mask >> from & 1;
    if (!there && (e.warp->present >> from & 1)) {
      e.Say("wrong mask", "a shuffle reads lane " + std::to_string(from) + ", which takes no part",
            l);
    }
    e.Reg(in.d[0])[l] = there ? values[from] : kNoValue;
    if (p != nullptr) p[l] = inside;
  });
}

void VoteOp(Exec& e, const Insn& in, uint32_t mask) {
  uint32_t yes = 0;
  EachLane(mask, [&](int l) {
    if (((e.Reg(in.s[0])[l] & 1) != 0) != in.negate) yes |= 1u << l;
  });
  const uint64_t value = in.mode == 0   ? yes == mask
                         : in.mode == 1 ? yes != 0
                         : in.mode == 2 ? yes == mask || yes == 0
                                        : yes;
  EachLane(mask, [&](int l) { e.Reg(in.d[0])[l] = value; });
}

void MatchOp(Exec& e, const Insn& in, uint32_t mask) {
  const uint64_t width = SizeOf(in.type) == 8 ? ~0ull : 0xffffffffull;
  const uint64_t* const v = e.Reg(in.s[0]);
  std::array<uint32_t, 32> same{};
  EachLane(mask, [&](int l) {
    EachLane(mask, [&](int k) {
      if (((v[l] ^ v[k]) & width) == 0) same[l] |= 1u << k;
    });
  });
  EachLane(mask, [&](int l) {
    const bool all = same[l] == mask;
    e.Reg(in.d[0])[l] = in.mode == 0 ? same[l] : all ? mask : 0;
    if (in.mode == 1 && in.d[1] >= 0) e.Reg(in.d[1])[l] = all;
  });
}

void ReduxOp(Exec& e, const Insn& in, uint32_t mask) {
  const uint64_t* const v = e.Reg(in.s[0]);
  bool first = true;
  uint32_t r = 0;
  EachLane(mask, [&](int l) {
    const uint32_t x = static_cast<uint32_t>(v[l]);
    const bool sign = in.type == Type::kS32;
    const bool less = sign ? static_cast<int32_t>(x) < static_cast<int32_t>(r) : x < r;
    if (first) {
      r = x;
    } else {
      switch (in.mode) {
        case 0:
          r += x;
          break;
        case 1:
          r = less ? x : r;
          break;
        case 2:
          r = less ? r : x;
          break;
        case 3:
          r &= x;
          break;
        case 4:
          r |= x;
          break;
        default:
          r ^= x;
          break;
      }
    }
    first = false;
  });
  EachLane(mask, [&](int l) { e.Reg(in.d[0])[l] = r; });
}

void SyncWarpOp(Exec& e, const Insn&, uint32_t mask) {
  if (!e.options.races) return;
  std::vector<uint32_t> threads;
  EachLane(mask, [&](int l) { threads.push_back(static_cast<uint32_t>(e.ThreadOf(l))); });
  e.block->clocks->Meet(threads);
}

uint8_t Which(const Opcode& op, std::initializer_list<const char*> names) {
  uint8_t i = 0;
  for (const char* name : names) {
    if (op.Has(name)) return i;
    ++i;
  }
  return i;
}

OpFn FindBarrier(const Opcode& op, Insn* in) {
  if (op.Has("warp")) {
    in->flow = Flow::kWarp;
    in->s[15] = in->s[0];
    return &SyncWarpOp;
  }
  in->flow = Flow::kBarrier;
  in->mode = op.Has("arrive") ? 1 : !op.Has("red") ? 0 : op.Has("popc") ? 2 : op.Has("and") ? 3 : 4;
  if (in->mode >= 2 && in->s[2] < 0) {  // no count: the predicate comes second
    in->s[2] = in->s[1];
    in->s[1] = -1;
  }
  return nullptr;  // the machine does it all
}

}  // namespace

OpFn FindWarp(const Opcode& op, Insn* in) {
  const std::string& b = op.base;
  if (b == "bar" || b == "barrier") return FindBarrier(op, in);
  if (b == "activemask") {
    return +[](Exec& e, const Insn& i, uint32_t mask) {
      EachLane(mask, [&](int l) { e.Reg(i.d[0])[l] = mask; });
    };
  }
  if (b != "shfl" && b != "vote" && b != "match" && b != "redux") return nullptr;
  if (!op.Has("sync")) return nullptr;  // before compute capability 7
  in->flow = Flow::kWarp;
  in->s[15] = in->s[b == "shfl" ? 3 : 1];
  if (b == "shfl") {
    in->mode = Which(op, {"up", "down", "bfly", "idx"});
    return &ShflOp;
  }
  if (b == "vote") {
    in->mode = Which(op, {"all", "any", "uni", "ballot"});
    return &VoteOp;
  }
  if (b == "match") {
    in->mode = Which(op, {"any", "all"});
    return &MatchOp;
  }
  in->mode = Which(op, {"add", "min", "max", "and", "or", "xor"});
  return &ReduxOp;
}

}  // namespace cusim

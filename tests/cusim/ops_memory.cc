// Loads, stores, atomics, fences and asynchronous copies.
#include "tests/cusim/ops.h"

namespace cusim {
namespace {

Scope ScopeIn(const Opcode& op, Scope otherwise) {
  if (op.Has("cta") || op.Has("cluster")) return Scope::kBlock;
  if (op.Has("gpu") || op.Has("gl")) return Scope::kDevice;
  if (op.Has("sys")) return Scope::kSystem;
  return otherwise;
}

// What one location's releases and acquires are kept under.
uint64_t SyncKey(const Exec& e, Space space, uint64_t address) {
  return SpaceOf(space, &address) == Space::kShared ? kSharedBase + (e.block->index << 32) + address
                                                    : address;
}

ThreadClock& ClockOf(Exec& e, int lane) { return e.block->clocks->of(e.ThreadOf(lane)); }

// After a strong read: what its location has been released with.
void Acquire(Exec& e, const Insn& in, uint64_t address, int lane) {
  if (!e.options.races || e.sync.empty()) return;
  const auto seen =
      e.sync.Look(SyncKey(e, in.space, address), static_cast<uint32_t>(e.block->index), in.scope);
  ThreadClock& clock = ClockOf(e, lane);
  if (in.acquire) {
    clock.known = Joined(Joined(clock.known, seen.block), seen.device);
  } else {
    clock.seen_block = Joined(clock.seen_block, seen.block);
    clock.seen_device = Joined(clock.seen_device, seen.device);
  }
}

// Before a strong write: publishes what is known, or what was at the last fence.
void Release(Exec& e, const Insn& in, uint64_t address, int lane) {
  if (!e.options.races) return;
  ThreadClock& clock = ClockOf(e, lane);
  const uint32_t block = static_cast<uint32_t>(e.block->index);
  if (in.release) {
    const KnownPtr known = e.block->clocks->Publish(static_cast<uint32_t>(e.ThreadOf(lane)));
    e.sync.Release(SyncKey(e, in.space, address), block, in.scope, known);
  } else if (clock.fenced != nullptr) {
    e.sync.Release(SyncKey(e, in.space, address), block, std::min(in.scope, clock.fenced_scope),
                   clock.fenced);
  }
}

void FenceOp(Exec& e, const Insn& in, uint32_t mask) {
  if (!e.options.races) return;
  EachLane(mask, [&](int l) {
    ThreadClock& clock = ClockOf(e, l);
    clock.known = Joined(clock.known, clock.seen_block);
    if (in.scope != Scope::kBlock) clock.known = Joined(clock.known, clock.seen_device);
    clock.fenced = e.block->clocks->Publish(static_cast<uint32_t>(e.ThreadOf(l)));
    clock.fenced_scope = in.scope;
    if (in.scope == Scope::kSystem) clock.told_host = false;
  });
}

// The register that one lane has loaded from, or stores to, `bytes` bytes at `address`: in shared
// memory it is noted whether something has been written to it, elsewhere it has to be.
void NoteLoaded(Exec& e, const Insn& in, uint64_t address, size_t bytes, int lane, int slot) {
  if (e.warp->defined.empty() || SpaceOf(in.space, &address) != Space::kShared) return;
  const uint8_t* const written = &e.block->shared_written[address];
  if (std::find(written, written + bytes, kUnset) == written + bytes) return;
  e.warp->defined[slot] &= ~(1u << lane);
}
void NoteStored(Exec& e, const Insn& in, uint64_t address, size_t bytes, int lane, int slot) {
  if (e.warp->defined.empty() || (e.warp->defined[slot] >> lane & 1) != 0) return;
  if (SpaceOf(in.space, &address) == Space::kShared) {
    std::memset(&e.block->shared_written[address], kUnset, bytes);
  } else {
    e.Say("uninitialised read", kUnsetRegister, lane);
  }
}

template <class T>
void LoadOp(Exec& e, const Insn& in, uint32_t mask) {
  const uint64_t* const base = e.Reg(in.s[0]);
  const int bytes = static_cast<int>(sizeof(T)) * in.vec;
  e.CountRequest(in.space, base, in.offset, mask, bytes);
  EachLane(mask, [&](int l) {
    const uint64_t address = base[l] + static_cast<uint64_t>(in.offset);
    const uint8_t* const p = e.At(in, in.space, address, bytes, l, Access::kRead);
    if (in.scope != Scope::kWeak) Acquire(e, in, address, l);
    for (int i = 0; i < in.vec; ++i) {
      T v;
      std::memcpy(&v, p + i * sizeof(T), sizeof(T));
      if (in.d[i] < 0) continue;
      e.Reg(in.d[i])[l] = std::is_signed_v<T> ? static_cast<uint64_t>(static_cast<int64_t>(v))
                                              : static_cast<uint64_t>(v);
      NoteLoaded(e, in, address + i * sizeof(T), sizeof(T), l, in.d[i]);
    }
  });
}

template <class T>
void StoreOp(Exec& e, const Insn& in, uint32_t mask) {
  const uint64_t* const base = e.Reg(in.s[0]);
  const int bytes = static_cast<int>(sizeof(T)) * in.vec;
  e.CountRequest(in.space, base, in.offset, mask, bytes);
  EachLane(mask, [&](int l) {
    const uint64_t address = base[l] + static_cast<uint64_t>(in.offset);
    uint8_t* const p = e.At(in, in.space, address, bytes, l, Access::kWrite);
    if (in.scope != Scope::kWeak) Release(e, in, address, l);
    for (int i = 0; i < in.vec; ++i) {
      std::memcpy(p + i * sizeof(T), &e.Reg(in.s[1 + i])[l], sizeof(T));
      NoteStored(e, in, address + i * sizeof(T), sizeof(T), l, in.s[1 + i]);
    }
  });
}

OpFn FindAccess(const Opcode& op, Insn* in) {
  const bool load = op.base != "st";
  in->acquire = op.Has("acquire");
  in->release = op.Has("release");
  const bool strong = op.Has("volatile") || op.Has("relaxed") || in->acquire || in->release;
  if (strong) in->scope = ScopeIn(op, Scope::kSystem);
  switch (SizeOf(in->type)) {
    case 1:
      if (!load) return &StoreOp<uint8_t>;
      return in->type == Type::kS8 ? &LoadOp<int8_t> : &LoadOp<uint8_t>;
    case 2:
      if (!load) return &StoreOp<uint16_t>;
      return in->type == Type::kS16 ? &LoadOp<int16_t> : &LoadOp<uint16_t>;
    case 4:
      if (!load) return &StoreOp<uint32_t>;
      return in->type == Type::kS32 ? &LoadOp<int32_t> : &LoadOp<uint32_t>;
    case 8:
      return load ? &LoadOp<uint64_t> : &StoreOp<uint64_t>;
    default:
      return nullptr;
  }
}

// The new value of an atomic from the old one and its operands; lanes go one after the other.
template <class T, class F>
void AtomicOp(Exec& e, const Insn& in, uint32_t mask) {
  const uint64_t* const base = e.Reg(in.s[0]);
  e.CountRequest(in.space, base, in.offset, mask, sizeof(T));
  EachLane(mask, [&](int l) {
    const uint64_t address = base[l] + static_cast<uint64_t>(in.offset);
    uint8_t* const p = e.At(in, in.space, address, sizeof(T), l, Access::kUpdate);
    Acquire(e, in, address, l);
    Release(e, in, address, l);
    T old;
    std::memcpy(&old, p, sizeof(T));
    const T b = Get<T>(e.Reg(in.s[1])[l]);
    const T c = in.s[2] >= 0 ? Get<T>(e.Reg(in.s[2])[l]) : b;
    const T now = F{}(old, b, c);
    std::memcpy(p, &now, sizeof(T));
    if (in.d[0] >= 0) e.Reg(in.d[0])[l] = Put(old);
  });
}
template <class T, class F>
OpFn Atomic(F) {
  return &AtomicOp<T, F>;
}

template <class T>
struct Halves {
  uint16_t low, high;
};

template <class T>
OpFn FindArithmeticAtomic(const Opcode& op) {
  if (op.Has("add")) {
    return Atomic<T>([](T a, T b, T) { return static_cast<T>(a + b); });
  }
  if (op.Has("min")) return Atomic<T>([](T a, T b, T) { return b < a ? b : a; });
  if (op.Has("max")) return Atomic<T>([](T a, T b, T) { return a < b ? b : a; });
  if constexpr (!std::is_integral_v<T>) {
    return nullptr;
  } else {
    if (op.Has("and")) return Atomic<T>([](T a, T b, T) -> T { return a & b; });
    if (op.Has("or")) return Atomic<T>([](T a, T b, T) -> T { return a | b; });
    if (op.Has("xor")) return Atomic<T>([](T a, T b, T) -> T { return a ^ b; });
    if (op.Has("exch")) return Atomic<T>([](T, T b, T) { return b; });
    if (op.Has("cas")) return Atomic<T>([](T a, T b, T c) { return a == b ? c : a; });
    if (op.Has("inc")) return Atomic<T>([](T a, T b, T) -> T { return a >= b ? 0 : a + 1; });
    if (op.Has("dec")) {
      return Atomic<T>([](T a, T b, T) -> T { return a == 0 || a > b ? b : a - 1; });
    }
    return nullptr;
  }
}

OpFn FindAtomic(const Opcode& op, Insn* in) {
  in->atomic = true;
  in->acquire = op.Has("acquire") || op.Has("acq_rel");
  in->release = op.Has("release") || op.Has("acq_rel");
  in->scope = ScopeIn(op, Scope::kDevice);
  if (op.base == "red") in->d[0] = -1;
  const auto half = [&]<class T>(Tag<T>) -> OpFn {
    if (op.Has("add")) return Atomic<T>([](T a, T b, T) { return Add(a, b); });
    if (op.Has("min")) return Atomic<T>([](T a, T b, T) { return Extreme(a, b, false, false); });
    if (op.Has("max")) return Atomic<T>([](T a, T b, T) { return Extreme(a, b, true, false); });
    return nullptr;
  };
  const auto pair = [&]<class T>(Tag<T>) -> OpFn {
    if (!op.Has("add")) return nullptr;
    return Atomic<Halves<T>>([](Halves<T> a, Halves<T> b, Halves<T>) -> Halves<T> {
      return {Add(T{a.low}, T{b.low}).bits, Add(T{a.high}, T{b.high}).bits};
    });
  };
  switch (in->type) {
    case Type::kF16:
      return half(Tag<F16>());
    case Type::kBF16:
      return half(Tag<BF16>());
    case Type::kF16x2:
      return pair(Tag<F16>());
    case Type::kBF16x2:
      return pair(Tag<BF16>());
    case Type::kF32:
      return FindArithmeticAtomic<float>(op);
    case Type::kF64:
      return FindArithmeticAtomic<double>(op);
    default:
      break;
  }
  return ForInteger(in->type, [&]<class T>(Tag<T>) { return FindArithmeticAtomic<T>(op); });
}

// cp.async: the bytes come to shared memory when the group is waited for, not before. s: where to,
// from, bytes, and of these how many are read (the rest are zeros).
void CopyOp(Exec& e, const Insn& in, uint32_t mask) {
  const uint64_t *const to = e.Reg(in.s[0]), *const from = e.Reg(in.s[1]);
  const int bytes = static_cast<int>(e.Reg(in.s[2])[std::countr_zero(mask)]);
  const auto taken = [&](int l) {
    return in.s[3] < 0 ? bytes : static_cast<int>(std::min<uint64_t>(e.Reg(in.s[3])[l], bytes));
  };
  uint32_t readers = 0;
  EachLane(mask, [&](int l) { readers |= taken(l) > 0 ? 1u << l : 0; });
  e.CountRequest(Space::kGlobal, from, 0, readers,
                 readers == 0 ? 0 : taken(std::countr_zero(readers)));
  e.CountRequest(Space::kShared, to, in.offset, mask, bytes);
  EachLane(mask, [&](int l) {
    const int take = taken(l);
    PendingCopy copy{to[l] + static_cast<uint64_t>(in.offset), std::vector<uint8_t>(bytes), l, &in};
    if (copy.shared % bytes != 0 || from[l] % bytes != 0) {
      e.Fail(Outcome::kMisaligned, "misaligned", "cp.async", l);
    }
    if (take > 0) {
      std::memcpy(copy.bytes.data(), e.Global(in, from[l], take, l, Access::kRead),
                  static_cast<size_t>(take));
    }
    auto& groups = e.warp->copies[l];
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back(std::move(copy));
  });
}
void CommitOp(Exec& e, const Insn&, uint32_t mask) {
  EachLane(mask, [&](int l) {
    auto& groups = e.warp->copies[l];
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
  });
}
void WaitOp(Exec& e, const Insn& in, uint32_t mask) {
  EachLane(mask, [&](int l) {
    // The open group is no committed one: it stays unless all are waited for.
    e.LandCopies(l, in.mode == 1 ? 0 : static_cast<size_t>(e.Reg(in.s[0])[l]) + 1);
  });
}

void NothingOp(Exec&, const Insn&, uint32_t) {}

}  // namespace

OpFn FindMemory(const Opcode& op, Insn* in) {
  if (op.base == "ld" || op.base == "ldu" || op.base == "st") return FindAccess(op, in);
  if (op.base == "atom" || op.base == "red") return FindAtomic(op, in);
  if (op.base == "membar" || op.base == "fence") {
    in->scope = op.Has("cta") ? Scope::kBlock : ScopeIn(op, Scope::kDevice);
    return &FenceOp;
  }
  if (op.base == "cp") {
    if (!op.Has("async") || op.Has("bulk")) return nullptr;
    if (op.Has("commit_group")) return &CommitOp;
    if (op.Has("wait_group") || op.Has("wait_all")) {
      in->mode = op.Has("wait_all");
      return &WaitOp;
    }
    if (op.Has("mbarrier")) return nullptr;
    in->space = Space::kShared;
    return &CopyOp;
  }
  if (op.base == "prefetch" || op.base == "prefetchu" || op.base == "nanosleep" ||
      op.base == "discard" || op.base == "applypriority") {
    return &NothingOp;
  }
  return nullptr;
}

}  // namespace cusim

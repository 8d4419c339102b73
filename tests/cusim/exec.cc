#include "tests/cusim/exec.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <cstring>

namespace cusim {

void Counters::operator+=(const Counters& o) {
  launches += o.launches;
  blocks += o.blocks;
  warp_insns += o.warp_insns;
  lane_insns += o.lane_insns;
  for (size_t i = 0; i < by_class.size(); ++i) by_class[i] += o.by_class[i];
  global_requests += o.global_requests;
  global_bytes += o.global_bytes;
  sectors += o.sectors;
  shared_requests += o.shared_requests;
  bank_conflicts += o.bank_conflicts;
}

namespace {

constexpr int kTurn = 400;  // instructions of a warp until another may run

class Machine {
 public:
  explicit Machine(Exec* e) : e_(*e), track_(e->kernel.undefined && e->options.uninitialised) {
    const Kernel& k = e_.kernel;
    // What nothing has written is something else for each seed.
    fresh_.regs.assign(static_cast<size_t>(k.slots) * 32,
                       0xcdcdcdcdcdcdcdcd ^ e_.options.seed * 0x9e3779b97f4a7c15);
    for (const auto& [slot, value] : k.constants) {
      std::fill_n(&fresh_.regs[static_cast<size_t>(slot) * 32], 32, value);
    }
    if (!track_) return;
    fresh_.defined.assign(static_cast<size_t>(k.slots), 0);
    for (const auto& [slot, value] : k.constants) fresh_.defined[slot] = ~0u;
    for (const int slot : k.specials) {
      if (slot >= 0) fresh_.defined[slot] = ~0u;
    }
  }

  void Run() {
    const uint64_t blocks = e_.grid.count();
    // Blocks that cannot see each other run one after the other; in order they start in any case,
    // as devices do.
    size_t resident = e_.options.cooperative ? blocks : e_.kernel.talks ? 8 : 1;
    if (e_.options.seed != 0 && resident == 1) resident = 3;
    std::vector<std::unique_ptr<Block>> live;
    uint64_t next = 0;
    while (next < blocks || !live.empty()) {
      while (live.size() < resident && next < blocks) {
        if (spare_.empty()) spare_.push_back(std::make_unique<Block>());
        live.push_back(std::move(spare_.back()));
        spare_.pop_back();
        Start(live.back().get(), next++);
      }
      const size_t pick = live.size() == 1 ? 0 : e_.random() % live.size();
      e_.block = live[pick].get();
      const int turns = live.size() == 1 ? INT_MAX : 1 + static_cast<int>(e_.random() % 16);
      for (int i = 0; i < turns && e_.block->alive != 0; ++i) TurnOf(e_.block);
      if (e_.block->alive == 0) {
        spare_.push_back(std::move(live[pick]));
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(pick));
      }
    }
  }

 private:
  struct Group {  // lanes of a warp that are at one instruction
    uint32_t lanes = 0;
    int pc = 0;
    int others = INT_MAX;  // the first instruction behind that at which other lanes are
  };

  void Start(Block* b, uint64_t index) {
    const Kernel& k = e_.kernel;
    const uint32_t threads = static_cast<uint32_t>(e_.dim.count());
    b->index = index;
    b->id = {static_cast<uint32_t>(index % e_.grid.x),
             static_cast<uint32_t>(index / e_.grid.x % e_.grid.y),
             static_cast<uint32_t>(index / e_.grid.x / e_.grid.y)};
    b->alive = threads;
    b->warps.resize((threads + 31) / 32);
    const size_t shared = static_cast<size_t>(k.shared_bytes) + e_.dynamic_shared;
    b->shared.assign(shared, 0xcd);
    b->shared_written.assign(shared, 0);
    b->barriers = {};
    b->clocks = std::make_unique<BlockClocks>(static_cast<uint32_t>(index), threads);
    b->shadow = std::make_unique<ShadowMap>(threads);
    for (size_t i = 0; i < b->warps.size(); ++i) {
      Warp& w = b->warps[i];
      w.index = static_cast<int>(i);
      w.pc.fill(0);
      const uint32_t rest = threads - static_cast<uint32_t>(i) * 32;
      w.present = w.alive = rest >= 32 ? ~0u : (1u << rest) - 1;
      w.at_barrier = w.at_warp = 0;
      w.regs = fresh_.regs;
      w.defined = fresh_.defined;
      w.local.assign(static_cast<size_t>(k.local_bytes) * 32, 0xcd);
      for (auto& groups : w.copies) groups.clear();
      SetSpecials(*b, &w);
    }
    e_.out->counters.blocks++;
  }

  void SetSpecials(const Block& b, Warp* w) {
    const Dim& d = e_.dim;
    for (size_t id = 0; id < e_.kernel.specials.size(); ++id) {
      const int slot = e_.kernel.specials[id];
      if (slot < 0) continue;
      for (uint32_t lane = 0; lane < 32; ++lane) {
        const uint32_t t = static_cast<uint32_t>(w->index) * 32 + lane;
        const uint64_t values[] = {t % d.x,
                                   t / d.x % d.y,
                                   t / d.x / d.y,
                                   d.x,
                                   d.y,
                                   d.z,
                                   b.id[0],
                                   b.id[1],
                                   b.id[2],
                                   e_.grid.x,
                                   e_.grid.y,
                                   e_.grid.z,
                                   lane,
                                   static_cast<uint64_t>(w->index),
                                   b.warps.size(),
                                   b.index % 4,
                                   4,
                                   1u << lane,
                                   (1u << lane) - 1,
                                   (2ull << lane) - 1,
                                   ~((2ull << lane) - 1) & 0xffffffffu,
                                   ~((1u << lane) - 1),
                                   32,
                                   e_.dynamic_shared,
                                   e_.workspace >> 32,
                                   e_.workspace & 0xffffffff};
        static_assert(sizeof values / sizeof *values == static_cast<size_t>(Special::kCount));
        w->regs[static_cast<size_t>(slot) * 32 + lane] = values[id];
      }
    }
  }

  void TurnOf(Block* b) {
    const size_t n = b->warps.size();
    const size_t first = e_.options.seed == 0 ? last_warp_ : e_.random() % n;
    for (size_t i = 0; i < n; ++i) {
      Warp& w = b->warps[(first + i) % n];
      if ((w.alive & ~w.at_barrier & ~w.at_warp) == 0) continue;
      last_warp_ = (first + i) % n;
      e_.warp = &w;
      Turn(&w);
      if (w.spun) last_warp_ = (last_warp_ + 1) % n;  // it may wait for another
      return;
    }
    Stuck(b);
  }

  // Nobody in the block can go on.
  void Stuck(Block* b) {
    for (Warp& w : b->warps) {
      const uint32_t waiting = w.alive & (w.at_barrier | w.at_warp);
      if (waiting == 0) continue;
      const int lane = std::countr_zero(w.at_warp != 0 ? w.at_warp : waiting);
      e_.warp = &w;
      e_.at = &e_.kernel.code[w.pc[lane] - (w.at_barrier >> lane & 1)];
      e_.Fail(
          Outcome::kTimeout, "deadlock",
          w.at_warp ? "lanes that the mask names never come" : "threads never come to a barrier",
          lane);
    }
  }

  Group Choose(Warp* w, bool any) {
    const uint32_t ready = w->alive & ~w->at_barrier & ~w->at_warp;
    Group g;
    int skip = any ? static_cast<int>(e_.random() % std::popcount(ready)) : -1;
    int pc = INT_MAX;
    for (uint32_t left = ready; left != 0; left &= left - 1) {
      const int at = w->pc[std::countr_zero(left)];
      if (any ? skip-- == 0 : at < pc) pc = at;
    }
    g.pc = pc;
    for (uint32_t left = ready; left != 0; left &= left - 1) {
      const int lane = std::countr_zero(left);
      if (w->pc[lane] == pc) {
        g.lanes |= 1u << lane;
      } else {
        g.others = any ? 0 : std::min(g.others, w->pc[lane]);
      }
    }
    return g;
  }

  void SetPc(Warp* w, uint32_t lanes, int pc) {
    for (; lanes != 0; lanes &= lanes - 1) w->pc[std::countr_zero(lanes)] = pc;
  }

  // Lanes run together from where the hindmost are until they meet others, part or have to wait.
  // Where that took a whole turn (hindmost lanes may wait for others in a loop), others go next.
  void Turn(Warp* w) {
    Group g = Choose(w, w->spun);
    w->spun = false;
    if (g.others == 0) g.others = INT_MAX;
    const Insn* const code = e_.kernel.code.data();
    Counters& c = e_.out->counters;
    int done = 0;
    for (; done < kTurn && g.pc < g.others; ++done) {
      const Insn& in = code[g.pc];
      uint32_t run = g.lanes;
      if (in.guard >= 0) {
        const uint64_t* const p = e_.Reg(in.guard);
        uint32_t on = 0;
        for (int l = 0; l < 32; ++l) on |= static_cast<uint32_t>(p[l] & 1) << l;
        run &= in.guard_not ? ~on : on;
      }
      ++c.warp_insns;
      c.lane_insns += static_cast<uint64_t>(std::popcount(run));
      c.by_class[in.mode_class]++;
      e_.at = &in;
      e_.mask = g.lanes;
      if (track_) Track(w, in, run, g.lanes);
      if (in.flow == Flow::kNext) {
        if (run != 0) in.run(e_, in, run);
        ++g.pc;
        continue;
      }
      if (in.flow == Flow::kBranch && (run == g.lanes || run == 0)) {
        g.pc = run == 0 ? g.pc + 1 : in.target;
        continue;
      }
      SetPc(w, g.lanes, g.pc);
      if (run != g.lanes) SetPc(w, g.lanes & ~run, g.pc + 1);
      if (run != 0) Other(w, in, run, g.pc);
      return Count();
    }
    SetPc(w, g.lanes, g.pc);
    w->spun = done == kTurn;
    Count();
  }

  uint32_t Ones(int slot) {  // lanes whose predicate is true
    uint32_t on = 0;
    for (int l = 0; l < 32; ++l) on |= static_cast<uint32_t>(e_.Reg(slot)[l] & 1) << l;
    return on;
  }

  // Lanes whose result comes of registers that something has written.
  uint32_t Defined(const Warp& w, const Insn& in) {
    uint32_t all = ~0u;
    for (const int slot : in.s) {
      if (slot >= 0) all &= w.defined[slot];
    }
    if (in.undefined == Undefined::kSelects) {
      const uint32_t first = in.negate ? ~Ones(in.s[2]) : Ones(in.s[2]);
      return w.defined[in.s[2]] & ((first & w.defined[in.s[0]]) | (~first & w.defined[in.s[1]]));
    }
    if (in.undefined == Undefined::kAnd || in.undefined == Undefined::kOr) {
      for (const int slot : {in.s[0], in.s[1]}) {
        const uint32_t ones = Ones(slot);
        all |= w.defined[slot] & (in.undefined == Undefined::kOr ? ones : ~ones);
      }
    }
    return in.undefined == Undefined::kClears ? ~0u : all;
  }

  // Notes which of the lanes `run` write something, and says where what nothing has written
  // addresses memory, goes there or, as a guard of all `lanes`, decides what runs.
  void Track(Warp* w, const Insn& in, uint32_t run, uint32_t lanes) {
    uint32_t missing = in.guard >= 0 ? lanes & ~w->defined[in.guard] : 0;
    uint32_t whole = run & Defined(*w, in);
    switch (in.undefined) {
      case Undefined::kReports:
        missing |= run & ~whole;
        whole = run;
        break;
      case Undefined::kLoads:  // the operation says of what it reads and writes
      case Undefined::kStores:
        missing |= run & ~w->defined[in.s[0]];
        whole = run;
        break;
      default:
        break;
    }
    if (missing != 0) {
      e_.Say("uninitialised read", kUnsetRegister, std::countr_zero(missing));
    }
    for (const int slot : in.d) {
      if (slot >= 0) w->defined[slot] = (w->defined[slot] & ~run) | whole;
    }
  }

  void Count() {
    if (e_.out->counters.warp_insns <= e_.options.limit) return;
    e_.Fail(Outcome::kTimeout, "hang",
            "more than " + std::to_string(e_.options.limit) + " warp instructions",
            std::countr_zero(e_.mask));
  }

  // What is no plain instruction, for the lanes `run`, which are at `pc`.
  void Other(Warp* w, const Insn& in, uint32_t run, int pc) {
    switch (in.flow) {
      case Flow::kBranch:
        return SetPc(w, run, in.target);
      case Flow::kCall:
        for (int l = 0; l < 32; ++l) {
          if (run >> l & 1) e_.Reg(in.d[0])[l] = static_cast<uint64_t>(pc + 1);
        }
        return SetPc(w, run, in.target);
      case Flow::kReturn:
        for (int l = 0; l < 32; ++l) {
          if (run >> l & 1) w->pc[l] = static_cast<int>(e_.Reg(in.s[0])[l]);
        }
        return;
      case Flow::kTrap:
        e_.Fail(Outcome::kAssert, "trap", "an assertion or trap", std::countr_zero(run));
      case Flow::kExit:
        return Exit(w, run);
      case Flow::kBarrier:
        return Arrive(w, in, run, pc);
      default:
        break;
    }
    w->at_warp |= run;
    WarpMeets(w, in, pc);
  }

  void Exit(Warp* w, uint32_t run) {
    for (uint32_t left = run; left != 0; left &= left - 1) {
      e_.LandCopies(std::countr_zero(left), 0);
    }
    w->alive &= ~run;
    e_.block->alive -= static_cast<uint32_t>(std::popcount(run));
    for (int id = 0; id < 16; ++id) Complete(id);
    // Lanes that waited for these wait in vain: as on devices they go on.
    for (uint32_t left = w->at_warp & w->alive; left != 0; left = w->at_warp & w->alive & left) {
      const int lane = std::countr_zero(left);
      left &= left - 1;
      const int pc = w->pc[lane];
      e_.at = &e_.kernel.code[pc];
      WarpMeets(w, e_.kernel.code[pc], pc);
    }
  }

  // Runs an instruction of the whole warp for those lanes that wait at it and whose mask has come.
  void WarpMeets(Warp* w, const Insn& in, int pc) {
    uint32_t here = 0;
    for (uint32_t left = w->at_warp; left != 0; left &= left - 1) {
      const int lane = std::countr_zero(left);
      if (w->pc[lane] == pc) here |= 1u << lane;
    }
    while (here != 0) {
      const int lane = std::countr_zero(here);
      const uint32_t named = MemberMask(*w, in, lane);
      uint32_t same = 0;
      for (uint32_t left = here; left != 0; left &= left - 1) {
        const int l = std::countr_zero(left);
        if (MemberMask(*w, in, l) == named) same |= 1u << l;
      }
      here &= ~same;
      if ((named & w->alive & ~same) != 0) continue;  // some are still to come
      if ((named >> lane & 1) == 0) {
        e_.Say("wrong mask", "a lane is not in its own mask", lane);
      } else if (in.s[15] >= 0 && (named & w->present & ~w->alive) != 0) {
        e_.Say("wrong mask", "the mask names a lane that has exited", lane);
      }
      const uint32_t before = e_.mask;
      e_.mask = same;
      in.run(e_, in, same);
      e_.mask = before;
      w->at_warp &= ~same;
      SetPc(w, same, pc + 1);
    }
  }

  uint32_t MemberMask(const Warp& w, const Insn& in, int lane) {
    if (in.s[15] < 0) return w.alive;  // .aligned: all
    const uint32_t mask = static_cast<uint32_t>(e_.Reg(in.s[15])[lane]);
    return mask & w.present;
  }

  void Arrive(Warp* w, const Insn& in, uint32_t run, int pc) {
    for (uint32_t left = run; left != 0; left &= left - 1) {
      const int lane = std::countr_zero(left);
      const uint64_t id = e_.Reg(in.s[0])[lane];
      if (id >= 16) e_.Fail(Outcome::kInvalid, "wrong barrier", "barrier beyond the 16", lane);
      Barrier& b = e_.block->barriers[id];
      const int count = in.s[1] >= 0 ? static_cast<int>(e_.Reg(in.s[1])[lane]) : 0;
      if (!b.arrived.empty() && b.count != count) {
        e_.Say("divergent barrier", "threads come to one barrier with different counts", lane);
      }
      if (!b.arrived.empty() && b.pc != pc && count == 0) {
        e_.Say("divergent barrier", "other threads of the block wait at another barrier", lane);
      }
      b.pc = pc;
      b.count = count;
      b.insn = &in;
      const bool waits = in.mode != 1;
      b.arrived.push_back({w->index, lane, waits});
      if (in.mode >= 2) {
        const bool p = (e_.Reg(in.s[2])[lane] & 1) != in.negate;
        b.popc += p;
        b.any |= p;
        b.all &= p;
      }
      w->pc[lane] = pc + 1;
      if (waits) {
        w->at_barrier |= 1u << lane;
        w->barrier[lane] = static_cast<int>(id);
      }
      if (!waits) b.known = Joined(b.known, e_.block->clocks->Publish(e_.ThreadOf(lane)));
    }
    Complete(static_cast<int>(e_.Reg(in.s[0])[std::countr_zero(run)]));
  }

  void Complete(int id) {
    Block& block = *e_.block;
    Barrier& b = block.barriers[id];
    if (b.arrived.empty()) return;
    uint64_t here = b.arrived.size();
    if (b.count != 0) {  // in warps: a ragged one counts as 32
      std::vector<uint32_t> of(block.warps.size());
      for (const auto& a : b.arrived) of[a.warp] |= 1u << a.lane;
      for (size_t i = 0; i < of.size(); ++i) {
        if (of[i] == block.warps[i].present) here += 32 - std::popcount(of[i]);
      }
    }
    if (here < (b.count != 0 ? static_cast<uint64_t>(b.count) : block.alive)) return;
    const Barrier done = std::move(b);
    b = {};
    std::vector<uint32_t> threads;
    for (const auto& a : done.arrived) {
      if (!a.waits) continue;
      const uint32_t thread = static_cast<uint32_t>(a.warp * 32 + a.lane);
      threads.push_back(thread);
      Warp& w = block.warps[a.warp];
      w.at_barrier &= ~(1u << a.lane);
      ThreadClock& clock = block.clocks->of(thread);
      clock.known = Joined(clock.known, done.known);
      if (done.insn->mode >= 2) {
        const uint64_t value = done.insn->mode == 2   ? done.popc
                               : done.insn->mode == 3 ? done.all
                                                      : done.any;
        w.regs[static_cast<size_t>(done.insn->d[0]) * 32 + a.lane] = value;
      }
    }
    if (e_.options.races && !threads.empty()) block.clocks->Meet(threads);
  }

  Exec& e_;
  const bool track_;  // which registers have been written
  Warp fresh_;        // as warps start
  std::vector<std::unique_ptr<Block>> spare_;
  size_t last_warp_ = 0;
};

}  // namespace

Outcome Launch(DeviceMemory& memory, const Kernel& kernel, Dim grid, Dim block,
               uint64_t dynamic_shared, const void* params, const Options& options,
               const std::map<uint64_t, uint64_t>* host_memory) {
  Outcome out;
  out.counters.launches = 1;
  if (!kernel.error.empty()) {
    out.kind = Outcome::kInvalid;
    out.reports.push_back({"unknown instruction", kernel.error});
    return out;
  }
  if (kernel.max_threads != 0 && block.count() > static_cast<uint64_t>(kernel.max_threads)) {
    out.kind = Outcome::kInvalid;
    out.reports.push_back({"launch bounds", "kernel " + kernel.name + " takes at most " +
                                                std::to_string(kernel.max_threads) + " threads"});
    return out;
  }
  Exec e{memory,
         kernel,
         grid,
         block,
         static_cast<const uint8_t*>(params),
         options,
         host_memory,
         &out,
         std::mt19937_64(options.seed),
         ShadowMap(static_cast<uint32_t>(block.count())),
         {},
         dynamic_shared};
  if (options.cooperative) {
    e.workspace = memory.Allocate(64, kAllDevices);  // the driver's: no device's room
    if (e.workspace == 0) {
      out.kind = Outcome::kInvalid;
      out.reports.push_back({"no room", "for the barrier of the grid of " + kernel.name});
      return out;
    }
    std::memset(memory.Host(e.workspace), 0, 64);
    memory.MarkWritten(e.workspace, 64);
  }
  try {
    Machine(&e).Run();
  } catch (Fault& fault) {
    out.kind = fault.kind;
    out.reports.push_back(std::move(fault.report));
  }
  if (e.workspace != 0) memory.Free(e.workspace);
  return out;
}

}  // namespace cusim

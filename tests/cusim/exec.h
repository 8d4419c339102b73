// Runs kernels: 32 lanes at a time, warps and blocks in an order that a seed picks, every access
// checked.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/cusim/memory.h"
#include "tests/cusim/ptx.h"
#include "tests/cusim/race.h"
#include "tests/cusim/ranges.h"

namespace cusim {

struct Dim {
  uint32_t x = 1, y = 1, z = 1;
  uint64_t count() const { return uint64_t{x} * y * z; }
};

// What was found: `kind` is one of a fixed few ("out of bounds", "global race"), `text` says where.
struct Report {
  std::string kind, text;
};

struct Options {
  uint64_t seed = 0;  // of the schedule
  bool races = true;  // look for them
  bool uninitialised = true;
  uint64_t limit = 4'000'000'000;  // warp instructions of a launch, beyond which it hangs
  bool cooperative = false;        // all blocks at once
  uint64_t devices = ~0ull;        // whose memory it reaches: a bit for each
};

enum class Class : uint8_t { kArithmetic, kMemory, kControl, kWarp, kMatrix, kBarrier, kCount };
struct Counters {
  uint64_t launches = 0, blocks = 0;
  uint64_t warp_insns = 0, lane_insns = 0;
  std::array<uint64_t, static_cast<int>(Class::kCount)> by_class{};  // warp instructions
  uint64_t global_requests = 0, global_bytes = 0;                    // bytes asked for by lanes
  uint64_t sectors = 0;                              // of 32 bytes, touched by a request of a warp
  uint64_t shared_requests = 0, bank_conflicts = 0;  // passes beyond the first
  void operator+=(const Counters& other);
};

// Which bytes of a page of 512 bytes a launch touched: a bit for each.
struct Touched {
  PageBits read{}, written{};
};
struct Outcome {
  enum Kind { kFine, kIllegalAddress, kMisaligned, kTimeout, kAssert, kInvalid } kind = kFine;
  std::vector<Report> reports;
  Counters counters;
  std::map<uint64_t, Touched> touched;
};

// Runs a kernel; `params` are its parameters' bytes, `host_memory` the pinned blocks (address to
// bytes) that it may reach beside device memory.
Outcome Launch(DeviceMemory& memory, const Kernel& kernel, Dim grid, Dim block,
               uint64_t dynamic_shared, const void* params, const Options& options,
               const std::map<uint64_t, uint64_t>* host_memory = nullptr);

// ---- What operations see. ----

struct Fault {  // ends the launch
  Outcome::Kind kind;
  Report report;
};

struct PendingCopy {  // cp.async: the bytes, until the group that it is of is waited for
  uint64_t shared;
  std::vector<uint8_t> bytes;
  int lane;
  const Insn* insn;
};

struct Warp {
  int index = 0;
  std::vector<uint64_t> regs;     // [slot][lane]
  std::vector<uint32_t> defined;  // by slot: lanes for which something has been written to it
  std::array<int, 32> pc{};
  uint32_t present = 0;  // lanes that exist
  uint32_t alive = 0, at_barrier = 0, at_warp = 0;
  bool spun = false;              // its last turn ended without a stop
  std::array<int, 32> barrier{};  // which, of lanes at one
  std::vector<uint8_t> local;
  std::array<std::vector<std::vector<PendingCopy>>, 32> copies;  // committed groups, then the open
};

struct Barrier {
  struct Arrival {
    int warp, lane;
    bool waits;
  };
  std::vector<Arrival> arrived;
  int count = 0;  // threads awaited; 0: all that live
  const Insn* insn = nullptr;
  int pc = -1;
  uint32_t popc = 0, any = 0, all = 1;  // of a reduction
  KnownPtr known;                       // of threads that came and went on
};

struct Block {
  uint64_t index = 0;
  std::array<uint32_t, 3> id{};
  std::vector<Warp> warps;
  std::vector<uint8_t> shared, shared_written;  // the latter: a Written for each byte
  std::array<Barrier, 16> barriers;
  std::unique_ptr<BlockClocks> clocks;
  std::unique_ptr<ShadowMap> shadow;  // of shared memory
  uint32_t alive = 0;                 // threads
};

enum class Access : uint8_t { kRead, kWrite, kUpdate };
// What a byte of shared memory holds; kUnset: of a register that nothing has written.
enum Written : uint8_t { kNever, kUnset, kWritten };

struct Exec {
  DeviceMemory& memory;
  const Kernel& kernel;
  Dim grid, dim;
  const uint8_t* params;
  Options options;
  const std::map<uint64_t, uint64_t>* host_memory;
  Outcome* out;
  std::mt19937_64 random;
  ShadowMap shadow;  // of global memory
  SyncMap sync;      // what releases have published, by address
  uint64_t dynamic_shared = 0;
  uint64_t workspace = 0;  // of a cooperative launch: the grid's barrier
  // Where it is.
  Block* block = nullptr;
  Warp* warp = nullptr;
  const Insn* at = nullptr;
  uint32_t mask = 0;  // lanes of the step
  std::map<std::string, int> said{};
  // The allocation or pinned block of the last access, and where the simulator sees it.
  uint64_t live_at = 0, live_bytes = 0;
  uint8_t* live_view = nullptr;
  bool live_pinned = false;
  uint64_t page_at = ~0ull;
  Touched* page = nullptr;

  uint64_t* Reg(int slot) { return &warp->regs[static_cast<size_t>(slot) * 32]; }
  int ThreadOf(int lane) const { return warp->index * 32 + lane; }
  uint32_t GlobalThread(int lane) const {
    return static_cast<uint32_t>(block->index * dim.count() + ThreadOf(lane));
  }
  // "kernel f (file.cu:12), block (0,0,0), thread (3,0,0): st.global.f32 [%rd1], %f2;"
  std::string Where(int lane) const;
  void Say(const char* kind, const std::string& what, int lane);
  [[noreturn]] void Fail(Outcome::Kind fault, const char* kind, const std::string& what, int lane);

  // The simulator's bytes of one lane's access, checked and noted. `space` as in the instruction.
  uint8_t* At(const Insn& in, Space space, uint64_t address, int bytes, int lane, Access access);
  // The same without the checks of order, for what is not the lane's own access.
  uint8_t* Global(const Insn& in, uint64_t address, int bytes, int lane, Access access);
  void FindBlock(uint64_t address, int bytes, int lane, Access access);
  uint8_t* Shared(const Insn& in, uint64_t address, int bytes, int lane, Access access);
  uint8_t* Local(uint64_t address, int bytes, int lane, Access access);
  // Counts a warp's request to global or shared memory, at base[lane] + offset.
  void CountRequest(Space space, const uint64_t* base, int64_t offset, uint32_t lanes, int bytes);
  void LandCopies(int lane, size_t keep);
};

inline constexpr const char* kUnsetRegister = "a register that nothing has written";

// Where a generic address points.
inline Space SpaceOf(Space space, uint64_t* address) {
  if (space != Space::kGeneric) return space;
  if (*address >= kLocalBase) {
    *address -= kLocalBase;
    return Space::kLocal;
  }
  if (*address >= kSharedBase) {
    *address -= kSharedBase;
    return Space::kShared;
  }
  return Space::kGlobal;
}

}  // namespace cusim

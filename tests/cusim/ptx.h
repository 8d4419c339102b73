// PTX, the assembly that nvcc emits, read into a form that the interpreter of exec.h runs.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace cusim {

enum class Type : uint8_t {
  kNone,
  kPred,
  kB8,
  kB16,
  kB32,
  kB64,
  kB128,
  kU8,
  kU16,
  kU32,
  kU64,
  kS8,
  kS16,
  kS32,
  kS64,
  kF16,
  kBF16,
  kTF32,
  kF32,
  kF64,
  kF16x2,
  kBF16x2
};
int SizeOf(Type type);  // bytes
bool IsSigned(Type type);
bool IsFloat(Type type);  // of one value: neither integers nor pairs
// kNone where `name` ("u32") is no type.
Type TypeNamed(std::string_view name);

enum class Space : uint8_t { kGeneric, kGlobal, kShared, kLocal, kParam };
// Generic addresses of shared and local memory: these plus the offset, addresses that no host has.
inline constexpr uint64_t kSharedBase = 1ull << 56, kLocalBase = 2ull << 56;

// What an instruction does beside its operation.
enum class Flow : uint8_t {
  kNext,
  kBranch,
  kCall,    // to `target`, coming back to the next instruction
  kReturn,  // from a function; from a kernel the lane is done
  kExit,
  kTrap,
  kBarrier,  // waits for the block
  kWarp,     // waits for the lanes that its mask names
};

// How far an access, an atomic or a fence is seen; weak accesses are seen where something orders.
enum class Scope : uint8_t { kWeak, kBlock, kDevice, kSystem };

// Compilers compute with registers that nothing has written, as long as nothing comes of it: what
// is wrong is to address memory by them, to store them or to branch on them. In shared memory they
// may lie until they are read again: what is read is a register that nothing has written.
enum class Undefined : uint8_t {
  kPasses,   // a result is what its operands are
  kSelects,  // selp: as the operand that is taken
  kAnd,      // of predicates: an operand that decides is enough
  kOr,
  kReports,  // memory
  kLoads,    // as kReports, but the result is what its bytes are
  kStores,   // as kReports, but what goes to shared memory is noted there
  kClears,   // results of several lanes: not followed
};

struct Exec;
struct Insn;
// Runs an instruction for the lanes of `mask`.
using OpFn = void (*)(Exec& e, const Insn& in, uint32_t mask);

struct Insn {
  OpFn run = nullptr;
  OpFn inner = nullptr;  // what `run` wraps, for rounding modes other than to nearest
  Flow flow = Flow::kNext;
  Type type = Type::kNone, from = Type::kNone;  // the first and second type of the opcode
  Space space = Space::kGeneric;
  Scope scope = Scope::kWeak;
  uint8_t vec = 1;                   // elements of a vector access, or of a packed mov
  uint8_t mode = 0;                  // the operation's own
  uint8_t compare = 0, combine = 0;  // of setp
  uint8_t rounding = 0;              // a Rounding
  uint8_t mode_class = 0;            // a Class, for the counters
  bool round_to_integer = false, saturate = false, relu = false, flush = false;
  bool acquire = false, release = false, atomic = false, writes = false, negate = false;
  bool aligned = false;  // a barrier that whole warps reach together
  bool guard_not = false;
  Undefined undefined = Undefined::kPasses;  // what it does with registers that nothing wrote
  int guard = -1;                            // the slot of the predicate
  std::array<int, 8> d;                      // slots written
  std::array<int, 16> s;                     // slots read
  int64_t offset = 0;                        // of an address
  int target = -1;                           // of a branch or call
  uint32_t line = 0, file = 0;               // of the source
  std::shared_ptr<const std::string> text;
  Insn() { d.fill(-1), s.fill(-1); }
};
enum Rounding : uint8_t { kNearest, kZero, kDown, kUp, kNearestAway };

// Registers that the machine sets; their slots are filled when a warp starts.
enum class Special : uint8_t {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaX,
  kCtaY,
  kCtaZ,
  kNctaX,
  kNctaY,
  kNctaZ,
  kLane,
  kWarp,
  kNwarp,
  kSmid,
  kNsmid,
  kLaneEq,
  kLaneLt,
  kLaneLe,
  kLaneGt,
  kLaneGe,
  kWarpSize,
  kDynamicShared,
  kGridHigh,  // where cooperative groups keep a grid's barrier
  kGridLow,
  kCount
};

struct Param {
  std::string name;
  int offset = 0, bytes = 0;
};
struct Kernel {
  std::string name;
  std::string error;  // why it cannot be run: an instruction that the interpreter does not know
  std::vector<Param> params;
  int param_bytes = 0;
  int slots = 0;           // registers, constants and special registers of a warp
  int shared_bytes = 0;    // without those of the launch, which follow
  int local_bytes = 0;     // of one thread
  int max_threads = 0;     // .maxntid, 0: as many as the device takes
  bool undefined = false;  // some way through it reads a register that nothing wrote before
  bool talks = false;      // blocks may wait for each other: atomics, fences, volatile accesses
  std::vector<Insn> code;
  std::vector<std::pair<int, uint64_t>> constants;  // slot, value
  std::array<int, static_cast<int>(Special::kCount)> specials;
  int carry = -1;  // the slot of the condition code, where add.cc and its kin need one
  std::shared_ptr<const std::vector<std::string>> files;  // by number
};

struct Variable {  // of the module: .global or .const
  std::string name;
  size_t bytes = 0, align = 1;
  std::vector<uint8_t> init;  // empty: zeros
};
// Finds memory for a variable and copies its initial bytes there; gives its address.
using Place = std::function<uint64_t(const Variable&)>;

class Module {
 public:
  // `text` outlives it. Text that is no PTX throws std::runtime_error, which names the line.
  Module(std::string_view text, const Place& place);
  ~Module();
  const std::map<std::string, std::pair<uint64_t, size_t>>& variables() const;  // address, bytes
  std::vector<std::string> kernels() const;                                     // their names
  // Reads a kernel, the first time that it is asked for; nullptr where there is none of that name.
  // One with an instruction that is not known has its `error` set; one that is no PTX throws as
  // above. Not for two threads at once.
  const Kernel* Read(const std::string& name);

 private:
  class Parser;
  std::unique_ptr<Parser> parser_;
};

// An opcode's parts: "ld.global.v2.u32" has the base "ld" and three modifiers.
struct Opcode {
  explicit Opcode(std::string_view text);
  bool Has(std::string_view modifier) const;
  std::string base;
  std::vector<std::string> modifiers;
};

// Whether an instruction may read a register that nothing has written: `undefined` of the kernel.
bool MayReadUndefined(const Kernel& kernel);

// What runs the opcode: sets `in->run` and what else depends on it. False where it is not known.
bool Decode(const Opcode& op, Insn* in);

}  // namespace cusim

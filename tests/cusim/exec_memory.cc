// Where an access goes, and what is wrong with it.
#include <cstdio>
#include <cstring>

#include "tests/cusim/exec.h"

namespace cusim {
namespace {

std::string Hex(uint64_t address) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
  return text;
}

const char* Verb(Access access) {
  return access == Access::kRead ? "read" : access == Access::kWrite ? "write" : "atomic";
}

}  // namespace

std::string Exec::Where(int lane) const {
  const uint32_t t = static_cast<uint32_t>(ThreadOf(lane));
  char text[160];
  std::snprintf(text, sizeof text, ", block (%u,%u,%u), thread (%u,%u,%u): ", block->id[0],
                block->id[1], block->id[2], t % dim.x, t / dim.x % dim.y, t / dim.x / dim.y);
  std::string file = "line ";
  if (kernel.files != nullptr && at->file < kernel.files->size() && at->file > 0) {
    const std::string& path = (*kernel.files)[at->file];
    file = path.substr(path.rfind('/') + 1) + ":";
  }
  return "kernel " + kernel.name + " (" + file + std::to_string(at->line) + ")" + text + *at->text;
}

void Exec::Say(const char* kind, const std::string& what, int lane) {
  // One report per kind and source line, or instruction where lines are not known.
  const std::string place = at->line != 0
                                ? std::to_string(at->file) + ":" + std::to_string(at->line)
                                : std::to_string(at - kernel.code.data());
  if (said[kind + place]++ > 0) return;
  out->reports.push_back({kind, what + " in " + Where(lane)});
}

void Exec::Fail(Outcome::Kind fault, const char* kind, const std::string& what, int lane) {
  throw Fault{fault, {kind, what + " in " + Where(lane)}};
}

uint8_t* Exec::At(const Insn& in, Space space, uint64_t address, int bytes, int lane,
                  Access access) {
  if (space == Space::kParam) return const_cast<uint8_t*>(params) + address;
  space = SpaceOf(space, &address);
  if (address % bytes != 0) {
    Fail(Outcome::kMisaligned, "misaligned", std::to_string(bytes) + " bytes at " + Hex(address),
         lane);
  }
  switch (space) {
    case Space::kShared:
      return Shared(in, address, bytes, lane, access);
    case Space::kLocal:
      return Local(address, bytes, lane, access);
    default:
      return Global(in, address, bytes, lane, access);
  }
}

uint8_t* Exec::Local(uint64_t address, int bytes, int lane, Access access) {
  const uint64_t size = static_cast<uint64_t>(kernel.local_bytes);
  if (!Within(address, static_cast<uint64_t>(bytes), 0, size)) {
    Fail(Outcome::kIllegalAddress, "out of bounds",
         std::string(Verb(access)) + " of local memory at " + Hex(address), lane);
  }
  return &warp->local[lane * size + address];
}

uint8_t* Exec::Shared(const Insn& in, uint64_t address, int bytes, int lane, Access access) {
  if (!Within(address, static_cast<uint64_t>(bytes), 0, block->shared.size())) {
    Fail(Outcome::kIllegalAddress, "out of bounds",
         std::string(Verb(access)) + " of " + std::to_string(bytes) +
             " bytes of shared memory at " + Hex(address) + ", of which there are " +
             std::to_string(block->shared.size()),
         lane);
  }
  if (access != Access::kWrite && options.uninitialised) {
    const Written least = in.undefined == Undefined::kLoads ? kUnset : kWritten;
    for (int i = 0; i < bytes; ++i) {
      if (block->shared_written[address + i] >= least) continue;
      Say("uninitialised read", "shared memory that nothing has written", lane);
      break;
    }
  }
  if (access != Access::kRead) std::memset(&block->shared_written[address], kWritten, bytes);
  if (options.races) {
    ShadowMap::Conflict other;
    if (block->shadow->Note(address, bytes, GlobalThread(lane), block->clocks->of(ThreadOf(lane)),
                            access == Access::kWrite, access == Access::kUpdate, in.scope,
                            &other)) {
      Say("shared race",
          std::string(Verb(access)) + " not ordered after the " +
              (other.other_wrote ? "write" : "read") + " of " + shadow.NameOf(other.other),
          lane);
    }
  }
  return &block->shared[address];
}

// Finds the block of memory that the access lies in, or ends the launch.
void Exec::FindBlock(uint64_t address, int bytes, int lane, Access access) {
  const uint64_t size = static_cast<uint64_t>(bytes);
  const Allocation* const a = memory.Owns(address) ? memory.Find(address) : nullptr;
  const std::string what =
      std::string(Verb(access)) + " of " + std::to_string(bytes) + " bytes at " + Hex(address);
  if (a != nullptr && a->live && Within(address, size, a->address, a->bytes)) {
    if (a->device != kAllDevices && (options.devices >> a->device & 1) == 0) {
      Fail(Outcome::kIllegalAddress, "wrong device",
           what + ", " + memory.Describe(address) +
               ", which is another device's: peer access is not enabled",
           lane);
    }
    live_at = a->address, live_bytes = a->bytes;
    live_view = memory.Host(a->address);
    live_pinned = false;
    return;
  }
  if (!memory.Owns(address) && host_memory != nullptr) {
    auto it = host_memory->upper_bound(address);
    if (it != host_memory->begin()) --it;
    if (it != host_memory->end() && Within(address, size, it->first, it->second)) {
      live_at = it->first, live_bytes = it->second;
      live_view = reinterpret_cast<uint8_t*>(it->first);
      live_pinned = true;
      return;
    }
  }
  Fail(Outcome::kIllegalAddress, a != nullptr && !a->live ? "use after free" : "out of bounds",
       what + ", " + memory.Describe(address), lane);
}

uint8_t* Exec::Global(const Insn& in, uint64_t address, int bytes, int lane, Access access) {
  if (!Within(address, static_cast<uint64_t>(bytes), live_at, live_bytes)) {
    FindBlock(address, bytes, lane, access);
  }
  if (live_pinned && access == Access::kUpdate && in.scope == Scope::kSystem) {
    Say("system atomic", "on memory of the host, which few devices can have", lane);
  }
  if (live_pinned && access == Access::kWrite && options.races) {
    bool& told = block->clocks->of(ThreadOf(lane)).told_host;
    if (told && in.scope != Scope::kWeak && !in.release) {
      Say("host order",
          "a volatile write to memory of the host, which may see it before what this thread wrote "
          "there earlier: no fence of the system is between",
          lane);
    }
    told |= in.scope == Scope::kWeak;
  }
  if (!live_pinned) {
    if (access != Access::kWrite && options.uninitialised && !memory.Written(address, bytes)) {
      Say("uninitialised read", "global memory that nothing has written", lane);
    }
    if (access != Access::kRead) memory.MarkWritten(address, bytes);
  }
  if (address / kPage != page_at) {
    page_at = address / kPage;
    page = &out->touched[page_at];
  }
  const uint64_t bits = ((1ull << bytes) - 1) << (address % 64);  // aligned: of one word
  if (access != Access::kWrite) page->read[address % kPage / 64] |= bits;
  if (access != Access::kRead) page->written[address % kPage / 64] |= bits;
  if (options.races) {
    ShadowMap::Conflict other;
    if (shadow.Note(address, bytes, GlobalThread(lane), block->clocks->of(ThreadOf(lane)),
                    access == Access::kWrite, access == Access::kUpdate, in.scope, &other)) {
      Say("global race",
          std::string(Verb(access)) + " not ordered after the " +
              (other.other_wrote ? "write" : "read") + " of " + shadow.NameOf(other.other),
          lane);
    }
  }
  return live_view + (address - live_at);
}

void Exec::CountRequest(Space space, const uint64_t* base, int64_t offset, uint32_t lanes,
                        int bytes) {
  if (lanes == 0 || space == Space::kParam || space == Space::kLocal) return;
  std::array<uint64_t, 32> at;
  int n = 0;
  bool shared = false;
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    uint64_t address = base[std::countr_zero(left)] + static_cast<uint64_t>(offset);
    const Space where = SpaceOf(space, &address);
    if (where == Space::kLocal) return;
    shared = where == Space::kShared;
    at[n++] = address;
  }
  Counters& c = out->counters;
  if (!shared) {
    std::array<uint64_t, 64> sectors;
    int m = 0;
    for (int i = 0; i < n; ++i) sectors[m++] = at[i] / 32;
    if (!std::is_sorted(sectors.begin(), sectors.begin() + m)) {
      std::sort(sectors.begin(), sectors.begin() + m);
    }
    c.global_requests++;
    c.global_bytes += static_cast<uint64_t>(n) * bytes;
    c.sectors += std::unique(sectors.begin(), sectors.begin() + m) - sectors.begin();
    return;
  }
  // Words of one bank that differ need a pass each; wide accesses go in parts of 128 bytes.
  c.shared_requests++;
  std::array<std::vector<uint64_t>, 32> words;
  const int part = bytes > 4 ? 32 * 4 / bytes : 32;
  for (int from = 0; from < n; from += part) {
    for (auto& w : words) w.clear();
    size_t passes = 1;
    for (int i = from; i < std::min(n, from + part); ++i) {
      for (uint64_t word = at[i] / 4; word <= (at[i] + bytes - 1) / 4; ++word) {
        auto& bank = words[word % 32];
        if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
        passes = std::max(passes, bank.size());
      }
    }
    c.bank_conflicts += passes - 1;
  }
}

void Exec::LandCopies(int lane, size_t keep) {
  auto& groups = warp->copies[lane];
  while (groups.size() > keep) {
    for (const PendingCopy& copy : groups.front()) {
      const int bytes = static_cast<int>(copy.bytes.size());
      const Insn* const now = at;
      at = copy.insn;
      std::memcpy(Shared(*copy.insn, copy.shared, bytes, lane, Access::kWrite), copy.bytes.data(),
                  bytes);
      at = now;
    }
    groups.erase(groups.begin());
  }
}

}  // namespace cusim

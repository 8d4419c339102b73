#include "tests/cusim/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

namespace cusim {
namespace {

constexpr uint64_t kGap = 512;  // between allocations, so that what overruns one is in none

void* Map(uint64_t bytes, int rights, int flags, int file) {
  void* const p = mmap(nullptr, bytes, rights, flags | MAP_NORESERVE, file, 0);
  if (p == MAP_FAILED) throw std::runtime_error("cusim: no address space for device memory");
  return p;
}

}  // namespace

DeviceMemory::DeviceMemory(uint64_t range, uint64_t capacity) : range_(range), capacity_(capacity) {
  const int file = memfd_create("cusim", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(range)) != 0) {
    throw std::runtime_error("cusim: no memory file");
  }
  base_ = reinterpret_cast<uint64_t>(Map(range, PROT_NONE, MAP_SHARED, file));
  view_ = static_cast<uint8_t*>(Map(range, PROT_READ | PROT_WRITE, MAP_SHARED, file));
  written_ = static_cast<uint8_t*>(
      Map(range / 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1));
  close(file);
  next_ = base_ + kGap;
}

DeviceMemory::~DeviceMemory() {
  munmap(reinterpret_cast<void*>(base_), range_);
  munmap(view_, range_);
  munmap(written_, range_ / 8);
}

uint64_t DeviceMemory::Allocate(uint64_t bytes, int device) {
  if (bytes > capacity_ || used(device) > capacity_ - bytes) return 0;
  const uint64_t size = (bytes + kGap - 1) / kGap * kGap + kGap;
  uint64_t at = 0;
  if (next_ + size <= base_ + range_) {
    at = next_;
    next_ += size;
  } else {  // the first gap among what lives
    uint64_t from = base_ + kGap;
    for (auto it = allocations_.begin(); it != allocations_.end();) {
      if (!it->second.live) {
        it = allocations_.erase(it);
        continue;
      }
      if (it->first - from >= size) break;
      from = it->first + (it->second.bytes + kGap - 1) / kGap * kGap + kGap;
      ++it;
    }
    if (from + size > base_ + range_) return 0;
    at = from;
  }
  allocations_[at] = {at, bytes, device, true, false};
  used_[device] += bytes;
  std::memset(Host(at), 0xcd, std::min<uint64_t>(bytes, 1 << 16));
  MarkUnwritten(at, bytes);
  return at;
}

bool DeviceMemory::Free(uint64_t address) {
  const auto it = allocations_.find(address);
  if (it == allocations_.end() || !it->second.live) return false;
  it->second.live = false;
  used_[it->second.device] -= it->second.bytes;
  // Whole pages go back to the system.
  const uint64_t page = 4096, first = (address + page - 1) / page * page;
  const uint64_t end = (address + it->second.bytes) / page * page;
  if (end > first) madvise(Host(first), end - first, MADV_REMOVE);
  return true;
}

const Allocation* DeviceMemory::Find(uint64_t address) const {
  auto it = allocations_.upper_bound(address);
  if (it == allocations_.begin()) return nullptr;
  --it;
  return address - it->first < it->second.bytes ? &it->second : nullptr;
}
Allocation* DeviceMemory::Find(uint64_t address) {
  return const_cast<Allocation*>(static_cast<const DeviceMemory*>(this)->Find(address));
}

std::string DeviceMemory::Describe(uint64_t address) const {
  const auto extent = [](const Allocation& a) {
    return std::string(a.live ? "an" : "a freed") + " allocation of " + std::to_string(a.bytes) +
           " bytes" + (a.device > 0 ? " of device " + std::to_string(a.device) : "");
  };
  if (!Owns(address)) return "no device memory";
  auto it = allocations_.upper_bound(address);
  if (it == allocations_.begin()) return "before all allocations";
  --it;
  const uint64_t offset = address - it->first;
  if (offset < it->second.bytes)
    return "byte " + std::to_string(offset) + " of " + extent(it->second);
  return std::to_string(offset - it->second.bytes) + " bytes behind " + extent(it->second);
}

void DeviceMemory::MarkWritten(uint64_t address, uint64_t bytes) {
  uint64_t i = address - base_;
  const uint64_t end = i + bytes;
  if (i % 8 + bytes <= 8) {  // most accesses
    written_[i / 8] |= static_cast<uint8_t>(((1u << bytes) - 1) << (i % 8));
    return;
  }
  for (; i < end && i % 8; ++i) written_[i / 8] |= uint8_t(1u << (i % 8));
  if (i < end) {
    std::memset(written_ + i / 8, 0xff, (end - i) / 8);
    i += (end - i) / 8 * 8;
  }
  for (; i < end; ++i) written_[i / 8] |= uint8_t(1u << (i % 8));
}

void DeviceMemory::MarkUnwritten(uint64_t address, uint64_t bytes) {
  const uint64_t i = address - base_;  // allocations begin and end with bytes of their own
  std::memset(written_ + i / 8, 0, (bytes + 7) / 8);
}

void DeviceMemory::CopyWritten(uint64_t to, uint64_t from, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i) {
    const uint64_t t = to - base_ + i, f = from - base_ + i;
    const uint8_t bit = uint8_t(1u << (t % 8));
    written_[f / 8] >> (f % 8) & 1 ? written_[t / 8] |= bit : written_[t / 8] &= uint8_t(~bit);
  }
}

}  // namespace cusim
